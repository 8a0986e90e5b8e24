"""Which other variant, known fault and factor does a wrong answer equal?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from grpo_lib.conformance import equations
from grpo_lib.conformance.cases import Case
from grpo_lib.conformance.equations import Answer, Variant, expected, expected_loss
from grpo_lib.conformance.rows import Row

# A field of a variant, and its other values.
OTHER_VALUES = {
    "advantage": tuple(equations.ADVANTAGES),
    "rewards": tuple(equations.REWARDS),
    "aggregation": tuple(equations.AGGREGATIONS),
    "ratio": tuple(equations.RATIOS),
    "clip": tuple(equations.OBJECTIVES),
    "epsilon_high": (0.2, 0.28),
    "kl": ("none", *equations.KL_ESTIMATORS),
    "correction": ("none", *equations.CORRECTIONS),
    "truncated": ("in", "out"),
    "micro_batches": ("one", "mean of means"),
    "rows": ("with tokens",),
    "fault": (
        "the denominator counts what is left out",
        "the KL counts padding",
        "each completion is its length times a mean that counts padding",
    ),
}
# Of what each comparison can show.
FIELDS = {
    "advantages": ("advantage", "rewards", "kl"),
    "loss": tuple(name for name in OTHER_VALUES if name not in ("advantage", "rewards")),
    "weights": tuple(OTHER_VALUES),
}


def _one_token_late(case: Case) -> Case:
    return dataclasses.replace(case, mask=np.pad(case.mask, ((0, 0), (1, 0)))[:, :-1])


def _without_first_token(case: Case) -> Case:
    return dataclasses.replace(case, mask=case.mask & _one_token_late(case).mask)


def _without_last_token(case: Case) -> Case:
    return dataclasses.replace(case, mask=case.mask & np.pad(case.mask, ((0, 0), (0, 1)))[:, 1:])


# What goes wrong with a batch before the loss, by the words of the table.
FAULTS: dict[str, Callable[[Case], Case]] = {
    "": lambda case: case,
    "the mask is one token late": _one_token_late,
    "the first token is left out": _without_first_token,
    "the last token is left out": _without_last_token,
    "padding is counted": lambda case: dataclasses.replace(case, mask=np.ones_like(case.mask)),
    "the width is the maximal length": lambda case: dataclasses.replace(case, max_length=case.mask.shape[1]),
}


@functools.cache
def _faulty(case: Case, fault: str) -> Case:
    return FAULTS[fault](case)


def factors(case: Case) -> dict[str, float]:
    """Simple factors of a case by name."""
    sizes = {
        "2": 2,
        "the group size": case.group_size,
        "the number of groups": len(np.unique(case.groups)),
        "the number of rows": len(case.mask),
        "the number of tokens": int(case.mask.sum()),
        "the width": case.mask.shape[1],
        "the maximal length": case.max_length,
        "the number of micro-batches": len(case.micro_batches),
    }
    found = {"": 1.0, "-1": -1.0, "0.5": 0.5}
    for name, size in sizes.items():
        found |= {name: float(size), (f"1 / {name}" if name != "2" else "0.5"): 1.0 / size}
    return found


@dataclass(frozen=True)
class Candidate:
    words: str
    variant: Variant
    fault: str = ""


def close(got: np.ndarray | float, wanted: np.ndarray | float, tolerance: float, scale: float | None = None) -> bool:
    """Whether the largest difference is within the tolerance, of the largest value or of `scale`."""
    got, wanted = np.asarray(got, float), np.asarray(wanted, float)
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return False
    largest = np.abs(wanted).max() if scale is None else scale
    return bool(np.abs(got - wanted).max() <= tolerance * max(largest, 1e-12))


def same(got: Answer, wanted: Answer, compares: str, tolerance: float, factor: float = 1.0) -> bool:
    """Whether an answer is what is wanted times a factor."""
    if compares != "loss":
        return close(getattr(got, compares), factor * getattr(wanted, compares), tolerance)
    slope = factor * wanted.gradient
    # A loss is a sum of terms that may cancel: it is compared with their size.
    scale = max(abs(factor * wanted.loss), np.abs(slope).sum())
    return close(got.loss, factor * wanted.loss, tolerance, scale) and close(got.gradient, slope, tolerance)


def name_difference(row: Row, answers: list[tuple[Case, Answer]], tolerance: float) -> str:
    """What the answers of a row's cases equal, in words."""
    if not all(_finite(answer) for _, answer in answers):
        return "is not finite"
    for candidate in _candidates(row):
        factor = _factor(candidate, row, answers, tolerance)
        if factor is not None:
            return "equals " + candidate.words + (f" times {factor}" if factor else "")
    return _one_of_both(row, answers, tolerance) or "equals nothing that is known here"


def _finite(answer: Answer) -> bool:
    parts = [answer.advantages, answer.loss, answer.gradient, answer.weights]
    return all(np.isfinite(part).all() for part in parts if part is not None)


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


def _candidates(row: Row) -> Iterator[Candidate]:
    """The simplest first: the variant itself, with one fault, with one other value, with two of them."""
    itself = f"`{row.name}`"
    changes = list(_changes(row))
    yield Candidate(itself, row.variant)
    if row.compares != "advantages":
        for fault in filter(None, FAULTS):
            yield Candidate(f"{itself}, but {fault}", row.variant, fault)
    for words, variant in changes:
        yield Candidate(words, variant)
    if row.compares != "advantages":
        for (words, variant), fault in itertools.product(changes, filter(None, FAULTS)):
            yield Candidate(f"{words}, and {fault}", variant, fault)
    for words, variant in changes:
        yield from (Candidate(f"{words} and {more}", both) for more, both in _changes(row, variant, words))


def _changes(row: Row, start: Variant | None = None, not_again: str = "") -> Iterator[tuple[str, Variant]]:
    """(words, variant) for each single other value; the sign of the KL penalty is one, too."""
    start = start or row.variant
    for field in FIELDS[row.compares]:
        for value in OTHER_VALUES[field]:
            if value != getattr(start, field) and f"`{_spelled(field)}: " not in not_again:
                name = value if field == "fault" else f"{_spelled(field)}: {value}"
                yield f"`{name}`", dataclasses.replace(start, **{field: value})
    if start.kl != "none" and start.beta > 0:
        yield f"`{row.name}` with the KL of the other sign", dataclasses.replace(start, beta=-start.beta)


def _spelled(field: str) -> str:
    return field.replace("_", "-")


def _factor(candidate: Candidate, row: Row, answers: list[tuple[Case, Answer]], tolerance: float) -> str | None:
    """The name of the factor by which all answers are the candidate's; None if there is none."""
    names: list[str] | None = None
    for case, got in answers:
        changed = _faulty(case, candidate.fault)
        fitting = [name for name, factor in factors(case).items() if _may_be(got, changed, candidate, row, factor)]
        if names is not None:
            fitting = [name for name in fitting if name in names]
        if not fitting:
            return None
        wanted = _answer(changed, candidate.variant, row.compares)
        names = [name for name in fitting if same(got, wanted, row.compares, tolerance, factors(case)[name])]
        if not names:
            return None
    return names[0] if names else None


def _may_be(got: Answer, case: Case, candidate: Candidate, row: Row, factor: float) -> bool:
    """Whether the loss, which is quickly computed, does not speak against it."""
    if row.compares != "loss":
        return True
    wanted = factor * expected_loss(case, candidate.variant)
    return bool(np.isclose(got.loss, wanted, rtol=1e-3, atol=1e-4))


def _answer(case: Case, variant: Variant, compares: str) -> Answer:
    if compares == "advantages":
        return Answer(advantages=equations.advantages(case, variant))
    return expected(case, variant)
