"""Exercises: what earns points and what does not, hostile submissions, and that students get no solutions."""

import csv
import os
import re
import subprocess

import nbformat
import pytest
import translations

from grpo_teach import grading, mutants
from grpo_teach.notebooks import read_exercises

EXERCISES = grading.teachers_exercises()
ASSIGNMENT = read_exercises(EXERCISES["0.1"].path.parents[1] / "assignment-a" / "10_assignment_a.ipynb")
# What a student hands in as exercise 3.2, and words of the remark in that student's line.
HANDED_IN = {
    "fine": (EXERCISES["3.2"].code, "3.1 not handed in"),
    "loop": ("while True: pass", "3.2 stopped after"),
    "memory": ("import numpy as np\nx = np.ones(10 * 2**27)", "MemoryError"),
    "exit": ("import os\ndef advantages(*_): os._exit(0)", "ended its process"),
    "patched": (
        "import numpy as np\nnp.allclose = lambda *_, **__: True\ndef advantages(rewards, G): return 0 * rewards",
        "3.2 not right",
    ),
    "missing": ("def advantage(rewards, G): return rewards", "no function advantages"),
    "imports": ("import grpo_teach\ndef advantages(rewards, G): return rewards", "No module named"),
    "package": ("import scipy\ndef advantages(rewards, G): return rewards", "not scipy/__init__.py"),
    "untouched": ("def advantages(*_): raise NotImplementedError()", "3.2 NotImplementedError"),
    "odd": ("def advantages(rewards, G): return open", "was returned"),
}
OTHERS = {
    "garbage": ("no JSON", "not a notebook"),
    "other": (EXERCISES["2.1"].path.read_text("utf-8"), "no exercise of lesson 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(1, marks=pytest.mark.long(minutes=2)), pytest.param(10, marks=pytest.mark.nightly(minutes=10))],
)
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_work_earns_points_and_nothing_else_does(exercise, seeds) -> None:
    mistakes, without_work = mutants.mistakes(exercise), mutants.without_work(exercise)
    grades = {
        name: grading.grade(exercise, code, range(seeds))
        for name, code in {"solution": exercise.code, **mistakes, **without_work}.items()
    }
    assert [one.missed for one in grades["solution"] if one.points != exercise.points] == []
    assert [name for name in without_work if any(one.points for one in grades[name])] == []
    assert [name for name in mistakes if any(one.points >= exercise.points for one in grades[name])] == []


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_public_cases_pass_and_no_constant_passes_a_part(grpo, exercise) -> None:
    assert len(mutants.mistakes(exercise)) >= 3 and grpo("check", exercise.number, exercise.path).returncode == 0
    for one in (one for seed in range(10) for one in grading.planned(exercise, seed) if not one.part.passes):
        assert not all(grading.same(one.part, one.want[0], other) for other in one.want), one.part.name


def test_hostile_submissions_are_one_line_each(grpo, tmp_path) -> None:
    texts = {
        name: nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, id="ex-3-2")]))
        for name, (code, _) in HANDED_IN.items()
    }
    for name, text in {**texts, **{name: text for name, (text, _) in OTHERS.items()}}.items():
        (tmp_path / f"{name}.ipynb").write_text(text, "utf-8")
    (tmp_path / "both" / "zh_TW").mkdir(parents=True)
    for name, place in {"fine": "both", "untouched": "both/zh_TW"}.items():
        (tmp_path / place / "03_policy_update.ipynb").write_text(texts[name], "utf-8")
    assert grpo("grade", tmp_path, "--lesson", 3, "--output", tmp_path / "graded").returncode == 0
    rows = {row["submission"]: row for row in csv.DictReader((tmp_path / "graded" / "grades.csv").open())}
    assert {name: row["points"] for name, row in rows.items() if row["points"] != "0"} == {"fine": "2", "both": "2"}
    assert {
        name: rows[name] for name, (_, words) in {**HANDED_IN, **OTHERS}.items() if words not in rows[name]["remarks"]
    } == {}


def lines(text: str) -> set[str]:
    """The lines that are long enough to say something, without imports."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) > 30 and not re.match("import|from", line)}


def test_student_build_holds_nothing_secret_and_runs_to_the_first_exercise(root, grpo, tmp_path) -> None:
    python, build = root / ".venv-teach" / "bin" / "python", tmp_path / "build"
    python.exists() or pytest.skip("the student build: make student installs what cuts it")
    assert translations.main(["build"]) == 0
    subprocess.run(
        [python, "-m", "grpo_teach.student", build], cwd=root, env=os.environ | {"PYTHONPATH": ".:teaching"}, check=True
    )
    texts = (path.read_text("utf-8", errors="replace") for path in build.rglob("*") if path.is_file())
    given = "\n".join(texts).replace("\\n", "\n").replace('\\"', '"')  # as notebooks keep lines
    secret = lines("\n".join(
        text for one in (EXERCISES | ASSIGNMENT).values()
        for text in (*re.findall("(?s)BEGIN SOLUTION(.*?)### END", one.code), one.test.removeprefix(one.public))
    ))  # fmt: skip
    assert len(secret) > 500 and secret & lines(given) == set()
    drawn = repr([(one.part.inputs, one.want) for all_ in EXERCISES.values() for one in grading.planned(all_, 0)])
    # Numbers such as 2/3 say nothing; five equal digits give them away.
    numbers, known = (
        {found[0] for found in re.finditer(r"\d\.(?!\d*(\d)\1{4})\d{12,}", text)} for text in (drawn, given)
    )
    assert len(numbers) > 500 and numbers & known == set()
    books = {one.path.name for one in (EXERCISES | ASSIGNMENT).values()}
    for path in (build / "exercises" / folder / name for folder in ("", "zh_TW") for name in books):
        with pytest.raises(NotImplementedError):
            exec("\n".join(cell.source for cell in nbformat.read(path, 4).cells[2:4]), {})
