"""`grpo …`: what the notebooks do, without a notebook.

Every command prints errors on one line and leaves with 2; `--json` puts one JSON object on the last line.
Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.interruption import EXIT_CODE, Interrupted, Notice
from grpo_lib.recipes import Recipe, dump_recipe, load_recipe, plan_table

environment.prepare()

app = typer.Typer(
    help="GRPO on grade-school maths, from a recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A file in recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as training.steps=2.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run; default: the recipe's name.")]
Base = Annotated[
    Path | None, typer.Option("--base", help="Start from this output of grpo convert; default: convert into the run.")
]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]


@app.command()
def config(
    recipe: RecipePath,
    overrides: Overrides = None,
    form: Annotated[
        str, typer.Option("--as", help="yaml; plan: the batch plan alone; maxtext: arguments for MaxText's train_rl.")
    ] = "yaml",
    problems: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of maxtext: write what train_rl reads to this folder.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show the resolved recipe, every field with defaults included, and its batch plan: given and derived sizes.

    The plan comes in comments, so that what is printed is a recipe.

    With --as maxtext, the arguments of maxtext.trainers.post_train.rl.train_rl, one to a line; what they cannot say
    goes to stderr.  To run it: grpo config RECIPE --as maxtext --problems FOLDER | xargs python -m grpo_lib.upstream
    """
    if form not in ("yaml", "plan", "maxtext"):
        raise CourseError(f"--as {form}: choose yaml, plan or maxtext")
    if problems and form != "maxtext":
        raise CourseError("--problems writes what train_rl reads, and needs --as maxtext")
    resolved = load_recipe(recipe, overrides or ())
    if form == "maxtext":
        result = _for_maxtext(resolved, problems, runs)
        _finish(result, as_json, "\n".join(map(shlex.quote, result["arguments"])))
    elif form == "plan":
        result = {"given": resolved.batch_given, "derived": dataclasses.asdict(resolved.plan)}
        _finish(result, as_json, "\n".join(plan_table(resolved)))
    elif as_json:
        print(json.dumps(resolved.model_dump(mode="json")))
    else:
        print(dump_recipe(resolved))
        print("\n".join(f"# {line}".rstrip() for line in plan_table(resolved)))


@app.command()
def convert(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Where to write; default: runs/NAME/checkpoints/base.")] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Convert the recipe's Hugging Face model to a MaxText checkpoint."""
    from grpo_lib import models

    resolved = load_recipe(recipe, overrides or ())
    checkpoint = models.convert_to_maxtext(resolved.model, output or runs / resolved.name / "checkpoints" / "base")
    _finish({"checkpoint": str(checkpoint)}, as_json, f"MaxText checkpoint: {checkpoint}")


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    run: RunName = None,
    runs: RunsFolder = Path("runs"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of this name.")] = False,
    base: Base = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of several processes: where the first one is; the next port, too."),
    ] = None,
    process: Annotated[int | None, typer.Option(min=0, help="Of several processes: the number of this one.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many there are; default: hardware.processes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert, evaluate, train, evaluate again, export and report: a whole run.

    Given again, it continues a run that was interrupted.  On SIGTERM the step under way is saved, and the exit code
    is 75.

    A run of several processes, such as one on each host of a slice: the same command for each, with --coordinator and
    its --process, on a folder that all see.  When one is lost, the others end with 76 and say which.
    """
    resolved = load_recipe(recipe, overrides or ())
    count = _process_count(resolved, coordinator, process, processes)
    directory = runs / (run or resolved.name)
    with _together(coordinator, count, process, dump_recipe(resolved)):
        if process:  # the first one looks after the files, and does the talking
            _follow(resolved, directory)
        else:
            _train(resolved, directory, overwrite, base, as_json)


def _process_count(recipe: Recipe, coordinator: str | None, process: int | None, processes: int | None) -> int:
    """How many processes the run has.  Raises CourseError where options and recipe do not say the same."""
    said = recipe.hardware.processes
    if processes and said and processes != said:
        raise CourseError(f"--processes {processes}, and hardware.processes={said}: say the same, or leave one out")
    count = processes or recipe.hardware.process_count()
    if count > 1 and (coordinator is None or process is None):
        raise CourseError(
            f"a run of {count} processes needs --coordinator HOST:PORT, where process 0 is, and --process 0 to "
            f"{count - 1}: start it {count} times"
        )
    if count == 1 and (coordinator or process is not None):
        raise CourseError("--coordinator and --process are for several processes: add --processes N")
    return count


def _together(coordinator: str | None, count: int, process: int | None, digest: str):
    """The other processes for the time of a block; nothing of the kind where there are none."""
    if count == 1:
        return contextlib.nullcontext()
    from grpo_lib import processes

    return processes.joined(coordinator, count, process, digest=digest)


def _train(recipe: Recipe, directory: Path, overwrite: bool, base: Path | None, as_json: bool) -> None:
    from grpo_lib.problems import load_problems
    from grpo_lib.rewards import get_rewards
    from grpo_lib.runs import check_base, check_run, link_base, open_run

    # Whatever can be wrong is found before the directory is made.
    continued = check_run(directory, recipe, overwrite=overwrite)
    if base:
        check_base(base)
    get_rewards(recipe.rewards)
    for split in ("train", "validation", "test"):
        load_problems(recipe.problems, split)

    from grpo_lib import models, pipeline, processes, report, training

    training.require_supported(recipe)
    models.model_directory(recipe.model)
    say = _say(as_json)
    directory = open_run(directory, recipe, overwrite=overwrite)
    if continued:
        say(f"continuing {directory}")
    if base:
        link_base(directory, base)
    processes.wait("the run directory")
    with Notice() as notice:
        summary = pipeline.run(
            recipe, directory, _print_row(recipe, say), say, progress=sys.stderr.isatty(), notice=notice
        )
        page = report.write_report(directory)
    _finish(summary, as_json, f"{_headline(summary)}\nreport: {page}")


def _follow(recipe: Recipe, directory: Path) -> None:
    """What the other processes of a run do: all of the work, and nothing of the rest."""
    from grpo_lib import pipeline, processes, training

    training.require_supported(recipe)
    processes.wait("the run directory")
    if not (directory / "recipe.yaml").is_file():
        raise CourseError(f"{directory.resolve()} is not the folder in which process 0 started the run; share one")
    with Notice() as notice:
        pipeline.run(recipe, directory, progress=False, notice=notice)


@app.command()
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or validation")] = "test",
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per completion to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Also sample so often: pass@k and maj@k.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the samples; default: rollout.temperature.")] = None,
    completions: Annotated[Path | None, typer.Option(help="Grade the completions in this JSON-lines file.")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Ask a vLLM or OpenAI-compatible server.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on that server.")] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable with the server's key.")
    ] = "OPENAI_API_KEY",
    extra: Annotated[
        str | None, typer.Option(metavar="JSON", help='More for each request, such as {"repetition_penalty": 1}.')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the recipe's model (model.path=… for another) on all problems of a split, greedily.

    With --output an evaluation that was interrupted goes on where it was: give the same command again.
    """
    resolved = load_recipe(recipe, overrides or ())
    if split not in ("test", "validation"):
        raise CourseError(f"--split {split}: choose test or validation")
    if completions and endpoint:
        raise CourseError("--completions and --endpoint: choose one, the file or the server")
    if endpoint and not model:
        raise CourseError("--endpoint needs --model NAME, the model's name on that server")
    if model and not endpoint:
        raise CourseError("--model is the name on a server and needs --endpoint; here, choose with model.path=…")
    if extra is not None and not endpoint:
        raise CourseError("--extra is sent to a server and needs --endpoint")
    if temperature is not None and (completions or not samples or temperature <= 0):
        raise CourseError("--temperature is above 0 and needs --samples N: the greedy answer has none")
    if output and output.exists() and not overwrite:
        raise CourseError(f"{output} exists; add --overwrite to replace it, or choose another --output")

    from grpo_lib import evaluation
    from grpo_lib.problems import load_problems

    problems = load_problems(resolved.problems, split)
    if completions:
        source = _from_file(completions, problems, samples)
    elif endpoint:
        source = _from_server(resolved, endpoint, model, samples, temperature, api_key_env, extra)
    else:
        source = _from_recipe(resolved, samples, temperature)
    result = evaluation.evaluate(
        problems=problems, path=output, batch_size=resolved.evaluation.batch_size, label=split,
        progress=sys.stderr.isatty(), samples=samples or 1, overwrite=overwrite, **source,
    )  # fmt: skip
    failures = [record["error"] for record in result.records if record["error"]]
    summary = result.summary() | {"failures": len(failures)}
    _finish(summary, as_json, _verdict(summary, result.records, failures))


@app.command()
def report(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A folder in runs/.")],
    tables: Annotated[bool, typer.Option("--tables", help="Also evals/answers.csv and answers.parquet.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write report.html of a run: headline, curves, and every answer before and after."""
    from grpo_lib import report
    from grpo_lib.runs import load_run

    directory, _ = load_run(run_directory)
    page = report.write_report(directory)
    written = {"report": str(page)}
    if tables:
        written |= dict(zip(("csv", "parquet"), map(str, report.export_table(directory)), strict=True))
    _finish(written, as_json, "\n".join(f"{name}: {path}" for name, path in written.items()))


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A folder in runs/, or its name.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another; differences are B - A.")],
    output: Annotated[Path | None, typer.Option(help="The page; default: runs/compare-A-B.html.")] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Put two runs beside each other: recipes, curves, last metrics, and a paired test on their evaluations.

    Prints the comparison, with early warnings, and writes it with the curves to a page. An earlier page is replaced,
    another file is not.
    """
    from grpo_lib import comparison_page, run_comparison

    compared = run_comparison.compare(run_comparison.find_run(run_a, runs), run_comparison.find_run(run_b, runs))
    page = comparison_page.write_page(compared, output or runs / comparison_page.page_name(compared))
    result = compared.as_dict() | {"page": str(page)}
    _finish(result, as_json, f"{comparison_page.text(compared)}\n\npage: {page}")


@app.command()
def preflight(
    recipe: RecipePath,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compile with little effort: a tenth of the time, about the same size.")
    ] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Compile again what .cache/preflight holds.")] = False,
    largest: Annotated[
        bool, typer.Option("--largest-micro-batch", help="Find the largest micro-batch that fits, instead.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the result, as JSON, to this file.")] = None,
    price: Annotated[
        float | None, typer.Option("--price-per-chip-hour", min=0, help="For the cost of a run at the floor.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the recipe for its TPU, without one: does it fit, and what is the least a step can take?

    Takes minutes per program; what was compiled is kept. Leaves with 0 when the recipe fits, 1 when it does not (and
    says which changes do), 2 when it cannot be said.
    """
    from grpo_lib import compilation, preflight

    resolved = load_recipe(recipe, overrides or ())
    say = functools.partial(print, file=sys.stderr, flush=True)
    compiler = compilation.Compiler(resolved, say, refresh=refresh)
    if largest:
        found = preflight.largest_micro_batch(resolved, compiler, say, quick=quick)
        text = f"largest micro-batch that fits: {found} of the step's {resolved.completions_per_step} completions"
        _finish({"largest_micro_batch": found}, as_json, text if found else "no micro-batch fits")
        return
    command = shlex.join(["grpo", "preflight", str(recipe), *(overrides or ()), *(["--quick"] if quick else [])])
    result = preflight.preflight(resolved, compiler, say, quick=quick, command=command, versions=compiler.versions)
    if output:
        write_text_atomic(output, result.model_dump_json(indent=1) + "\n")
    _finish(result.model_dump(mode="json"), as_json, preflight.table(result, price))
    if not result.fits:
        raise typer.Exit(1)


@app.command()
def rehearse(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2,
    engine: Annotated[str, typer.Option(help="auto (the recipe's, where it can run here), tunix or vllm.")] = "auto",
    notebooks: Annotated[bool, typer.Option("--notebooks", help="Run the course's notebooks with it instead.")] = False,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: rehearsal-NAME.")] = None,
    runs: RunsFolder = Path("runs"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of this name.")] = False,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe with the tiny model and two steps, on virtual CPU devices with its mesh axes scaled down.

    The way is that of grpo train, from the data to the report, in a process of its own; a TPU on this machine is not
    touched. What is scaled is listed first. The tiny model is a Qwen3: weight names and layers of other architectures
    (Llama, Qwen2.5) are not what a rehearsal covers, nor are speed, memory and several hosts.
    """
    from grpo_lib import rehearsal

    original = load_recipe(recipe, overrides or ())
    scaled = rehearsal.rehearsal_recipe(
        original,
        steps=steps,
        engine=rehearsal.choose_engine(original, engine),
        gsm8k=rehearsal.gsm8k_folder(original),
        wandb=rehearsal.wandb_can_run(),
    )
    say, devices = _say(as_json), rehearsal.device_count(scaled)
    say(f"rehearsal of {original.name} on {devices} virtual CPU devices; recipe's -> rehearsal's:")
    for line in rehearsal.changes(original, scaled):
        say(f"  {line}")
    remarks = [f"note: {note}" for note in rehearsal.notes(original, scaled)]
    say("\n".join(remarks))
    result = rehearsal.rehearse(
        original, scaled, runs / (run or scaled.name), overwrite=overwrite, notebooks=notebooks, base=base, say=say
    )
    _finish(dataclasses.asdict(result), as_json, "\n".join([*remarks, rehearsal.verdict(result)]))
    if not result.green:
        raise typer.Exit(result.exit_code or 1)


# Below this accuracy `grpo evaluate` says in words that the model cannot do the task.
CHANCE = 0.02


KEPT = "what a run or an --output has finished is kept: give the same command again, and it goes on"


def main() -> None:
    """Entry point: a CourseError is one line on stderr and exit code 2; after a SIGTERM it is 75."""
    try:
        app()
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        _leave(2)
    except Interrupted:
        print(f"stopped by SIGTERM; {KEPT}", file=sys.stderr)
        _leave(EXIT_CODE)
    except SystemExit as end:
        if end.code == 130:  # typer's, after Ctrl-C
            print(f"interrupted; {KEPT}", file=sys.stderr)
        _leave(end.code)
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(code: Any) -> NoReturn:
    """Exit; at once where other processes may be gone, for which JAX would wait a minute and a half."""
    if "grpo_lib.processes" in sys.modules and code:
        sys.stdout.flush()
        sys.stderr.flush()
        if sys.modules["grpo_lib.processes"].several():
            os._exit(code)
    sys.exit(code)


def _for_maxtext(recipe: Recipe, problems: Path | None, runs: Path) -> dict[str, Any]:
    """The arguments of train_rl.  What they cannot say, and what is still to be done, goes to stderr."""
    from grpo_lib import upstream, upstream_problems

    run = runs / recipe.name
    folder, checkpoint = problems or run / "upstream" / "problems", run / "checkpoints" / "base" / "0" / "items"
    written = upstream_problems.write_problems(recipe, folder) if problems else None
    tests = written.test if written else None
    arguments = upstream.arguments(recipe, folder, checkpoint, run / "upstream", tests)
    lost = upstream.not_expressible(recipe, tests)
    for sentence in written.left_out if written else []:
        print(f"problems: {sentence}", file=sys.stderr)
    for sentence in lost:
        print(f"not expressible: {sentence}", file=sys.stderr)
    if not problems:
        print(f"to be written before it runs: {folder} (--problems {folder})", file=sys.stderr)
    if not checkpoint.is_dir():
        print(f"to be made before it runs: {checkpoint} (grpo convert)", file=sys.stderr)
    return {"arguments": arguments, "not_expressible": lost}


def _from_recipe(recipe: Recipe, samples: int | None, temperature: float | None) -> dict[str, Any]:
    """Arguments of evaluation.evaluate that say what answers: the recipe's own model."""
    from grpo_lib import models, pipeline

    settings: dict[str, Any] = {
        "max_completion_length": recipe.evaluation_completion_length,
        "weights": _digest(models.model_directory(recipe.model)),  # a path may hold other weights tomorrow
    }
    generate, render = pipeline.standalone_generate(recipe)
    sampled = None
    if samples:
        settings["temperature"] = temperature or recipe.rollout.temperature
        sampled = functools.partial(generate, temperature=settings["temperature"])
    return {
        "generate": generate, "sampled": sampled, "render": render, "model": recipe.model.path, "settings": settings
    }  # fmt: skip


def _digest(directory: Path) -> str:
    """Changes with the files of a Hugging Face directory: their names, sizes and times, since weights are long."""
    files = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".json", ".jinja")]
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _from_server(
    recipe: Recipe,
    url: str,
    model: str,
    samples: int | None,
    temperature: float | None,
    api_key_env: str,
    extra: str | None,
) -> dict[str, Any]:
    """The same for a server; its address may change while an evaluation is interrupted, and is no setting."""
    from grpo_lib import prompts, sources

    settings: dict[str, Any] = {
        "system": prompts.SYSTEM_PROMPT if recipe.prompts.system == "default" else recipe.prompts.system,
        "max_tokens": recipe.evaluation_completion_length,
    }
    if extra is not None:
        settings["extra"] = _json_object(extra)
    generate, sampled = sources.endpoint(url, model, api_key_env=api_key_env, **settings), None
    if samples:
        settings["temperature"] = temperature or recipe.rollout.temperature
        heat = {"temperature": settings["temperature"]}
        sampled = dataclasses.replace(generate, options=generate.options | heat)
    return {"generate": generate, "sampled": sampled, "model": model, "settings": settings}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CourseError(f"--extra is not JSON ({error}); write it like '{{\"top_k\": -1}}'") from None
    if not isinstance(value, dict):
        raise CourseError("--extra is not a JSON object; write it like '{\"top_k\": -1}'")
    return value


def _from_file(path: Path, problems: list, samples: int | None) -> dict[str, Any]:
    """The same for saved completions.  Raises CourseError unless the file holds as many of a problem as are graded."""
    from grpo_lib import sources

    saved = sources.saved_completions(path, problems)
    if saved.most != (samples or 1) + bool(samples and saved.greedy):
        fitting = "leave out --samples" if saved.most == 1 else f"say --samples {saved.most - saved.greedy}"
        raise CourseError(
            f"{path} holds up to {saved.most} completions of a problem; {fitting}, so that all are graded"
        )
    sampled = saved if samples and saved.greedy else None
    settings = {"completions": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {"generate": saved, "sampled": sampled, "settings": settings}


def _verdict(summary: dict[str, Any], records: list[dict[str, Any]], failures: list[str]) -> str:
    """What `evaluate` says to a person."""
    low, high = summary["interval"]
    solved = "solved" if any(record["greedy"] for record in records) else "solved, in the mean of the samples"
    lines = [
        f"{summary['accuracy']:.1%} of all {summary['n']} problems {solved} (95 % interval {low:.1%} to {high:.1%}); "
        f"last number right {summary['lenient_accuracy']:.1%}, format {summary['format_accuracy']:.1%}, "
        f"truncated {summary['truncated']:.1%}"
    ]
    if "samples" in summary:
        at = "".join(f", pass@{k} {rate:.1%}" for k, rate in summary["pass_at_k"].items())
        lines.append(
            f"sampled {summary['samples']} times: {summary['sampled_accuracy']:.1%} right{at}, "
            f"maj@{summary['samples']} {summary['maj_at_k']:.1%}"
        )
    if failures:
        lines.append(f"{len(failures)} of {len(records)} completions failed and count as wrong; first: {failures[0]}")
    if summary["accuracy"] < CHANCE:
        lines.append("That is next to nothing: this model cannot solve these problems.")
    return "\n".join(lines)


def _say(as_json: bool):
    """Progress goes to stderr when stdout is for JSON."""
    return lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def _print_row(recipe: Recipe, say):
    steps = recipe.training.steps

    def on_step(row: dict[str, Any]) -> None:
        step = int(row["step"])
        if step % 10 == 0 or step in (1, steps) or steps <= 10:
            say(
                f"step {step:>{len(str(steps))}}/{steps}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.1%}  "
                f"length {row['completion_length']:.1f}  {row['seconds']:.2f} s"
            )

    return on_step


def _headline(summary: dict[str, Any]) -> str:
    before, after, p = summary["before"], summary["after"], summary["mcnemar_p"]
    low, high = summary["difference_interval"]
    return (
        f"before {before['accuracy']:.1%}, after {after['accuracy']:.1%} of {after['n']} problems: "
        f"{summary['difference']:+.1%} (95 % interval {low:+.1%} to {high:+.1%}), McNemar p = {p:.2g}"
    )


def _finish(result: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(result) if as_json else text)


if __name__ == "__main__":
    main()
