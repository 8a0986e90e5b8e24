"""Bugs that were public once, and slips of a first loss, planted again; the suite has to name each.

`by_hand` is GRPO as one writes it without automatic differentiation, with the gradient derived on paper; it shares no
line with `equations`.  `planted(name)` is the same with one bug.  `ten_lines` is a first loss, with one slip.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_lib.conformance.cases import Case
from grpo_lib.conformance.equations import Variant
from grpo_lib.conformance.suite import Adapter, numerical_gradient

OFFERED = {"advantage", "aggregation", "truncated", "micro_batches", "kl", "correction"}


@dataclass(frozen=True)
class Bug:
    """A bug, where it was, and how the suite has to name it."""

    name: str
    where: str
    row: str  # that differs
    words: str  # of the table: what it equals


BUGS = (
    Bug(
        "the denominator is all tokens",
        "https://github.com/huggingface/trl/issues/3187",
        "plain GRPO",
        "equals `aggregation: tokens`",
    ),
    Bug(
        "truncated tokens stay in the denominator",
        "https://github.com/huggingface/trl/pull/6439",
        "truncated: out, tokens",
        "equals `the denominator counts what is left out`",
    ),
    Bug(
        "accumulation divides once more",
        "https://github.com/modelscope/ms-swift/issues/10117",
        "micro-batches: tokens",
        "equals `micro-batches: tokens` times 1 / the number of micro-batches",
    ),
    Bug(
        "micro-batches count alike",
        "https://github.com/allenai/open-instruct/pull/1161",
        "micro-batches: tokens",
        "equals `micro-batches: mean of means`",
    ),
    Bug(
        "the sum over rows is not divided",
        "https://github.com/verl-project/verl/issues/3741",
        "aggregation: constant",
        "equals `aggregation: constant` times the number of rows",
    ),
    Bug(
        "mean and std are the batch's",
        "https://github.com/XU-YIJIE/grpo-flat/issues/2",
        "advantage: std",
        "equals `advantage: whole-batch`",
    ),
    Bug(
        "the old log-probabilities are computed again",
        "https://github.com/PrimeIntellect-ai/verifiers/pull/320",
        "plain GRPO",
        "equals `ratio: against the new policy`",
    ),
    Bug(
        "the mask leaves out the first token",
        "https://github.com/OpenRLHF/OpenRLHF/issues/973",  # there in supervised training
        "plain GRPO",
        "equals `plain GRPO`, but the first token is left out",
    ),
    Bug(
        "the KL penalty is a reward",
        "https://github.com/marin-community/marin/issues/1708",
        "kl: k2",
        "equals `kl: k2` with the KL of the other sign",
    ),
    Bug(
        "the KL is a mean over padding, too",
        "https://github.com/allenai/open-instruct/pull/535",
        "kl: k3",
        "equals `the KL counts padding`",
    ),
    Bug(
        "the sampler is not corrected for",
        "https://github.com/linkedin/Liger-Kernel/issues/1082",
        "correction: tis",
        "equals `correction: none`",
    ),
)


def planted(name: str) -> Adapter:
    """An adapter of the implementation with this bug."""
    return functools.partial(by_hand, bug=name)


def by_hand(case: Case, variant: Variant, bug: str = "") -> dict[str, Any] | None:
    """Plain GRPO with a few variants; loss and gradient of a batch are sums over its micro-batches."""
    if set(variant.asks) - OFFERED or variant.correction == "mask" or variant.kl == "k3-ratio":
        return None
    if variant.advantage != "given":
        return _advantages(case, variant, bug)
    several = variant.micro_batches == "several"
    parts = case.parts() if several else [case]
    mask = _mask(case, variant, bug)
    loss, gradients = 0.0, []
    for part in parts:
        of_part, slope = _terms(part, variant, bug)  # [b, T] each, the weight of a token not yet in
        if bug == "micro-batches count alike" and several:
            weights = _weights(part, _mask(part, variant, bug), variant, bug) / len(parts)
        else:
            rows = np.isin(np.arange(len(case.mask)), np.arange(len(case.mask))[_rows_of(case, part)])
            weights = _weights(case, mask, variant, bug)[rows]
        if bug == "accumulation divides once more":
            weights = weights / len(parts)
        loss += (weights * of_part).sum()
        gradients.append(weights * slope)
    gradient = np.concatenate(gradients)
    if variant.kl != "none":
        penalty, slope = _penalty(case, variant)
        weights = np.full(mask.shape, 1 / mask.size) if "over padding" in bug else _weights(case, mask, variant, bug)
        sign = -1 if bug == "the KL penalty is a reward" else 1
        loss += sign * variant.beta * (weights * penalty).sum()
        gradient += sign * variant.beta * weights * slope
    return {"loss": loss, "gradient": gradient}


def _advantages(case: Case, variant: Variant, bug: str) -> dict[str, Any] | None:
    if variant.advantage != "std" or variant.kl != "none":
        return None
    rewards = case.rewards.sum(1)
    groups = rewards[None] if bug == "mean and std are the batch's" else rewards.reshape(-1, case.group_size)
    spread = groups.std(1, ddof=1, keepdims=True)
    return {"advantages": ((groups - groups.mean(1, keepdims=True)) / (spread + 1e-6)).ravel()}


def _mask(case: Case, variant: Variant, bug: str) -> np.ndarray:
    mask = case.mask & ~case.truncated[:, None] if variant.truncated == "out" else case.mask
    if bug == "the mask leaves out the first token":
        mask = mask.copy()
        mask[:, 0] = False
    return mask


def _rows_of(case: Case, part: Case) -> slice:
    """Which rows of the batch a micro-batch has."""
    if len(part.mask) == len(case.mask):
        return slice(None)
    starts = [rows for rows in case.micro_batches if np.array_equal(case.logps[rows], part.logps)]
    return starts[0]


def _terms(case: Case, variant: Variant, bug: str) -> tuple[np.ndarray, np.ndarray]:
    """The clipped objective of each token, negated, and its derivative."""
    old = case.logps if bug == "the old log-probabilities are computed again" else case.old_logps
    ratio = np.exp(case.logps - old)
    A = np.broadcast_to(case.advantages[:, None], ratio.shape)
    bound = np.where(A > 0, 1.2, 0.8)
    stopped = np.where(A > 0, ratio > bound, ratio < bound)  # beyond the bound there is no more to gain
    correction = np.ones_like(ratio)
    if variant.correction == "tis" and bug != "the sampler is not corrected for":
        correction = np.minimum(np.exp(case.old_logps - case.sampler_logps), variant.correction_cap)
    return -np.where(stopped, bound, ratio) * A * correction, -np.where(stopped, 0, ratio) * A * correction


def _penalty(case: Case, variant: Variant) -> tuple[np.ndarray, np.ndarray]:
    """The KL estimate of each token, and its derivative."""
    d = case.logps - case.ref_logps
    if variant.kl == "k1":
        return d, np.ones_like(d)
    if variant.kl == "k2":
        return d**2 / 2, d
    return np.exp(-d) + d - 1, 1 - np.exp(-d)


def _weights(case: Case, mask: np.ndarray, variant: Variant, bug: str) -> np.ndarray:
    """What each token counts for in the loss, [B, T]."""
    rows = len(mask)
    if variant.aggregation == "tokens" or (
        bug == "the denominator is all tokens" and variant.aggregation == "completion"
    ):
        counted = case.mask if bug == "truncated tokens stay in the denominator" else mask
        return mask / counted.sum()
    if variant.aggregation == "completion":
        return mask / np.maximum(mask.sum(1, keepdims=True), 1) / rows
    if variant.aggregation == "constant":
        return mask / case.max_length / (1 if bug == "the sum over rows is not divided" else rows)
    raise NotImplementedError(variant.aggregation)


# ----- Slips of a first loss -----

SLIPS = (  # what one writes; the row that differs, and its words
    ("max for min", "plain GRPO", "equals `clip: max in place of min`"),
    ("no min", "plain GRPO", "equals `clip: without the min`"),
    ("only the upper bound", "plain GRPO", "equals `plain GRPO` without the lower bound of the clip"),
    ("only the lower bound", "plain GRPO", "equals `plain GRPO` without the upper bound of the clip"),
    ("no clip", "plain GRPO", "equals `clip: none`"),
    ("another ε", "plain GRPO", "equals `epsilon: 0.1`"),
    ("another ε above", "plain GRPO", "equals `epsilon-high: 0.3`"),
    ("ε without the 1", "plain GRPO", "equals `plain GRPO` with a clip to [-ε, ε]"),
    ("no exp", "plain GRPO", "equals `ratio: without exp`"),
    ("no ratio", "plain GRPO", "equals `clip: log π in place of the ratio`"),
    ("no minus", "plain GRPO", "equals `plain GRPO` with the other sign"),
    ("no mask", "plain GRPO", "equals `plain GRPO`, but padding is counted"),
    ("no mask in the sum", "plain GRPO", "equals `the sum counts padding`"),
    ("no mask in the denominator", "plain GRPO", "equals `the denominator counts padding`"),
    ("0 / 0", "completions of no token", "is not finite where a completion has no token; divide by at least 1"),
    ("n for n - 1", "advantage: std", "equals `advantage: std-n`"),
    ("no root", "advantage: std", "equals `advantage: the variance in place of std`"),
    ("ε 1e-2", "advantage: std", "equals `advantage: std` with ε 1e-2"),
    ("ε 1e-3 under the root", "advantage: std", "equals `advantage: std` with ε 1e-3 under the root"),
    ("no ε", "groups without variance",
     "is not finite where a group has no variance; add ε to the standard deviation"),
)  # fmt: skip


def ten_lines(case: Case, variant: Variant, slip: str = "") -> dict[str, Any] | None:
    """Plain GRPO as in a first notebook, with one of SLIPS."""
    if set(variant.asks) - {"advantage"} or variant.advantage not in ("given", "std"):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        if variant.advantage == "std":
            return {"advantages": _first_advantages(case.rewards.sum(1).reshape(-1, case.group_size), slip).ravel()}
        loss = functools.partial(_first_loss, case, slip=slip)
        return {"loss": loss(case.logps), "gradient": numerical_gradient(loss, case.logps)}


def _first_advantages(rewards: np.ndarray, slip: str) -> np.ndarray:
    centred = rewards - rewards.mean(1, keepdims=True)
    spread = rewards.std(1, ddof=0 if slip == "n for n - 1" else 1, keepdims=True)
    divisors = {
        "no root": spread**2 + 1e-6,
        "ε 1e-2": spread + 1e-2,
        "ε 1e-3 under the root": np.sqrt(spread**2 + 1e-3),
        "no ε": spread,
    }
    return centred / divisors.get(slip, spread + 1e-6)


def _first_loss(case: Case, logps: np.ndarray, slip: str) -> Any:
    mask, A = case.mask, case.advantages[:, None]
    ratio = logps - case.old_logps if slip == "no exp" else np.exp(logps - case.old_logps)
    bounds = {
        "only the upper bound": (-np.inf, 1.2),
        "only the lower bound": (0.8, np.inf),
        "another ε": (0.9, 1.1),
        "another ε above": (0.8, 1.3),
        "ε without the 1": (-0.2, 0.2),
    }
    unclipped, clipped = ratio * A, np.clip(ratio, *bounds.get(slip, (0.8, 1.2))) * A
    chosen = {
        "max for min": np.maximum(unclipped, clipped),
        "no min": clipped,
        "no clip": unclipped,
        "no ratio": logps * A,
    }
    terms = chosen.get(slip, np.minimum(unclipped, clipped))
    lengths = np.maximum(mask.sum(1), 1)
    if slip == "no mask":
        return -terms.mean()
    if slip == "no mask in the sum":
        return -(terms.sum(1) / lengths).mean()
    if slip == "no mask in the denominator":
        return -(terms * mask).mean()
    if slip == "0 / 0":
        lengths = mask.sum(1)
    mean = ((terms * mask).sum(1) / lengths).mean()
    return mean if slip == "no minus" else -mean
