"""Tunix's GRPO learner, and what a recipe's `grpo` section adds to it through methods that Tunix leaves to subclasses.

Upstream's names for the values of a recipe are here, too: ADVANTAGES are in Tunix's registry, AGGREGATIONS are modes of
its aggregate_loss, which it takes of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tunix.rl import common
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.queue import data_queue as queues

from grpo_lib import losses
from grpo_lib.losses.packing import WeightedExample
from grpo_lib.recipes import Recipe
from grpo_lib.recipes.schema import GRPORecipe

ADVANTAGES = {"std": "grpo", "mean": "drgrpo", "leave-one-out": "rloo"}
AGGREGATIONS = {
    "completion": "sequence-mean-token-mean", "constant": "sequence-mean-token-scale", "step": "token-mean",
}  # fmt: skip


@dataclasses.dataclass(slots=True, kw_only=True)
class PolicyLossConfig(GRPOConfig):
    """Tunix's configuration; google-tunix 0.1.7 has `epsilon_high` in DAPOConfig only, with other fixed values."""

    epsilon_high: float = 0.2


def policy_loss_config(recipe: Recipe, layout: str) -> PolicyLossConfig:
    """The recipe's algorithm in Tunix's terms, for rows of that layout."""
    grpo, implementation = recipe.grpo, recipe.loss.implementation
    # Tunix's own loss is for padded rows, and its metrics are those of the reference run.
    own = implementation == "jax" and layout == "padded" and is_plain(grpo)
    return PolicyLossConfig(
        num_generations=grpo.group_size,
        num_iterations=grpo.iterations,
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        advantage_estimator=ADVANTAGES[grpo.advantage],
        loss_agg_mode=AGGREGATIONS[grpo.aggregation],
        policy_loss_fn="grpo" if own else losses.policy_loss_name(implementation),
        kl_loss_mode=_key_of(losses.KL_ESTIMATORS_OF_TUNIX, grpo.kl),  # Tunix's default is k1
        loss_algo=_key_of(losses.RATIOS_OF_TUNIX, grpo.ratio),
    )


def is_plain(grpo: GRPORecipe) -> bool:
    """Whether the loss is that of the GRPO paper: no switch of it was changed."""
    switches = ("kl", "aggregation", "epsilon_high", "ratio")
    return all(getattr(grpo, name) == GRPORecipe.model_fields[name].default for name in switches)


def _key_of(names: dict[str, str], value: str) -> str:
    return next(key for key, name in names.items() if name == value)


class Learner(GRPOLearner):
    """GRPOLearner, and the mean over all tokens of a step.

    google-tunix 0.1.7 takes "token-mean" of each micro-batch, and optax.MultiSteps the mean of these: a token of a
    micro-batch with short completions counts for more (test_tunix_still_takes_the_token_mean_of_a_micro_batch).
    """

    def __init__(self, *, step_mean: bool, **arguments: Any):
        super().__init__(**arguments)
        self._step_mean = step_mean

    def _prepare_data(self, *, data_queue: Any, mode: rl.Mode = rl.Mode.TRAIN, **arguments: Any) -> None:
        if not self._step_mean:
            return super()._prepare_data(data_queue=data_queue, mode=mode, **arguments)
        whole = queues.SimpleDataQueue(maxsize=0)  # of a step: its tokens are counted before the first update
        try:
            super()._prepare_data(data_queue=whole, mode=mode, **arguments)
            for example in weighted([batch[0] for batch in iter(whole.get, None)]):
                data_queue.put([example])
        finally:
            data_queue.put(None)


def weighted(examples: Sequence[common.TrainExample]) -> Iterator[WeightedExample]:
    """The micro-batches of a step with weights [B, C], so that their mean is the mean over all tokens of the step."""
    tokens = sum(int(np.asarray(example.completion_mask).sum()) for example in examples)
    for example in examples:
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(common.TrainExample)}
        share = np.asarray(example.completion_mask, np.float32) * (len(examples) / max(tokens, 1))
        yield WeightedExample(**fields, weights=share)
