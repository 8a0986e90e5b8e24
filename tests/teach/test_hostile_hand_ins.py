"""Links, FIFOs, names and errors that no file can hold: such a hand-in earns nothing, and nobody else loses a grade."""

import csv
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from helpers import result_of

from grpo_teach import grading, hand_ins, limited

SOLUTIONS = grading.teachers_exercises()
LESSON = SOLUTIONS["3.2"].path
SURROGATE = 'def advantages(*_): raise ValueError("\\udcff \\x1b]0;title\\x07")'
HUGE = "def advantages(rewards, G): return 10**400"


def notebook(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = nbformat.v4.new_code_cell(code, id="ex-3-2")
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])), "utf-8")


def honest(path: Path) -> None:
    notebook(path, SOLUTIONS["3.2"].code)


def raises_what_no_file_holds(path: Path) -> None:
    notebook(path, SURROGATE)


def returns_a_number_too_large(path: Path) -> None:
    notebook(path, HUGE)


def link_to_the_solution(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(LESSON)


def link_to_all_solutions(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(LESSON.parent)


def fifo(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def no_notebook(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("no JSON")


def cell_without_source(path: Path) -> None:
    cell = {"cell_type": "code", "id": "ex-3-2", "metadata": {}, "outputs": [], "execution_count": None}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))


# What is handed in: how it is made, and of its line the name, the points and words of the remark.
CLASS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "ada.ipynb": (honest, "ada", "2", "3.1 not handed in"),
    "ben/03.ipynb": (honest, "ben", "2", "3.1 not handed in"),
    "surrogate.ipynb": (raises_what_no_file_holds, "surrogate", "0", "3.2 ValueError: ? ?]0;title?"),
    "latin\udcff.ipynb": (honest, "latin?", "2", "3.1 not handed in"),
    "huge.ipynb": (returns_a_number_too_large, "huge", "0", "a list or an array expected, a number returned"),
    "eve.ipynb": (link_to_the_solution, "eve", "0", "eve.ipynb is a symbolic link"),
    "folder": (link_to_all_solutions, "folder", "0", "folder is a symbolic link"),
    "inside/03.ipynb": (link_to_the_solution, "inside", "0", "03.ipynb is a symbolic link"),
    "deep/work": (link_to_all_solutions, "deep", "0", "work is a symbolic link"),
    "fifo.ipynb": (fifo, "fifo", "0", "fifo.ipynb is neither a file nor a folder"),
    "fifos/03.ipynb": (fifo, "fifos", "0", "03.ipynb is neither a file nor a folder"),
    "...ipynb": (honest, "...ipynb", "2", "3.1 not handed in"),
    "grades.csv/03.ipynb": (honest, "grades.csv (2)", "2", "3.1 not handed in"),
    "dup.ipynb": (honest, "dup.ipynb", "2", "a notebook and a folder have this name"),
    "dup/03.ipynb": (raises_what_no_file_holds, "dup", "0", "a notebook and a folder have this name"),
    '=HYPERLINK("x").ipynb': (no_notebook, '\'=HYPERLINK("x")', "0", '\'=HYPERLINK("x").ipynb is not a notebook'),
    "cell.ipynb": (cell_without_source, "cell", "0", "not a notebook"),
}


def test_a_class_with_hostile_hand_ins_comes_out_whole(grpo, tmp_path) -> None:
    folder = tmp_path / "class"
    graded = tmp_path / "graded"
    folder.mkdir()
    for name, (make, *_) in CLASS.items():
        make(folder / name)
    done = grpo("grade", folder, "--lesson", 3, "--seed", 7, "--output", graded, "--json")
    points = result_of(done)["points"]
    rows = {row["submission"]: row for row in csv.DictReader((graded / "grades.csv").open(encoding="utf-8-sig"))}
    assert len(rows) == len(CLASS) == len(points)
    for _, name, earned, words in CLASS.values():
        assert name in rows
        assert rows[name]["points"] == earned, name
        assert words in rows[name]["remarks"], name
    assert len(list(graded.glob("*/results.json"))) == len(CLASS)
    assert [path.name for path in tmp_path.iterdir()] in (["class", "graded"], ["graded", "class"])
    shown = (graded / "grades.csv").read_text("utf-8-sig") + done.stderr
    assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.parametrize("metadata", ["", "{}", "[]", '{"assignment": {"title": "Exercises 03"}}', "no JSON", None])
def test_gradescope_gets_results_whatever_is_handed_in(root, tmp_path, monkeypatch, metadata) -> None:
    link_to_the_solution(tmp_path / "submission" / "03_policy_update.ipynb")
    fifo(tmp_path / "submission" / "04.ipynb")
    notebook(tmp_path / "submission" / "mine.ipynb", SURROGATE)
    if metadata is not None:
        (tmp_path / "submission_metadata.json").write_text(metadata)
    monkeypatch.setattr(sys, "argv", ["grade_one.py", str(tmp_path)])
    runpy.run_path(str(root / "teaching" / "gradescope" / "grade_one.py"), run_name="__main__")
    found = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert found["score"] == 0
    assert "is a symbolic link" in found["output"]
    assert "neither a file" in found["output"]
    assert "ValueError: ?" in {test["name"][:3]: test["output"] for test in found["tests"]}["3.2"]


def test_entries_of_a_leaderboard_that_are_links_are_a_remark(grpo, tmp_path) -> None:
    own = tmp_path / "class"
    other = tmp_path / "other"
    for place in (own / "ada" / "a6", other / "a6", own / "eve", own / "none\udcff"):
        place.mkdir(parents=True)
    (own / "ada" / "a6" / "note.txt").write_text("no reward")
    (own / "bob").symlink_to(other)
    (own / "eve" / "a6").symlink_to("../ada/a6")
    done = grpo("leaderboard", own, "--seed", 3, "--part", "a6", "--json")
    remarks = {row["entry"]: row["remark"] for row in result_of(done)["leaderboard"]}
    assert {*remarks} == {"ada", "bob", "eve", "none?"}
    assert "note.txt is not taken" in remarks["ada"]
    assert "no reward.py" in remarks["none?"]
    assert "bob is a symbolic link" in remarks["bob"]
    assert "a6 is a symbolic link" in remarks["eve"]
    assert len((tmp_path / "class-leaderboard" / "leaderboard.csv").read_text("utf-8").splitlines()) == 5


def test_a_students_function_makes_no_fifo(tmp_path) -> None:
    code = (
        f"def advantages(*_):\n    import os, posix\n    (posix.mkfifo if G else os.mkfifo)({str(tmp_path / 'x')!r})\n"
    )
    for value in (True, False):
        [result] = limited.run(f"G = {value}\n{code}", [limited.Call("advantages", "", ())])
        assert isinstance(result, limited.Failed)
        assert result.kind == "AttributeError"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ValueError: 7", "ValueError: 7"),
        ("在第 3 行", "在第 3 行"),
        ("a\udcffb\x00\x1b[2J\u202e", "a?b??[2J?"),
        ("two\nlines\tand\u2028more", "two lines and more"),
        ("x" * 1000, "x" * 300 + "…"),
    ],
)
def test_a_students_text_is_one_line_that_can_be_shown(text, shown) -> None:
    assert hand_ins.plain(text) == shown


@pytest.mark.long(minutes=2)
def test_the_table_of_the_loop_comes_out_whole(root, tmp_path) -> None:
    cell = nbformat.v4.new_code_cell('raise ValueError("\\udcff \\x1b")', id="ex-10-1")
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "ben.ipynb").write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])), "utf-8")
    (folder / "eve.ipynb").symlink_to(root / "teaching" / "assignment-a" / "10_assignment_a.ipynb")
    fifo(folder / "=1+1.ipynb")
    program = root / "teaching" / "assignment-a" / "grade_loop.py"
    done = subprocess.run([sys.executable, program, folder, "--seed", "7"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["submission"]: row for row in csv.DictReader((tmp_path / "class-loop.csv").open(encoding="utf-8-sig"))}
    assert {*rows} == {"ben", "eve", "'=1+1"}
    assert {row["points"] for row in rows.values()} == {"0.0"}
    assert "ValueError" in rows["ben"]["remarks"]
    assert "symbolic link" in rows["eve"]["remarks"]
