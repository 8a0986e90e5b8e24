"""The optimizer of a recipe: its steps, after clipping by the global norm, learning rates, and rounding of weights."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from grpo_train.recipes.schema import DType, TrainingRecipe


class RoundingState(NamedTuple):
    """What `rounded` keeps."""

    update: jax.Array  # int32, updates so far: the noise follows from it
    applied: jax.Array  # float32, `update_applied` of the last one
    inner: Any


def learning_rate_schedule(training: TrainingRecipe) -> optax.Schedule:
    """The learning rate of a step, counted from 0. The first step already moves: it does not start at zero.

    Linear warm-up, then constant, or half a cosine that would reach 0 at the step after the last, or later
    (`schedule_steps`). A step is one batch of completions; all its updates (`grpo.iterations`) have the step's rate.
    """
    first = training.learning_rate / max(training.warmup_steps, 1)
    if training.schedule == "cosine" and training.cosine_steps > training.warmup_steps:  # else it ends in the warm-up
        return optax.warmup_cosine_decay_schedule(
            first, training.learning_rate, training.warmup_steps, decay_steps=training.cosine_steps
        )
    return optax.warmup_constant_schedule(first, training.learning_rate, training.warmup_steps)


def learning_rates(training: TrainingRecipe) -> np.ndarray:
    """The learning rates of all steps, [steps], for the rows of metrics.jsonl.

    Computed at once: one by one, each would wait on the device for the update that is under way.
    """
    return np.broadcast_to(learning_rate_schedule(training)(jnp.arange(training.steps)), training.steps)


def make_optimizer(
    training: TrainingRecipe, iterations: int, seed: int, weights: DType = "float32"
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) or Lion (arXiv:2302.06675) after clipping by the global norm, for `iterations` updates
    a step; preflight compiles the same.

    Args:
      seed: of the noise of stochastic rounding.
      weights: their dtype.  Steps to bfloat16 weights are `rounded`.
    """
    schedule = learning_rate_schedule(training)
    rate = schedule if iterations == 1 else lambda update: schedule(update // iterations)
    algorithm = {"adamw": optax.adamw, "lion": optax.lion}[training.optimizer]
    chain = optax.chain(
        clip_by_global_norm(training.max_grad_norm),
        algorithm(rate, b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )
    return chain if weights == "float32" else rounded(chain, training.rounding, training.optimizer_dtype, seed)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """As optax.clip_by_global_norm, up to the last bit: gradients are multiplied by one factor, not divided by a norm.

    XLA's CPU compiler computes a product again wherever it is needed, in both moments of Adam, but writes a quotient to
    memory and reads it twice: with it, clipping and AdamW take 1.3 times as long for the weights of SmolLM2.
    """

    def update(gradients: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda gradient: factor.astype(gradient.dtype) * gradient, gradients), state

    return optax.GradientTransformation(lambda weights: optax.EmptyState(), update)


def rounded(inner: optax.GradientTransformation, rounding: str, kept: DType, seed: int) -> optax.GradientTransformation:
    """An optimizer that computes in float32, and whose steps u reach bfloat16 weights w as `rounding` says.

    A step of Adam is about the learning rate, and a bfloat16 has 8 bits: rounded to `nearest`, w + u is w again where
    |u| is below about |w| / 512.  `stochastic` rounds up or down by chance, so that w + u is right on average (S. Gupta
    et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, section 3).  The noise follows from
    seed, update and the weight's name, not from devices or processes.

    Adam's moments are kept in `kept`, rounded in the same way: in bfloat16 the change of the second one, 1 - b2 of it,
    is too small for `nearest`, too.  float32 weights get w + u.

    The state's `applied` is <Δw, u> / <u, u> over all weights: the part of the step that they took.

    The TPU's own instruction (pltpu.stochastic_round) takes the random bits as an argument, too: it would save an
    addition and a mask, and needs a kernel for each weight.
    """

    def hold(values: Any, key: jax.Array) -> Any:
        """float32 arrays of a tree by what bfloat16 can say."""

        def one(path: Any, value: jax.Array) -> jax.Array:
            name = zlib.crc32(jax.tree_util.keystr(path).encode())
            return ROUNDINGS[rounding](value, jax.random.fold_in(key, name)) if _is_float(value) else value

        return jax.tree_util.tree_map_with_path(one, values)

    def init(weights: Any) -> RoundingState:
        return RoundingState(jnp.zeros((), jnp.int32), jnp.ones(()), _cast(inner.init(_cast(weights, "float32")), kept))

    def compute(gradients: Any, state: RoundingState, weights: Any) -> tuple[Any, Any, Any]:
        """The steps, what the weights take of them, and the new moments."""
        key = jax.random.fold_in(jax.random.key(seed), state.update)
        before = _cast(weights, "float32")
        steps, moments = inner.update(_cast(gradients, "float32"), _cast(state.inner, "float32"), before)

        def change(weight: jax.Array, held: jax.Array, full: jax.Array, step: jax.Array) -> jax.Array:
            # The difference is exact in float32, so that added to the weight it gives the rounded one.
            return step if weight.dtype == jnp.float32 else held - full

        changes = jax.tree.map(change, weights, hold(jax.tree.map(jnp.add, before, steps), key), before, steps)
        if kept == "bfloat16":
            moments = _cast(hold(moments, jax.random.fold_in(key, 1)), kept)
        return steps, changes, moments

    def update(gradients: Any, state: RoundingState, weights: Any = None) -> tuple[Any, RoundingState]:
        steps, changes, _ = compute(gradients, state, weights)
        whole, taken = (optax.tree.sum(jax.tree.map(jnp.multiply, steps, each)) for each in (steps, changes))
        applied = jnp.where(whole > 0, taken / whole, 1.0)
        # Again: else the TPU's compiler keeps arrays as large as the weights, for these sums, until the update ends.
        gradients, state, weights, applied = jax.lax.optimization_barrier((gradients, state, weights, applied))
        _, changes, moments = compute(gradients, state, weights)
        # optax.MultiSteps keeps its sum of gradients in the dtype of the changes.  In bfloat16 they are exact but where
        # a step is larger than its weight, and the sum of a few micro-batches is off by half a per cent at most.
        return _cast(changes, kept), RoundingState(state.update + 1, applied, moments)

    return optax.GradientTransformation(init, update)


def sum_in(optimizer: nnx.Optimizer, dtype: DType) -> nnx.Optimizer:
    """Let optax.MultiSteps add up the gradients of micro-batches in this dtype; optax 0.2.6 takes the weights'."""
    sums: Any = getattr(optimizer.opt_state, "acc_grads", ())
    for variable in jax.tree.leaves(sums, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_value(variable.get_value().astype(dtype))
    return optimizer


def add_sum(optimizer: nnx.Optimizer, model: nnx.Module, count: int) -> None:
    """Let an optimizer add up the gradients of `count` micro-batches before each of its updates.

    It goes on with the state that it has.
    """
    sums: Any = nnx.Optimizer(model, optax.MultiSteps(optax.identity(), count), wrt=optimizer.wrt).opt_state
    optimizer.opt_state = nnx.data(sums._replace(inner_opt_state=optimizer.opt_state))
    of_sums: Any = optax.MultiSteps(optimizer.tx, count)
    optimizer.tx = of_sums


def drop_sum(optimizer: nnx.Optimizer) -> None:
    """Take optax.MultiSteps from an optimizer, whose updates then are of one gradient; between two the sum is zero."""
    sums: Any = optimizer.opt_state
    of_sums: Any = optimizer.tx
    optimizer.opt_state = nnx.data(sums.inner_opt_state)
    optimizer.tx = of_sums.inner_opt


@jax.jit
def nearest_moves(weights: Any, rate: float) -> tuple[jax.Array, jax.Array]:
    """(`update_applied`, share of the weights that move) when all weights, in bfloat16, get a step of `rate`, as Adam's
    are, rounded to the nearest."""
    full = [round_to_nearest(array.astype(jnp.float32)) for array in jax.tree.leaves(weights)]
    moves = [round_to_nearest(array + rate) - array for array in full]
    moved = [move != 0 for move in moves]
    size = sum(array.size for array in full)
    return jnp.asarray(optax.tree.sum(moves)) / (rate * size), jnp.asarray(optax.tree.sum(moved)) / size


def round_to_nearest(values: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """float32 values that bfloat16 can hold.  XLA leaves out a conversion to bfloat16 and back; this it computes."""
    return jax.lax.reduce_precision(values, 8, 7)


def round_stochastically(values: jax.Array, key: jax.Array) -> jax.Array:
    """float32 values that bfloat16 can hold: one of the two neighbours, the nearer one more often, right on average.

    A bfloat16 is the upper half of a float32.  16 random bits are added to the lower half, which is then cut off: it
    carries with the probability that the lower half is of a whole.  NaN and infinity stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    new = jax.lax.bitcast_convert_type((bits + _noise(values.shape, key)) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(values), new, values)


def _noise(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """16 random bits for each element, as uint32: a hash of its index and the key.

    Tried: jax.random.bits, whose bits the TPU's compiler writes to memory, all of them; those of the fast generators
    (rbg) may depend on how the weight is sharded.  This is computed where it is added.
    """
    words = jax.random.key_data(key)
    # The index has an offset of the key's: else the compiler keeps one array of indices for all weights of a shape.
    hashed = jnp.broadcast_to(words[0], shape)
    for axis, size in enumerate(shape):
        hashed = hashed * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    for word in words:
        hashed ^= word
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # C. Wellons, lowbias32
            hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
    return hashed >> 16


ROUNDINGS = {"nearest": round_to_nearest, "stochastic": round_stochastically}


def _is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _cast(tree: Any, dtype: DType) -> Any:
    return jax.tree.map(lambda array: array.astype(dtype) if _is_float(array) else array, tree)
