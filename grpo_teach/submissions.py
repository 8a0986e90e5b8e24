"""Grade a folder of submissions: one line each in a CSV, and Gradescope's results.json for each.

A submission is a notebook, or a folder with notebooks, named after the student:

    submissions/ada.ipynb      submissions/ben/03_policy_update.ipynb

What a student hands in never stops the grading of the others: it becomes a remark on that student's line.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lib.common import files
from grpo_lib.common.errors import CourseError
from grpo_teach.grading import Grade, grade
from grpo_teach.notebooks import Exercise, read_exercises

UNWRITTEN = "raise NotImplementedError()"  # what nbgrader puts in place of a solution


@dataclass(frozen=True)
class Submission:
    """What a student handed in: the code of each exercise that was found, and remarks on what was not."""

    name: str
    code: Mapping[str, str]
    remarks: Sequence[str]


@dataclass(frozen=True)
class Result:
    """A submission with its grades, in the order of the lesson's exercises."""

    submission: Submission
    grades: Sequence[Grade]

    @property
    def points(self) -> float:
        return round(sum(one.points for one in self.grades), 2)

    @property
    def remarks(self) -> str:
        missed = [f"{one.exercise.number} {missed}" for one in self.grades for missed in one.summary]
        return " ".join("; ".join([*self.submission.remarks, *missed]).split())


def read_submissions(folder: Path) -> list[Submission]:
    """The submissions in a folder, by name.  Raises CourseError where there is none."""
    entries = sorted(one for one in folder.iterdir() if one.is_dir() or one.suffix == ".ipynb")
    if not entries:
        raise CourseError(f"{folder} has no submissions: a notebook, or a folder with notebooks, for each student")
    return [_read(entry) for entry in entries]


def lesson_of(submissions: Sequence[Submission]) -> str:
    """The lesson, such as "3", that most of the submissions have exercises of.  Raises CourseError."""
    lessons = Counter(lesson for one in submissions for lesson in sorted({_lesson(number) for number in one.code}))
    if not lessons:
        raise CourseError("no submission has an exercise of the course; name the lesson with --lesson")
    return lessons.most_common(1)[0][0]


def grade_all(
    submissions: Sequence[Submission],
    exercises: Sequence[Exercise],
    seed: int,
    log: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Grade the exercises of one lesson, as many at a time as there are cores; all submissions get the same inputs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [(one, [pool.submit(_grade, one, exercise, seed) for exercise in exercises]) for one in submissions]
        results = []
        for submission, grades in waiting:
            results.append(Result(_with_remark(submission, exercises), [grade.result() for grade in grades]))
            log(f"{submission.name}: {results[-1].points:g}")
    return results


def table(results: Sequence[Result]) -> str:
    """The CSV: a line per submission, with its points per exercise, their sum, and remarks."""
    columns = ["submission", *(one.exercise.number for one in results[0].grades), "points", "of", "remarks"]
    lines = [
        [
            one.submission.name,
            *(f"{grade.points:g}" for grade in one.grades),
            f"{one.points:g}",
            f"{sum(grade.exercise.points for grade in one.grades):g}",
            one.remarks,
        ]
        for one in results
    ]
    return pd.DataFrame(lines, columns=columns).to_csv(index=False, lineterminator="\n")


def gradescope(result: Result) -> dict[str, Any]:
    """What Gradescope's autograder reads as results.json."""
    tests = [
        {
            "name": f"{one.exercise.number} {one.exercise.title.removeprefix(one.exercise.number).strip()}",
            "score": one.points,
            "max_score": one.exercise.points,
            "output": "\n".join(one.lines),
            "visibility": "after_published",
        }
        for one in result.grades
    ]
    return {"score": result.points, "output": "\n".join(result.submission.remarks), "tests": tests}


def write_results(results: Sequence[Result], folder: Path) -> Path:
    """Write grades.csv, and NAME/results.json for each submission; return the CSV."""
    for one in results:
        files.write_json_atomic(folder / one.submission.name / "results.json", gradescope(one))
    return files.write_text_atomic(folder / "grades.csv", table(results))


def _lesson(number: str) -> str:
    return number.partition(".")[0]


def _read(entry: Path) -> Submission:
    code, remarks = {}, []
    notebooks = sorted(entry.rglob("*.ipynb")) if entry.is_dir() else [entry]
    for path in notebooks:
        try:
            for number, one in read_exercises(path).items():  # an exercise may be there in English and in Chinese
                code[number] = min(one.code, code.get(number, one.code), key=lambda text: text.count(UNWRITTEN))
        except ValueError as error:
            remarks.append(str(error))
    return Submission(entry.stem if entry.is_file() else entry.name, code, remarks if notebooks else ["no notebook"])


def _with_remark(submission: Submission, exercises: Sequence[Exercise]) -> Submission:
    """Say once that nothing of this lesson is there."""
    if submission.remarks or any(one.number in submission.code for one in exercises):
        return submission
    others = sorted({_lesson(number) for number in submission.code}) or ["none"]
    remark = f"no exercise of lesson {_lesson(exercises[0].number)}; it has those of lesson {', '.join(others)}"
    return Submission(submission.name, submission.code, [remark])


def _grade(submission: Submission, exercise: Exercise, seed: int) -> Grade:
    code = submission.code.get(exercise.number)
    return Grade(exercise, 0.0, (("all of it", "not handed in"),)) if code is None else grade(exercise, code, [seed])[0]
