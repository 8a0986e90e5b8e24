"""`grpo check`, `grpo grade` and `grpo leaderboard`.

The entry point `grpo.commands` (pyproject.toml) adds them to the command line of grpo_train.cli.  Students do not get
what `grade` needs (grpo_teach.student).
"""

import importlib.util
import json
import secrets
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_lib.common import boundary, environment, files
from grpo_lib.common.errors import CourseError
from grpo_train.cli.options import AsJson, NoIsolation, commands, finish, log_for

if TYPE_CHECKING:
    from grpo_teach.notebooks import Exercise

SEED = "GRPO_SEED"  # in place of --seed: every user may read command lines, and nobody else's environment

app = commands()


@app.command()
def check(
    number: Annotated[str, typer.Argument(metavar="NUMBER", help="Of the exercise, such as 3.2.")],
    notebook: Annotated[
        Path | None, typer.Argument(metavar="[NOTEBOOK]", help="Default: the lesson's notebook in exercises/.")
    ] = None,
    hidden_count: Annotated[
        bool, typer.Option("--hidden-count", help="For teachers: only say how many hidden parts are right.")
    ] = False,
    student: Annotated[str, typer.Option(help="With --hidden-count: a name, which draws the inputs.")] = "",
    no_isolation: NoIsolation = False,
    as_json: AsJson = False,
) -> None:
    """Run the public cases of an exercise on your notebook.

    Only the exercise's own cells are run, as in grading, with its imports and limits: what the function needs must be
    in its cell, and what it prints is shown.  Save the notebook first.  Exit code 2: it is not
    right yet.

    With --hidden-count a teacher tells a student before the deadline how many parts would count: with --student the
    inputs are that student's own, and the same at each try.
    """
    from grpo_teach import check as public_cases
    from grpo_teach import words
    from grpo_teach.notebooks import read_exercises

    path = notebook or _notebook_of(number)
    try:
        exercises = read_exercises(path)
    except (ValueError, OSError) as error:
        raise CourseError(str(error)) from error
    if number not in exercises:
        language = next((one.language for one in exercises.values()), "en")
        others = ", ".join(exercises) or "none"
        no_exercise = "{path} has no exercise {number}; it has {others}"
        raise CourseError(words.say(no_exercise, language, path=path, number=number, others=others))
    if hidden_count:  # it is a student's, and not the teacher's own
        log_for(as_json)(boundary.require(*_teachers(), off=no_isolation))
        right, parts = _hidden_parts(exercises[number], student)
        summary = "exercise {number}: {right} of {count} parts are right"
        said = words.say(summary, exercises[number].language, number=number, right=right, count=parts)
        finish({"exercise": number, "right": right, "parts": parts}, as_json, said)
        return
    said = public_cases.check(exercises[number], log_for(as_json))
    finish({"exercise": number, "passed": True}, as_json, said)


@app.command()
def grade(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A notebook, or a folder of them, per student.")],
    lesson: Annotated[
        int | None, typer.Option(help="The lesson's number; default: what most of the submissions are.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, envvar=SEED, help="Draws the hidden inputs; default: a new one, which is printed."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: FOLDER-graded.")] = None,
    no_isolation: NoIsolation = False,
    as_json: AsJson = False,
) -> None:
    """Grade a folder of submissions of one lesson (for teachers).

    Writes grades.csv, one line per submission, and NAME/results.json for Gradescope.  Keep the seed: with it the same
    grades come out again.  Student code runs behind a boundary of the system; where there is none, nothing is graded.
    """
    _teachers_copy("grpo grade")
    from grpo_teach import grading, submissions

    log = log_for(as_json)
    output = output or folder.with_name(f"{folder.resolve().name}-graded")
    log(boundary.require(*_teachers(), folder, output, off=no_isolation))
    handed_in = submissions.read_submissions(folder)
    if seed is None:
        seed = secrets.randbits(32)
    name = str(lesson) if lesson is not None else submissions.lesson_of(handed_in)
    exercises = [
        exercise for exercise in grading.teachers_exercises().values() if exercise.number.split(".")[0] == name
    ]
    if not exercises:
        raise CourseError(f"lesson {name} has no exercises")
    log(f"lesson {name}: {len(handed_in)} submissions, {len(exercises)} exercises, --seed {seed}")
    results = submissions.grade_all(handed_in, exercises, seed, log)
    table = submissions.write_results(results, output)
    points = {result.submission.name: result.points for result in results}
    finish({"lesson": name, "seed": seed, "grades": str(table), "points": points}, as_json, f"grades: {table}")


@app.command()
def leaderboard(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder per student: reward.py, recipe.yaml.")],
    seed: Annotated[
        int, typer.Option(min=0, envvar=SEED, help="Draws secret problems and seeds: choose one, and keep it.")
    ],
    recipe: Annotated[Path, typer.Option(help="What entries change.")] = Path("recipes/lessons/tiny-hard.yaml"),
    part: Annotated[str, typer.Option(help="Where in a student's folder the entry is, such as a6.")] = ".",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of an entry.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="That each training may take.")] = 240,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: FOLDER-leaderboard.")] = None,
    no_isolation: NoIsolation = False,
    as_json: AsJson = False,
) -> None:
    """Train the reward and the recipe of each student on problems drawn from --seed, and rank them.

    Writes leaderboard.csv after each entry; what is wrong with one is its remark.  The same command continues where it
    was interrupted.  Student code runs behind a boundary of the system; where there is none, nothing is trained.
    Students try their own entry with it, another seed, and --no-isolation where they have no boundary.
    """
    from grpo_teach import hand_ins
    from grpo_teach import leaderboard as board

    output = (output or folder.with_name(f"{folder.resolve().name}-leaderboard")).resolve()
    log = log_for(as_json)
    log(boundary.require(*_teachers(), folder, output, off=no_isolation))
    entries = hand_ins.entries_of(folder)
    rows = []
    for number, (entry, name) in enumerate(zip(entries, hand_ins.names(entries), strict=True), 1):
        log(f"{name}, {number} of {len(entries)}")
        row: dict[str, Any]
        if reason := hand_ins.linked(entry, part) or hand_ins.no_folder(entry):
            row = {"remark": reason}
        else:
            row = board.train_entry(entry / part, recipe, seed, seeds, output / name, seconds, log)
        log(f"  {row.get('remark') or format(row['accuracy'], '.1%')}")
        rows.append({"entry": name, **row})
        files.write_text_atomic(output / "leaderboard.csv", board.csv(rows))
    lines = json.loads(board.ranked(rows).to_json(orient="records"))
    finish({"leaderboard": lines}, as_json, f"leaderboard: {output / 'leaderboard.csv'}")


def _teachers() -> list[Path]:
    """What of this repository a student's code must not read, where it is there."""
    return [environment.repo_root() / name for name in ("teaching", "tests/teach")]


def _teachers_copy(command: str) -> None:
    """Raises CourseError in a student's folder, which has no solutions."""
    if importlib.util.find_spec("grpo_teach.grading") is None:
        raise CourseError(f"{command} needs the teacher's copy of the course: this one has no solutions")


def _hidden_parts(exercise: "Exercise", student: str) -> tuple[int, int]:
    """How many parts of an exercise are right, and how many there are, with inputs of the student's own."""
    _teachers_copy("grpo check --hidden-count")
    from grpo_teach import grading

    teachers = grading.teachers_exercises()
    if exercise.number not in teachers:
        raise CourseError(f"exercise {exercise.number} has no hidden parts that grpo grade counts")
    seed = zlib.crc32(student.encode()) if student else secrets.randbits(32)
    [graded] = grading.grade(teachers[exercise.number], exercise.code, [seed])
    parts = len(grading.planned(teachers[exercise.number], seed))
    return parts - len(graded.missed), parts


def _notebook_of(number: str) -> Path:
    """The lesson's notebook: the student's, else, in the teacher's copy, the one with the solutions."""
    folders = [environment.repo_root() / "exercises", environment.repo_root() / "teaching" / "exercises"]
    pattern = f"{number.partition('.')[0].zfill(2)}_*.ipynb"
    for folder in folders:
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths[0]
    raise CourseError(f"{folders[0]} has no notebook {pattern}; give the notebook's path as the second argument")
