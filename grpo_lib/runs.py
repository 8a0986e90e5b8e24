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


def open_run(directory: str | Path, recipe: Recipe, *, overwrite: bool = False) -> Path:
    """Start a run, or continue the one that is there; with `overwrite` it is replaced.

    Raises CourseError when the directory holds a run of another recipe (it lists what differs) or other files.
    """
    directory = Path(directory).resolve()
    if check_run(directory, recipe, overwrite=overwrite):
        return directory
    if overwrite and directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_json_atomic(directory / "environment.json", environment.describe())
    write_text_atomic(directory / "recipe.yaml", dump_recipe(recipe))  # last: its presence makes this a run
    return directory


def check_run(directory: str | Path, recipe: Recipe, *, overwrite: bool = False) -> bool:
    """Is there a run of this recipe, to be continued?

    Raises CourseError when there is one of another recipe that was not to be overwritten, or something that is no run.
    """
    directory = Path(directory).resolve()
    if (directory / "recipe.yaml").is_file():
        if overwrite:
            return False
        if differing := differences(load_recipe(directory / "recipe.yaml"), recipe):
            raise CourseError(
                f"run {directory} was started with another recipe ({'; '.join(differing)}); continue it with its own, "
                "replace it with --overwrite, or choose another name with --run NAME"
            )
        return True
    if directory.is_dir() and any(path.name != "notebooks" for path in directory.iterdir()):
        raise CourseError(f"{directory} exists and is not a run (it has no recipe.yaml); choose another run name")
    return False


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
