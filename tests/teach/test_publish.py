"""What students get without an installation: notebooks for Colab, and a repository of their own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_teach import grading, student
from grpo_teach.notebooks import HIDDEN, read_exercises

EXERCISES = grading.teachers_exercises()
NOTEBOOKS = sorted({exercise.path for exercise in EXERCISES.values()})
# Python without this repository and with no package but NumPy, as far as Colab can be imitated.
RUN = "import sys; sys.path.append(sys.argv[1]); [exec(cell, globals()) for cell in __import__('json').load(sys.stdin)]"


def as_on_colab(path: Path, folder: Path, replaced: str = "", by: str = "") -> subprocess.CompletedProcess:
    """Run a notebook's copy for Colab, with the solutions in place of a student's work, and without hidden tests."""
    place = folder / path.name
    notebook = json.loads(path.read_text("utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"]).partition(HIDDEN)[0].replace(replaced or "\0", by)
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(notebook), "utf-8")
    student.colab(place, folder / "colab" / path.name, Path(student.__file__).with_name("cases.py").read_text("utf-8"))
    cells = json.loads((folder / "colab" / path.name).read_text("utf-8"))["cells"]
    code = json.dumps([cell["source"] for cell in cells if cell["cell_type"] == "code"])
    packages = str(Path(np.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", RUN, packages]
    return subprocess.run(command, input=code, capture_output=True, text=True, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_copy_for_colab_runs_with_numpy_alone(path, tmp_path) -> None:
    done = as_on_colab(path, tmp_path)
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "colab" / path.name
    assert read_exercises(copy).keys() == read_exercises(path).keys()
    texts = [cell["source"] for cell in json.loads(copy.read_text("utf-8"))["cells"] if cell["cell_type"] == "markdown"]
    assert [text for text in texts if "grpo check" in text] == [], "Colab has no command line of the course"


@pytest.mark.parametrize(("folder", "words"), [("exercises", "expected"), ("zh_TW", "應為")])
def test_a_wrong_function_on_colab_is_told_what_was_expected(folder, words, tmp_path) -> None:
    done = as_on_colab(EXERCISES["3.2"].path, tmp_path / folder, ".ravel()", "")
    assert done.returncode == 1 and words in done.stderr and "(1, 4)" in done.stderr


def test_colab_keeps_the_ids_in_the_metadata_and_the_exercise_is_found(tmp_path) -> None:
    notebook = json.loads(EXERCISES["3.2"].path.read_text("utf-8"))
    for cell in notebook["cells"]:
        cell["metadata"] = {"id": cell.pop("id")}
    (tmp_path / "03.ipynb").write_text(json.dumps(notebook | {"nbformat_minor": 0}), "utf-8")
    assert read_exercises(tmp_path / "03.ipynb")["3.2"].code == EXERCISES["3.2"].code


def publish(root: Path, out: Path | str, repository: str) -> subprocess.CompletedProcess:
    command = [root / "dev" / "tools" / "publish.sh", out, repository]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_build_is_published_to_a_repository_of_its_own(root, tmp_path) -> None:
    out, repository = tmp_path / "class", tmp_path / "students.git"
    (out / "exercises" / "colab").mkdir(parents=True)
    (out / "exercises" / "colab" / "03_policy_update.ipynb").write_text("{}")
    refused = publish(root, out, str(repository))
    assert refused.returncode == 1 and "no student build" in refused.stderr
    (out / student.STAMP).write_text("{}")
    subprocess.run(["git", "init", "--quiet", "--bare", repository], check=True)
    for _ in range(2):  # again, after another build
        assert publish(root, out, str(repository)).returncode == 0
    listed = subprocess.run(
        ["git", "-C", repository, "ls-tree", "-r", "--name-only", "main"], capture_output=True, text=True, check=True
    )
    assert {"COLAB.md", "exercises/colab/03_policy_update.ipynb"} < {*listed.stdout.splitlines()}
    assert "blob/main/exercises/colab/03_policy_update.ipynb" in (out / "COLAB.md").read_text("utf-8")


def test_the_repository_with_the_solutions_is_no_place_to_publish(root, tmp_path) -> None:
    remotes = subprocess.run(["git", "remote", "-v"], cwd=root, capture_output=True, text=True).stdout.split()
    if not remotes:
        pytest.skip("this clone has no remote")
    (tmp_path / student.STAMP).write_text("{}")
    for out in (tmp_path, "--check"):
        refused = publish(root, out, remotes[1])
        assert refused.returncode == 1 and "has the solutions" in refused.stderr


def test_a_repository_is_asked_for_before_anything_is_built(root, tmp_path) -> None:
    refused = publish(root, "--check", "")
    assert refused.returncode == 1 and "make publish REPOSITORY=" in refused.stderr
    assert publish(root, "--check", str(tmp_path / "students.git")).returncode == 0


def test_a_copy_from_colab_is_checked_as_the_notebook_is(grpo, tmp_path) -> None:
    as_on_colab(EXERCISES["3.2"].path, tmp_path)
    done = grpo("check", "3.2", tmp_path / "colab" / EXERCISES["3.2"].path.name)
    assert done.returncode == 0 and "cases pass (2 of 2" in done.stdout
