"""`grpo …`: what the notebooks do, without a notebook.  grpo_tpu.cli adds the commands for a TPU.

Every command prints errors on one line and leaves with 2; `--json` puts one JSON object on the last line.
Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
import typer.exceptions

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.recipes import Recipe, dump_recipe, load_recipe, plan_table
from grpo_train.runs.metric_glossary import TASK_METRIC
from grpo_train.runs.preemption import EXIT_CODE, Interrupted, PreemptionHandler

app = typer.Typer(
    help="GRPO on grade-school maths, from a recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the help of rich keeps the line breaks of the source
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A file in recipes/, also FILE.yaml@PROFILE.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as training.steps=2.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run; default: the recipe's name.")]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="FOLDER", help="Start from this output of grpo convert, also gs://; default: convert again."
    ),
]

Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Of a multi-process run: process 0, with a free port; default: JAX's."),
]
ProcessNumber = Annotated[
    int | None, typer.Option(min=0, help="With --coordinator: the number of this process, from 0.")
]
Processes = Annotated[int | None, typer.Option(min=1, help="Number of processes; default: hardware.processes.")]


def _on_a_disk(folder: Path) -> Path:
    if str(folder).startswith("gs:"):
        raise CourseError(
            f"--runs {folder} is a bucket, and a run needs a disk: mount the bucket (docs/tpu-vm.md), or leave the "
            "runs here and set training.checkpoints=gs://BUCKET/FOLDER"
        )
    return folder


RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder of all runs.", callback=_on_a_disk)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def _show_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("grpo-hands-on"))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def config(
    recipe: RecipePath,
    overrides: Overrides = None,
    form: Annotated[
        Literal["yaml", "maxtext"],
        typer.Option("--as", help="yaml, with the batch plan; maxtext: arguments for MaxText's train_rl."),
    ] = "yaml",
    problems: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --as maxtext: where what train_rl reads is written.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show the resolved recipe, every field with defaults included, and its batch plan: given and derived sizes.

    The plan comes in comments, so that what is printed is a recipe.

    With --as maxtext, the arguments of maxtext.trainers.post_train.rl.train_rl, one to a line; what they cannot say
    goes to stderr.  To run it:
    grpo config RECIPE --as maxtext --problems FOLDER | xargs python -m grpo_train.maxtext_rl
    """
    if (form == "maxtext") != bool(problems):
        raise CourseError("--as maxtext and --problems FOLDER, for the files that train_rl reads, go together")
    from grpo_lib.rewards import get_rewards
    from grpo_train.engines import model_files

    resolved = load_recipe(recipe, overrides or ())
    get_rewards(resolved.rewards)
    model_files.check_model(resolved.model)
    if problems:
        result = _for_maxtext(resolved, problems, runs)
        finish(result, as_json, "\n".join(map(shlex.quote, result["arguments"])))
    elif as_json:
        print(json.dumps(resolved.model_dump(mode="json")))
    else:
        print(dump_recipe(resolved))
        print("\n".join(f"# {line}".rstrip() for line in plan_table(resolved).splitlines()))
        if resolved.model.sizes and not model_files.local_folder(resolved.model):
            print("# model.sizes: not compared with config.json, which is not here; grpo train refuses what differs")


@app.command()
def convert(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A folder, or gs://BUCKET/FOLDER; default: runs/NAME/checkpoints/base."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Convert the recipe's Hugging Face model to a MaxText checkpoint."""
    from grpo_train.engines import conversion, model_files

    resolved = load_recipe(recipe, overrides or ())
    base = output or runs / resolved.name / "checkpoints" / "base"
    model_files.require_disk(resolved, base)
    checkpoint = conversion.convert_to_maxtext(resolved.model, base)
    finish({"checkpoint": str(checkpoint)}, as_json, f"MaxText checkpoint: {checkpoint}")


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    run: RunName = None,
    runs: RunsFolder = Path("runs"),
    overwrite: Overwrite = False,
    base: Base = None,
    coordinator: Coordinator = None,
    process: ProcessNumber = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """End-to-end run: convert, evaluate, train, evaluate again, export and report.

    The same command continues a run that was interrupted.  On SIGTERM the current step is saved, and the exit code is
    75.

    A multi-process run, such as one process per host of a TPU slice: the same command on each, on a folder that all
    share.  Where JAX does not find the others by itself, as it does on a TPU slice, on GKE and under SLURM, each gets
    --coordinator and its own --process.  When a process is lost, the others exit within a minute.
    """
    resolved = load_recipe(recipe, overrides or ())
    count = process_count(resolved, coordinator, process, processes)
    if run is not None and (Path(run).name != run or run in ("", "..")):
        raise CourseError(
            f"--run {run!r} is not a name: the run becomes a folder in {runs}; leave out slashes and dots"
        )
    directory = runs / (run or resolved.name)
    if count == 1 and not overwrite and (summary := _finished(directory, resolved)):
        rates = " -> ".join(f"{summary[phase]['accuracy']:.1%}" for phase in PHASES)
        return finish(
            summary,
            as_json,
            f"{directory} is finished: {rates}; grpo report {directory} shows it, --overwrite trains it again",
        )
    environment.require_free_chips()
    connected: contextlib.AbstractContextManager[int] = contextlib.nullcontext(0)
    if count > 1:
        from grpo_train.runs import multihost

        connected = multihost.distributed_context(coordinator, count, process, digest=dump_recipe(resolved))
    # In this order: JAX's distributed runtime installs a SIGTERM handler of its own, which would ignore it.
    with connected as number, PreemptionHandler(resolved.training.stop_after) as preemption:
        if count > 1:
            import jax

            own = f"{jax.local_device_count()} of {jax.device_count()} devices are its own, {jax.default_backend()}"
            print(f"process {number} of {count}: {own}", file=sys.stderr, flush=True)
        if number:  # it computes with process 0, which does all file I/O and logging
            from grpo_train import pipeline, training

            training.require_supported(resolved)
            pipeline.run(resolved, directory, progress=False, preemption=preemption)
        else:
            _train(resolved, directory, overwrite, base, as_json, preemption)


def process_count(recipe: Recipe, coordinator: str | None, process: int | None, processes: int | None) -> int:
    """How many processes the run has.  Raises CourseError where options and recipe disagree."""
    configured = recipe.hardware.processes
    if processes and configured and processes != configured:
        raise CourseError(f"--processes {processes} and hardware.processes={configured} differ; leave one out")
    count = processes or recipe.hardware.process_count()
    if environment.uses_pathways() and (count > 1 or coordinator or process is not None):
        raise CourseError(
            "JAX_PLATFORMS names proxy: with Pathways one process drives the devices of all hosts; set "
            "hardware.processes=1, and leave out --processes, --coordinator and --process"
        )
    if count > 1 and (coordinator is None) != (process is None):
        raise CourseError("--coordinator and --process go together; leave both out where JAX finds the processes")
    if count == 1 and (coordinator or process is not None):
        raise CourseError("--coordinator and --process are for multi-process runs: add --processes N")
    return count


def _train(
    recipe: Recipe, directory: Path, overwrite: bool, base: str | None, as_json: bool, preemption: PreemptionHandler
) -> None:
    from grpo_lib.problems import load_problems, take_different
    from grpo_lib.rewards import get_rewards
    from grpo_train.engines import model_files
    from grpo_train.runs import tracking
    from grpo_train.runs.run_directory import check_base, check_run, link_base, one_at_a_time, open_run, require_folder

    # Whatever can be wrong is found before the directory is made, and what is found at once comes first.
    continued = check_run(directory, recipe, overwrite=overwrite)
    require_folder(directory.parent, "--runs")
    if recipe.training.checkpoints:
        require_folder(recipe.training.checkpoints, "training.checkpoints")
    if base:
        check_base(base)
    model_files.require_engine(recipe.rollout.engine)
    tracking.require(recipe.tracking)
    train, *_ = (load_problems(recipe.problems, split) for split in ("train", "validation", "test"))
    get_rewards(recipe.rewards, {problem.kind for problem in train})
    model_files.check_model(recipe.model)  # one of the hub is downloaded when nothing else can be wrong
    model_files.require_disk(recipe, None if base else directory / "checkpoints" / "base", directory)

    from grpo_train import pipeline, report, training
    from grpo_train.engines import maxtext_model, prompt_lengths
    from grpo_train.report.comparison import read_json
    from grpo_train.report.formatting import duration

    training.require_supported(recipe)
    sizes = model_files.maxtext_sizes(recipe.model)
    model_files.require_heads(sizes.get("base_num_kv_heads"), recipe.hardware.trainer_tensor)
    model_files.model_directory(recipe.model)
    _, asked = take_different(train, recipe.training.cold_start)
    prompt_lengths.fit_prompts(recipe.rollout, recipe.prompts, maxtext_model.load_tokenizer(recipe.model), asked)
    log = log_for(as_json)
    seconds: dict[int, float] = {}

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] in seconds:  # it comes again when its validation joins it
            log(f"step {row['step']}/{recipe.training.steps}  validation {row['validation_accuracy']:.1%}")
            return
        seconds[row["step"]] = row["seconds"]
        # The first steps compile, and a step after a validation has its time, so the usual one counts.
        steps = statistics.median(seconds.values()) * (recipe.training.steps - row["step"])
        evaluated = read_json(directory / "evals" / "before.json").get("seconds") or 0.0
        log(
            f"step {row['step']}/{recipe.training.steps}  {_step(row, recipe)}  "
            f"({duration(steps + evaluated)} left, with the evaluation after it)"
        )

    with one_at_a_time(directory):
        if continued:
            log(f"continuing {directory}")
        directory = open_run(directory, recipe, overwrite=overwrite, log=log)
        if base:
            link_base(directory, base)
        summary = pipeline.run(recipe, directory, on_step, log, progress=sys.stderr.isatty(), preemption=preemption)
        finish(summary, as_json, f"{report.headline(summary)}\nreport: {report.write_report(directory)}")


def _finished(directory: Path, recipe: Recipe) -> dict[str, Any]:
    """summary.json of a run of this recipe that has done everything, its export, too; of another nothing.

    A damaged one counts as none: the run goes on, finds all steps done, and writes it again.
    """
    from grpo_train.report.comparison import read_json
    from grpo_train.runs.run_directory import changed_keys, check_run

    if not check_run(directory, recipe) or not all((directory / file).exists() for file in DONE):
        return {}
    if "training.steps" in changed_keys(directory, recipe):
        return {}  # it has done everything for another last step
    try:
        summary = read_json(directory / "summary.json")
        rates = [summary[phase]["accuracy"] for phase in PHASES]
    except (CourseError, LookupError, TypeError):
        return {}
    return summary if all(isinstance(rate, float) for rate in rates) else {}


def _step(row: dict[str, Any], recipe: Recipe) -> str:
    """What the terminal shows of a step, in the order in which it happens."""
    keys = {
        "reward": ("reward", ".3f"),
        "accuracy": ("accuracy", ".1%"),
        **{task.name: (TASK_METRIC.format(task.name, "accuracy"), ".1%") for task in recipe.tasks},
        "format": ("format", ".1%"),
        "length": ("completions/mean_length", ".1f"),
        "loss": ("loss", ".2g"),
        "kl": ("kl", ".2g"),
        "beta": ("beta", ".2g"),
        "rollout": ("seconds_rollout", ".2f"),
        "update": ("seconds_update", ".2f"),
        "sync": ("seconds_sync", ".2f"),
        "seconds": ("seconds", ".2f"),
        "validation": ("validation_accuracy", ".1%"),
    }
    return "  ".join(
        f"{name} {'nan' if row[key] is None else format(row[key], form)}"  # None: not a finite number
        for name, (key, form) in keys.items()
        if key in row
    )


@app.command()
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or validation")] = "test",
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per completion to this file.")] = None,
    overwrite: Overwrite = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per problem, for pass@k and maj@k; default: the recipe's.")
    ] = None,
    completions: Annotated[Path | None, typer.Option(help="Grade the completions in this JSON-lines file.")] = None,
    probe: Annotated[
        Literal["partial-prompt"] | None, typer.Option(help="Has it seen the problems? It completes their questions.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the recipe's model (another with model.path=…) on all problems of a split: greedy completions.

    With --output, an interrupted evaluation goes on where it stopped: run the same command again.

    With --probe partial-prompt the model gets the first 60 % of each question, without a chat around it, and what it
    goes on with is compared with the rest.  Give it problems that it cannot have seen, too (problems.source=words).
    """
    resolved = load_recipe(recipe, overrides or ())
    if probe and (samples or completions):
        raise CourseError("--probe is about the model's greedy completions; leave out --samples and --completions")
    if output and output.exists() and not overwrite:
        raise CourseError(f"{output} exists; add --overwrite to replace it, or choose another --output")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)  # an error comes before the first answer

    from grpo_lib import contamination, evaluation
    from grpo_lib.problems import load_problems

    problems = load_problems(resolved.problems, split)
    samples = None if probe else samples or resolved.evaluation.samples or None
    source = _from_file(completions, problems, samples) if completions else _from_model(resolved, samples)
    if probe:
        problems = contamination.partial_prompts(problems)
        source |= {"render": None, "settings": source["settings"] | {"probe": probe}}
    result = evaluation.evaluate(
        problems=problems, path=output, batch_size=resolved.evaluation.batch_size, label=split,
        progress=sys.stderr.isatty(), samples=samples or 1, overwrite=overwrite, **source,
    )  # fmt: skip
    failures = [record["error"] for record in result.records if record["error"]]
    if probe:
        seen = contamination.summary(result) | {"failures": len(failures)}
        return finish(seen, as_json, _seen(seen))
    summary = result.summary() | {"failures": len(failures)}
    text = _verdict(summary, result.records, failures)
    if not completions and summary["accuracy"] < EXPECTED_OF_TINY and _is_tiny_on_others(resolved):
        text += f"\n{TINY_ON_OTHERS}"
    finish(summary, as_json, text)


@app.command()
def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A folder in runs/, or its name.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Of this step; default: the newest checkpoint that can be read.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: RUN/export-STEP.")] = None,
    overwrite: Overwrite = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face directory with tokenizer.

    `grpo train` does so after its last evaluation.  This needs no evaluation and none of the run's devices: it works
    on the CPU, also while the run goes on.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # chips may be another process's
    from grpo_train.report.compare_runs import find_run
    from grpo_train.runs.run_directory import load_run

    if str(output).startswith("gs:"):
        raise CourseError(f"--output {output} is a bucket; export into a folder, and copy that")
    directory, recipe = load_run(find_run(run_directory, runs))

    from grpo_train import pipeline

    folder, exported = pipeline.export_step(
        recipe, directory, step, output, overwrite=overwrite, log=lambda text: print(text, file=sys.stderr)
    )
    finish({"export": str(folder), "step": exported}, as_json, f"step {exported}, exported to {folder}")


@app.command()
def report(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A folder in runs/, or its name.")],
    runs: RunsFolder = Path("runs"),
    tables: Annotated[bool, typer.Option("--tables", help="Write evals/answers.csv, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write report.html of a run: headline, curves, and every answer before and after training."""
    from grpo_train import report
    from grpo_train.report.compare_runs import find_run
    from grpo_train.runs.run_directory import load_run

    directory, _ = load_run(find_run(run_directory, runs))
    written = {
        "report": str(report.write_report(directory)),
        **({"csv": str(report.export_table(directory))} if tables else {}),
    }
    finish(written, as_json, "\n".join(f"{name}: {path}" for name, path in written.items()))


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A folder in runs/, or its name.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run; differences are B - A.")],
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compare two runs: recipes, last metrics, early warnings, and a paired test on their evaluations.

    For curves of several runs in one plot: tensorboard --logdir runs.
    """
    from grpo_train.report import compare_runs

    compared = compare_runs.compare(compare_runs.find_run(run_a, runs), compare_runs.find_run(run_b, runs))
    finish(dataclasses.asdict(compared), as_json, compare_runs.text(compared))


# What is gone from the command line, and what to do instead: the error of such a command line ends with it.
REMOVED = {
    "evaluate --endpoint": "save what the server answers, and grade the file with --completions FILE",
    "config --as plan": "grpo config RECIPE has the plan in its comments",
    "preflight --refresh": "to compile again, remove .cache/preflight",
    "preflight --largest-micro-batch": "give sizes to try: grpo preflight RECIPE training.micro_batch_size=N",
}
PHASES = ("before", "after")
# Below this accuracy the tiny model's share is explained: what it solves of other problems, it solves by chance.
EXPECTED_OF_TINY = 0.05
TINY_ON_OTHERS = (
    "note: this is the course's tiny model. It has 0.8 million weights and has read nothing but the course's own word "
    "problems (problems.source=words), so it solves next to none of these. A model that can: make real-model, then "
    "recipes/smollm2-135m-cpu.yaml"
)
DONE = ("export/config.json", "report.html")  # the last files of a run, after summary.json
RESUMABLE = "finished work of a run or an --output is kept; the same command continues it"


def main() -> None:
    """Entry point: a CourseError is one line on stderr and exit code 2; after a SIGTERM it is 75."""
    try:
        environment.prepare()
        code = app(standalone_mode=False)
        if code == 130:  # typer's, after Ctrl-C
            print(f"interrupted; {RESUMABLE}", file=sys.stderr)
        _exit(code)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit(2)
    except typer.exceptions.TyperException as error:  # of the command line; without a message it has shown the help
        if message := error.format_message():
            command = context.command_path if (context := getattr(error, "ctx", None)) else "grpo"
            print(f"error: {message} {_removed(sys.argv[1:]) or f'See {command} --help.'}", file=sys.stderr)
        _exit(2)
    except Interrupted as reason:
        print(f"stopped by {reason}; {RESUMABLE}", file=sys.stderr)
        _exit(EXIT_CODE)
    except SystemExit as end:  # typer's, where nobody reads the output
        _exit(end.code)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a file that cannot be read or written
            print(f"error: {error.filename}: {error.strerror}; name another file or folder", file=sys.stderr)
            _exit(2)
        traceback.print_exc()
        _exit(1)


def _removed(arguments: list[str]) -> str | None:
    """What to do instead, where the arguments have an option, or a value of one, that was removed."""
    words = {part for argument in arguments for part in argument.split("=")}
    for command_line, instead in REMOVED.items():
        if words.issuperset(command_line.split()):
            return f"It was removed: {instead}."
    return None


def _exit(code: Any) -> NoReturn:
    """Exit; without cleaning up while other processes are connected: at exit JAX would wait for those that are lost."""
    multihost = sys.modules.get("grpo_train.runs.multihost")
    if code and multihost and multihost.is_distributed():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _for_maxtext(recipe: Recipe, problems: Path, runs: Path) -> dict[str, Any]:
    """The arguments of train_rl, and its files.  What cannot be expressed, or is still to be done, goes to stderr."""
    from grpo_train import maxtext_rl

    run = runs / recipe.name
    checkpoint = run / "checkpoints" / "base" / "0" / "items"
    tests, filtered = maxtext_rl.write_problems(recipe, problems)
    arguments = maxtext_rl.arguments(recipe, problems, checkpoint, run / "upstream", tests)
    lost = maxtext_rl.not_expressible(recipe, tests)
    print(
        *(f"problems: {sentence}" for sentence in filtered),
        *(f"not expressible: {sentence}" for sentence in lost),
        *[f"to be made before it runs: {checkpoint} (grpo convert)"] * (not checkpoint.is_dir()),
        sep="\n",
        file=sys.stderr,
    )
    return {"arguments": arguments, "not_expressible": lost}


def _from_model(recipe: Recipe, samples: int | None) -> dict[str, Any]:
    """Arguments of evaluation.evaluate for the recipe's own model."""
    from grpo_train.engines import model_files

    environment.require_free_chips()
    model_files.require_engine(recipe.rollout.engine)
    # A path may hold other weights tomorrow; sizes and times tell them apart without reading them.
    kinds, folder = (".safetensors", ".json", ".jinja"), model_files.model_directory(recipe.model)
    stats = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.suffix in kinds}

    from grpo_train import pipeline

    sampling = recipe.evaluation_sampling if samples else {}
    generate, render = pipeline.standalone_generate(recipe)
    return {
        "generate": generate,
        "sampled": functools.partial(generate, **sampling) if samples else None,
        "render": render,
        "model": recipe.model.path,
        "settings": {
            "max_completion_length": recipe.rollout.max_completion_length,
            "weights": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()],
            **sampling,
        },
    }


def _is_tiny_on_others(recipe: Recipe) -> bool:
    """Whether the tiny model, or what was trained from it, is asked for something else than the course's problems."""
    from grpo_train.engines import model_files

    others = any(source.source not in ("words", "code") for source in recipe.sources)
    return others and model_files.is_tiny(recipe.model)


def _from_file(path: Path, problems: list, samples: int | None) -> dict[str, Any]:
    """The same for saved completions.

    Raises CourseError unless the file has as many per problem as are graded, and that of half of the problems at least.
    """
    from grpo_lib import completions_file

    saved = completions_file.saved_completions(path, problems)
    answered = len({problem for problem, _ in saved.found})
    if 2 * answered < len(problems):
        raise CourseError(
            f"{path} has completions of {answered:,} of the {len(problems):,} problems, and the others would count as "
            "wrong; give the problems.… keys that it was made with, such as problems.test"
        )
    if saved.most != (samples or 1) + bool(samples and saved.greedy):
        fitting = "leave out --samples" if saved.most == 1 else f"add --samples {saved.most - saved.greedy}"
        raise CourseError(f"{path} has up to {saved.most} completions per problem; {fitting}, so that all are graded")
    return {
        "generate": saved,
        "sampled": saved if samples and saved.greedy else None,
        "settings": {"completions": hashlib.sha256(path.read_bytes()).hexdigest()},
    }


def _verdict(summary: dict[str, Any], records: list[dict[str, Any]], failures: list[str]) -> str:
    """What `evaluate` prints."""
    low, high = summary["interval"]
    solved = "solved" if any(record["greedy"] for record in records) else "solved, averaged over samples"
    lines = []
    if failures:
        lines.append(f"{len(failures)} of {len(records)} completions failed and count as wrong; first: {failures[0]}")
    lines.append(
        f"{summary['accuracy']:.1%} of all {summary['n']} problems {solved} (95 % interval {low:.1%} to {high:.1%}); "
        f"last number right {summary['lenient_accuracy']:.1%}, within 10 % {summary['partial_accuracy']:.1%}, "
        f"format {summary['format_accuracy']:.1%}, "
        f"truncated {summary['truncated']:.1%}"
    )
    if "samples" in summary:
        at = "".join(f", pass@{k} {rate:.1%}" for k, rate in summary["pass_at_k"].items())
        lines.append(
            f"sampled {summary['samples']} times: {summary['sampled_accuracy']:.1%} right{at}, "
            f"maj@{summary['samples']} {summary['maj_at_k']:.1%}"
        )
    return "\n".join(lines)


def _seen(summary: dict[str, Any]) -> str:
    """What `evaluate --probe` prints."""
    low, high = summary["interval"]
    return (
        f"{summary['exact']:.1%} of {summary['n']} questions completed word for word (95 % interval {low:.1%} to "
        f"{high:.1%}); on average {summary['words']:.1%} of the rest's words before the first other one"
    )


def log_for(as_json: bool):
    """Progress goes to stderr when stdout is for JSON."""
    return lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def finish(result: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(result) if as_json else text)
