"""`grpo …`: what the notebooks do, without a notebook.

Every command prints errors on one line and leaves with 2; `--json` puts one JSON object on the last line.
Heavy modules are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.recipes import Recipe, dump_recipe, load_recipe

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
RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]


@app.command()
def config(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the resolved recipe: every field, defaults included."""
    resolved = load_recipe(recipe, overrides or ())
    if as_json:
        print(json.dumps(resolved.model_dump(mode="json")))
    else:
        print(dump_recipe(resolved), end="")


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
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert, evaluate, train, evaluate again, export and report: a whole run."""
    from grpo_lib.problems import load_problems
    from grpo_lib.rewards import get_rewards
    from grpo_lib.runs import check_new, new_run

    resolved = load_recipe(recipe, overrides or ())
    directory = runs / (run or resolved.name)
    # Whatever can be wrong is found before the directory is made.
    check_new(directory, resume=resume, overwrite=overwrite)
    get_rewards(resolved.rewards)
    for split in ("train", "validation", "test"):
        load_problems(resolved.problems, split)

    from grpo_lib import models, pipeline, report

    models.model_directory(resolved.model)
    directory = new_run(directory, resolved, resume=resume, overwrite=overwrite)

    say = _say(as_json)
    summary = pipeline.run(resolved, directory, _print_row(resolved, say), say, progress=sys.stderr.isatty())
    page = report.write_report(directory)
    _finish(summary, as_json, f"{_headline(summary)}\nreport: {page}")


@app.command()
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or validation")] = "test",
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per problem to this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Greedy evaluation of the recipe's model (model.path=… for another) on all problems of a split."""
    resolved = load_recipe(recipe, overrides or ())
    if split not in ("test", "validation"):
        raise CourseError(f"--split {split}: choose test or validation")
    if output and output.exists() and not overwrite:
        raise CourseError(f"{output} exists; add --overwrite to replace it, or choose another --output")

    from grpo_lib import evaluation, pipeline
    from grpo_lib.problems import load_problems

    problems = load_problems(resolved.problems, split)
    generate, render = pipeline.standalone_generate(resolved)
    result = evaluation.evaluate(
        generate, problems, render=render, batch_size=resolved.evaluation.batch_size, label=split,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    if output:
        result.save(output)
    summary = result.summary()
    low, high = summary["interval"]
    text = (
        f"{summary['accuracy']:.1%} of all {summary['n']} problems solved (95 % interval {low:.1%} to {high:.1%}); "
        f"last number right {summary['lenient_accuracy']:.1%}, format {summary['format_accuracy']:.1%}, "
        f"truncated {summary['truncated']:.1%}"
    )
    if summary["accuracy"] < CHANCE:
        text += "\nThat is next to nothing: this model cannot solve these problems."
    _finish(summary, as_json, text)


@app.command()
def report(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A folder in runs/.")], as_json: AsJson = False
) -> None:
    """Write report.html of a run: headline, curves, and every answer before and after."""
    from grpo_lib import report
    from grpo_lib.runs import load_run

    directory, _ = load_run(run_directory)
    page = report.write_report(directory)
    _finish({"report": str(page)}, as_json, f"report: {page}")


# Below this accuracy `grpo evaluate` says in words that the model cannot do the task.
CHANCE = 0.02


def main() -> None:
    """Entry point: a CourseError is one line on stderr and exit code 2."""
    try:
        app()
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept, and --resume continues it", file=sys.stderr)
        sys.exit(130)


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
