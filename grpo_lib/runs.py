"""The run directory: the only thing that passes from one notebook, or one command, to the next.

runs/NAME/  recipe.yaml  environment.json  metrics.jsonl  tensorboard/  checkpoints/
            evals/before.jsonl  evals/after.jsonl  evals/answers.csv  evals/answers.parquet
            sync.json  export/  summary.json  report.html
"""

from __future__ import annotations

import shutil
from pathlib import Path

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.files import write_json_atomic, write_text_atomic
from grpo_lib.recipes import Recipe, differences, dump_recipe, load_recipe


def open_run(directory: str | Path, recipe: Recipe) -> Path:
    """Start a run, or continue the one that is there.

    Raises CourseError when the directory holds a run of another recipe (it lists what differs) or other files.
    """
    directory = Path(directory).resolve()
    if (directory / "recipe.yaml").is_file():
        differing = differences(load_recipe(directory / "recipe.yaml"), recipe)
        if differing:
            raise CourseError(
                f"run {directory} was started with another recipe ({'; '.join(differing)}); "
                "continue it with its own, or choose another run name"
            )
        return directory
    if directory.is_dir() and any(path.name not in ("notebooks",) for path in directory.iterdir()):
        raise CourseError(f"{directory} exists and is not a run (it has no recipe.yaml); choose another run name")
    directory.mkdir(parents=True, exist_ok=True)
    write_json_atomic(directory / "environment.json", environment.describe())
    write_text_atomic(directory / "recipe.yaml", dump_recipe(recipe))  # last: its presence makes this a run
    return directory


def check_new(directory: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raises CourseError when the directory is in use and neither resuming nor overwriting was asked for."""
    directory = Path(directory).resolve()
    if resume or not directory.exists() or not any(directory.iterdir()):
        return
    if not overwrite:
        raise CourseError(
            f"run {directory} exists; add --resume to continue it, --overwrite to replace it, "
            "or --run NAME for another name"
        )
    if not (directory / "recipe.yaml").is_file():
        raise CourseError(
            f"{directory} is not a run (it has no recipe.yaml), so it is not replaced; choose another name"
        )


def new_run(directory: str | Path, recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Start a run that must be new, unless asked to resume or overwrite what is there; see `check_new`."""
    check_new(directory, resume=resume, overwrite=overwrite)
    if overwrite and Path(directory).exists():
        shutil.rmtree(directory)
    return open_run(directory, recipe)


def check_base(base: str | Path) -> Path:
    """A MaxText checkpoint, absolute: the folder, or its `0/items`, as `grpo convert` prints it.

    Raises CourseError when the folder holds none.
    """
    base = Path(base).expanduser().resolve()
    if base.parts[-2:] == ("0", "items"):
        base = base.parents[1]
    if not (base / "0" / "items").is_dir():
        raise CourseError(f"--base {base} is no MaxText checkpoint (it has no 0/items); make one with grpo convert")
    return base


def link_base(directory: str | Path, base: str | Path) -> None:
    """Let a run start from a model that was converted before, by a link; one that the run has already is kept."""
    link = Path(directory) / "checkpoints" / "base"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(check_base(base), target_is_directory=True)


def load_run(directory: str | Path) -> tuple[Path, Recipe]:
    """A run that exists, and its recipe."""
    directory = Path(directory).resolve()
    if not (directory / "recipe.yaml").is_file():
        raise CourseError(f"{directory} is not a run (it has no recipe.yaml); start one with grpo train RECIPE")
    return directory, load_recipe(directory / "recipe.yaml")
