"""Whether a claim held: the differences of two arms, one for each seed, their interval, and a sentence that says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from experiment import Claim

from grpo_lib.statistics import mean_interval, smallest_mean

UNITS = {"kl": " nats per token", "entropy": " nats per token", "wrong_length": " tokens"}  # of what is not a share
SHARES = ("accuracy", "accuracy_or_majority", "applied", "form", "way", "at_updates", "at_completions")


def is_share(claim: Claim) -> bool:
    return claim.measure in SHARES or claim.measure.startswith(("pass@", "worked@"))


def values_of(claim: Claim, runs: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The measure of the claim's two arms, for each seed that both have, in the order of the seeds."""
    of_arms = [{run["seed"]: run for run in runs if run["arm"] == arm} for arm in (claim.one, claim.other)]
    seeds = sorted(of_arms[0].keys() & of_arms[1].keys())
    ones, others = ([of_arm[seed][claim.measure] for seed in seeds] for of_arm in of_arms)
    return ones, others


def compared(claim: Claim, ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """One difference for each seed, or one ratio where the claim is about a ratio."""
    pairs = zip(ones, others, strict=True)
    if claim.kind == "half":
        return [one / other for one, other in pairs]
    return [one - other for one, other in pairs]


def holds(claim: Claim, mean: float, low: float, high: float) -> bool:
    if claim.kind == "above":
        return mean >= claim.bar and low > 0
    if claim.kind == "zero":
        return low <= 0 <= high
    if claim.kind == "within":
        return abs(mean) <= claim.bar
    return mean <= claim.bar  # `half`, `at most`


def scale_and_unit(claim: Claim) -> tuple[int, str]:
    """What a difference is multiplied by to be shown, and its unit."""
    if is_share(claim):
        return 100, " points"
    if claim.kind == "half":
        return 1, ""
    return 1, UNITS[claim.measure]


def judge(claim: Claim, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A claim with the value of each seed, mean, interval, verdict and a sentence.

    `smallest`, for claims of no difference: what would have been seen with a chance of 80 %.
    """
    ones, others = values_of(claim, runs)
    differences = compared(claim, ones, others)
    mean = float(np.mean(differences))
    low, high = mean_interval(differences)
    held = holds(claim, mean, low, high)

    scale, unit = scale_and_unit(claim)
    word = "over" if claim.kind == "half" else "minus"
    interval = f"95 % interval {scale * low:+.3g} to {scale * high:+.3g}"
    measured = f"{claim.measure} of {claim.one} {word} {claim.other} is {scale * mean:+.3g}{unit} ({interval})"
    predicted = bar_of(claim)
    verdict = "held" if held else "FAILED"
    sentence = f"{claim.text}: {measured}; predicted: {predicted}; {verdict}"
    judged = dataclasses.asdict(claim) | {
        "values": {claim.one: ones, claim.other: others},
        "mean": mean,
        "low": low,
        "high": high,
        "held": held,
        "measured": measured,
        "predicted": predicted,
    }
    if claim.kind == "zero":
        smallest = smallest_mean(float(np.std(differences, ddof=1)), len(differences))
        judged["smallest"] = smallest
        sentence += f". Seen with a chance of 80 %: a difference of {scale * smallest:.3g}{unit} or more"
    judged["sentence"] = sentence
    return judged


def bar_of(claim: Claim) -> str:
    """The bar in words, as the list of predictions shows it."""
    if claim.kind == "zero":
        return "an interval that covers 0"
    if claim.kind == "half":
        return f"a ratio of at most {claim.bar:g}"
    amount = f"{100 * claim.bar:g} points" if is_share(claim) else f"{claim.bar:g}{UNITS[claim.measure]}"
    if claim.kind == "above":
        return f"at least {amount}, and an interval above 0"
    if claim.kind == "within":
        return f"at most {amount} apart"
    return f"at most {amount}"
