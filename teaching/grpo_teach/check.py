"""The public cases of an exercise, run on the student's notebook: `grpo check 3.2`.

python -m grpo_teach.check exercises/*.ipynb      all of them, as a GitHub Classroom counts; NumPy and nbformat do
"""

import ast
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError, first_line
from grpo_teach import cases, limited, words
from grpo_teach.cases import Case
from grpo_teach.limited import Call, Failed
from grpo_teach.notebooks import Exercise, read_exercises

CELLS = "the cell of the function", "the public cases"


def check(exercise: Exercise, log: Callable[[str], None]) -> str:
    """Run the exercise's two cells, and nothing else of the notebook, as grading does.

    The function runs in the process that grading uses, with its imports and limits.  `log` gets each case that is not
    right: the call, what was expected, what came.  Exercises without such cases (10.1, which needs JAX) run here.

    Returns:
      The line to print: how many cases passed, and how long they took.

    Raises:
      CourseError: a case is not right, or the cell has an error; in the language of the exercise.
    """
    language = exercise.language
    if "grpo_teach.cases" not in exercise.public:
        _run_here(exercise)
        return f"exercise {exercise.number}: the public cases pass"
    found = public_cases(exercise)
    started = time.perf_counter()
    values = limited.run(exercise.code, calls(exercise, found), own=True)
    seconds = time.perf_counter() - started
    if any(isinstance(value, Failed) and value.kind == "NotImplementedError" for value in values):
        missing = words.say(
            "exercise {number} is still to be written in {path}", language, number=exercise.number, path=exercise.path
        )
        raise CourseError(missing)
    wrong = [place for place, (one, value) in enumerate(zip(found, values, strict=True)) if not is_right(one, value)]
    for place in wrong:
        for line in report(found, place, values[place], language):
            log(line)
    count = {"number": exercise.number, "count": len(found)}
    if wrong:
        summary = "exercise {number}: {right} of {count} public cases are right"
        raise CourseError(words.say(summary, language, right=len(found) - len(wrong), **count))
    passed = "exercise {number}: the public cases pass ({count} of {count}; {seconds:.1f} s, grading allows {limit})"
    return words.say(passed, language, seconds=seconds, limit=limited.SECONDS, **count)


def public_cases(exercise: Exercise) -> list[Case]:
    """The cases of the exercise's test cell.  Raises CourseError where one of its cells cannot be run."""
    try:
        space: dict[str, Any] = {name: _stand_in(name) for name in exercise.functions}
    except SyntaxError as error:
        raise CourseError(f"exercise {exercise.number}: {_where(error, *_cells(exercise)[0])}") from error
    name, source = _cells(exercise)[1]
    try:
        with cases.recording() as found:
            exec(compile(source, name, "exec"), space)
    except Exception as error:
        raise CourseError(f"exercise {exercise.number}: {_where(error, name, source)}") from error
    return found


def calls(exercise: Exercise, found: Sequence[Case]) -> list[Call]:
    """The calls that the cases make."""
    tree = ast.parse(exercise.public)
    sources = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [Call(one.function, sources[one.by.__name__] if one.by else "", one.inputs) for one in found]


def is_right(one: Case, value: Any) -> bool:
    """Whether a case got what it expects, which may be an error."""
    if isinstance(value, Failed):
        return isinstance(one.want, type) and value.kind == one.want.__name__
    return cases.right(one, value)


def report(found: Sequence[Case], place: int, value: Any, language: str) -> list[str]:
    """The lines for a case that is not right: the call, what was expected, what came."""
    call, expected, got = cases.told(found[place], None if isinstance(value, Failed) else value, language)
    heading = words.say("case {place} of {count}: {call}", language, place=place + 1, count=len(found), call=call)
    if isinstance(value, Failed):
        got = f"  {words.say('an error', language)}: {words.reason(value.reason, language)}"
    return [heading, expected, got]


def _stand_in(name: str) -> Callable:
    """A function's name for `case`; the function itself is called in another process."""

    def function(*_: Any, **__: Any) -> None:
        raise TypeError(f"{name} is called by case(…) only")

    function.__name__ = name
    return function


def _cells(exercise: Exercise) -> list[tuple[str, str]]:
    return list(zip(CELLS, (exercise.code, exercise.public), strict=True))


def _run_here(exercise: Exercise) -> None:
    """Run both cells in this process, without limits: it is the student's own code."""
    space = {"__name__": "exercise"}
    for name, source in _cells(exercise):
        try:
            exec(compile(source, name, "exec"), space)
        except NotImplementedError:
            raise CourseError(f"exercise {exercise.number} is still to be written in {exercise.path}") from None
        except Exception as error:
            raise CourseError(f"exercise {exercise.number}: {_where(error, name, source)}") from error


def _where(error: Exception, name: str, source: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    number = frames[0].lineno if frames else getattr(error, "lineno", None)
    line = source.splitlines()[number - 1].strip() if number else ""
    said = first_line(error) if str(error) else ""
    return f"{type(error).__name__} in {name}, line {number}: {line}  {said}".rstrip()


def main(paths: Sequence[str]) -> None:
    """Check all exercises of the notebooks: a line each, and a sum that GitHub Classroom reads.

    Public cases are no grade: they say that work was done, and where it is not right yet.
    """
    points = most = 0.0
    lines = ["| exercise | points | public cases |", "|---|--:|---|"]
    for path in paths:
        for exercise in read_exercises(Path(path)).values():
            try:
                said, earned = check(exercise, print), exercise.points
            except CourseError as error:
                said, earned = str(error), 0.0
            points, most = points + earned, most + exercise.points
            lines.append(f"| {exercise.number} | {earned:g} of {exercise.points:g} | {said.replace('|', '/')} |")
            print(said, flush=True)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with open(summary, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    print(f"::notice title=Autograding complete::Points {points:g}/{most:g}")
    print(f"::notice title=Autograding report::{json.dumps({'totalPoints': points, 'maxPoints': most})}")


if __name__ == "__main__":
    main(sys.argv[1:])
