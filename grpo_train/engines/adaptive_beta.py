"""β adapted to a KL (`grpo.target_kl`): a heavier penalty after a step too far from the reference, a lighter one after
a step well within the target.

The idea is that of PPO with an adaptive penalty (arXiv:1707.06347, section 4), with other constants.  What is adapted
is a factor on the recipe's β:

- It is in the optimizer's state, so that each of Tunix's checkpoints has it, and a run that goes on has the β of one
  that did not stop.  (google-tunix 0.1.7 has a place for metadata in a checkpoint, but leaves it empty in the last one
  of a training that stops.)
- Every micro-batch takes β with it, as an array: a new value is not compiled again.
- The KL that decides is the one that metrics.jsonl has: the mean over the micro-batches of all updates of the step.
  It comes from the loss over all devices, so every process sees the same number.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import common

from grpo_train.losses.packing import Example, to_example
from grpo_train.runs import multihost

STEP = 1.5  # β is multiplied or divided by this after a step
RANGE = 100.0  # and stays between the recipe's β divided by this, and times this


class FactorState(NamedTuple):
    """What `keep_factor` adds to an optimizer's state."""

    beta_factor: jax.Array  # float32 []


def keep_factor() -> optax.GradientTransformation:
    """A part of an optimizer that leaves the steps as they are, and keeps the factor on β; it begins with 1."""

    def init(weights: Any) -> FactorState:
        return FactorState(jnp.ones((), jnp.float32))

    def update(steps: Any, state: FactorState, weights: Any = None) -> tuple[Any, FactorState]:
        return steps, state

    return optax.GradientTransformation(init, update)


def next_factor(factor: float, kl: float, target: float) -> float:
    """The factor after a step with this KL, in nats per token as its target; a NaN changes nothing."""
    if kl > target:
        factor *= STEP
    elif kl < target / 2:
        factor /= STEP
    return min(max(factor, 1 / RANGE), RANGE)


class AdaptiveBeta:
    """β of a training from step to step."""

    def __init__(self, trainer: Any, mesh: jax.sharding.Mesh, *, start: float, target: float, updates: int):
        """Let Tunix's trainer adapt β, in the two methods that it leaves to subclasses.

        Args:
          trainer: whose optimizer has `keep_factor`; what it has restored is continued.
          mesh: of its devices.
          start: the recipe's β.
          target: KL in nats per token.
          updates: in a step, of the weights.
        """
        self.start = start
        self.target = target
        self._optimizer = trainer.optimizer
        self._mesh = mesh
        self._micro_batches = updates * trainer.config.get_with_default("gradient_accumulation_steps", 1)  # in a step
        self._measured: list[jax.Array] = []  # KL [] of each micro-batch of the step so far
        # A copy on the host: the one in the optimizer's state is not known before the update under way has ended.
        self._factor = float(multihost.to_numpy(_factor_variable(self._optimizer).get_value()))

        prepare: Callable[[Any], Any] = trainer._prepare_inputs
        finish: Callable[[Any], None] = trainer._post_process_train_step

        def finish_and_measure(aux: dict[str, jax.Array]) -> None:
            finish(aux)
            self._measure(aux["kl"])

        trainer._prepare_inputs = lambda example: self._with_beta(prepare(example))
        trainer._post_process_train_step = finish_and_measure

    @property
    def beta(self) -> float:
        """Of the step that is next, or under way."""
        return self.start * self._factor

    def metrics(self, **_: Any) -> dict[str, tuple[float, Callable]]:
        """A metric function of Tunix's learner."""
        return {"step/beta": (self.beta, np.mean)}

    def _with_beta(self, example: common.TrainExample) -> Example:
        packed = example.completion_ids.ndim == 3  # [M, R, W]: the loss takes one of M micro-batches after another
        shape = example.completion_ids.shape[:1] if packed else ()
        beta = np.full(shape, self.beta, np.float32)
        return to_example(example, beta=multihost.shard_batch(beta, self._mesh))

    def _measure(self, kl: jax.Array) -> None:
        """Take the KL of a micro-batch; after the last one of a step, change the factor."""
        self._measured.append(kl)
        if len(self._measured) < self._micro_batches:
            return
        of_step = float(np.mean([multihost.to_numpy(kl) for kl in self._measured]))
        self._measured.clear()
        variable = _factor_variable(self._optimizer)
        old = variable.get_value()
        new = np.asarray(next_factor(self._factor, of_step, self.target), old.dtype)
        # With the sharding that the compiled update knows.
        variable.set_value(jax.make_array_from_callback((), old.sharding, lambda _: new))
        self._factor = float(new)


def _factor_variable(optimizer: nnx.Optimizer) -> nnx.Variable:
    """Where an optimizer with `keep_factor` has the factor."""
    places, _ = jax.tree_util.tree_flatten_with_path(
        optimizer.opt_state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    name = jax.tree_util.GetAttrKey("beta_factor")
    (found,) = [variable for path, variable in places if name in path]
    return found
