"""The grade of one exercise of one student."""

import ast
import copy
import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_teach import cases, limited, words, worker
from grpo_teach.limited import Call, Failed
from grpo_teach.notebooks import Exercise, read_exercises
from grpo_teach.parts import Part

MOST_REPEATS = 20  # calls that are made twice, beside one of each part


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


def grade(exercise: Exercise, code: str, seeds: Sequence[int], language: str = "en") -> list[Grade]:
    """One grade per seed for the functions that `code` defines, each seed with inputs of its own.

    The code runs in a process of its own, for all seeds together, with limits; see the package's docstring.  Calls are
    in random order and some are repeated, so that an answer cannot be told from its place.

    Args:
      language: of the reasons, "en" or "zh".
    """
    plans = [planned(exercise, seed) for seed in seeds]
    all_parts = [planned_part for plan in plans for planned_part in plan]
    rng = np.random.default_rng([*seeds, len(all_parts)])
    got: dict[int, list[Any]] = {id(planned_part): [] for planned_part in all_parts}
    for turn in range(max(planned_part.part.processes for planned_part in plans[0])):
        asked = [planned_part for planned_part in all_parts if turn < planned_part.part.processes]
        values = iter(_answers(code, [one.calls for one in asked], len(seeds), rng))
        for planned_part in asked:
            got[id(planned_part)] += [next(values) for _ in planned_part.part.inputs]
    grades = []
    for plan in plans:
        verdicts = [_missed(planned_part, got[id(planned_part)], language) for planned_part in plan]
        grades.append(_grade(exercise, verdicts))
    return grades


def _answers(code: str, parts: Sequence[Sequence[Call]], seeds: int, rng: np.random.Generator) -> list[Any]:
    """The values of all parts' calls.  They are made in random order, some twice, and must come out alike.

    Of each part one is made twice: a part with one call would else be right for an answer that knows the values and
    guesses their order, as often as there are calls.
    """
    calls = [call for part in parts for call in part]
    firsts = np.cumsum([0, *map(len, parts[:-1])])
    repeated = {int(first + rng.integers(len(part))) for first, part in zip(firsts, parts, strict=True)}
    repeated |= set(rng.choice(len(calls), min(MOST_REPEATS, 1 + len(calls) // 10), replace=False).tolist())
    order = rng.permutation([*range(len(calls)), *sorted(repeated)])
    values = limited.run(code, [calls[place] for place in order], limited.SECONDS * seeds)
    answers: dict[int, Any] = {}
    for place, value in zip(order, values, strict=True):
        if place in answers and not _alike(answers[place], value):
            value = Failed("another answer for the same inputs")
        answers[place] = value
    return [answers[place] for place in range(len(calls))]


def _alike(one: Any, other: Any) -> bool:
    """Whether two calls gave the same: NaN is NaN here.  After a limit of time only one of them has a value."""
    if isinstance(one, Failed) or isinstance(other, Failed):
        return True
    return json.dumps(worker.encode(one)) == json.dumps(worker.encode(other))


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


def _missed(planned_part: Planned, got: list[Any], language: str = "en") -> tuple[str, str]:
    """A part and why it does not count; "" if it does."""
    part = planned_part.part
    pairs = list(zip(got, planned_part.want * part.processes, strict=True))
    wrong = [(value, want) for value, want in pairs if not same(part, value, want)]
    failed = [value.reason for value, _ in wrong if isinstance(value, Failed)]
    if part.passes:
        verdict = _passes(part, got, planned_part.want)
        counts = not failed and verdict is True
        summary = words.reason(verdict, language) if isinstance(verdict, str) else words.say("not right", language)
        if any(one is None for one in planned_part.want):  # None is an answer here like the others
            wrong = []
    else:
        counts = len(wrong) <= (1 - part.share) * len(pairs)
        right = len(pairs) - len(wrong)
        summary = words.say("{right} of {count} inputs right", language, right=right, count=len(pairs))
    reason = words.reason(failed[0], language) if failed else _kind_of(wrong, language) or summary
    # An empty reason means that the part counts, so one that does not always has words.
    return part_name(part.name, language), "" if counts else reason.strip() or words.say("not right", language)


def _passes(part: Part, got: list[Any], want: list[Any]) -> bool | str:
    try:
        with np.errstate(all="ignore"):
            verdict = part.passes(got, want) if part.passes else False
            return verdict if isinstance(verdict, str) else bool(verdict)
    except Exception:  # a value of another type or shape
        return False


def _kind_of(wrong: Sequence[tuple[Any, Any]], language: str) -> str:
    """What is wrong with the type or shape of all values that are not right; "" where that is not it."""
    compared = [(value, want) for value, want in wrong if want is not None and not isinstance(want, Failed)]
    try:
        kinds = [cases.difference(value, want, language) for value, want in compared]
    except Exception:  # a value may be anything
        return ""
    return kinds[0] if kinds and all(kinds) else ""


def same(part: Part, got: Any, want: Any) -> bool:
    """Whether two values are equal; two errors are if they have the same type."""
    if isinstance(got, Failed) or isinstance(want, Failed):
        if not isinstance(got, Failed) or not isinstance(want, Failed):
            return False
        return got.kind == want.kind and not got.uncalled
    if not part.equal:
        return cases.equal(got, want, part.tolerance)
    try:
        return bool(part.equal(got, want))
    except Exception:  # a value of another type
        return False


@functools.cache
def _chinese_names() -> dict[str, str]:
    path = environment.repo_root() / "teaching" / "zh_TW" / "parts.yaml"
    return yaml.safe_load(path.read_text("utf-8"))


def part_name(name: str, language: str) -> str:
    """A part's name in a language."""
    return _chinese_names()[name] if language == "zh" else name


def _grade(exercise: Exercise, verdicts: Sequence[tuple[str, str]]) -> Grade:
    missed = tuple(verdict for verdict in verdicts if verdict[1])
    return Grade(exercise, round(exercise.points * (1 - len(missed) / len(verdicts)), 2), missed)
