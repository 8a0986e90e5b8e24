"""Gradescope's folders: source/, submission/ and results/, and run_autograder once for each hand-in."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_teach import grading

LESSON = grading.teachers_exercises()["6.1"].path
SOURCE = ("grpo_lib", "notebooks", "recipes", "requirements", "teaching")  # as gradescope.md packs it


def honest(folder: Path) -> None:
    (folder / LESSON.name).write_bytes(LESSON.read_bytes())


def empty(folder: Path) -> None:
    pass


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "work.zip", "w") as archive:
        archive.write(LESSON, f"work/{LESSON.name}")
        archive.writestr(f"__MACOSX/work/._{LESSON.name}", "no notebook")


def writes_the_mark(folder: Path) -> None:
    """A cell that replaces the results and reads the solution."""
    results = folder.parent / "results" / "results.json"
    notebook = json.loads(LESSON.read_text("utf-8"))
    [cell] = [one for one in notebook["cells"] if one["id"] == "ex-6-1"]
    cell["source"] = f"""import os, sys
solution = {str(folder.parent / "source" / "teaching" / "exercises" / LESSON.name)!r}
for path in (solution, {str(results)!r}):
    try:
        open(path).read(), sys.stderr.write("TAKEN")
        open(path, "w").write('{{"score": 99}}')
    except OSError:
        pass
"""
    (folder / LESSON.name).write_text(json.dumps(notebook), "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "score", "words"),
    [
        (honest, 2, ""),
        (zipped, 2, ""),
        (empty, 0, "not graded"),
        (writes_the_mark, 0, "no function"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_run_autograder_writes_the_results(
    root, tmp_path, make: Callable[[Path], None], score: float, words: str
) -> None:
    for name in ("source", "submission", "results"):
        (tmp_path / name).mkdir()
    for name in SOURCE:
        (tmp_path / "source" / name).symlink_to(root / name)
    (tmp_path / "venv").symlink_to(sys.prefix)
    make(tmp_path / "submission")
    script = root / "teaching" / "gradescope" / "run_autograder"
    variables = os.environ | {"AUTOGRADER": str(tmp_path)}
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("isolation: ")
    found = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert found["score"] == score
    assert words in json.dumps(found)
    for name in ("source", "submission", "results"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
