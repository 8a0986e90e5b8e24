"""The optimizer of a recipe: AdamW after clipping by the global norm, its learning rates, and rounding of weights."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from grpo_train.recipes.schema import TrainingRecipe


class RoundingState(NamedTuple):
    """What `rounded` keeps."""

    update: jax.Array  # int32, updates so far: the noise follows from it
    applied: jax.Array  # float32, `update_applied` of the last one
    inner: Any


def learning_rate_schedule(training: TrainingRecipe) -> optax.Schedule:
    """The learning rate of a step, counted from 0. The first step already moves: it does not start at zero.

    Linear warm-up, then constant, or half a cosine that would reach 0 at the step after the last. A step is one batch
    of completions; all its updates (`grpo.iterations`) have the step's rate.
    """
    first = training.learning_rate / max(training.warmup_steps, 1)
    if training.schedule == "cosine" and training.steps > training.warmup_steps:  # else it ends in the warm-up
        return optax.warmup_cosine_decay_schedule(
            first, training.learning_rate, training.warmup_steps, decay_steps=training.steps
        )
    return optax.warmup_constant_schedule(first, training.learning_rate, training.warmup_steps)


def learning_rates(training: TrainingRecipe) -> np.ndarray:
    """The learning rates of all steps, [steps], for the rows of metrics.jsonl.

    Computed at once: one by one, each would wait on the device for the update that is under way.
    """
    rates = learning_rate_schedule(training)(jnp.arange(training.steps))
    return np.broadcast_to(np.asarray(rates), training.steps)


def make_optimizer(training: TrainingRecipe, iterations: int, seed: int) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, for `iterations` updates a step; preflight compiles the same.

    `seed`: of the noise of stochastic rounding.
    """
    schedule = learning_rate_schedule(training)
    rate = schedule if iterations == 1 else lambda update: schedule(update // iterations)
    chain = optax.chain(
        optax.clip_by_global_norm(training.max_grad_norm),
        optax.adamw(rate, b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )
    return chain if training.rounding == "nearest" else rounded(chain, training.rounding, seed)


def rounded(inner: optax.GradientTransformation, rounding: str, seed: int) -> optax.GradientTransformation:
    """An optimizer whose steps u reach bfloat16 weights w as `rounding` says; float32 weights get w + u.

    A step of Adam is about the learning rate, and a bfloat16 has 8 bits: rounded to `nearest`, w + u is w again where
    |u| is below about |w| / 512.  `stochastic` rounds up or down by chance, so that w + u is right on average (S. Gupta
    et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, section 3); the optimizer then computes
    in float32.  The noise follows from seed, update and the weight's name, not from devices or processes.

    The state's `applied` is <Δw, u> / <u, u> over all weights: the part of the step that they took.

    The TPU's own instruction (pltpu.stochastic_round) takes the random bits as an argument, too: it would save an
    addition and a mask, and needs a kernel for each weight.
    """
    exact = _float32 if rounding == "stochastic" else lambda tree: tree

    def init(weights: Any) -> RoundingState:
        return RoundingState(jnp.zeros((), jnp.int32), jnp.ones(()), inner.init(exact(weights)))

    def update(gradients: Any, state: RoundingState, weights: Any = None) -> tuple[Any, RoundingState]:
        steps, inner_state = inner.update(exact(gradients), state.inner, exact(weights))
        key = jax.random.fold_in(jax.random.key(seed), state.update)

        def change(path: Any, step: jax.Array, weight: jax.Array) -> jax.Array:
            if weight.dtype == jnp.float32 or rounding == "nearest":
                return step
            name = zlib.crc32(jax.tree_util.keystr(path).encode())
            # The difference is exact in float32, so that added to the weight it gives the rounded one.
            return round_stochastically(weight + step, jax.random.fold_in(key, name)) - weight

        changes = jax.tree_util.tree_map_with_path(change, steps, weights)
        whole = optax.tree.vdot(_float32(steps), _float32(steps))
        applied = jnp.where(whole > 0, optax.tree.vdot(taken(weights, changes), _float32(steps)) / whole, 1.0)
        return changes, RoundingState(state.update + 1, applied, inner_state)

    return optax.GradientTransformation(init, update)


def taken(weights: Any, changes: Any) -> Any:
    """What weights move by when changes are added to them, in float32."""

    def of_one(weight: jax.Array, change: jax.Array) -> jax.Array:
        before = weight.astype(jnp.float32)
        bits = jnp.finfo(weight.dtype)
        # XLA leaves out a conversion to bfloat16 and back; this it computes.
        return jax.lax.reduce_precision(before + change.astype(jnp.float32), bits.nexp, bits.nmant) - before

    return jax.tree.map(of_one, weights, changes)


def sum_in_float32(optimizer: nnx.Optimizer, rounding: str) -> nnx.Optimizer:
    """Where rounding is stochastic, let optax.MultiSteps add up the gradients of micro-batches in float32.

    optax 0.2.6 begins the sum in the weights' dtype, and goes on in that of the steps, which are float32 then.
    """
    sums: Any = getattr(optimizer.opt_state, "acc_grads", ()) if rounding == "stochastic" else ()
    for variable in jax.tree.leaves(sums, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_value(variable.get_value().astype(jnp.float32))
    return optimizer


def round_stochastically(values: jax.Array, key: jax.Array) -> jax.Array:
    """float32 values that bfloat16 can hold: one of the two neighbours, the nearer one more often, right on average.

    A bfloat16 is the upper half of a float32.  16 random bits are added to the lower half, which is then cut off: it
    carries with the probability that the lower half is of a whole.  NaN and infinity stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    new = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(values), new, values)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda array: array.astype(jnp.float32), tree)
