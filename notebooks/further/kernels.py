"""The streaming kernels that notebook 07 takes apart: log π(y) and entropy from logits that are there already.

    per_token_logps, entropy = from_logits(logits, target_ids)             # logits [B, T, V]

They read the logits once, tile by tile, and keep four numbers per token; the gradient streams the logits again and
writes over them.  Training uses the fused kernel (grpo_train.losses.pallas_kernel), which has the head's matmul in it
too and so needs no logits; `add_tile`, the online log-sum-exp, is the same function for both.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grpo_train.losses.pallas_kernel import (
    ENTROPY,
    LOG_SUM,
    NUM_STATS,
    RUNNING_MAX,
    add_tile,
    custom_vjp,
    finalize,
    pallas_call,
)  # fmt: skip

# Tiles, [tokens, vocabulary]: 1 MiB of bfloat16 logits.
ROWS, COLUMNS = 256, 2048


def from_logits(logits: jax.Array, target_ids: jax.Array, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """(log π(target) [B, T], entropy [B, T]), in float32 nats, of softmax(logits / temperature).

    The gradient with respect to the logits has their dtype, bfloat16 or float32, and takes their place in memory where
    nothing else needs them.  The entropy is for logging and has no gradient.
    """
    logps, entropy = _from_logits(logits, target_ids, float(temperature))
    return logps, jax.lax.stop_gradient(entropy)


def forward_kernel(targets, logits, stats, *, columns: int, scale: float):
    """Update the running log-sum-exp of each token with one tile of logits.

    Args:
      targets: [1, rows, 1]; logits: [1, rows, tile].
      stats: [1, rows, 4], in VMEM while the tiles of a token's vocabulary pass by.  Until the last tile, LOG_SUM holds
        z, and ENTROPY Σ exp(d) d.
      columns: V.  What a tile holds beyond it is whatever was in memory.
    """
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    add_tile(logits[0].astype(jnp.float32), targets[0], stats.at[0], step, last, columns, scale)


def backward_kernel(targets, stats, weight, logits, gradient, *, scale: float):
    """One tile of the gradient: weight / τ (1[v = y] - π(v)).

    Args:
      targets: [1, rows, 1]; stats: [1, rows, 4]; weight: [1, rows, 1], the gradient of log π(y).
      logits, gradient: [1, rows, tile], the same place in memory.  Nothing beyond V is written.
    """
    column = pl.program_id(2) * logits.shape[2] + jax.lax.broadcasted_iota(jnp.int32, logits.shape[1:], 1)
    running_max, log_sum = stats[0, :, RUNNING_MAX:LOG_SUM], stats[0, :, LOG_SUM:ENTROPY]
    probability = jnp.exp((logits[0].astype(jnp.float32) - running_max) * scale - log_sum)
    slope = jnp.where(column == targets[0], 1.0 - probability, -probability)
    gradient[0] = (weight[0] * scale * slope).astype(gradient.dtype)


def tiles(tokens: int, vocabulary: int) -> tuple[int, int]:
    """[tokens, vocabulary] of a tile: whole where the array is smaller than a tile."""
    return min(ROWS, tokens), min(COLUMNS, vocabulary)


def streaming(kernel, logits, arrays, out_shape, out_block, aliases=None):
    """Run a kernel over all tiles of logits [B, T, V], the vocabulary innermost.

    Args:
      arrays: what comes before the logits, each [B, T, few].
      out_block: "stats", as the arrays are cut, or "logits".
    """
    batch, tokens, vocabulary = logits.shape
    rows, columns = tiles(tokens, vocabulary)

    def few(array):
        return pl.BlockSpec((1, rows, array.shape[-1]), lambda b, t, v: (b, t, 0))

    tile = pl.BlockSpec((1, rows, columns), lambda b, t, v: (b, t, v))
    grid = (batch, pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns))
    settings = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
    return pallas_call(
        kernel,
        (*arrays, logits),
        grid=grid,
        in_specs=[*map(few, arrays), tile],
        out_specs=tile if out_block == "logits" else few(out_shape),
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=settings,
    )


def logits_forward(logits, targets, scale):
    """stats [B, T, 4] of logits [B, T, V] and targets [B, T]."""
    kernel = functools.partial(forward_kernel, columns=logits.shape[-1], scale=scale)
    shape = jax.ShapeDtypeStruct((*targets.shape, NUM_STATS), jnp.float32)
    return streaming(kernel, logits, (targets[..., None],), shape, "stats")


def logits_backward(logits, targets, stats, weight, scale):
    """The gradient, [B, T, V], in the place of the logits."""
    arrays = (targets[..., None], stats, weight[..., None])
    shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    kernel = functools.partial(backward_kernel, scale=scale)
    return streaming(kernel, logits, arrays, shape, "logits", {len(arrays): 0})


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _from_logits(logits, target_ids, temperature):
    return _from_logits_fwd(logits, target_ids, temperature)[0]


def _from_logits_fwd(logits, target_ids, temperature):
    targets = target_ids.astype(jnp.int32)
    stats = logits_forward(logits, targets, 1 / temperature)
    return finalize(stats, 1 / temperature), (logits, targets, stats)


def _from_logits_bwd(temperature, residuals, gradients):
    logits, targets, stats = residuals
    return logits_backward(logits, targets, stats, gradients[0], 1 / temperature), None


_from_logits.defvjp(_from_logits_fwd, _from_logits_bwd)
