"""`grpo export`, `grpo report` and `grpo compare`: what is done with run directories."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_lib.common.errors import CourseError
from grpo_train.cli.options import AsJson, Overwrite, RunsFolder, commands, finish

app = commands()


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

    from grpo_train.export import export_step

    folder, exported = export_step(
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
