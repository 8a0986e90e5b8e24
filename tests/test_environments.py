"""Making an environment clears its folder: a link, a file or somebody's folder is refused first, and stays whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import without_make

COMMANDS = {
    "setup": (".venv", ["dev/tools/setup.sh"]),
    "setup-tpu": (".venv-tpu", ["dev/tools/setup.sh", ".venv-tpu"]),
    "setup-site": (".venv-site", ["dev/tools/setup.sh", ".venv-site"]),
    "student": (".venv-teach", ["make", "student"]),
    "class-check": (".venv", [sys.executable, "dev/tools/class_check.py"]),
}


@pytest.fixture
def course(root: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "course"
    for name in ("dev/tools", "requirements"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "Makefile", folder)
    return folder


@pytest.mark.parametrize("kind", ["link", "link to a complete one", "link to nothing", "file", "folder"])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_environment_is_refused_in_one_line(course, command, kind) -> None:
    name, arguments = COMMANDS[command]
    place, other = course / name, course.with_name("other")
    (other / "bin").mkdir(parents=True)
    (other / "thesis.tex").write_text("years")
    if kind == "link to a complete one":
        (other / "pyvenv.cfg").write_text("home = /usr/bin\n")
        (other / ".complete").write_text(f"{course}\n")
    if kind.startswith("link"):
        place.symlink_to("../nothing" if kind == "link to nothing" else other)
    elif kind == "file":
        place.write_text("mine")
    else:
        shutil.copytree(other, place)
    before = listing(course.parent)
    done = subprocess.run(arguments, cwd=course, capture_output=True, text=True, env=without_make())
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode and len(lines) == 1 and lines[0].startswith(f"error: {name} is "), done.stderr
    assert listing(course.parent) == before and done.stdout == ""


def test_clean_removes_links_and_not_what_is_behind_them(course) -> None:
    other = course.with_name("other")
    for name in (".venv", ".venv-tpu", ".venv-teach", ".venv-site", ".cache"):
        (other / name).mkdir(parents=True)
        (other / name / "thesis.tex").write_text("years")
        (course / name).symlink_to(other / name)
    (course / ".venv-mine").mkdir()
    before = listing(other)
    subprocess.run(["make", "clean"], cwd=course, check=True, capture_output=True)
    assert listing(other) == before and not os.path.lexists(course / ".venv") and (course / ".venv-mine").is_dir()


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in str(path))
