"""Which slip does a wrong answer equal, and with which factor?"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lib.conformance import equations
from grpo_lib.conformance.cases import WEIGHTS, Case
from grpo_lib.conformance.equations import Answer, Variant, expected
from grpo_lib.conformance.rows import Row
from grpo_lib.conformance.slips import FAULTS, Slip, changes, factors, faulty

NOTHING = "equals nothing that is known here"
WITHOUT_VARIANCE = "is not finite where a group has no variance; add ε to the standard deviation"
WITHOUT_TOKENS = "is not finite where a completion has no token; divide by at least 1"


@dataclass(frozen=True)
class Difference:
    """What is said about a row that differs; the slip, where it has a name, is tried first in the next rows."""

    words: str
    slip: Slip | None = None


def close(got: np.ndarray | float, wanted: np.ndarray | float, tolerance: float, scale: float | None = None) -> bool:
    """Whether the largest difference is within the tolerance, of the largest value or of `scale`."""
    got, wanted = np.asarray(got, float), np.asarray(wanted, float)
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return False
    largest = np.abs(wanted).max() if scale is None else scale
    return bool(np.abs(got - wanted).max() <= tolerance * max(largest, 1e-12))


def same(got: Answer, wanted: Answer, compares: str, tolerance: float, factor: float = 1.0) -> bool:
    """Whether an answer is what is wanted times a factor; of the weights, whether their step is."""
    if compares == "advantages":
        return close(got.advantages, factor * wanted.advantages, tolerance)
    if compares == "weights":
        before = np.array(WEIGHTS["logps"])
        scale = np.abs(wanted.weights).max()
        return close(got.weights - before, factor * (wanted.weights - before), tolerance, scale)
    slope = factor * wanted.gradient
    # A loss is a sum of terms that may cancel: it is compared with their size.
    scale = max(abs(factor * wanted.loss), np.abs(slope).sum())
    return close(got.loss, factor * wanted.loss, tolerance, scale) and close(got.gradient, slope, tolerance)


def name_difference(
    row: Row, answers: list[tuple[Case, Answer]], tolerance: float, seen: Sequence[Slip] = ()
) -> Difference:
    """What the answers of a row's cases equal.  `seen`: slips of rows above, which explain this one best."""
    if not all(_finite(answer) for _, answer in answers):
        return Difference(_not_finite(row, answers))
    for alike in itertools.chain([_seen(row, seen)], _slips(row)):
        fitting = ((slip, _factor(slip, row, answers, tolerance)) for slip in alike)
        found = _simplest((slip, factor) for slip, factor in fitting if factor is not None)
        if found:
            slip, factor = found
            return Difference(f"equals {slip.words(row)}{factor}", slip)
    return Difference(_one_of_both(row, answers, tolerance) or NOTHING)


# ----- Answers with nan -----


def _parts(answer: Answer) -> list[np.ndarray]:
    parts = [answer.advantages, answer.loss, answer.gradient, answer.weights]
    return [part for part in parts if part is not None]


def _finite(answer: Answer) -> bool:
    return all(np.isfinite(part).all() for part in _parts(answer))


def _not_finite(row: Row, answers: list[tuple[Case, Answer]]) -> str:
    """What the completions whose values are not finite have in common."""
    for case, answer in answers:
        bad = _bad_rows(answer, len(case.mask))
        for of_kind, words in ((_without_variance, WITHOUT_VARIANCE), (_without_tokens, WITHOUT_TOKENS)):
            kind = of_kind(case, row.variant)
            spread_to_all = bad.all()  # as a loss is one number
            if kind.any() and bad.any() and (spread_to_all or not (bad & ~kind).any()):
                return words
    return "is not finite"


def _bad_rows(answer: Answer, rows: int) -> np.ndarray:
    """Which completions have a value that is not finite, [B]."""
    bad = np.zeros(rows, bool)
    for part in (answer.advantages, answer.gradient):
        if part is not None:
            bad |= ~np.isfinite(np.asarray(part, float)).reshape(rows, -1).all(1)
    return bad


def _without_variance(case: Case, variant: Variant) -> np.ndarray:
    spread = equations.by_group(case.rewards.sum(1), case.groups, np.ptp)
    return spread < 1e-9


def _without_tokens(case: Case, variant: Variant) -> np.ndarray:
    return ~equations.tokens_in_loss(case, variant).any(1)


# ----- Answers that equal a slip -----


def _simplest(found: Iterator[tuple[Slip, str]]) -> tuple[Slip, str] | None:
    """The first without a factor, else the first."""
    first = None
    for slip, factor in found:
        if not factor:
            return slip, factor
        first = first or (slip, factor)
    return first


def _seen(row: Row, seen: Sequence[Slip]) -> Iterator[Slip]:
    """Those that change something in this row; for a whole step also one of its advantages with one of its loss."""
    changing = [slip for slip in seen if slip.fault or slip.of(row.variant) != row.variant]
    yield from changing
    if row.compares == "weights":
        for one, other in itertools.combinations(changing, 2):
            yield Slip(one.changes + other.changes, one.fault or other.fault)


def _slips(row: Row) -> Iterator[Iterator[Slip]]:
    """The simplest first: the variant itself, with one fault, with one change, with both, with two changes.

    Two numbers, the weights after a step, say too little to choose between two thousand slips.
    """
    single = changes(row)
    faults = [fault for fault in FAULTS if fault and row.compares != "advantages"]
    yield iter([Slip()])
    yield (Slip(fault=fault) for fault in faults)
    yield (Slip((change,)) for change in single)
    if row.compares == "weights":
        return
    yield (Slip((change,), fault) for change in single for fault in faults)
    pairs = itertools.combinations(single, 2)
    yield (Slip(pair) for pair in pairs if not pair[0].touches(pair[1]) and not all(one.constant for one in pair))


def _factor(slip: Slip, row: Row, answers: list[tuple[Case, Answer]], tolerance: float) -> str | None:
    """The words for the factor by which all answers are the slip's; None if there is none."""
    variant = slip.of(row.variant)
    fitting: set[str] | None = None
    for case, got in answers:
        changed = faulty(case, slip.fault)
        names = _factors_that_may_be(got, changed, variant, row.compares)
        if fitting is not None:
            names = [name for name in names if name in fitting]
        if not names:
            return None
        wanted = _answer(changed, variant, row.compares)
        fitting = {name for name in names if same(got, wanted, row.compares, tolerance, factors(case)[name])}
        if not fitting:
            return None
    return next(name for name in factors(answers[0][0]) if name in (fitting or ()))


def _factors_that_may_be(got: Answer, case: Case, variant: Variant, compares: str) -> list[str]:
    """Those that the loss and one derivative, which are quickly computed, do not speak against."""
    names, values = _factor_arrays(case)
    if compares != "loss":
        return names
    size = np.abs(got.gradient).sum()
    direction = _direction(case.logps.shape)
    value, slope = _value_and_slope(case, variant)
    near = 1e-3 * max(abs(float(got.loss)), size, 1e-12)
    fits = np.abs(got.loss - values * value) <= near
    fits &= np.abs((got.gradient * direction).sum() - values * slope) <= near
    return [names[place] for place in np.flatnonzero(fits)]


@functools.cache
def _factor_arrays(case: Case) -> tuple[list[str], np.ndarray]:
    found = factors(case)
    return list(found), np.array(list(found.values()))


@functools.cache
def _direction(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape)


@functools.cache
def _value_and_slope(case: Case, variant: Variant) -> tuple[float, float]:
    return equations.value_and_slope(case, variant, _direction(case.logps.shape))


@functools.cache
def _answer(case: Case, variant: Variant, compares: str) -> Answer:
    if compares == "advantages":
        return Answer(advantages=equations.advantages(case, variant))
    if compares == "weights":
        return Answer(weights=equations.weights_after_step(case, variant))
    return expected(case, variant)


# ----- Answers that equal none -----


def _one_of_both(row: Row, answers: list[tuple[Case, Answer]], tolerance: float) -> str | None:
    """What to say where the gradient is right and the loss is not, or the other way round."""
    if row.compares != "loss":
        return None
    wanted = [expected(case, row.variant) for case, _ in answers]
    pairs = [(got, right) for (_, got), right in zip(answers, wanted, strict=True)]
    if all(close(got.gradient, right.gradient, tolerance) for got, right in pairs):
        return "the gradient agrees, the loss is another number"
    if all(np.any(right.gradient) and not np.any(got.gradient) for got, right in pairs):
        return "the gradient is 0: something between log-probabilities and loss stops it"
    if all(close(got.loss, right.loss, tolerance, np.abs(right.gradient).sum()) for got, right in pairs):
        return "the loss agrees, its gradient does not"
    return None
