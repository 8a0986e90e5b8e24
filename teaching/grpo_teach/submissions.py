"""Grade a folder of submissions: one line each in a CSV, and Gradescope's results.json for each.

A submission is a notebook, a ZIP or a folder with notebooks, named after the student, or as a learning platform names
it (grpo_teach.hand_ins).  Whatever else is in the folder has a line as well:

    submissions/ada.ipynb      submissions/ben/03_policy_update.ipynb      submissions/eve.zip

What a student hands in never stops the grading of the others: it becomes a remark on that student's line.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from grpo_lib.common import files
from grpo_lib.common.errors import CourseError
from grpo_lib.common.spreadsheets import BYTE_ORDER_MARK, for_spreadsheet
from grpo_teach import hand_ins, words
from grpo_teach.grading import Grade, grade, planned
from grpo_teach.likeness import near_equal
from grpo_teach.notebooks import Exercise, exercises_in

LONGEST = 4000  # characters of remarks in a cell of the CSV


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
    entries = hand_ins.entries_of(folder)
    if not entries:
        raise CourseError(f"{folder} has no submissions: a notebook, a ZIP or a folder with notebooks per student")
    return [read_submission(one.entries, one.name, one.remark) for one in hand_ins.by_student(entries)]


def read_submission(entries: Sequence[Path], name: str, remark: str = "") -> Submission:
    """What is in a student's notebooks, folders and ZIPs; links and special files are not read.

    Of several versions of an exercise the newest counts that was written.
    """
    remarks = [remark] if remark else []
    found: list[hand_ins.Notebook] = []
    for entry in entries:
        notebooks, reasons = hand_ins.notebooks_in(entry)
        found += notebooks
        remarks += reasons
    if not found and not remarks:
        remarks.append("no notebook")
    versions: dict[str, list[tuple[str, Exercise]]] = {}
    places: dict[str, list[PurePath]] = {}
    for notebook in sorted(found, key=lambda one: one.newest):
        try:
            exercises = exercises_in(notebook.content, Path(notebook.name))
        except ValueError as error:
            remarks.append(hand_ins.plain(str(error)))
            continue
        for number, one in exercises.items():
            versions.setdefault(number, []).append((notebook.name, one))
            places.setdefault(number, []).append(notebook.place)
    chosen = {number: _newest_written(found) for number, found in versions.items()}
    remarks += _on_versions(versions, chosen)
    remarks += hand_ins.of_several(places.values())
    for number, (_, one) in chosen.items():
        remarks += [f"{number}: {one.remark}"] if one.remark else []
        if one.left_over:
            remarks.append(f"{number}: {words.LEFT_OVER.format(line=one.left_over)}")
    code = {number: one.code for number, (_, one) in chosen.items()}
    languages = {number: one.language for number, (_, one) in chosen.items()}
    return Submission(name, code, remarks, languages)


def _newest_written(versions: Sequence[tuple[str, Exercise]]) -> tuple[str, Exercise]:
    """Of versions in order of their dates the last of those that are written most."""
    fewest = min(one.unwritten for _, one in versions)
    return [version for version in versions if version[1].unwritten == fewest][-1]


def _on_versions(
    versions: Mapping[str, Sequence[tuple[str, Exercise]]], chosen: Mapping[str, tuple[str, Exercise]]
) -> list[str]:
    """A remark for each notebook that counts before another one, with the exercises that differ there."""
    numbers: dict[str, list[str]] = {}
    for number, found in versions.items():
        name, best = chosen[number]
        if any(one.code.strip() != best.code.strip() and not one.unwritten for _, one in found):
            numbers.setdefault(name, []).append(number)
    return [f"several versions of {', '.join(which)}: {name}, the newest, counts" for name, which in numbers.items()]


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
            log("; ".join([f"{submission.name}: {result.points:g}", *submission.remarks]))
    return results


def table(results: Sequence[Result]) -> str:
    """The CSV: a line per submission, with its points per exercise, their sum, remarks, and whom it is nearly equal to.

    It begins with a byte order mark, without which Excel shows names in Chinese as something else.
    """
    near = near_equal([one.submission for one in results])
    columns = ["submission", *(grade.exercise.number for grade in results[0].grades), "points", "of", "remarks"]
    lines = []
    for result in results:
        points = [f"{grade.points:g}" for grade in result.grades]
        most = sum(grade.exercise.points for grade in result.grades)
        name = result.submission.name
        cells = [name, *points, f"{result.points:g}", f"{most:g}", hand_ins.plain(result.remarks, LONGEST)]
        lines.append([*cells, ", ".join(near.get(name, []))])
    frame = pd.DataFrame(lines, columns=[*columns, "near-equal"], dtype=object)
    return BYTE_ORDER_MARK + frame.map(for_spreadsheet).to_csv(index=False, lineterminator="\n")


def gradescope(result: Result) -> dict[str, Any]:
    """What Gradescope's autograder reads as results.json, in the language of the exercises."""
    language = min(result.submission.languages.values(), default="en")
    remarks = [words.reason(remark, language) for remark in result.submission.remarks]
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
    return {"score": result.points, "output": "\n".join(remarks), "tests": tests}


def write_results(results: Sequence[Result], folder: Path) -> Path:
    """Write grades.csv, and NAME/results.json for each submission; return the CSV."""
    written = files.write_text_atomic(folder / "grades.csv", table(results))
    for one in results:
        files.write_json_atomic(folder / one.submission.name / "results.json", gradescope(one))
    return written


def _lesson(number: str) -> str:
    return number.partition(".")[0]


def _with_remark(submission: Submission, exercises: Sequence[Exercise]) -> Submission:
    """Say once that nothing of this lesson is there."""
    if submission.remarks or any(one.number in submission.code for one in exercises):
        return submission
    others = sorted({_lesson(number) for number in submission.code})
    if not others:
        return replace(submission, remarks=["no exercise of the course"])
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
