"""A folder as a learning platform delivers it: a line for each hand-in, whatever it is, with the right marks."""

import csv
import os
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers import result_of

from grpo_teach import grading, hand_ins, likeness, submissions
from grpo_teach.notebooks import exercises_in

EXERCISE = grading.teachers_exercises()["3.2"]
SOLUTION = EXERCISE.code
WRONG = "def advantages(rewards, G):\n    return 0 * rewards\n"
UNWRITTEN = "def advantages(rewards, G):\n    raise NotImplementedError()\n"
HELPER = "def helper(rewards, G):\n    return rewards.reshape(-1, G)\n"
NAMED = {"nbgrader": {"grade_id": "ex-3-2"}}
TEST = nbformat.v4.new_code_cell("assert advantages(r, 2).shape == (2,)", id="ex-3-2-test")


def cell(source: str, own: str = "ex-3-2", named: bool = True):
    return nbformat.v4.new_code_cell(source, id=own, metadata=NAMED if named else {})


def book(*cells) -> bytes:
    return nbformat.writes(nbformat.v4.new_notebook(cells=[*cells, TEST])).encode()


RIGHT_BOOK, WRONG_BOOK = book(cell(SOLUTION)), book(cell(WRONG))
EARLY, LATE = 1, 9  # hours
LINK = "a link to the solution"


def make(path: Path, what: Any) -> None:
    """A file with (content, hour), a ZIP with a dict of contents, whose hours are 0, 1, …, or a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == LINK:
        path.symlink_to(grading.teachers_exercises()["3.2"].path)
    elif isinstance(what, dict):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, (name, content) in enumerate(what.items()):
                archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, number, 0, 0)), content)
    else:
        content, hour = what
        path.write_bytes(content)
        os.utime(path, (hour * 3600, hour * 3600))


SPLIT = book(cell(HELPER), cell(SOLUTION.replace("def advantages", "x = helper\n\ndef advantages"), "b"))
HALF = book(cell(HELPER), cell(SOLUTION, "b", named=False))
EMPTY = book(cell(UNWRITTEN))
COPIED = book(cell(SOLUTION), cell(WRONG, "copy"))
PYTHON = SOLUTION.encode()
NEW_CELL = book(cell(UNWRITTEN), cell(SOLUTION, "x", named=False))
LEFT_BELOW = book(cell("def advantages(rewards, G):\n    print(rewards)\n    raise NotImplementedError()\n"))
NO_CELLS = nbformat.writes(nbformat.v4.new_notebook()).encode()
# What is in the folder, and of its line the name, the points, and words of the remark.
KINDS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a notebook": ({"ada.ipynb": (RIGHT_BOOK, EARLY)}, "ada", "2", ""),
    "a folder": ({"ben/03.ipynb": (RIGHT_BOOK, EARLY)}, "ben", "2", ""),
    "a ZIP": ({"max.zip": {"work/03.ipynb": RIGHT_BOOK, "__MACOSX/._03.ipynb": b"\0"}}, "max", "2", ""),
    "a ZIP in a folder": ({"zoe/03.zip": {"03.ipynb": RIGHT_BOOK}}, "zoe", "2", ""),
    "no notebook": ({"nora.py": (PYTHON, EARLY)}, "nora", "0", "nora.py is no notebook"),
    "a second suffix": ({"oli.ipynb.txt": (RIGHT_BOOK, EARLY)}, "oli", "2", ""),
    "Moodle": ({"王小明_123_assignsubmission_file_/03.ipynb": (RIGHT_BOOK, EARLY)}, "王小明", "2", ""),
    "Canvas": (
        {
            "lovelaceeve_4711_99001_03_policy_update.ipynb": (WRONG_BOOK, EARLY),
            "lovelaceeve_LATE_4711_99002_03_policy_update-1.ipynb": (RIGHT_BOOK, LATE),
        },
        "lovelaceeve",
        "2",
        "several versions of 3.2: lovelaceeve_LATE_4711_99002_03_policy_update-1.ipynb, the newest",
    ),
    "Blackboard": (
        {
            "Exercises 03_tom_attempt_2026-02-01-10-00-00_03.ipynb": (RIGHT_BOOK, LATE),
            "Exercises 03_tom_attempt_2026-02-03-10-00-00_03.ipynb": (WRONG_BOOK, EARLY),
        },
        "tom",
        "0",
        "the newest, counts",
    ),
    "two versions": (
        {"ann/03_policy_update.ipynb": (WRONG_BOOK, EARLY), "ann/03_policy_update (1).ipynb": (RIGHT_BOOK, LATE)},
        "ann",
        "2",
        "several versions of 3.2: 03_policy_update (1).ipynb, the newest, counts",
    ),
    "a checkpoint of Jupyter": (
        {"lea/03.ipynb": (RIGHT_BOOK, EARLY), "lea/.ipynb_checkpoints/03-checkpoint.ipynb": (WRONG_BOOK, LATE)},
        "lea",
        "2",
        "",
    ),
    "the empty one beside": (
        {"sam/03.ipynb": (RIGHT_BOOK, EARLY), "sam/zh_TW/03.ipynb": (EMPTY, LATE)},
        "sam",
        "2",
        "",
    ),
    "a copied cell": ({"kim.ipynb": (COPIED, EARLY)}, "kim", "2", "is there 2 times"),
    "a split cell": ({"joe.ipynb": (SPLIT, EARLY)}, "joe", "2", "its code is in 2 cells"),
    "a function in a new cell": ({"ida.ipynb": (NEW_CELL, EARLY)}, "ida", "2", "its function is in a new cell"),
    "the given line left below": (
        {"rob.ipynb": (LEFT_BELOW, EARLY)},
        "rob",
        "0",
        "3.2: line 3 still raises NotImplementedError",
    ),
    "Moodle's text beside": (
        {
            "Lee_77_assignsubmission_file_/03.ipynb": (RIGHT_BOOK, EARLY),
            "Lee_77_assignsubmission_onlinetext_/onlinetext.html": (b"<p>done</p>", EARLY),
        },
        "Lee",
        "2",
        "",
    ),
    "Blackboard's receipt": (
        {
            "Exercises 03_gil_attempt_2026-02-01-10-00-00.txt": (b"Name: Gil", EARLY),
            "Exercises 03_gil_attempt_2026-02-01-10-00-00_03.ipynb": (RIGHT_BOOK, EARLY),
        },
        "gil",
        "2",
        "",
    ),
    "a text alone": ({"Amy_78_assignsubmission_onlinetext_/onlinetext.html": (b"", EARLY)}, "Amy", "0", "no notebook"),
    "a class in a ZIP": (
        {"all.zip": {"a/Ada/03.ipynb": RIGHT_BOOK, "a/Ben/03.ipynb": WRONG_BOOK}},
        "all",
        "0",
        "Ada, Ben are taken as one student's",
    ),
    "a class in a ZIP, of Canvas": (
        {"section.zip": {"xu_1001_2001_03.ipynb": RIGHT_BOOK, "yi_1002_2002_03.ipynb": RIGHT_BOOK}},
        "section",
        "2",
        "xu, yi are taken as one student's",
    ),
    "a notebook without cells": ({"noa.ipynb": (NO_CELLS, EARLY)}, "noa", "0", "no exercise of the course"),
    "half a cell without a name": ({"una.ipynb": (HALF, EARLY)}, "una", "2", "its code is in 2 cells"),
    "a name that is no UTF-8": ({"latin\udcff.ipynb": (RIGHT_BOOK, EARLY)}, "latin?", "2", ""),
    "a link": ({"eve.ipynb": LINK}, "eve", "0", "eve.ipynb is a symbolic link"),
    "a ZIP that is none": ({"pia.zip": (b"PK no", EARLY)}, "pia", "0", "pia.zip cannot be read as a ZIP"),
}
LEFT = ("__MACOSX/x", ".DS_Store", "Thumbs.db", "._ada.ipynb")


def test_each_kind_of_hand_in_is_one_line(grpo, tmp_path) -> None:
    folder = tmp_path / "class"
    for files, *_ in KINDS.values():
        for name, what in files.items():
            make(folder / name, what)
    for name in LEFT:
        make(folder / name, (b"", LATE))
    done = grpo("grade", folder, "--lesson", 3, "--seed", 7, "--json")
    assert result_of(done)["points"]
    content = (tmp_path / "class-graded" / "grades.csv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbf")
    rows = {row["submission"]: row for row in csv.DictReader(content.decode("utf-8-sig").splitlines())}
    assert {*rows} == {name for _, name, *_ in KINDS.values()}
    for kind, (_, name, points, words) in KINDS.items():
        assert rows[name]["points"] == points, (kind, rows[name])
        assert words in rows[name]["remarks"], (kind, rows[name])
        said = rows[name]["remarks"].replace("3.1 not handed in", "")
        assert words or "3.2" not in said, (kind, said)


def test_results_of_a_chinese_notebook_are_in_chinese(tmp_path) -> None:
    text = nbformat.v4.new_markdown_cell("## 3.2 一組的優勢值", id="ex-3-2-text")
    (tmp_path / "ada.ipynb").write_bytes(book(text, cell(UNWRITTEN), cell(SOLUTION, "x", named=False)))
    [handed_in] = submissions.read_submissions(tmp_path)
    [result] = submissions.grade_all([handed_in], [EXERCISE], 0)
    assert submissions.gradescope(result)["output"] == "3.2: 函式寫在新的一格，應該寫在原來給的那一格"


# --- ZIPs that somebody made for the grader ---


BOMB = bytes(2**25)
THOUSAND = {f"{number}.ipynb": WRONG_BOOK for number in range(1000)}
ODD_NAME = "03\x1b]0;x.ipynb"
ZIPS: dict[str, tuple[dict[str, bytes], str]] = {
    "a link": ({"03.ipynb": b"/etc/passwd"}, "is a symbolic link"),
    "a way out": ({"../../../../tmp/out.ipynb": RIGHT_BOOK}, ""),
    "an absolute name": ({"/tmp/out.ipynb": RIGHT_BOOK}, ""),
    "a bomb": ({"03.ipynb": BOMB}, "03.ipynb is too large"),
    "a ZIP in it": ({"03.zip": b"PK"}, "is a ZIP in a ZIP"),
    "nothing": ({}, "no notebook in eve.zip"),
    "a thousand": (THOUSAND, ""),
    "an odd name": ({ODD_NAME: b"no"}, "03?]0;x.ipynb is not a notebook"),
}


@pytest.mark.parametrize("what", ZIPS)
def test_a_hostile_zip_is_a_remark(tmp_path, what) -> None:
    members, words = ZIPS[what]
    path = tmp_path / "eve.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if what == "a link" else 0o100644) << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    [found] = submissions.read_submissions(tmp_path)
    assert found.name == "eve"
    assert words in "; ".join(found.remarks)
    assert [*found.code] == ([] if words else ["3.2"])
    assert not Path("/tmp/out.ipynb").exists()
    assert [*tmp_path.iterdir()] == [path]


def test_long_names_are_cut_and_stay_apart(tmp_path) -> None:
    """A name and a number behind it must fit into a folder's name."""
    names = ["王" * 83, "a" * 249, "a" * 248 + "b", "Ada", "ada"]
    for name in names:
        make(tmp_path / f"{name}.ipynb", (RIGHT_BOOK, EARLY))
    found = [one.name for one in submissions.read_submissions(tmp_path)]
    assert len({name.casefold() for name in found}) == len(names)
    assert max(len(name.encode()) for name in found) < 200


# --- who is alike ---

LONG = """
def advantages(rewards, G):
    '''Mine.'''
    groups = rewards.reshape(-1, G)  # one row a question
    mean = groups.mean(axis=1, keepdims=True)
    std = groups.std(axis=1, keepdims=True)
    return ((groups - mean) / (std + 1e-6)).reshape(-1)
"""
RENAMED = LONG.replace("groups", "table").replace("mean =", "m =").replace("- mean", "- m").replace("Mine.", "My own!")
OTHER = """
def advantages(rewards, G):
    out = []
    for start in range(0, len(rewards), G):
        part = rewards[start : start + G]
        out += [(one - part.mean()) / (part.std() + 1e-6) for one in part]
    return np.array(out)
"""


def test_near_equal_hand_ins_are_named_and_others_are_not() -> None:
    codes = {"ada": LONG, "ivan": RENAMED, "ben": OTHER, "two": WRONG, "three": WRONG, "odd": "def ("}
    found = [submissions.Submission(name, {"3.2": code}, []) for name, code in codes.items()]
    assert likeness.near_equal(found) == {"ada": ["ivan"], "ivan": ["ada"]}


def test_students_do_not_read_whom_they_are_alike_to() -> None:
    exercise = grading.teachers_exercises()["3.2"]
    results = []
    for name in ("ada", "ivan"):
        one = submissions.Submission(name, {"3.2": LONG}, [])
        results.append(submissions.Result(one, [grading.Grade(exercise, 2.0)]))
    assert "ivan" in submissions.table(results).splitlines()[1]
    assert "ivan" not in str(submissions.gradescope(results[0]))


def test_a_copy_without_the_given_cell_is_the_last_one() -> None:
    found = exercises_in(book(cell(WRONG, "a"), cell(SOLUTION, "b")), Path("x.ipynb"))["3.2"]
    assert found.code == SOLUTION


def test_names_of_platforms_are_not_seen_in_other_names() -> None:
    folder = Path("class")
    entries = [folder / name for name in ("group_1_2_final.ipynb", "group_1_3_final.ipynb", "ada_03.ipynb")]
    assert [one.name for one in hand_ins.by_student(entries)] == ["group_1_2_final", "group_1_3_final", "ada_03"]
