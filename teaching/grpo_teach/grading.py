"""The grade of one exercise of one student."""

import ast
import copy
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_teach import limited
from grpo_teach.limited import Call, Failed
from grpo_teach.notebooks import Exercise, read_exercises
from grpo_teach.parts import Part, close


@dataclass(frozen=True)
class Grade:
    """Points of an exercise, and what was missed: pairs of a part and the reason."""

    exercise: Exercise
    points: float
    missed: tuple[tuple[str, str], ...] = ()

    @property
    def lines(self) -> list[str]:
        """One line per part that was missed."""
        return [f"{part}: {reason}" for part, reason in self.missed]

    @property
    def summary(self) -> list[str]:
        """`lines`, or where the whole exercise failed for one reason, only that reason."""
        reasons = {reason for _, reason in self.missed}
        return self.lines if self.points or len(reasons) > 1 else list(reasons)


@dataclass(frozen=True)
class Planned:
    """A part with what the solution returns, and the source of its harness."""

    part: Part
    want: list[Any]
    function: str
    harness: str

    @property
    def calls(self) -> list[Call]:
        return [Call(self.function, self.harness, arguments) for arguments in self.part.inputs]


def teachers_exercises() -> dict[str, Exercise]:
    """All exercises with their solutions, by number.  Raises CourseError where a notebook cannot be read."""
    exercises: dict[str, Exercise] = {}
    try:
        for path in sorted((environment.repo_root() / "teaching" / "exercises").glob("*.ipynb")):
            exercises |= read_exercises(path)
        return exercises
    except ValueError as error:
        raise CourseError(f"teaching/exercises: {error}; put the notebook back (git restore), or remove it") from None


def grade(exercise: Exercise, code: str, seeds: Sequence[int]) -> list[Grade]:
    """One grade per seed for the functions that `code` defines, each seed with inputs of its own.

    The code runs in a process of its own, for all seeds together, with limits; see the package's docstring.
    """
    plans = [planned(exercise, seed) for seed in seeds]
    all_parts = [planned_part for plan in plans for planned_part in plan]
    got: dict[int, list[Any]] = {id(planned_part): [] for planned_part in all_parts}
    for turn in range(max(planned_part.part.processes for planned_part in plans[0])):
        asked = [planned_part for planned_part in all_parts if turn < planned_part.part.processes]
        calls = [call for planned_part in asked for call in planned_part.calls]
        values = iter(limited.run(code, calls, limited.SECONDS * len(seeds)))
        for planned_part in asked:
            got[id(planned_part)] += [next(values) for _ in planned_part.part.inputs]
    grades = []
    for plan in plans:
        verdicts = [_missed(planned_part, got[id(planned_part)]) for planned_part in plan]
        grades.append(_grade(exercise, verdicts))
    return grades


def points_here(number: str, hidden: Callable, space: Mapping[str, Any]) -> float:
    """Points for functions in this process: for a cell of nbgrader's own autograde, which reads the last value.

    Nothing is isolated there: the student's code can change what this function uses.  `grade` is the one to rely on.
    """
    exercise = teachers_exercises()[number]
    verdicts = []
    for planned_part in _plan(exercise, hidden, secrets.randbits(32)):
        values = _values(planned_part.part, space[planned_part.function])
        verdicts.append(_missed(planned_part, values * planned_part.part.processes))
    return _grade(exercise, verdicts).points


@functools.lru_cache(maxsize=256)  # the same for all students
def planned(exercise: Exercise, seed: int) -> list[Planned]:
    """The parts of a teacher's exercise, with inputs of this seed."""
    hidden: dict[str, Any] = {}
    exec(compile(exercise.hidden, f"hidden tests of {exercise.number}", "exec"), hidden)
    return _plan(exercise, hidden["hidden"], seed)


def _plan(exercise: Exercise, hidden: Callable, seed: int) -> list[Planned]:
    solution: dict[str, Any] = {"__name__": "solution"}
    exec(compile(exercise.code, f"solution of {exercise.number}", "exec"), solution)
    sources = {node.name: ast.unparse(node) for node in exercise.hidden.body if isinstance(node, ast.FunctionDef)}
    rng = np.random.default_rng([seed, *map(int, exercise.number.split("."))])
    plan = []
    for part in hidden(rng):
        function = part.function or exercise.functions[0]
        harness = sources[part.harness.__name__] if part.harness else ""
        plan.append(Planned(part, _values(part, solution[function]), function, harness))
    return plan


def _values(part: Part, function: Callable) -> list[Any]:
    return [_value(part, function, copy.deepcopy(arguments)) for arguments in part.inputs]


def _value(part: Part, function: Callable, arguments: tuple) -> Any:
    try:
        return part.harness(function, *arguments) if part.harness else function(*arguments)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


def _missed(planned_part: Planned, got: list[Any]) -> tuple[str, str]:
    """A part and why it does not count; "" if it does."""
    part = planned_part.part
    pairs = list(zip(got, planned_part.want * part.processes, strict=True))
    failed = [value.reason for value, want in pairs if isinstance(value, Failed) and not same(part, value, want)]
    try:
        with np.errstate(all="ignore"):
            if part.passes:
                passed = part.passes(got, planned_part.want)
            else:
                passed = all(same(part, value, want) for value, want in pairs)
    except Exception:  # a value of another type or shape
        passed = False
    if failed:
        return part.name, failed[0]
    return part.name, "" if passed else "not right"


def same(part: Part, got: Any, want: Any) -> bool:
    """Whether two values are equal; two errors are if they have the same type."""
    if isinstance(got, Failed) or isinstance(want, Failed):
        return isinstance(got, Failed) and isinstance(want, Failed) and got.kind == want.kind
    try:
        return close(got, want, part.tolerance)
    except (AttributeError, TypeError, ValueError):  # a value of another type or shape
        return False


def _grade(exercise: Exercise, verdicts: Sequence[tuple[str, str]]) -> Grade:
    missed = tuple(verdict for verdict in verdicts if verdict[1])
    return Grade(exercise, round(exercise.points * (1 - len(missed) / len(verdicts)), 2), missed)
