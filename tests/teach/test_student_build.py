"""`make student` replaces nothing but its own build: all else in OUT, and the teacher's repository, stays."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import without_make

from grpo_lib.common.errors import CourseError
from grpo_teach import student


def contents(folder: Path) -> dict[str, bytes | str]:
    """All files and links of a folder, but those of Python and git."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts]
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(paths)
        if path.is_symlink() or path.is_file()
    }


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True)


@pytest.fixture
def course(root: Path, tmp_path: Path) -> Path:
    """A small repository: what `make student` runs before it makes an environment, two lessons and a teacher's file."""
    folder = tmp_path / "course"
    for name in ("Makefile", "dev/tools/check-environment.sh", "dev/tools/find-python.sh", "grpo_lib/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name)
    for name in ("grpo_lib/common", "teaching/grpo_teach"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    texts = ("recipes/a.yaml", "notebooks/00.ipynb", "notebooks/01.ipynb", "teaching/solutions.md")
    for name in (*texts, f"build/{student.TAB}", *student.STUDENTS_README.values(), *student.AUTOMATIC.values()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    (folder / ".gitignore").write_text("build/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    return folder


def file(path: Path) -> None:
    path.write_text("mine")


def link(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    (path.with_name("elsewhere") / "mine").write_text("mine")
    path.symlink_to("elsewhere")


def class_of_last_year(path: Path) -> None:
    """What a teacher has after the first build of an older version, and a hand-in."""
    for name in ("exercises/03.ipynb", "submissions/ada.ipynb"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("work")


def damaged_stamp(path: Path) -> None:
    path.mkdir()
    (path / student.STAMP).write_text('{"files": ')


def linked_environment(path: Path) -> None:
    link(path.with_name("course") / ".venv")


FOREIGN = [
    *[("../class", made) for made in (file, link, class_of_last_year, damaged_stamp, Path.mkdir)],
    *[(out, None) for out in ("teaching", "teaching/new", "new", ".", "..", "../..", "build", ".git/class")],
]


@pytest.mark.parametrize(("out", "made"), FOREIGN)
def test_a_folder_that_it_did_not_make_is_refused_and_stays(course, tmp_path, monkeypatch, out, made) -> None:
    if made:
        made(tmp_path / "class")
    before = contents(tmp_path)
    monkeypatch.chdir(course)
    with pytest.raises(CourseError, match=r"another folder|a folder outside"):
        student.build(course, Path(out))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("out", "made"), [FOREIGN[2], FOREIGN[5], ("../class", linked_environment)])
def test_make_refuses_before_it_makes_anything(course, tmp_path, out, made) -> None:
    if made:
        made(tmp_path / "class")
    before = contents(tmp_path)
    done = subprocess.run(
        ["make", "student", f"OUT={out}"], cwd=course, capture_output=True, text=True, env=without_make()
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert contents(tmp_path) == before and done.stdout == ""


def test_a_rebuild_replaces_its_own_files_and_keeps_all_others(course, tmp_path) -> None:
    out = tmp_path / "class"
    student.build(course, out)
    built = contents(out)
    assert {"recipes/a.yaml", "notebooks/00.ipynb", student.TAB, student.STAMP} < {
        *built
    } and "solutions.md" not in built
    for name in ("submissions/ada.ipynb", "notebooks/mine.ipynb"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("work")
    (course / "recipes" / "a.yaml").write_text("changed\n")
    git(course, "rm", "--quiet", "--force", "notebooks/01.ipynb")
    student.build(course, out)
    added, removed = {"submissions/ada.ipynb": b"work", "notebooks/mine.ipynb": b"work"}, "notebooks/01.ipynb"
    expected = {name: text for name, text in built.items() if name != removed} | added
    found = contents(out)
    assert found.pop(student.STAMP) != expected.pop(student.STAMP)
    assert found == expected | {"recipes/a.yaml": b"changed\n"}
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("course", "class")] == []


def changed(out: Path) -> None:
    (out / "notebooks" / "00.ipynb").write_text("solved")


def replaced_by_a_link(out: Path) -> None:
    shutil.move(out / "notebooks", out.with_name("theirs"))
    (out / "notebooks").symlink_to("../theirs")


def in_the_way(out: Path) -> None:
    (out / "docs").write_text("a note where the new build has a folder")


def another_in_the_way(out: Path) -> None:
    (out / "docs").mkdir()
    (out / "docs" / "new.md").write_text("mine")


@pytest.mark.parametrize("change", [changed, replaced_by_a_link, in_the_way, another_in_the_way])
def test_a_build_in_which_somebody_worked_is_refused_and_stays(course, tmp_path, change) -> None:
    out = tmp_path / "class"
    student.build(course, out)
    change(out)
    (course / "docs").mkdir()
    (course / "docs" / "new.md").write_text("new")
    git(course, "add", ".")
    before = contents(tmp_path)
    with pytest.raises(CourseError, match="move it away, or name another folder"):
        student.build(course, out)
    assert contents(tmp_path) == before


def test_a_build_that_was_stopped_while_it_replaced_files_can_be_repeated(course, tmp_path, monkeypatch) -> None:
    out = tmp_path / "class"
    student.build(course, out)
    for name in ("recipes/a.yaml", "notebooks/00.ipynb"):
        (course / name).write_text("new\n")
    monkeypatch.setattr(Path, "replace", stopped_at("a.yaml", Path.replace))
    with pytest.raises(KeyboardInterrupt):
        student.build(course, out)
    monkeypatch.undo()
    assert (out / "notebooks" / "00.ipynb").read_text() == "new\n"
    student.build(course, out)
    assert (out / "recipes" / "a.yaml").read_text() == "new\n"


def stopped_at(name: str, replace):
    def replaced(path: Path, target: Path) -> Path:
        if path.name == name:
            raise KeyboardInterrupt
        return replace(path, target)

    return replaced


def test_without_nbgrader_an_earlier_build_stays(course, tmp_path) -> None:
    student.build(course, tmp_path / "class")
    before = contents(tmp_path / "class")
    (course / "teaching" / "exercises").mkdir()
    (course / "teaching" / "exercises" / "03.ipynb").write_text("{}")
    with pytest.raises(CourseError):  # nbgrader is not in .venv; where it is, this is no notebook
        student.build(course, tmp_path / "class")
    assert contents(tmp_path / "class") == before
