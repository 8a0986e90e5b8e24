"""The run directory: all that one notebook, or one command, hands on to the next.

runs/NAME/  recipe.yaml  environment.json  changes.jsonl  metrics.jsonl  tensorboard/  checkpoints/
            evals/before.jsonl  evals/before.json  evals/after.jsonl  evals/after.json
            evals/base.jsonl  evals/answers.csv
            sync.json  seconds.json  export/  summary.json  report.html

recipe.yaml is what the run goes on with; changes.jsonl has a row for each time that it went on with other values
(recipes.continuing), with the values before and after.
"""

import contextlib
import datetime
import errno
import functools
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
from etils import epath

from grpo_lib import reward_files
from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl, read_jsonl, write_json_atomic, write_text_atomic
from grpo_lib.problems import own_files
from grpo_train.recipes import Recipe, changed_values, continuing, differences, dump_recipe, load_recipe, plan_table
from grpo_train.runs import machine
from grpo_train.runs.metric_glossary import read_metrics
from grpo_train.runs.run_files import read_environment

# What is made of the weights of the last step.  A run that goes on behind that step keeps them under other names.
OF_THE_LAST_STEP = (
    "evals/after.jsonl",
    "evals/after.jsonl.partial",
    "evals/after.json",
    "evals/answers.csv",
    "summary.json",
    "report.html",
    "export",
)


def open_run(
    directory: str | Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    log: Callable[[str], None] = print,
    date: datetime.date | None = None,
) -> Path:
    """Start a run, or continue the existing one; with `overwrite` it is replaced.  Raises what `check_run` raises.

    `date` is that of a new run, for `date_of`; None: today.
    `log` is called with a sentence about the values with which it continues, if some have changed.
    """
    directory = Path(directory).resolve()
    if check_run(directory, recipe, overwrite=overwrite):
        _take_changes(directory, recipe, log)
        return directory
    if overwrite and directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    described = machine.describe() | digests_of_files(recipe)
    described["date"] = (date or datetime.date.today()).isoformat()
    write_json_atomic(directory / "environment.json", described)
    _write_recipe(directory, recipe)  # last: it makes this a run
    return directory


def date_of(directory: str | Path) -> datetime.date | None:
    """The day on which a run began: the date in its prompts, where a chat template writes one.  None: no run, or one
    that has not kept it."""
    began = read_environment(directory).get("date")
    return datetime.date.fromisoformat(began) if began else None


def _write_recipe(directory: Path, recipe: Recipe) -> None:
    plan = "\n".join(f"# {line}".rstrip() for line in plan_table(recipe).splitlines())
    write_text_atomic(directory / "recipe.yaml", f"{dump_recipe(recipe)}\n{plan}\n")


def _take_changes(directory: Path, recipe: Recipe, log: Callable[[str], None]) -> None:
    """Write down what this recipe changes of the run's, and make it the run's.

    A process that is killed in between leaves the old recipe.yaml, and the next one does the same again.
    """
    old = load_recipe(directory / "recipe.yaml")
    changed = changed_values(old, recipe)
    if not changed:
        return
    with one_at_a_time(directory):
        row = {
            "step": _step_to_continue_from(directory, old),
            "changes": {key: {"before": before, "after": after} for key, (before, after) in changed.items()},
        }
        last = read_changes(directory)[-1:]
        if not last or any(last[0].get(key) != row[key] for key in row):
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            append_jsonl(directory / "changes.jsonl", row | {"time": now})
        if "training.steps" in changed:
            _set_aside(directory, old.training.steps)
            _bring_back(directory, recipe.training.steps)
        _write_recipe(directory, recipe)
    log(f"changed after step {row['step']}: {'; '.join(continuing.describe_changes(old, recipe))}")


def read_changes(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's changes.jsonl: `step` after which it went on, `changes`, key -> before and after, `time`.

    Raises CourseError for a row that is something else.
    """
    path = directory / "changes.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        changes = row.get("changes")
        pairs = changes.values() if isinstance(changes, dict) else [None]
        if "step" not in row or not all(isinstance(pair, dict) and {"before", "after"} <= set(pair) for pair in pairs):
            raise CourseError(f"{path}: line {number} is not a change of a run; remove the line")
    return rows


def describe_change(row: dict[str, Any]) -> str:
    """A row of changes.jsonl in one line."""
    parts = [continuing.describe_change(key, pair["before"], pair["after"]) for key, pair in row["changes"].items()]
    return f"after step {row['step']}: {'; '.join(parts)}"


def _set_aside(directory: Path, step: int) -> None:
    """Rename what was made of the weights of this step, evals/after.jsonl to evals/after-50.jsonl and so on."""
    evaluated = directory / "evals" / "after.jsonl"
    if not evaluated.exists() and not Path(f"{evaluated}.partial").exists():
        return  # training has not come to its end
    for name in OF_THE_LAST_STEP:
        path = directory / name
        kept = _of_step(path, step)
        if path.is_dir() and kept.exists():  # grpo export has written the same weights there
            shutil.rmtree(path)
        elif path.exists():
            path.rename(kept)


def _bring_back(directory: Path, step: int) -> None:
    """The other way: the run's last step is one at which it had ended before."""
    for name in OF_THE_LAST_STEP:
        kept = _of_step(directory / name, step)
        if kept.exists():
            kept.rename(directory / name)


def _of_step(path: Path, step: int) -> Path:
    """after.jsonl.partial -> after-50.jsonl.partial"""
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}-{step}{dot}{suffixes}")


def finished_steps(directory: str | Path) -> int:
    """The step of the last row of metrics.jsonl; 0 without one."""
    rows = read_metrics(Path(directory) / "metrics.jsonl")
    return max((int(row.get("step") or 0) for row in rows), default=0)


def _step_to_continue_from(directory: Path, recipe: Recipe) -> int:
    """The step of the newest checkpoint that has a row in metrics.jsonl; 0 without one."""
    from grpo_train.runs import checkpoints  # here, because it imports JAX

    folder = checkpoints.checkpoint_root(recipe.training, directory) / "actor"
    saved = [update // recipe.grpo.iterations for update in checkpoints.updates(folder)]
    rows = finished_steps(directory)
    return max((step for step in saved if step <= rows), default=0)


def check_run(directory: str | Path, recipe: Recipe, *, overwrite: bool = False) -> bool:
    """True if there is a run that this recipe continues; some of its values may be others (recipes.continuing).

    Raises CourseError when the directory holds a run of another recipe (it lists what differs) or other files.
    """
    directory = Path(directory).resolve()
    if (directory / "recipe.yaml").is_file():
        if overwrite:
            return False
        old = load_recipe(directory / "recipe.yaml")
        if differing := continuing.refused(old, recipe, finished_steps(directory)):
            raise CourseError(
                f"run {directory} was started with another recipe ({'; '.join(differing)}); continue it with its own "
                f"values, or start a new run: grpo train RECIPE … --run {_free_name(directory)}; --overwrite replaces "
                "the old one"
            )
        _require_same_files(directory, recipe)
        return True
    if directory.is_dir() and any(path.name != "notebooks" for path in directory.iterdir()):
        raise CourseError(f"{directory} exists and is not a run (it has no recipe.yaml); choose another run name")
    return False


def digests_of_files(recipe: Recipe) -> dict[str, dict[str, str]]:
    """SHA-256 of the user's own files that a recipe names: those of `rewards`, and of problems from files.

    Raises CourseError where one is not there.
    """
    own = [own_files.train_and_test(source) for source in recipe.sources if source.source == "file"]
    problems = {str(file): reward_files.digest(file) for files in own for file in files if file}
    found = {"reward_files": reward_files.digests(recipe.rewards), "problem_files": problems}
    return {kind: digests for kind, digests in found.items() if digests}


def _require_same_files(directory: Path, recipe: Recipe) -> None:
    """Raise CourseError where a file of `rewards`, or of problems, is another one than when the run began."""
    began = read_environment(directory)
    for kind, digests in digests_of_files(recipe).items():
        before = began.get(kind, {})
        changed = [name for name, digest in digests.items() if before.get(name, digest) != digest]
        if changed:
            raise CourseError(
                f"run {directory} began with another content of {changed[0]}; put the file back as it was, or start a "
                f"new run: grpo train RECIPE … --run {_free_name(directory)}; --overwrite replaces the old one"
            )


def changed_keys(directory: str | Path, recipe: Recipe) -> set[str]:
    """Keys in which a recipe differs from that of an existing run; empty where there is none."""
    file = Path(directory) / "recipe.yaml"
    return set(changed_values(load_recipe(file), recipe)) if file.is_file() else set()


def _free_name(directory: Path) -> str:
    """A name for another run next to this one: mine-2, mine-3, ..."""
    names = (f"{directory.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if not directory.with_name(name).exists())


def require_folder(folder: str | Path, given: str) -> None:
    """Raise CourseError, and leave nothing behind, where this folder cannot be made or written; buckets pass.

    `given`: the option or field that names it.
    """
    if is_address(folder):
        return
    path = location(folder)
    existing = next(place for place in (path, *path.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix="."):
            pass
    except OSError as error:  # not os.access: it says yes to root, also for /proc
        raise CourseError(f"{given} {path} cannot be written ({error.strerror}); give another folder") from None


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Let no other process train in this run, here or on a host that shares the disk.  A process that is killed leaves
    no lock: the lock is the operating system's, on a file next to the run.

    Raises CourseError, at once, where another process does.
    """
    directory = directory.resolve()  # one lock for a run, however it is written
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory.with_name(f".{directory.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise CourseError(
            f"another process is training in {directory}; wait until it has ended, stop it, or choose another name "
            f"with --run NAME; if there is none on any host, remove {lock.lock_file}"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise  # else: a disk without locks
    try:
        yield
    finally:
        lock.release()


@functools.cache  # one object for a run: a process that has the lock gets it again
def _lock(file: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(file)


def finished_run(directory: str | Path, recipe: Recipe) -> Path:
    """The run, if it was evaluated after training; else a copy of the shipped run of this recipe, and it says so.

    So everything that reads a finished run works in a fresh clone too. The copy is `DIRECTORY-shipped`; what a reader
    changes there is kept.  Where the run keeps its checkpoints makes no difference: they are not read.

    Raises:
      CourseError: neither; or a run of another recipe.
    """
    directory = Path(directory).resolve()
    evaluated = Path("evals") / "after.jsonl"
    if (directory / "recipe.yaml").is_file():
        own = load_recipe(directory / "recipe.yaml")
        recipe = _with_checkpoints_in(own.training.checkpoints, recipe)
    if check_run(directory, recipe) and (directory / evaluated).exists():
        if others := changed_keys(directory, recipe).intersection(continuing.OF_THE_RUN):
            raise CourseError(
                f"run {directory} was trained with another {' and '.join(sorted(others))} than this recipe; go on with "
                "the training (notebook 04), or name the run's own values"
            )
        return directory
    same = [
        file.parents[1]
        for file in (environment.repo_root() / "assets" / "reference").glob(f"*/{evaluated}")
        if not differences(load_recipe(file.parents[1] / "recipe.yaml"), _with_checkpoints_in(None, recipe))
    ]
    copy = directory.with_name(f"{directory.name}-shipped")
    if not same:
        raise CourseError(f"run {directory.name} has no evaluation after training; train it first (notebook 04)")
    print(f"{directory.name} is not trained yet: this is the shipped run of the same recipe, in {copy.name}")
    if not copy.exists():
        unfinished = copy.with_name(f".{copy.name}.partial")
        shutil.copytree(same[0], unfinished, dirs_exist_ok=True)
        unfinished.rename(copy)
    return copy


def _with_checkpoints_in(place: str | None, recipe: Recipe) -> Recipe:
    training = recipe.training.model_copy(update={"checkpoints": place})
    return recipe.model_copy(update={"training": training})


def has_base(base: Any) -> bool:
    """Does this folder or address hold a complete MaxText checkpoint?

    A folder of this machine is renamed when it is complete. A bucket has no rename: there Orbax writes a file last.
    Raises CourseError for an address that names no bucket, or one that cannot be asked.
    """
    if not is_address(base):
        return (base / "0" / "items").is_dir()
    reason = "it names no bucket"
    if base.parts[2:]:  # after "/" and "gs"
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback for what is raised anyway
        try:
            return (base / "0" / "commit_success.txt").exists()
        except Exception as error:  # those of aiohttp, gcsfs and google.auth have no class in common
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise CourseError(
        f"{base} cannot be read ({reason}); --base, or --output of grpo convert, needs gs://BUCKET/FOLDER and an "
        "account with access to it"
    )


def check_base(base: str | Path) -> Any:
    """The absolute path or address of a MaxText checkpoint, from its own or its `0/items`, as `grpo convert` prints it.

    Raises CourseError when it holds none, or, in a bucket, an interrupted one.
    """
    found = location(base)
    if found.parts[-2:] == ("0", "items"):
        found = found.parents[1]
    if not has_base(found):
        missing = "commit_success.txt" if is_address(found) else "items"
        raise CourseError(
            f"--base {found} is not a MaxText checkpoint (it has no 0/{missing}); make one with grpo convert"
        )
    return found


def link_base(directory: str | Path, base: str | Path) -> None:
    """Let a run start from a model converted earlier; a base that the run already has is kept.

    It is a symbolic link, or, for an address in a bucket, a file that holds the address.
    """
    link = Path(directory) / "checkpoints" / "base"
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        return
    found = check_base(base)
    if is_address(found):
        write_text_atomic(link, f"{found}\n")
    else:
        link.symlink_to(found, target_is_directory=True)


def base_of(directory: str | Path) -> Any:
    """Where the base checkpoint of a run is, or will be: a folder in the run, or the address that `link_base` wrote."""
    base = Path(directory) / "checkpoints" / "base"
    return location(base.read_text(encoding="utf-8").strip()) if base.is_file() else base


def load_run(directory: str | Path) -> tuple[Path, Recipe]:
    """The directory and recipe of an existing run."""
    directory = Path(directory).resolve()
    if not (directory / "recipe.yaml").is_file():
        raise CourseError(f"{directory} is not a run (it has no recipe.yaml); start one with grpo train RECIPE")
    return directory, load_recipe(directory / "recipe.yaml")


def location(path: str | os.PathLike) -> Any:
    """An absolute folder, or an address such as gs://BUCKET/FOLDER as it is: pathlib would make gs:/ of it.

    Returns a pathlib.Path, or, of an address, etils' epath.Path, which has the same methods.
    """
    return epath.Path(path) if is_address(path) else Path(path).expanduser().resolve()


def is_address(path: str | os.PathLike) -> bool:
    """Is it an address in a bucket, and not a folder of this machine?"""
    return os.fspath(path).startswith("gs://")
