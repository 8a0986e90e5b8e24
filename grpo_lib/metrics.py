"""The metric glossary: what each number of metrics.jsonl is, and what it looks like when all is well.

The entries of the metrics that some rows hold, in reading order: `glossary(rows)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# A row holds two such keys for each reward function of the recipe.
REWARD_PART = "reward/"
REWARD_SPREAD = "reward_spread/"


@dataclass(frozen=True)
class Metric:
    """One entry.  A share is a number from 0 to 1."""

    meaning: str
    unit: str
    healthy: str


METRICS: dict[str, Metric] = {
    "step": Metric("number of the training step", "count from 1", "each number once, also after a resume"),
    # What the policy earned.
    "reward": Metric(
        "sum of the reward functions, mean over the completions of the step",
        "reward",
        "rises fast, then flattens; single steps jump, because each has other problems",
    ),
    REWARD_PART + "…": Metric(
        "the same for one reward function",
        "reward",
        "all rise; if one rises while the others fall, the policy has found a way to be paid without the task",
    ),
    REWARD_SPREAD + "…": Metric(
        "standard deviation of that reward function over the completions of the step",
        "reward",
        "above 0 for a while; at 0 every completion earns the same from it, and it teaches nothing any more",
    ),
    "reward_std": Metric(
        "spread of the reward inside a group, mean over groups",
        "reward",
        "above 0; falls towards 0 as the groups begin to agree",
    ),
    "zero_variance_groups": Metric(
        "groups in which all completions earned the same, so that every advantage is 0",
        "share",
        "well below 1; it grows with success, and near 1 a step has almost nothing left to learn from",
    ),
    "accuracy": Metric(
        "completions with the right number in the answer tags, sampled at the training temperature",
        "share",
        "rises with the reward; if only the reward rises, something else than right answers is paid",
    ),
    "lenient_accuracy": Metric(
        "completions whose last number is right, tags or not",
        "share",
        "rises too; if only the strict one rises, the policy has learnt the tags and nothing else",
    ),
    "format": Metric("completions in exactly the template", "share", "rises first, to nearly 1, and stays there"),
    "validation_accuracy": Metric(
        "right answers, greedy and strict, on problems held out of training",
        "share",
        "rises with the training accuracy and stays near it",
    ),
    "validation_lenient": Metric("the same with the lenient grader", "share", "as above"),
    # What the policy writes.
    "completion_length": Metric(
        "tokens of a completion with its end token, mean",
        "tokens",
        "moves to the length of a full solution and stays; a climb to the limit, or a fall to nothing, is a warning",
    ),
    "truncated": Metric(
        "completions that reached the length limit before they ended",
        "share",
        "near 0; else the limit decides the reward",
    ),
    "entropy": Metric(
        "uncertainty of the policy about the next token, mean",
        "nats per token",
        "falls slowly; a drop to 0 ends exploration, a steep rise means that the text is falling apart",
    ),
    # What the update does.
    "loss": Metric(
        "value of the policy loss before the update",
        "none",
        "about 0 throughout: the advantages of a group sum to 0. It is no measure of success",
    ),
    "clip_fraction": Metric(
        "tokens whose probability ratio left the range 1 ± ε",
        "share",
        "0 with one update per batch: the policy that learns is the one that sampled",
    ),
    "kl": Metric(
        "distance from the reference model, where the recipe has β > 0, by the k3 estimator: r − 1 − log r, "
        "r = π_ref / π",
        "nats per token",
        "0 without a penalty, because then it is not computed; else it grows slowly",
    ),
    "grad_norm": Metric(
        "length of the gradient before it is clipped",
        "none",
        "of one order of magnitude, at times above the limit; growing by powers of ten is a warning",
    ),
    "sampler_trainer_gap": Metric(
        "difference between the sampler's log-probabilities and the trainer's, same weights and tokens, mean of a few "
        "completions of the step",
        "nats per token",
        "as small as the arithmetic allows, and level; a jump means that weights did not arrive",
    ),
    "learning_rate": Metric("step size of the optimizer", "none", "climbs in the warm-up, then as the recipe says"),
    # What it costs.
    "seconds": Metric("the whole step", "s", "level after the first step, which compiles"),
    "seconds_rollout": Metric("sampling the completions", "s", "the larger share for long completions"),
    "seconds_reward": Metric("the reward functions", "s", "next to nothing, for rewards that only read text"),
    "seconds_reference": Metric(
        "log-probabilities of the reference model, where the recipe has β > 0", "s", "less than the update"
    ),
    "seconds_update": Metric("gradient and optimizer", "s", "level"),
    "seconds_sync": Metric("bringing the new weights to the sampler", "s", "a small share of the step"),
    "tokens_per_second": Metric("tokens of all completions by seconds of the step", "tokens/s", "level or rising"),
}


def metric(name: str) -> Metric:
    """The entry of a key of metrics.jsonl; KeyError for one that is not in the glossary."""
    for family in (REWARD_PART, REWARD_SPREAD):
        if name.startswith(family):
            return METRICS[family + "…"]
    return METRICS[name]


def glossary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Name -> entry for the metrics that `rows` hold, in the order of METRICS."""
    order = list(METRICS.values())
    names = {name for row in rows for name in row}
    return {name: metric(name) for name in sorted(names, key=lambda name: (order.index(metric(name)), name))}
