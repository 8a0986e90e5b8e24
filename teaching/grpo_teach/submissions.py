"""Grade a folder of submissions: one line each in a CSV, and Gradescope's results.json for each.

A submission is a notebook, or a folder with notebooks, named after the student:

    submissions/ada.ipynb      submissions/ben/03_policy_update.ipynb

What a student hands in never stops the grading of the others: it becomes a remark on that student's line.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lib.common import files
from grpo_lib.common.errors import CourseError
from grpo_lib.common.spreadsheets import for_spreadsheet
from grpo_teach import hand_ins, words
from grpo_teach.grading import Grade, grade, planned
from grpo_teach.notebooks import Exercise, read_exercises

UNWRITTEN = "raise NotImplementedError()"  # what nbgrader puts in place of a solution


@dataclass(frozen=True)
class Submission:
    """What a student handed in: the code of each exercise that was found, and remarks on what was not."""

    name: str
    code: Mapping[str, str]
    remarks: Sequence[str]
    languages: Mapping[str, str] = field(default_factory=dict)  # of each exercise, as Exercise.language


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
        """What was missed of each exercise; one line where nothing of the lesson was written, or handed in."""
        missed = [f"{one.exercise.number} {missed}" for one in self.grades for missed in one.summary]
        reasons = {reason for one in self.grades for _, reason in one.missed}
        for language in ("en", "zh"):
            if not self.points and reasons == {words.say("not written", language)}:
                missed = [words.say("empty: nothing was written", language)]
            if reasons == {words.say("not handed in", language)} and self.submission.remarks:
                missed = []
        return " ".join("; ".join([*self.submission.remarks, *missed]).split())


def read_submissions(folder: Path) -> list[Submission]:
    """The submissions in a folder, by name, each name once.  Raises CourseError where there is none."""
    entries = sorted(path for path in folder.iterdir() if path.is_dir() or path.is_symlink() or path.suffix == ".ipynb")
    if not entries:
        raise CourseError(f"{folder} has no submissions: a notebook, or a folder with notebooks, for each student")
    often = Counter(map(hand_ins.stem, entries))
    named = zip(entries, hand_ins.names(entries), strict=True)
    return [read_submission(entry, name, often[hand_ins.stem(entry)] > 1) for entry, name in named]


def read_submission(entry: Path, name: str, twice: bool = False) -> Submission:
    """What is in a notebook, or in a folder with notebooks; links and special files are not read.

    Args:
      twice: a file and a folder have this name, which becomes a remark.
    """
    notebooks, remarks = hand_ins.files_in(entry, ".ipynb")
    if not notebooks and not remarks:
        remarks = ["no notebook"]
    if twice:
        remarks.append("a notebook and a folder have this name; each is graded, choose one")
    code: dict[str, str] = {}
    languages: dict[str, str] = {}
    for path in notebooks:
        try:
            exercises = read_exercises(path)
        except ValueError as error:
            remarks.append(hand_ins.plain(str(error)))
            continue
        for number, one in exercises.items():  # an exercise may be there in English and in Chinese
            code[number] = min(one.code, code.get(number, one.code), key=lambda text: text.count(UNWRITTEN))
            if code[number] == one.code:
                languages[number] = one.language
    return Submission(name, code, remarks, languages)


def lesson_of(submissions: Sequence[Submission]) -> str:
    """The lesson, such as "3", that most of the submissions have exercises of.  Raises CourseError."""
    lessons: Counter[str] = Counter()
    for submission in submissions:
        lessons.update(sorted({_lesson(number) for number in submission.code}))
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
    for exercise in exercises:  # an error of a solution or a hidden test is the teacher's: it shows before any grade
        planned(exercise, seed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = []
        for submission in submissions:
            waiting.append([pool.submit(_grade, submission, exercise, seed) for exercise in exercises])
        results = []
        for submission, grades in zip(submissions, waiting, strict=True):
            result = Result(_with_remark(submission, exercises), [grade.result() for grade in grades])
            results.append(result)
            log(f"{submission.name}: {result.points:g}")
    return results


def table(results: Sequence[Result]) -> str:
    """The CSV: a line per submission, with its points per exercise, their sum, and remarks."""
    columns = ["submission", *(grade.exercise.number for grade in results[0].grades), "points", "of", "remarks"]
    lines = []
    for result in results:
        points = [f"{grade.points:g}" for grade in result.grades]
        most = sum(grade.exercise.points for grade in result.grades)
        lines.append([result.submission.name, *points, f"{result.points:g}", f"{most:g}", result.remarks])
    frame = pd.DataFrame(lines, columns=columns, dtype=object)
    return frame.map(for_spreadsheet).to_csv(index=False, lineterminator="\n")


def gradescope(result: Result) -> dict[str, Any]:
    """What Gradescope's autograder reads as results.json."""
    tests = []
    for graded in result.grades:
        exercise = graded.exercise
        title = exercise.title.removeprefix(exercise.number).strip()
        test = {
            "name": f"{exercise.number} {title}",
            "score": graded.points,
            "max_score": exercise.points,
            "output": "\n".join(graded.lines),
            "visibility": "after_published",
        }
        tests.append(test)
    return {"score": result.points, "output": "\n".join(result.submission.remarks), "tests": tests}


def write_results(results: Sequence[Result], folder: Path) -> Path:
    """Write grades.csv, and NAME/results.json for each submission; return the CSV."""
    for one in results:
        files.write_json_atomic(folder / one.submission.name / "results.json", gradescope(one))
    return files.write_text_atomic(folder / "grades.csv", table(results))


def _lesson(number: str) -> str:
    return number.partition(".")[0]


def _with_remark(submission: Submission, exercises: Sequence[Exercise]) -> Submission:
    """Say once that nothing of this lesson is there."""
    if submission.remarks or any(one.number in submission.code for one in exercises):
        return submission
    others = sorted({_lesson(number) for number in submission.code}) or ["none"]
    remark = f"no exercise of lesson {_lesson(exercises[0].number)}; it has those of lesson {', '.join(others)}"
    return replace(submission, remarks=[remark])


def _grade(submission: Submission, exercise: Exercise, seed: int) -> Grade:
    code = submission.code.get(exercise.number)
    languages = submission.languages.values()
    language = submission.languages.get(exercise.number, min(languages, default="en"))
    if code is None:
        return Grade(exercise, 0.0, ((words.say("all of it", language), words.say("not handed in", language)),))
    try:
        return grade(exercise, code, [seed], language)[0]
    except CourseError:  # there is no boundary
        raise
    except Exception as error:  # the others go on, whatever a result holds
        return Grade(exercise, 0.0, (("all of it", f"it could not be graded ({type(error).__name__})"),))
