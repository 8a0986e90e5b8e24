"""Cut what students get: `make student`, with nbgrader (requirements/teach.lock), which students never install.

The student build is this repository's tracked files without the teacher's, and exercises/ with the notebooks as
nbgrader's own preprocessors cut them: no solutions, no hidden tests.  Those in exercises/zh_TW/ are cut from what
`make zh` built; assignment-a/ has the handout.  Seeds are in no file at all.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError

# Of the teacher's part, what students get: what `grpo check` and `grpo leaderboard` need, and the assignment.
STUDENTS_KEEP = [
    *(f"grpo_teach/{name}.py" for name in ("__init__", "cli", "check", "notebooks", "leaderboard", "train_process")),
    *("grpo_teach/limited.py", "grpo_teach/worker.py", "teaching/zh_TW/assignment-a/README.md"),
    *("teaching/assignment-a/README.md", "teaching/assignment-a/train_loop.py"),
]
# In the student's folder these stand in for the teacher's.
STUDENTS_README = {"README.md": "teaching/student/README.md", "README.zh.md": "teaching/zh_TW/student/README.md"}
TEACHERS = ("teaching/", "tests/teach/", "grpo_teach/", "requirements/teach.")


def build(root: Path, output: Path) -> list[Path]:
    """Write the student build to `output`, which is replaced, and return the exercises' notebooks.

    Raises:
      CourseError: nbgrader is not installed, or output is a folder with other contents.
    """
    if output.exists() and not (output / "exercises").is_dir():
        raise CourseError(f"{output} is not a student build; name another folder")
    shutil.rmtree(output, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (name in STUDENTS_KEEP or not name.startswith(TEACHERS)) and (root / name).is_file():
            target = output / name.removeprefix("teaching/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
    for name, source in STUDENTS_README.items():
        shutil.copyfile(root / source, output / name)
    paths = [path for pattern in ("*/*.ipynb", "*/zh_TW/*.ipynb") for path in (root / "teaching").glob(pattern)]
    places = {True: output / "exercises" / "zh_TW", False: output / "exercises"}
    return [cut(path, places[path.parent.name == "zh_TW"]) for path in sorted(paths)]


def cut(path: Path, folder: Path) -> Path:
    """Write the student's version of a teacher's notebook to `folder`."""
    try:
        from nbgrader import preprocessors
    except ImportError:
        raise CourseError("make student needs nbgrader; it installs requirements/teach.lock into .venv-teach") from None
    notebook = nbformat.read(path, as_version=4)
    for name in ("LockCells", "ClearSolutions", "ClearOutput", "ClearHiddenTests", "CheckCellMetadata"):
        notebook, _ = getattr(preprocessors, name)().preprocess(notebook, {})
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / path.name)
    return folder / path.name


def main() -> None:
    root = environment.repo_root()
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "build" / "student"
    try:
        notebooks = build(root, output)
    except CourseError as error:
        sys.exit(f"error: {error}")
    print(f"{output}: the course with {len(notebooks)} notebooks of exercises, without solutions and hidden tests")


if __name__ == "__main__":
    main()
