"""An adapter against the rows of the table."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.conformance import equations, naming
from grpo_lib.conformance.cases import Case, cases
from grpo_lib.conformance.equations import Answer, Variant
from grpo_lib.conformance.rows import ROWS, Row
from grpo_lib.conformance.slips import Slip

# What an adapter returns: the parts of an Answer by name, or None where the variant is not offered.
Adapter = Callable[[Case, Variant], Mapping[str, Any] | None]

AGREES, DIFFERS, ERROR, NOT_OFFERED = "agrees", "differs", "error", "not offered"
TOLERANCES = {"float64": 1e-6, "float32": 1e-5}
PARTS = tuple(field.name for field in dataclasses.fields(Answer))


@dataclass(frozen=True)
class Finding:
    """A line of the table, filled."""

    row: Row
    status: str  # AGREES, DIFFERS, ERROR or NOT_OFFERED
    detail: str = ""  # which convention; what it equals instead; or the exception and its line
    slip: Slip | None = None  # of what it equals instead

    @property
    def text(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status


def check(adapter: Adapter, rows: Sequence[Row] = ROWS) -> list[Finding]:
    """A finding for each row.  Raises CourseError where the adapter returns what is no answer, or offers no row."""
    findings: list[Finding] = []
    for row in rows:
        seen = dict.fromkeys(finding.slip for finding in findings if finding.slip)
        findings.append(check_row(adapter, row, list(seen)))
    if all(finding.status == NOT_OFFERED for finding in findings):
        raise CourseError("the adapter returned None for every row, so nothing was compared; return a dict for one")
    return findings


def check_row(adapter: Adapter, row: Row, seen: Sequence[Slip] = ()) -> Finding:
    """What an adapter computes for the cases of a row.  `seen`: slips of rows above, tried first.

    An exception of the adapter's is an ERROR with the line of the user's code, also where it asks Python to leave.
    """
    answers = []
    for name in row.cases:
        case = cases()[name]
        try:
            answer = _ask(adapter, row, case)
        except CourseError:
            raise
        except NotImplementedError:
            return Finding(row, NOT_OFFERED)
        except (Exception, SystemExit) as error:
            return Finding(row, ERROR, f"{type(error).__name__}: {first_line(error)} ({_place(error, adapter)})")
        if answer is None:
            return Finding(row, NOT_OFFERED)
        answers.append((case, answer))
    return _judge(row, answers, seen)


def _place(error: BaseException, adapter: Adapter) -> str:
    """FILE.py:LINE, the innermost in the folder of the adapter; where it is defined, if its answer cannot be read."""
    frames = traceback.extract_tb(error.__traceback__)
    defined = getattr(inspect.unwrap(adapter), "__code__", None)
    if defined is None:  # an object that can be called, such as a functools.partial
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    folder = Path(defined.co_filename).parent
    inside = [place for place, frame in enumerate(frames) if frame.filename == defined.co_filename]
    if not inside:
        return f"{Path(defined.co_filename).name}:{defined.co_firstlineno}"
    own = [frame for frame in frames[inside[0] :] if _is_own(Path(frame.filename), folder)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _is_own(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and "site-packages" not in file.relative_to(folder).parts


def _ask(adapter: Adapter, row: Row, case: Case) -> Answer | None:
    if row.compares != "weights":
        return _answer(adapter(case, row.variant), row, case)
    # The whole step: rewards, advantages, loss, gradient, weights.
    first = _answer(adapter(case, row.variant), dataclasses.replace(row, compares="advantages"), case)
    if first is None:
        return None
    case = dataclasses.replace(case, advantages=np.asarray(first.advantages, float))
    plain = dataclasses.replace(row, compares="loss")
    then = _answer(adapter(case, dataclasses.replace(row.variant, advantage="given")), plain, case)
    if then is None or then.weights is not None:
        return then
    return dataclasses.replace(then, weights=equations.step(case, np.asarray(then.gradient, float)))


def _answer(returned: Mapping[str, Any] | None, row: Row, case: Case) -> Answer | None:
    """What an adapter returned, checked; only its parts keep their dtype."""
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        raise TypeError(f"the adapter returned a {type(returned).__name__}; return a dict, or None")
    needed = ("advantages",) if row.compares == "advantages" else ("loss", "gradient")
    missing = [name for name in needed if returned.get(name) is None]
    if missing:
        raise CourseError(f"the adapter returned no {missing[0]} for `{row.name}`; return a dict with it, or None")
    unknown = set(returned) - set(PARTS)
    if unknown:
        raise CourseError(f"the adapter returned {min(unknown)}; the parts of an answer are {', '.join(PARTS)}")
    parts = {name: np.asarray(value) for name, value in returned.items() if value is not None}
    for name, shape in {
        "advantages": (len(case.mask),),
        "gradient": case.mask.shape,
        "loss": (),
        "weights": (2,),
    }.items():
        if name in parts and parts[name].shape != shape:
            raise CourseError(f"the adapter's {name} has shape {parts[name].shape}; for `{row.name}` it is {shape}")
    return Answer(**parts)


def _judge(row: Row, answers: list[tuple[Case, Answer]], seen: Sequence[Slip]) -> Finding:
    tolerance = _tolerance(answers, row.compares)
    conventions = {"": {}, **(row.conventions or {})}
    for words, changed in conventions.items():
        variant = dataclasses.replace(row.variant, **changed)
        if all(naming.same(got, _wanted(case, variant, row), row.compares, tolerance) for case, got in answers):
            return Finding(row, AGREES, words)
    difference = naming.name_difference(row, answers, tolerance, seen)
    return Finding(row, DIFFERS, difference.words, difference.slip)


def _wanted(case: Case, variant: Variant, row: Row) -> Answer:
    if row.compares == "advantages":
        return Answer(advantages=equations.advantages(case, variant))
    return equations.expected(case, variant)


def _tolerance(answers: list[tuple[Case, Answer]], compares: str) -> float:
    """By the dtype in which the implementation computes."""
    part = "advantages" if compares == "advantages" else "gradient"
    dtypes = {np.asarray(getattr(answer, part)).dtype.name for _, answer in answers}
    return max(TOLERANCES.get(dtype, TOLERANCES["float32"]) for dtype in dtypes)


def numerical_gradient(loss: Callable[[np.ndarray], Any], logps: np.ndarray) -> np.ndarray:
    """The derivative of a plain NumPy loss with respect to each log-probability [B, T], by central differences.

    For an adapter of a loss without automatic differentiation; right to about nine digits.
    """
    distance = 1e-5
    found = np.zeros(logps.shape)
    for place in np.ndindex(*logps.shape):
        above, below = logps.copy(), logps.copy()
        above[place] += distance
        below[place] -= distance
        found[place] = (loss(above) - loss(below)) / (2 * distance)
    return found


def reference(case: Case, variant: Variant) -> dict[str, Any]:
    """The adapter of what is right: it agrees everywhere, and is where the planted bugs are planted."""
    if variant.advantage != "given":
        return {"advantages": equations.advantages(case, variant)}
    one = dataclasses.replace(variant, micro_batches="one")
    found = equations.expected(case, one)
    return {"loss": found.loss, "gradient": found.gradient}
