"""Glossary of metrics.jsonl: what each metric is, its unit, and how it looks in a healthy run.

A metric that TRL's GRPOTrainer logs too has TRL's name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.files import read_jsonl

Row = dict[str, Any]  # numbers, or None where a value was not finite

# A row has these two keys for each reward function of the recipe.
REWARD_MEAN, REWARD_STD = "rewards/{}/mean", "rewards/{}/std"
_REWARD = re.compile(r"rewards/(.+)/(mean|std)")
# And these, for each task of a recipe with several.
TASK_METRIC = "tasks/{}/{}"
_TASK = re.compile(r"tasks/([^/]+)/(.+)")

# Names that files of version 0.1.0 hold.  read_metrics translates them; to be removed after the next release.
OLD_METRICS = {
    "zero_variance_groups": "frac_reward_zero_std",
    "clip_fraction": "clip_ratio",
    "truncated": "completions/clipped_ratio",
    "completion_length": "completions/mean_length",
    "reward/NAME": "rewards/NAME/mean",
    "reward_spread/NAME": "rewards/NAME/std",
}


@dataclass(frozen=True)
class Metric:
    """One entry.  A fraction is a number from 0 to 1."""

    meaning: str
    unit: str
    healthy: str


METRICS: dict[str, Metric] = {
    "step": Metric("number of the training step", "count from 1", "each number once, also after a resume"),
    # What the policy earned.
    "reward": Metric(
        "sum of the reward functions, mean over the completions of the step",
        "reward",
        "rises fast, then flattens; single steps jump, because each step has other problems",
    ),
    "rewards/NAME/mean": Metric(
        "mean of one reward function over the completions of the step",
        "reward",
        "all rise; if one rises while the others fall, the policy earns reward without solving the task",
    ),
    "rewards/NAME/std": Metric(
        "standard deviation of one reward function over the completions of the step",
        "reward",
        "above 0 for a while; at 0 every completion gets the same value, and this function gives no signal",
    ),
    "reward_std": Metric(
        "standard deviation of the reward within a group, mean over groups",
        "reward",
        "above 0; falls towards 0 as the completions of a group become equally good",
    ),
    "frac_reward_zero_std": Metric(
        "groups in which all completions have the same reward (standard deviation 0), so that every advantage is 0",
        "fraction",
        "well below 1; it grows with success, and near 1 a step has almost nothing left to learn from",
    ),
    "accuracy": Metric(
        "completions with the correct number in the answer tags, sampled at the training temperature",
        "fraction",
        "rises with the reward; if only the reward rises, it rewards something other than correct answers",
    ),
    "lenient_accuracy": Metric(
        "completions whose last number is correct, with or without tags",
        "fraction",
        "rises too; if only the strict accuracy rises, the policy has learnt the tags and nothing else",
    ),
    "format": Metric(
        "completions in exactly the required format", "fraction", "rises first, to nearly 1, and stays there"
    ),
    "format_without_number": Metric(
        'completions in exactly the required format, without a number in the answer tags, such as "?"',
        "fraction",
        "0, or falls to 0; a rise says that the form is rewarded whatever it holds (reward hacking)",
    ),
    "validation_accuracy": Metric(
        "correct answers, greedy and strict, on problems held out of training",
        "fraction",
        "rises with the training accuracy and stays near it",
    ),
    "validation_lenient": Metric("the same with the lenient grader", "fraction", "as above"),
    "tasks/NAME/reward": Metric("the reward of one task, of several", "reward", "rises, for each task"),
    "tasks/NAME/accuracy": Metric(
        "the accuracy of one task, of several",
        "fraction",
        "rises for each task; one that falls while another rises is being unlearnt",
    ),
    "tasks/NAME/frac_reward_zero_std": Metric(
        "groups of one task, of several, without spread in their rewards",
        "fraction",
        "well below 1 for each task; at 1 the task teaches nothing, and its share of the prompts is better given away",
    ),
    "tasks/NAME/validation_accuracy": Metric("validation_accuracy of one task, of several", "fraction", "rises"),
    # What the policy writes.
    "completions/mean_length": Metric(
        "mean length of the completions, with the end-of-turn token",
        "tokens",
        "approaches the length of a full solution; a climb to the limit, or a fall to almost 0, is a warning",
    ),
    "completions/clipped_ratio": Metric(
        "truncated completions: they reached the length limit before their end-of-turn token",
        "fraction",
        "near 0; otherwise the length limit decides the reward",
    ),
    "entropy": Metric(
        "entropy of the policy's next-token distribution, mean over the tokens of the completions",
        "nats per token",
        "falls as the policy grows surer, to a level above 0; 0 ends exploration, a steep rise means random text",
    ),
    # What the update does.
    "loss": Metric(
        "policy loss before the update",
        "none",
        "about 0 throughout with one update per batch and β = 0: the ratios are 1, the advantages of a group sum to 0, "
        "and each completion is averaged over its own tokens; it does not measure success",
    ),
    "clip_ratio": Metric(
        "tokens at which the clip of the probability ratio to 1 ± ε limits the objective",
        "fraction",
        "0 with one update per batch: the policy that is updated is the policy that sampled",
    ),
    "kl": Metric(
        "KL divergence from the reference model, where the recipe has β > 0, by the k3 estimator: u − 1 − log u, "
        "u = π_ref / π",
        "nats per token",
        "0 without a penalty, because it is not computed then; otherwise it grows slowly",
    ),
    "kl_from_base": Metric(
        "the same k3 estimate, from the base model, on a few completions of every grpo.watch_kl-th step of a recipe "
        "with β = 0",
        "nats per token",
        "grows as the policy learns, and flattens; without a penalty nothing bounds it",
    ),
    "beta": Metric(
        "β of the step, where the recipe has a grpo.target_kl",
        "none",
        "falls while the KL is below its target, then rises and falls by a factor of 1.5 at a time",
    ),
    "temperature": Metric("sampling temperature of the step, where it changes", "none", "as the recipe says"),
    "sampling/importance_sampling_ratio/mean": Metric(
        "mean of π_old / π_sampler over the tokens, before the cap, where the recipe has grpo.correction=tis",
        "ratio",
        "1, as long as the sampler has the trainer's weights and arithmetic",
    ),
    "sampling_passes": Metric(
        "times that the step sampled, of the grpo.dynamic_sampling that it may; reward, accuracy and the like are of "
        "all that was sampled",
        "passes",
        "grows as the problems are solved, up to the limit",
    ),
    "groups_left_out": Metric(
        "groups without both right and wrong completions after the last pass of dynamic sampling, whose advantages are "
        "set to 0",
        "groups",
        "0",
    ),
    "grad_norm": Metric(
        "L2 norm of the gradient before clipping",
        "none",
        "stays within one order of magnitude, at times above the clipping limit; growth by powers of ten is a warning",
    ),
    "sampler_trainer_gap": Metric(
        "mean absolute difference between the sampler's and the trainer's log-probabilities of the same tokens, on a "
        "few completions of the step",
        "nats per token",
        "as small as the arithmetic allows, and level; a jump means that weights were not synchronized",
    ),
    "learning_rate": Metric("learning rate of the optimizer", "none", "rises in the warm-up, then follows the recipe"),
    # What it costs.
    "seconds": Metric("the whole step", "s", "level after the first step, which compiles"),
    "seconds_rollout": Metric("sampling the completions", "s", "most of the step for long completions"),
    "seconds_reward": Metric("the reward functions", "s", "close to 0, for rewards that only read text"),
    "seconds_reference": Metric(
        "log-probabilities of the reference model, where the recipe has β > 0", "s", "less than the update"
    ),
    "seconds_update": Metric("gradient and optimizer", "s", "level"),
    "seconds_sync": Metric("copying the new weights to the sampler", "s", "a small fraction of the step"),
    "tokens_per_second": Metric("tokens of all completions / seconds of the step", "tokens/s", "level or rising"),
}


def metric(name: str) -> Metric:
    """The entry of a key of metrics.jsonl; KeyError for one that is not in the glossary."""
    return METRICS[_entry(name)]


def glossary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Name -> entry for the metrics that `rows` hold, in the order of METRICS."""
    return {name: metric(name) for name in reading_order({name for row in rows for name in row})}


def reading_order(names: Iterable[str]) -> list[str]:
    """Keys of metrics.jsonl in the order of METRICS; those that are not in the glossary last."""
    order = {name: number for number, name in enumerate(METRICS)}
    return sorted(names, key=lambda name: (order.get(_entry(name), len(order)), name))


def reward_function(name: str) -> str | None:
    """The NAME of a key rewards/NAME/mean; None for any other key."""
    match = _REWARD.fullmatch(name)
    return match[1] if match and match[2] == "mean" else None


def task_of(name: str, metric: str) -> str | None:
    """The NAME of a key tasks/NAME/metric; None for any other key."""
    match = _TASK.fullmatch(name)
    return match[1] if match and match[2] == metric else None


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, in the order of the file; empty where there is no file.

    Old names (OLD_METRICS) are translated, with one line on stderr.
    """
    rows = read_jsonl(path) if path.exists() else []
    translated = [{_current_name(name): value for name, value in row.items()} for row in rows]
    if translated != rows:
        print(f"{path}: old metric names are read as TRL's names until the next release", file=sys.stderr)
    return translated


def _entry(name: str) -> str:
    """The key in METRICS: rewards/correct_answer/mean -> rewards/NAME/mean."""
    if match := _REWARD.fullmatch(name):
        return f"rewards/NAME/{match[2]}"
    match = _TASK.fullmatch(name)
    return f"tasks/NAME/{match[2]}" if match else name


def _current_name(name: str) -> str:
    family, _, part = name.partition("/")
    if part and (current := OLD_METRICS.get(f"{family}/NAME")):
        return current.replace("NAME", part)
    return OLD_METRICS.get(name, name)
