"""Tunix's GRPO learner, and what a recipe's `grpo` section adds to it through methods that Tunix leaves to subclasses.

Upstream's names for the values of a recipe are here, too: ADVANTAGES are in Tunix's registry (maxrl from here),
AGGREGATIONS are modes of its aggregate_loss, which it takes of a micro-batch.

The learner keeps no state of its own: what a step does follows from its number, so a run that goes on after a kill
does the same.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl import common, function_registry
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.queue import data_queue as queues

from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import opens_thoughts, with_prefix
from grpo_lib.records import grade
from grpo_train import losses
from grpo_train.engines.weight_sync import padded
from grpo_train.losses.packing import Example, to_example
from grpo_train.recipes.schema import GRPORecipe

ADVANTAGES = {"std": "grpo", "mean": "drgrpo", "leave-one-out": "rloo", "maxrl": "maxrl"}
AGGREGATIONS = {
    "completion": "sequence-mean-token-mean", "constant": "sequence-mean-token-scale", "step": "token-mean",
}  # fmt: skip

# The field of an example in which a correction takes the sampler's log-probabilities.
CORRECTIONS = {"ratio": "old_per_token_logps", "tis": "sampler_per_token_logps"}


@dataclasses.dataclass(slots=True, kw_only=True)
class PolicyLossConfig(GRPOConfig):
    """Tunix's configuration; google-tunix 0.1.7 has `epsilon_high` in DAPOConfig only, with other fixed values."""

    epsilon_high: float = 0.2


def policy_loss_config(grpo: GRPORecipe, implementation: str) -> PolicyLossConfig:
    """The algorithm in Tunix's terms; `implementation`: the recipe's loss.implementation."""
    return PolicyLossConfig(
        num_generations=grpo.group_size,
        num_iterations=grpo.iterations,
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        advantage_estimator=ADVANTAGES[grpo.advantage],
        loss_agg_mode=AGGREGATIONS[grpo.aggregation],
        policy_loss_fn=losses.policy_loss_name(implementation),
        kl_loss_mode=losses.KL_ESTIMATORS[grpo.kl],  # Tunix's default is k1
        loss_algo=losses.RATIOS[grpo.ratio],
    )


@function_registry.register_advantage_estimator("maxrl")
def maxrl_advantages(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Reward minus the group's mean, over that mean (MaxRL, arXiv:2602.02710): [B], 0 where a group earned nothing.

    Raises CourseError for a negative reward: a mean below 0 would turn every sign.
    """
    if np.min(rewards) < 0:
        raise CourseError(
            f"grpo.advantage=maxrl divides by the group's mean, and a reward is {np.min(rewards):g}: use rewards of at "
            "least 0, like correct_answer, and no overlong_buffer; or another advantage"
        )
    means = np.reshape(rewards, (-1, num_generations)).mean(axis=1).repeat(num_generations)
    return (rewards - means) / (means + 1e-6)


class Learner(GRPOLearner):
    """GRPOLearner with the parts of a recipe that Tunix's configuration cannot say.

    One step, and which function of Tunix 0.1.7 does it (the stages of plain_grpo.py); what is changed here is marked:

        1 sample      RLCluster.generate -> sampler.generate; * dynamic sampling, `_resample_uniform_groups`
        2 reward      RLLearner._compute_rewards: the recipe's functions, added up                      [B]
        3 advantages  algo_core.compute_advantages, by GRPOLearner._generate_and_compute_advantage      [B]
        4 log-probs   RLCluster.get_ref_per_token_logps, .get_old_per_token_logps; * of the sampler     [B, C]
        5 loss        * losses.grpo_loss, in the place of algo_core.grpo_loss_fn                        scalar
        6 update      PeftTrainer._train_step, per micro-batch; optax.MultiSteps takes the mean of the gradients, or
                      * losses.in_micro_batches (rows of groups on one device: one call for all of them)
        7 sync        RLCluster.sync_weights -> sampler.update_params

    - The mean over all tokens of a step.  google-tunix 0.1.7 takes "token-mean" of each micro-batch, and
      optax.MultiSteps the mean of these: a token of a micro-batch with short completions counts for more
      (test_tunix_still_takes_the_token_mean_of_a_micro_batch).
    - Dynamic sampling: see `_resample_uniform_groups`.
    - Truncated completions, left out of the loss; a step's denominator then counts those that stay.
    - The sampler's log-probabilities, for a correction.
    - A temperature that changes from step to step.
    """

    def __init__(
        self,
        *,
        grpo: GRPORecipe,
        steps: int,
        calls_per_step: int,
        batch_of_step: Callable[[int], Mapping[str, np.ndarray]],
        temperature_of_step: Callable[[int], float] | None = None,
        **arguments: Any,
    ):
        """
        Args:
          steps: of the whole run.
          calls_per_step: rollout micro-batches of a step.
          batch_of_step: training prompts by the number of their step; those after the run's last are spare ones.
          temperature_of_step: the sampling temperature by the number of a step, from 0; None: it is always that of the
            cluster's RolloutConfig.
        """
        super().__init__(**arguments)
        self._grpo = grpo
        self._steps = steps
        self._calls_per_step = calls_per_step
        self._batch_of_step = batch_of_step
        self._temperature_of_step = temperature_of_step

    @property
    def _sampler(self) -> Any:
        """A TunixSampler or a VllmSampler."""
        return self.rl_cluster.rollout

    def _prepare_data(self, *, data_queue: Any, mode: rl.Mode = rl.Mode.TRAIN, **arguments: Any) -> None:
        """Tunix calls it for each step, after the updates of the one before."""
        if self._grpo.aggregation != "step" and not self._grpo.mask_truncated:
            return super()._prepare_data(data_queue=data_queue, mode=mode, **arguments)
        # Of a step: its tokens, and the completions that stay, are counted before the first update.
        whole = queues.SimpleDataQueue(maxsize=0)
        try:
            super()._prepare_data(data_queue=whole, mode=mode, **arguments)
            for example in weight_tokens([batch[0] for batch in iter(whole.get, None)], self._grpo.aggregation):
                data_queue.put([example])
        finally:
            data_queue.put(None)

    def _generate_and_compute_advantage(
        self, training_input: dict[str, Any], mode: rl.Mode = rl.Mode.TRAIN
    ) -> common.TrainExample:
        call = self._sampler.calls
        if self._temperature_of_step:
            self._set_temperature(self._temperature_of_step(call // self._calls_per_step), mode)
        example = self._sampled_once(training_input, mode)  # stages 1 to 4
        if self._grpo.dynamic_sampling:
            example = self._resample_uniform_groups(example, training_input, call, mode)
        if self._temperature_of_step:
            shape = example.completion_ids.shape  # [B, C]
            example = to_example(example, temperature=jnp.full(shape, self.algo_config.temperature, jnp.float32))
        return example

    def _set_temperature(self, temperature: float, mode: rl.Mode) -> None:
        """For the sampler, and for the log-probabilities of reference, old policy and sampler, which Tunix computes
        next; those of the update take it from the example.

        As an array, so that it is an argument of the compiled programs, and no other one is compiled for another value.
        """
        self.algo_config.temperature = jnp.float32(temperature)
        self.rl_cluster.get_rollout_config(mode=mode).temperature = self.algo_config.temperature
        self.rl_cluster.buffer_metrics({"step/temperature": (temperature, np.mean)}, mode=mode)

    def _sampled_once(self, training_input: dict[str, Any], mode: rl.Mode) -> common.TrainExample:
        example = super()._generate_and_compute_advantage(training_input, mode)
        if self._grpo.mask_truncated:
            ended = ~np.asarray(self._sampler.truncated)  # [B]
            example = to_example(example, completion_mask=example.completion_mask * ended[:, None])
        if self._grpo.correction == "none":
            return example
        # 4. log π_sampler of these completions, [B, C], 0 behind their ends: in place of π_old or next to it.
        rows, width = example.completion_ids.shape
        scored = self._sampler.last_scored(rows, width, self.algo_config.temperature)
        return to_example(
            example, **{CORRECTIONS[self._grpo.correction]: jnp.asarray(padded(scored.logps, width, 0, np.float32))}
        )

    def _resample_uniform_groups(
        self, example: common.TrainExample, training_input: dict[str, Any], call: int, mode: rl.Mode
    ) -> common.TrainExample:
        """Groups without right and wrong completions replaced by others (dynamic sampling, DAPO, arXiv:2503.14476).

        Pass p samples what step `step + p · steps` would, the prompts and the noise.  A group that is not replaced
        keeps its place, with advantages of 0: every shape stays what it is.
        """
        sampler = self._sampler
        steps = self._steps
        parts = [example]
        size = self.algo_config.num_generations
        limit = self._grpo.dynamic_sampling or 1
        spread = self._rewards_differ(training_input)
        # In units of groups.
        chosen = np.arange(len(spread))
        missing = list(np.flatnonzero(~spread))
        step, part = divmod(call, self._calls_per_step)
        while missing and len(parts) < limit:
            later = len(parts) * steps
            rows = slice(part * len(spread), (part + 1) * len(spread))
            spare = {
                name: np.repeat(np.asarray(column)[rows], size, axis=0)
                for name, column in self._batch_of_step(step + later).items()
            }
            sampler.calls = call + later * self._calls_per_step
            parts.append(self._sampled_once(spare, mode))
            for group in np.flatnonzero(self._rewards_differ(spare))[: len(missing)]:
                chosen[missing.pop(0)] = (len(parts) - 1) * len(spread) + group
        sampler.calls = call + 1
        if len(parts) > 1:
            rows = (chosen[:, None] * size + np.arange(size)).reshape(-1)
            example = jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[rows], *parts)
        if missing:
            kept = np.ones(len(spread), np.float32)
            kept[missing] = 0
            example = to_example(example, advantages=example.advantages * np.repeat(kept, size))
        self.rl_cluster.buffer_metrics(
            {
                "step/dynamic_sampling/passes": (len(parts), np.mean),
                "step/dynamic_sampling/uniform_groups": (len(missing), np.sum),
            },
            mode=mode,
        )
        return example

    def _rewards_differ(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Of each group just sampled, whether some completions are right and some wrong; not their rewards, in which a
        part for the form may differ where nothing is right."""
        texts = with_prefix(batch.get("completion_prefix"), self._sampler.last.text)
        thinking = map(opens_thoughts, batch["prompts"])
        rows = zip(texts, batch["answer"], batch["kind"], thinking, strict=True)
        right = [grade(text, gold, kind, thinking=opened)["strict"] for text, gold, kind, opened in rows]
        return np.ptp(np.reshape(right, (-1, self.algo_config.num_generations)).astype(int), axis=1) > 0


def weight_tokens(examples: Sequence[common.TrainExample], aggregation: str) -> list[Example]:
    """The micro-batches of a step with weights [B, C], so that their mean is the `aggregation` of the whole step.

    It is of the completions that have tokens; without any, all weights are 0.
    """
    masks = [np.asarray(example.completion_mask, np.float32) for example in examples]
    lengths = [mask.sum(axis=1, keepdims=True) for mask in masks]  # [B, 1]
    completions = sum(np.count_nonzero(each) for each in lengths)
    tokens = sum(each.sum() for each in lengths)
    weighted = []
    for example, mask, length in zip(examples, masks, lengths, strict=True):
        # What the losses of a completion's tokens are divided by.
        divisor = {
            "step": max(tokens, 1),
            "completion": np.maximum(length, 1) * max(completions, 1),
            "constant": mask.shape[1] * max(completions, 1),
        }[aggregation]
        weighted.append(to_example(example, weights=mask * np.float32(len(examples)) / np.float32(divisor)))
    return weighted
