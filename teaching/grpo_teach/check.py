"""The public cases of an exercise, run on the student's notebook: `grpo check 3.2`.

python -m grpo_teach.check exercises/*.ipynb      all of them, as a GitHub Classroom counts; NumPy and nbformat do
"""

import ast
import json
import os
import re
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

FUNCTION, CASES = "the cell of the function", "the public cases"
IN_CELL = "{kind} in {cell}, line {line}: {code}  {said}"
OF_EXERCISE = "exercise {number}: {reason}"
LEFT_OVER = "line {line} still raises NotImplementedError; take it out"
NO_FUNCTION = "the cell has no function {name}"
NO_FUNCTION_BUT = "the cell has no function {name}; it has {others}"


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
    if not re.search(r"\bcase\(", exercise.public):
        _run_here(exercise)
        return words.say("exercise {number}: the public cases pass", language, number=exercise.number)
    found = public_cases(exercise)
    started = time.perf_counter()
    values = limited.run(exercise.code, calls(exercise, found), own=True)
    seconds = time.perf_counter() - started
    if any(isinstance(value, Failed) and value.kind == "NotImplementedError" for value in values):
        raise _unwritten(exercise)
    wrong = [place for place, (one, value) in enumerate(zip(found, values, strict=True)) if not is_right(one, value)]
    told: list[Any] = []
    for place in wrong:
        if isinstance(values[place], Failed) and values[place] in told:
            continue
        told.append(values[place])
        for line in report(found, place, values[place], language):
            log(line)
    if len(told) < len(wrong):
        log(words.say("{count} more: the same error", language, count=len(wrong) - len(told)))
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
        raise _failed(exercise, error, FUNCTION) from error
    space |= {"case": cases.case, "that": cases.that}  # a notebook for Colab defines them in a cell of its own
    try:
        with cases.recording() as found:
            exec(compile(exercise.public, CASES, "exec"), space)
    except Exception as error:
        raise _failed(exercise, error, CASES) from error
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
    call, expected, *got = cases.told(found[place], None if isinstance(value, Failed) else value, language)
    heading = words.say("case {place} of {count}: {call}", language, place=place + 1, count=len(found), call=call)
    if isinstance(value, Failed):
        got = [f"  {words.say('an error', language)}: {words.reason(value.reason, language)}"]
    return [heading, expected, *got]


def _stand_in(name: str) -> Callable:
    """A function's name for `case`; the function itself is called in another process."""

    def function(*_: Any, **__: Any) -> None:
        raise TypeError(f"{name} is called by case(…) only")

    function.__name__ = name
    return function


def _run_here(exercise: Exercise) -> None:
    """Run both cells in this process, without limits: it is the student's own code."""
    space = {"__name__": "exercise"}
    for cell, source in ((FUNCTION, exercise.code), (CASES, exercise.public)):
        try:
            exec(compile(source, cell, "exec"), space)
        except NotImplementedError:
            raise _unwritten(exercise) from None
        except Exception as error:
            raise _failed(exercise, error, cell) from error


def _unwritten(exercise: Exercise) -> CourseError:
    """The error of an exercise that raises NotImplementedError: nothing was written, or the line was left there."""
    if exercise.left_over:
        reason = words.say(LEFT_OVER, exercise.language, line=exercise.left_over)
        return CourseError(words.say(OF_EXERCISE, exercise.language, number=exercise.number, reason=reason))
    unwritten = "exercise {number} is still to be written in {path}"
    return CourseError(words.say(unwritten, exercise.language, number=exercise.number, path=exercise.path))


def _failed(exercise: Exercise, error: Exception, cell: str) -> CourseError:
    """The error of a cell that cannot be run: `cell` is FUNCTION or CASES."""
    missing = error.name if isinstance(error, NameError) and cell == CASES else None
    if missing and f"case({missing}," in exercise.public:
        reason = _no_function(exercise, missing)
    else:
        reason = _where(exercise, error, cell)
    return CourseError(words.say(OF_EXERCISE, exercise.language, number=exercise.number, reason=reason))


def _no_function(exercise: Exercise, name: str) -> str:
    others = ", ".join(exercise.functions)
    no_function = NO_FUNCTION_BUT if others else NO_FUNCTION
    return words.say(no_function, exercise.language, name=name, others=others)


def _where(exercise: Exercise, error: Exception, cell: str) -> str:
    """The kind of an error, and the line of the cell where it is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == cell]
    number = frames[0].lineno if frames else getattr(error, "lineno", None)
    source = exercise.code if cell == FUNCTION else exercise.public
    line = source.splitlines()[number - 1].strip() if number else ""
    said = error.msg if isinstance(error, SyntaxError) else first_line(error) if str(error) else ""
    place = {"kind": type(error).__name__, "cell": words.say(cell, exercise.language), "line": number}
    return words.say(IN_CELL, exercise.language, code=line, said=said, **place).rstrip()


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
