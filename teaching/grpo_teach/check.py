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
from collections.abc import Callable, Iterator, Sequence
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
NO_FUNCTION = "the cell has no function {name}"
NO_FUNCTION_BUT = "the cell has no function {name}; it has {others}"
NO_DEF = "{name} must be written with def"
NO_CASES = "the cell with the public cases is not there, or is empty; take it from the course's notebook again"
OWN_CALL = "line {line} of the public cases calls {name}; your own calls belong in another cell"
UNCALLED = "the cell of the function ends with an error, before any case: {said}"
# What to do about an error of this kind, where the error does not say it.
HINTS = {
    "ModuleNotFoundError": "only NumPy and Python's own library are there, as in grading",
    "NameError": "what the function needs must be in its own cell",
}
OF_JUPYTER = "lines with % or ! are Jupyter's own, and grading does not know them"


class _OwnCall(Exception):
    """A student's call of the function in the cell of the cases."""


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
    if exercise.remark:
        log(words.translated(exercise.remark, language))
    if "assert " in exercise.public and not re.search(r"\bcase\(", exercise.public):
        _run_here(exercise)
        return words.say("exercise {number}: the public cases pass", language, number=exercise.number)
    found = public_cases(exercise)
    started = time.perf_counter()
    values = limited.run(exercise.code, calls(exercise, found), own=True)
    seconds = time.perf_counter() - started
    _refuse_what_was_not_called(exercise, values)
    wrong = [place for place, (one, value) in enumerate(zip(found, values, strict=True)) if not is_right(one, value)]
    for line in _report_all(found, values, wrong, language):
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
        raise _failed(exercise, error, FUNCTION) from error
    space |= {"case": cases.case, "that": cases.that}  # a notebook for Colab defines them in a cell of its own
    try:
        with cases.recording() as found:
            exec(compile(exercise.public, CASES, "exec"), space)
    except _OwnCall as error:
        line = _lines(error, CASES)[0]
        raise _of(exercise, words.say(OWN_CALL, exercise.language, line=line, name=error)) from error
    except Exception as error:
        raise _failed(exercise, error, CASES) from error
    if not found:
        raise _of(exercise, words.say(NO_CASES, exercise.language))
    return found


def calls(exercise: Exercise, found: Sequence[Case]) -> list[Call]:
    """The calls that the cases make."""
    tree = ast.parse(exercise.public)
    sources = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [Call(one.function, sources[one.by.__name__] if one.by else "", one.inputs) for one in found]


def _refuse_what_was_not_called(exercise: Exercise, values: Sequence[Any]) -> None:
    """Raise CourseError where nothing was written, or the code itself ends with an error."""
    failed = [value for value in values if isinstance(value, Failed)]
    is_unwritten = exercise.left_over or exercise.unwritten == len(exercise.functions)
    if is_unwritten and any(one.kind == "NotImplementedError" for one in failed):
        raise _unwritten(exercise)
    for one in failed:
        if one.uncalled:
            said = words.translated(one.reason, exercise.language)
            raise _of(exercise, words.say(UNCALLED, exercise.language, said=said))


def _report_all(found: Sequence[Case], values: Sequence[Any], wrong: Sequence[int], language: str) -> Iterator[str]:
    """The lines for all cases that are not right; an error that several have is told once."""
    told: set[Failed] = set()
    repeated = 0
    for place in wrong:
        value = values[place]
        if isinstance(value, Failed) and value in told:
            repeated += 1
            continue
        if isinstance(value, Failed):
            told.add(value)
        yield from report(found, place, value, language)
    if repeated:
        yield words.say("{count} more: the same error", language, count=repeated)


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
        said = words.translated(value.reason, language)
        got = [f"  {words.say('an error: {said}', language, said=said)}"]
    if isinstance(value, Failed) and value.kind in HINTS:
        got.append(f"  {words.say(HINTS[value.kind], language)}")
    return [heading, expected, *got]


def _stand_in(name: str) -> Callable:
    """A function's name for `case`; the function itself is called in another process."""

    def function(*_: Any, **__: Any) -> None:
        raise _OwnCall(name)

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
        left_over = words.LEFT_OVER.format(line=exercise.left_over)
        return _of(exercise, words.translated(left_over, exercise.language))
    unwritten = "exercise {number} is still to be written in {path}"
    return CourseError(words.say(unwritten, exercise.language, number=exercise.number, path=exercise.path))


def _failed(exercise: Exercise, error: Exception, cell: str) -> CourseError:
    """The error of a cell that cannot be run: `cell` is FUNCTION or CASES."""
    missing = error.name if isinstance(error, NameError) and cell == CASES else None
    if missing and f"case({missing}," in exercise.public:
        reason = _no_function(exercise, missing)
    else:
        reason = _where(exercise, error, cell)
    return _of(exercise, reason)


def _of(exercise: Exercise, reason: str) -> CourseError:
    """The error that names the exercise."""
    return CourseError(words.say(OF_EXERCISE, exercise.language, number=exercise.number, reason=reason))


def _no_function(exercise: Exercise, name: str) -> str:
    if re.search(rf"(?m)^{name} *=", exercise.code):
        return words.say(NO_DEF, exercise.language, name=name)
    others = ", ".join(exercise.functions)
    no_function = NO_FUNCTION_BUT if others else NO_FUNCTION
    return words.say(no_function, exercise.language, name=name, others=others)


def _where(exercise: Exercise, error: Exception, cell: str) -> str:
    """The kind of an error, and the line of the cell where it is."""
    numbers = _lines(error, cell)
    number = numbers[0] if numbers else getattr(error, "lineno", None)
    source = exercise.code if cell == FUNCTION else exercise.public
    line = source.splitlines()[number - 1].strip() if number else ""
    said = error.msg if isinstance(error, SyntaxError) else first_line(error) if str(error) else ""
    if isinstance(error, SyntaxError) and line.startswith(("%", "!")):
        said = words.say(OF_JUPYTER, exercise.language)
    place = {"kind": type(error).__name__, "cell": words.say(cell, exercise.language), "line": number}
    return words.say(IN_CELL, exercise.language, code=line, said=said, **place).rstrip()


def _lines(error: Exception, cell: str) -> list[int]:
    """The lines of a cell that an error went through, the outermost first."""
    return [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == cell]


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
