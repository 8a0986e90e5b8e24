"""What the commands share: their options, and how they print."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lib.common import boundary, environment
from grpo_lib.common.errors import CourseError
from grpo_train.recipes import Recipe

# ----- The command line's settings -----


def commands() -> typer.Typer:
    """A new group of commands; `grpo_train.cli.main` puts the groups together."""
    return typer.Typer(
        help="GRPO on grade-school maths, from a recipe.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # the help of rich keeps the line breaks of the source
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


# ----- Options of several commands -----

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
    key, equals, _ = str(folder).partition("=")
    if equals and key.partition(".")[0] in Recipe.model_fields:  # as with `--runs $RUNS KEY=VALUE`, and RUNS empty
        raise CourseError(f"--runs {folder} is a change of the recipe; give a folder after --runs, and {folder} last")
    if str(folder).startswith("gs:"):
        raise CourseError(
            f"--runs {folder} is a bucket, and a run needs a disk: mount the bucket (docs/tpu-vm.md), or leave the "
            "runs here and set training.checkpoints=gs://BUCKET/FOLDER"
        )
    return folder


RunsFolder = Annotated[Path, typer.Option("--runs", help="Folder of all runs.", callback=_on_a_disk)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


NoIsolation = Annotated[
    bool, typer.Option("--no-isolation", help="Run foreign code without a boundary, as the user that you are.")
]


def isolate(recipe: Recipe, off: bool, log: Callable[[str], None]) -> None:
    """Say what isolates the code that a model writes, where the recipe has tasks of that kind.

    Raises CourseError where nothing does, unless `off`.
    """
    if any(source.source == "code" for source in recipe.sources):
        log(boundary.require(off=off))


# ----- Several processes -----


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


# ----- What a command prints -----


def program() -> str:
    """This command as it was called: with its folder, as that of a TPU VM's environment is not on the PATH."""
    called = sys.argv[0]
    return called if Path(called).name == "grpo" else "grpo"


def log_for(as_json: bool) -> Callable[[str], None]:
    """Progress goes to stderr when stdout is for JSON."""
    return lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def finish(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print the result: as one JSON object, or as text."""
    print(json.dumps(result) if as_json else text)
