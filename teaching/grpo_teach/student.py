"""Cut what students get: `make student`, with nbgrader (requirements/teach.lock), which students never install.

    python -m grpo_teach.student [--check] [FOLDER]        --check: only say whether FOLDER may be written

The student build is this repository's tracked files without the teacher's, the page in which the model learns, and
exercises/ with the notebooks as nbgrader's own preprocessors cut them: no solutions, no hidden tests.  Those in
exercises/zh_TW/ are cut from what `make zh` built; assignment-a/ has the handout.  Seeds are in no file at all.

A build replaces nothing but an earlier build, and of that only the files that it has written and nobody has changed:
STAMP, in the folder, lists them with their hashes.  Whatever else is there, such as submissions, stays.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_json_atomic

# Of the teacher's part, what students get: what `grpo check` and `grpo leaderboard` need, and the assignment.
PACKAGE = "teaching/grpo_teach"
FOR_STUDENTS = (
    *("__init__", "cli", "check", "cases", "words", "notebooks", "hand_ins", "limited", "worker"),
    *("leaderboard", "train_process"),
)
STUDENTS_KEEP = [
    *(f"{PACKAGE}/{name}.py" for name in FOR_STUDENTS),
    "teaching/assignment-a/README.md",
    "teaching/assignment-a/train_loop.py",
    "teaching/zh_TW/assignment-a/README.md",
]
# In the student's folder these stand in for the teacher's.
STUDENTS_README = {"README.md": "teaching/student/README.md", "README.zh.md": "teaching/zh_TW/student/README.md"}
# Made by `make tab`, which `make student` runs first: the page in which the model learns.
TAB = "grpo-in-a-tab.html"
# The students' repository runs the public cases of what is pushed to it.
AUTOMATIC = {".github/workflows/classroom.yml": "teaching/student/classroom.yml"}
IMPORTS_CASES = re.compile(r"(?m)^from grpo_teach\.cases import .*\n\n?")
# Colab has no command line of the course.
ON_A_COMMAND_LINE = re.compile(
    r", or save the notebook and run `[^`]*grpo check[^`]*` in a terminal, in the course's folder"
    "|，也可以先儲存筆記本[^`]*`[^`]*grpo check[^`]*`"
)
COLAB = (
    "*This copy needs nothing but NumPy, so it runs on Colab, in Kaggle or in any Jupyter.* Run the next cell first; "
    "then write each function, run its cell, and run the cell below it. Keep your work with *File → Save a copy in "
    "Drive*, and hand in what *File → Download → Download .ipynb* gives.",
    "這一份只需要 NumPy，所以在 Colab、Kaggle 或任何 Jupyter 上都能執行。請先執行下一個儲存格；然後寫每一個函式，"
    "執行它的儲存格，再執行下面的儲存格。用「檔案 → 在雲端硬碟中儲存副本」保存，"
    "再用「檔案 → 下載 → 下載 .ipynb」下載後繳交。",
)
TEACHERS = ("teaching/", "tests/teach/", "requirements/teach.")
STAMP = ".student-build.json"  # {"files": {name: [sha256, …]}}, of what the build wrote
ELSEWHERE = "move it away, or name another folder: make student OUT=../class"


def build(root: Path, output: Path) -> list[Path]:
    """Write the student build to `output`, in place of an earlier one, and return the exercises' notebooks.

    Everything is made in a folder next to `output` first: what fails leaves `output` as it was.

    Raises:
      CourseError: what `built_before` says of `output`, nbgrader is not installed, or a file of somebody is in the way.
    """
    old = built_before(root, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        made = Path(folder) / output.name
        notebooks = [path.relative_to(made) for path in write_build(root, made)]
        _put(made, output, old)
    return [output / path for path in notebooks]


def built_before(root: Path, output: Path) -> dict[str, list[str]]:
    """The files of an earlier build in `output`, with their hashes; none where there is no such folder.

    Nothing is written.

    Raises:
      CourseError: `output` is something else than a build, or is in this repository, or has files that were changed.
    """
    place = Path(os.path.normpath(output.parent.resolve() / output.name))
    if root.is_relative_to(place) or (place.is_relative_to(root) and root / "build" not in place.parents):
        raise CourseError(
            f"OUT={output} is where this repository is; name a folder outside of it, such as OUT=../class, or in build/"
        )
    if not output.exists() and not output.is_symlink():
        return {}
    files = _stamped(output)
    changed = [name for name in files if not _unchanged(output, name, files[name])]
    if changed:
        others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CourseError(f"OUT={output}: {changed[0]} was changed since it was built{others}; {ELSEWHERE}")
    return files


def write_build(root: Path, output: Path) -> list[Path]:
    """Write the student build to a new folder, and return the exercises' notebooks."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise CourseError(f"{root} is not a clone with git, which lists the files for students; clone it") from None
    for name in filter(None, listed.split("\0")):
        if (name in STUDENTS_KEEP or not name.startswith(TEACHERS)) and (root / name).is_file():
            target = output / name.removeprefix("teaching/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
    for name, source in STUDENTS_README.items():
        shutil.copyfile(root / source, output / name)
    shutil.copyfile(root / "build" / TAB, output / TAB)
    paths = [path for pattern in ("*/*.ipynb", "*/zh_TW/*.ipynb") for path in (root / "teaching").glob(pattern)]
    places = {True: output / "exercises" / "zh_TW", False: output / "exercises"}
    notebooks = [cut(path, places[path.parent.name == "zh_TW"]) for path in sorted(paths)]
    for name, source in AUTOMATIC.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / source, output / name)
    cases = (root / PACKAGE / "cases.py").read_text("utf-8")
    for path in notebooks:
        colab(path, output / "exercises" / "colab" / path.relative_to(output / "exercises"), cases)
    return notebooks


def cut(path: Path, folder: Path) -> Path:
    """Write the student's version of a teacher's notebook to `folder`."""
    try:
        from nbgrader import preprocessors
    except ImportError:
        raise CourseError("make student needs nbgrader; it installs requirements/teach.lock into .venv-teach") from None
    import nbformat  # here, as nbgrader: --check runs before there is an environment

    notebook = nbformat.read(path, as_version=4)
    for name in ("LockCells", "ClearSolutions", "ClearOutput", "ClearHiddenTests", "CheckCellMetadata"):
        notebook, _ = getattr(preprocessors, name)().preprocess(notebook, {})
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    return folder / path.name


def colab(path: Path, target: Path, cases: str) -> None:
    """Write a student's notebook as one that needs NumPy only, such as on Colab; not of exercises that need JAX.

    Args:
      cases: the source of grpo_teach/cases.py, which becomes the notebook's first cell of code.
    """
    notebook = json.loads(path.read_text("utf-8"))
    texts = ["".join(cell["source"]) for cell in notebook["cells"]]
    if not any(IMPORTS_CASES.search(text) for text in texts):
        return
    chinese = "zh_TW" in path.parts
    for cell, text in zip(notebook["cells"], texts, strict=True):
        cell["source"] = ON_A_COMMAND_LINE.sub("", IMPORTS_CASES.sub("", text).lstrip("\n"))
        cell["metadata"].pop("deletable", None)  # Colab would not let a locked cell be run again
    language = "import os\n\nos.environ['GRPO_LANGUAGE'] = 'zh'\n\n\n" if chinese else ""
    opening = {"cell_type": "markdown", "id": "colab", "metadata": {}, "source": COLAB[chinese]}
    code = {"cell_type": "code", "id": "colab-cases", "metadata": {"cellView": "form"}, "source": language + cases}
    notebook["cells"][1:1] = [opening, code | {"execution_count": None, "outputs": []}]
    notebook["metadata"] = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _stamped(output: Path) -> dict[str, list[str]]:
    """The files that the stamp in `output` lists.  Raises CourseError where `output` is not a build."""
    foreign = CourseError(f"OUT={output} was not made by make student; {ELSEWHERE}")
    stamp = output / STAMP
    if output.is_symlink() or stamp.is_symlink() or not stamp.is_file():
        raise foreign
    try:
        content: Any = json.loads(stamp.read_text("utf-8"))
        return {str(name): [*hashes] for name, hashes in content["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise foreign from None


def _unchanged(output: Path, name: str, hashes: Iterable[str]) -> bool:
    """Whether a file is as a build wrote it, or is gone; one behind a link is somebody else's."""
    path = output / name
    if ".." in Path(name).parts or Path(name).is_absolute() or _behind_other(output, name) or path.is_symlink():
        return False
    if not path.exists():
        return True
    return path.is_file() and _hash(path) in hashes


def _behind_other(output: Path, name: str) -> bool:
    """Whether a link or a file is where this file's folders are."""
    folders = [output / folder for folder in Path(name).parents if folder != Path()]
    return any(os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()) for folder in folders)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _put(made: Path, output: Path, old: dict[str, list[str]]) -> None:
    """Move a new build into `output`, and delete those files of the old one that it no longer has."""
    new = {str(path.relative_to(made)): [_hash(path)] for path in sorted(made.rglob("*")) if path.is_file()}
    if not output.exists():
        write_json_atomic(made / STAMP, {"files": new})
        made.rename(output)
        return
    for name in new:
        if _behind_other(output, name) or (name not in old and os.path.lexists(output / name)):
            raise CourseError(f"OUT={output}: what is at {name} is not of the earlier build; {ELSEWHERE}")
    # Until all is moved, a file may be of either build: one that is interrupted here can be repeated.
    either = {name: [*old.get(name, []), *new.get(name, [])] for name in {**old, **new}}
    write_json_atomic(output / STAMP, {"files": either})
    for name in new:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).replace(output / name)
    for name in old.keys() - new.keys():
        (output / name).unlink(missing_ok=True)
        _remove_empty(output, (output / name).parent)
    write_json_atomic(output / STAMP, {"files": new})


def _remove_empty(output: Path, folder: Path) -> None:
    """Remove folders that became empty, up to `output`."""
    while folder != output and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    only_check = given[:1] == ["--check"]
    name = "".join(given[only_check:])
    root = environment.repo_root()
    output = Path(name).expanduser() if name else root / "build" / "student"
    try:
        if only_check:
            built_before(root, output)
            return
        notebooks = build(root, output)
    except CourseError as error:
        sys.exit(f"error: {error}")
    print(f"{output}: the course with {len(notebooks)} notebooks of exercises, without solutions and hidden tests")


if __name__ == "__main__":
    main()
