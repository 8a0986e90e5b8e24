"""Exercises: what earns points and what does not, hostile submissions, and that students get no solutions."""

import csv
import os
import re
import subprocess
from itertools import product

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
        "0 of 3 inputs right",
    ),
    "missing": ("def advantage(rewards, G): return rewards", "no function advantages"),
    "imports": ("import grpo_teach\ndef advantages(rewards, G): return rewards", "No module named"),
    "package": ("import scipy\ndef advantages(rewards, G): return rewards", "No module named 'scipy'"),
    "untouched": ("def advantages(*_): raise NotImplementedError()", "3.2 not written"),
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
    mistakes = mutants.mistakes(exercise)
    without_work = mutants.without_work(exercise)
    grades = {
        name: grading.grade(exercise, code, range(seeds))
        for name, code in {"solution": exercise.code, **mistakes, **without_work}.items()
    }
    assert [one.missed for one in grades["solution"] if one.points != exercise.points] == []
    assert [name for name in without_work if any(one.points for one in grades[name])] == []
    assert [name for name in mistakes if any(one.points >= exercise.points for one in grades[name])] == []
    said = {(name, reason) for name in mistakes for one in grades[name] for _, reason in one.missed}
    assert [name for name, reason in said if reason == "not right"] == [], "it says what is wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(3, marks=pytest.mark.long(minutes=3)), pytest.param(40, marks=pytest.mark.nightly(minutes=25))],
)
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_no_mistake_and_no_guess_earns_by_the_luck_of_a_seed(exercise, seeds) -> None:
    """Each mistake loses the same part with every seed: what it is about.  Who goes by the order of calls has none."""
    for name, code in mutants.mistakes(exercise).items():
        lost = []
        for first in range(0, seeds, 10):
            lost += [
                {part for part, _ in one.missed}
                for one in grading.grade(exercise, code, range(first, min(first + 10, seeds)))
            ]
        assert set.intersection(*lost), name
    for seed in range(seeds):
        [graded] = grading.grade(exercise, mutants.by_order(exercise, seed), [seed])
        assert graded.points == 0, seed


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_public_cases_pass_and_no_constant_passes_a_part(grpo, exercise) -> None:
    assert len(mutants.mistakes(exercise)) >= 3
    assert grpo("check", exercise.number, exercise.path).returncode == 0
    for seed in range(10):
        for planned in grading.planned(exercise, seed):
            if planned.part.passes:
                continue
            first = planned.want[0]
            assert not all(grading.same(planned.part, first, other) for other in planned.want), planned.part.name


# A mistake in a part that is judged as a whole, and what its remark counts, in both languages.
TOLD = {
    ("2.4", "pays the last of several blocks"): ("12 of 36 attacks", "36 個攻擊裡有 12 個"),
    ("2.4", "the last number"): ("in 288 of 864 pairs", "864 對誠實的輸出裡，只有 288 對"),
    ("4.1", "the wrong sign"): ("0 of 3 trainings", "3 次訓練裡有 0 次"),
    ("4.3", "always"): ("20 of 20 healthy ones reported", "20 次健康的誤報了 20 次"),
    ("4.3", "the reward only"): ("0 of 10 bad runs found in time", "10 次出問題的訓練及時報了 0 次"),
    ("5.4", "1.96 s without √n"): ("0 of 200 ends", "200 個區間端點有 0 個"),
}


@pytest.mark.parametrize(("number", "mistake"), TOLD)
def test_a_part_that_is_judged_as_a_whole_says_how_much_was_right(number, mistake) -> None:
    exercise = EXERCISES[number]
    code = mutants.mistakes(exercise)[mistake]
    for language, words in zip(("en", "zh"), TOLD[number, mistake], strict=True):
        [graded] = grading.grade(exercise, code, [3], language)
        assert words in " ".join(reason for _, reason in graded.missed)


def as_notebook(code: str) -> str:
    """Of one cell, the work of exercise 3.2."""
    cell = nbformat.v4.new_code_cell(code, id="ex-3-2")
    return nbformat.writes(nbformat.v4.new_notebook(cells=[cell]))


def test_hostile_submissions_are_one_line_each(grpo, tmp_path) -> None:
    texts = {name: as_notebook(code) for name, (code, _) in HANDED_IN.items()}
    texts |= {name: text for name, (text, _) in OTHERS.items()}
    for name, text in texts.items():
        (tmp_path / f"{name}.ipynb").write_text(text, "utf-8")
    (tmp_path / "both" / "zh_TW").mkdir(parents=True)
    for name, place in {"fine": "both", "untouched": "both/zh_TW"}.items():
        (tmp_path / place / "03_policy_update.ipynb").write_text(texts[name], "utf-8")
    assert grpo("grade", tmp_path, "--lesson", 3, "--output", tmp_path / "graded").returncode == 0
    table = (tmp_path / "graded" / "grades.csv").read_text("utf-8-sig")
    rows = {row["submission"]: row for row in csv.DictReader(table.splitlines())}
    assert {name: row["points"] for name, row in rows.items() if row["points"] != "0"} == {"fine": "2", "both": "2"}
    for name, (_, words) in {**HANDED_IN, **OTHERS}.items():
        assert words in rows[name]["remarks"], name


def lines(text: str) -> set[str]:
    """The lines that are long enough to say something, without imports."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) > 30 and not re.match("import|from", line)}


def long_numbers(text: str) -> set[str]:
    """Those that say something: numbers such as 2/3 do not; five equal digits give them away."""
    return {number[0] for number in re.finditer(r"\d\.(?!\d*(\d)\1{4})\d{12,}", text)}


def test_student_build_holds_nothing_secret_and_runs_to_the_first_exercise(root, grpo, tmp_path) -> None:
    python = root / ".venv-teach" / "bin" / "python"
    if not python.exists():
        pytest.skip("the student build: make student installs what cuts it")
    build = tmp_path / "build"
    assert translations.main(["build"]) == 0
    subprocess.run(
        [python, "-m", "grpo_teach.student", build], cwd=root, env=os.environ | {"PYTHONPATH": ".:teaching"}, check=True
    )
    texts = (path.read_text("utf-8", errors="replace") for path in build.rglob("*") if path.is_file())
    given = "\n".join(texts).replace("\\n", "\n").replace('\\"', '"')  # as notebooks keep lines
    secret, public = set(), set()
    for exercise in (EXERCISES | ASSIGNMENT).values():
        public |= lines(exercise.public) | lines(re.sub("(?s)### BEGIN SOLUTION.*?### END SOLUTION", "", exercise.code))
        for solution in re.findall("(?s)BEGIN SOLUTION(.*?)### END", exercise.code):
            secret |= lines(solution)
        secret |= lines(exercise.test.removeprefix(exercise.public))
    assert len(secret - public) > 500
    assert (secret - public) & lines(given) == set()
    drawn = []
    for exercise in EXERCISES.values():
        drawn += [(planned.part.inputs, planned.want) for planned in grading.planned(exercise, 0)]
    numbers = long_numbers(repr(drawn))
    assert len(numbers) > 500
    assert numbers & long_numbers(given) == set()
    books = {exercise.path.name for exercise in (EXERCISES | ASSIGNMENT).values()}
    for folder, name in product(("", "zh_TW"), books):
        notebook = nbformat.read(build / "exercises" / folder / name, 4)
        with pytest.raises(NotImplementedError):
            exec("\n".join(cell.source for cell in notebook.cells[2:4]), {})
