"""What a wrong answer may equal: other variants, known slips, a batch that was spoiled before the loss, factors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_lib.conformance import equations
from grpo_lib.conformance.cases import Case
from grpo_lib.conformance.equations import Variant
from grpo_lib.conformance.rows import Row

# A field of a variant, and its other values.
OTHER_VALUES = {
    "advantage": tuple(equations.ADVANTAGES),
    "rewards": tuple(equations.REWARDS),
    "aggregation": tuple(equations.AGGREGATIONS),
    "ratio": tuple(equations.RATIOS),
    "clip": tuple(equations.OBJECTIVES),
    "kl": ("none", *equations.KL_ESTIMATORS),
    "correction": ("none", *equations.CORRECTIONS),
    "truncated": ("in", "out"),
    "micro_batches": ("one", "mean of means"),
    "rows": ("with tokens",),
    "fault": (
        "the denominator counts what is left out",
        "the denominator counts padding",
        "the sum counts padding",
        "the KL counts padding",
        "each completion is its length times a mean that counts padding",
    ),
}
# The numbers that a field of a variant may have by mistake, by their words.
BOUNDS = (0.2, 0.01, 0.05, 0.1, 0.15, 0.25, 0.28, 0.3, 0.4, 0.5)  # ε of the clip
CONSTANTS = {
    "dual_clip": {"2": 2.0},
    "correction_cap": {"1": 1.0, "3": 3.0, "5 or more": 5.0},
    "beta": {"1": 1.0, "0.1": 0.1, "0.04": 0.04, "0.01": 0.01, "0.001": 0.001},
}
EPSILONS = {  # beside a standard deviation, or under the root
    "ε 1e-3": {"std_epsilon": 1e-3},
    "ε 1e-2": {"std_epsilon": 1e-2},
    "ε 0.1": {"std_epsilon": 0.1},
    "ε 1": {"std_epsilon": 1.0},
    "ε 1e-5 under the root": {"inside": True, "std_epsilon": 1e-5},
    "ε 1e-4 under the root": {"inside": True, "std_epsilon": 1e-4},
    "ε 1e-3 under the root": {"inside": True, "std_epsilon": 1e-3},
}
# The fields that each comparison can show.
FIELDS = {
    "advantages": ("advantage", "rewards", "kl"),
    "loss": tuple(name for name in OTHER_VALUES if name not in ("advantage", "rewards")),
    "weights": tuple(OTHER_VALUES),
}


@dataclass(frozen=True)
class Change:
    """Other values of a variant, in the words of the table."""

    words: str
    fields: tuple[tuple[str, Any], ...]
    constant: bool = False  # only a number is another
    behind: bool = False  # the words stand behind what is changed: "with ...", "without ..."

    def of(self, variant: Variant) -> Variant:
        return dataclasses.replace(variant, **dict(self.fields))

    def touches(self, other: Change) -> bool:
        """Whether both change the same field."""
        return not {name for name, _ in self.fields}.isdisjoint(name for name, _ in other.fields)


@dataclass(frozen=True)
class Slip:
    """What an implementation does in place of what is asked: changes of the variant, and a fault of the batch."""

    changes: tuple[Change, ...] = ()
    fault: str = ""

    def of(self, variant: Variant) -> Variant:
        for change in self.changes:
            variant = change.of(variant)
        return variant

    def words(self, row: Row) -> str:
        names = [change.words for change in self.changes if not change.behind]
        behind = [change.words for change in self.changes if change.behind]
        named = " ".join([" and ".join(names) or f"`{row.name}`", *behind])
        if not self.fault:
            return named
        return f"{named}, {'and' if self.changes else 'but'} {self.fault}"


# ----- Changes of the variant -----


def changes(row: Row) -> list[Change]:
    """All single changes that a row can show, those of a name before those of a number."""
    found = [*_other_values(row), *_sides_of_the_clip(row), *_other_constants(row), *_epsilons(row)]
    return [change for change in found if change.of(row.variant) != row.variant]


def _other_values(row: Row) -> Iterator[Change]:
    for field in FIELDS[row.compares]:
        of_rewards = field == "kl" and row.compares == "advantages"
        for value in ("none", "reward") if of_rewards else OTHER_VALUES[field]:
            name = value if field == "fault" else f"{field.replace('_', '-')}: {value}"
            yield Change(f"`{name}`", ((field, value),))
    beta = row.variant.beta
    if row.variant.kl != "none" and row.compares != "advantages":
        yield Change("with the KL of the other sign", (("beta", -beta),), behind=True)


def _sides_of_the_clip(row: Row) -> Iterator[Change]:
    if row.compares == "advantages":
        return
    low, high = row.variant.epsilon_low, row.variant.epsilon_high
    without_1 = ("epsilon_low", 1 + low), ("epsilon_high", high - 1)
    exchanged = ("epsilon_low", high), ("epsilon_high", low)
    yield Change("without the lower bound of the clip", (("epsilon_low", np.inf),), behind=True)
    yield Change("without the upper bound of the clip", (("epsilon_high", np.inf),), behind=True)
    yield Change("with a clip to [-ε, ε]", without_1, behind=True)
    yield Change("with the two ε of the clip exchanged", exchanged, behind=True)
    for bound in BOUNDS:
        both = ("epsilon_low", bound), ("epsilon_high", bound)
        if row.variant.epsilon_low == row.variant.epsilon_high:
            yield Change(f"`epsilon: {bound}`", both, constant=True)
        yield Change(f"`epsilon-high: {bound}`", both[1:], constant=True)
        yield Change(f"`epsilon-low: {bound}`", both[:1], constant=True)


def _other_constants(row: Row) -> Iterator[Change]:
    variant = row.variant
    used = {
        "dual_clip": variant.clip == "dual",
        "correction_cap": variant.correction != "none",
        "beta": variant.kl != "none",
    }
    for field, values in CONSTANTS.items():
        if used[field]:
            name = field.replace("_", "-")
            for words, value in values.items():
                yield Change(f"`{name}: {words}`", ((field, value),), constant=True)


def _epsilons(row: Row) -> Iterator[Change]:
    """Of a standard deviation.  Those of the row's conventions agree by themselves, but can come with a factor."""
    if row.conventions is None or row.compares == "loss":
        return
    for words, changed in (row.conventions | EPSILONS).items():
        yield Change(f"with {words}", tuple(changed.items()), constant=True, behind=True)


# ----- What goes wrong with a batch before the loss -----


def _one_token_late(case: Case) -> Case:
    return dataclasses.replace(case, mask=np.pad(case.mask, ((0, 0), (1, 0)))[:, :-1])


def _without_first_token(case: Case) -> Case:
    return dataclasses.replace(case, mask=case.mask & _one_token_late(case).mask)


def _without_last_token(case: Case) -> Case:
    return dataclasses.replace(case, mask=case.mask & np.pad(case.mask, ((0, 0), (0, 1)))[:, 1:])


FAULTS: Mapping[str, Callable[[Case], Case]] = {
    "": lambda case: case,
    "the mask is one token late": _one_token_late,
    "the first token is left out": _without_first_token,
    "the last token is left out": _without_last_token,
    "padding is counted": lambda case: dataclasses.replace(case, mask=np.ones_like(case.mask)),
    "the width is the maximal length": lambda case: dataclasses.replace(case, max_length=case.mask.shape[1]),
}


@functools.cache
def faulty(case: Case, fault: str) -> Case:
    """A case as a loss sees it after the fault."""
    return FAULTS[fault](case)


# ----- Factors -----


@functools.cache
def factors(case: Case) -> dict[str, float]:
    """Simple factors of a case, by what the table says behind the name; with the other sign, too."""
    sizes = {
        "the group size": case.group_size,
        "the number of groups": len(np.unique(case.groups)),
        "the number of rows": len(case.mask),
        "the number of tokens": int(case.mask.sum()),
        "the width": case.mask.shape[1],
        "the maximal length": case.max_length,
        "the number of micro-batches": len(case.micro_batches),
    }
    found = {"": 1.0, " times 0.5": 0.5, " times 2": 2.0}
    for name, size in sizes.items():
        if size:  # a fault can leave no token
            found |= {f" times {name}": float(size), f" times 1 / {name}": 1.0 / size}
    return found | {words + " with the other sign": -factor for words, factor in found.items()}
