"""Log-probability and entropy of tokens on a TPU, without the softmax of [B, T, V] ever being in memory.

    per_token_logps, entropy = from_hidden(hidden, head, target_ids)       # hidden [B, T, D], head [D, V]

The kernel is fused: the head's matmul is in it, so that a tile of logits is in the chip's VMEM (its scratchpad) and
nowhere else.  A simpler one, from logits that are there already, is in notebooks/further/kernels.py: notebook 07 takes
it apart.

With logits l, temperature τ and target y, a token needs the largest logit m and z = Σ_v exp((l_v - m) / τ):

    log π(y) = (l_y - m) / τ - log z            H = log z - Σ_v exp((l_v - m) / τ) (l_v - m) / τ / z

Both sums can be had in one pass: when a tile brings a larger m, what was summed so far is multiplied by
exp((m_old - m_new) / τ) (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3).  m and log z are kept apart: of
logits near 1e4 a float32 log z + m has lost three digits, which the gradient would show.

tokamax 0.0.14 has a related kernel, linear_softmax_cross_entropy_loss: it gives no entropy, takes no temperature, and
wants the head as [D, V] (a tied embedding is [V, D]).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

custom_vjp: Any = jax.custom_vjp  # to a type checker it may return any object

# Where the running maximum starts: below every logit that a model writes, and finite, since inf - inf is NaN.
LOWEST = -1e30
# exp() of anything below is 0 in float32; a logit of -inf is taken for this, since 0 * -inf is NaN.
NEGLIGIBLE = -1e4

# The running statistics of a token, in the last axis of one array.
TARGET, RUNNING_MAX, LOG_SUM, ENTROPY = range(4)
NUM_STATS = 4

# Of VMEM, what tiles of the fused kernel may take.  The compiler finds room for them on v5e, v6e and v5p.
FUSED_VMEM = 40 * 2**20
# The gradient makes this many bytes of logits at a time, of a multiple of so many entries of the vocabulary.
CHUNK_BYTES = 128 * 2**20
MULTIPLE = 2048


@dataclass(frozen=True)
class Partition:
    """How a batch is spread over a mesh: over which axes its sequences, and over which the vocabulary."""

    mesh: Mesh
    batch: tuple[str, ...] = ("fsdp",)
    vocabulary: tuple[str, ...] = ()


def from_hidden(
    hidden: jax.Array,
    head: jax.Array,
    target_ids: jax.Array,
    temperature: float = 1.0,
    vocab_axis: int = 1,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log π(target) [B, T], entropy [B, T]), in float32 nats, of softmax(hidden head / temperature); see
    token_statistics.

    The matmul takes its inputs as they are (bfloat16 on the MXU), sums in float32 and is not rounded after.  Over
    several devices, each gathers the head and works on its own sequences.
    """
    logps, entropy = _from_hidden(hidden, head, target_ids, float(temperature), vocab_axis, partition)
    return logps, jax.lax.stop_gradient(entropy)


def add_tile(logits, targets, stats, step, last, columns, scale):
    """The online log-sum-exp.  logits: [rows, tile] in float32; stats: a reference [rows, 4].

    `total` is z and `moment` the sum in H.  Until the last tile they are kept where log z and H will be.
    """
    width = logits.shape[1]
    column = step * width + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    @pl.when(step == 0)
    def _():
        # [rows, 1]: a slice of one column keeps the axis.
        stats[:, TARGET:RUNNING_MAX] = jnp.zeros_like(stats[:, TARGET:RUNNING_MAX])
        stats[:, RUNNING_MAX:LOG_SUM] = jnp.full_like(stats[:, RUNNING_MAX:LOG_SUM], LOWEST)
        stats[:, LOG_SUM:] = jnp.zeros_like(stats[:, LOG_SUM:])

    if columns % width:
        logits = jnp.where(column < columns, logits, -jnp.inf)
    target, running_max, total, moment = (stats[:, index : index + 1] for index in range(NUM_STATS))
    target += jnp.sum(jnp.where(column == targets, logits, 0.0), axis=1, keepdims=True)
    highest = jnp.maximum(running_max, jnp.max(logits, axis=1, keepdims=True))
    down = (running_max - highest) * scale
    shrink = jnp.exp(down)
    distance = jnp.maximum((logits - highest) * scale, NEGLIGIBLE)
    weight = jnp.exp(distance)
    # Measured from the new maximum, every distance so far is larger by `down`.
    moment = shrink * moment + shrink * jnp.maximum(down, NEGLIGIBLE) * total
    moment += jnp.sum(weight * distance, axis=1, keepdims=True)
    total = shrink * total + jnp.sum(weight, axis=1, keepdims=True)
    stats[:, TARGET:RUNNING_MAX], stats[:, RUNNING_MAX:LOG_SUM] = target, highest

    @pl.when(step < last)
    def _():
        stats[:, LOG_SUM:ENTROPY], stats[:, ENTROPY:] = total, moment

    @pl.when(step == last)
    def _():
        stats[:, LOG_SUM:ENTROPY], stats[:, ENTROPY:] = jnp.log(total), jnp.log(total) - moment / total


def pallas_call(kernel, arrays, **arguments):
    """The kernel on a TPU; its interpretation elsewhere, operation by operation."""

    def run(interpret, *arrays):
        return pl.pallas_call(kernel, interpret=interpret, **arguments)(*arrays)

    return jax.lax.platform_dependent(*arrays, tpu=functools.partial(run, False), default=functools.partial(run, True))


def fused_forward_kernel(targets, hidden, head, stats, *, columns: int, scale: float, vocab_axis: int):
    """Make a tile of logits from a tile of the head, and update the running log-sum-exp with it.

    Args:
      targets: [rows, 1]; hidden: [rows, D]; head: [D, tile] or [tile, D]; stats: [rows, 4], in VMEM while
        the tiles of a token's vocabulary pass by.  Until the last tile, LOG_SUM holds z, and ENTROPY Σ exp(d) d.
    """
    step = pl.program_id(1)
    last = pl.num_programs(1) - 1
    add_tile(matmul(hidden[...], head[...], vocab_axis), targets[...], stats, step, last, columns, scale)


def fused_tiles(tokens: int, width: int, vocabulary: int, itemsize: int) -> tuple[int, int]:
    """[tokens, vocabulary] of a tile of the fused kernel, for hidden states of `width` numbers of `itemsize` bytes.

    The head is read once for every tile of tokens, so these are made as many as fit: with 1,024 of them a byte of
    the head is worth 1,024 operations, and v6e can do 560 in the time it takes to read one.
    """
    for rows, columns in ((1024, 1024), (1024, 512), (1024, 256), (512, 256), (256, 256), (128, 256)):
        streamed = 2 * itemsize * width * (rows + columns)  # two of each: one is computed with, the next is on its way
        if streamed + 4 * 4 * rows * columns <= FUSED_VMEM:
            break
    return min(rows, tokens), min(columns, vocabulary)


def matmul(hidden, head, vocab_axis):
    """hidden [N, D] times head: [N, V] in float32."""
    if hidden.dtype != head.dtype:
        hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    return jax.lax.dot_general(
        hidden, head, (((1,), (1 - vocab_axis,)), ((), ())),
        precision=_precision(hidden), preferred_element_type=jnp.float32,
    )  # fmt: skip


def _precision(array):
    """float32 is multiplied as such; the MXU would round it to bfloat16."""
    return jax.lax.Precision.HIGHEST if array.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _fused_forward(hidden, head, targets, scale, vocab_axis):
    """stats [N, 4] of hidden [N, D], head and targets [N]."""
    tokens, width = hidden.shape
    vocabulary = head.shape[vocab_axis]
    rows, columns = fused_tiles(tokens, width, vocabulary, hidden.dtype.itemsize)
    targets_block = pl.BlockSpec((rows, 1), lambda t, v: (t, 0))
    hidden_block = pl.BlockSpec((rows, width), lambda t, v: (t, 0))
    if vocab_axis == 1:
        head_block = pl.BlockSpec((width, columns), lambda t, v: (0, v))
    else:
        head_block = pl.BlockSpec((columns, width), lambda t, v: (v, 0))
    stats_block = pl.BlockSpec((rows, NUM_STATS), lambda t, v: (t, 0))
    compiler_params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=FUSED_VMEM + 16 * 2**20
    )
    return pallas_call(
        functools.partial(fused_forward_kernel, columns=vocabulary, scale=scale, vocab_axis=vocab_axis),
        (targets[:, None], hidden, head),
        grid=(pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns)),
        in_specs=[targets_block, hidden_block, head_block],
        out_specs=stats_block,
        out_shape=jax.ShapeDtypeStruct((tokens, NUM_STATS), jnp.float32),
        compiler_params=compiler_params,
    )


def _fused_backward(hidden, head, targets, stats, weight, scale, vocab_axis, gather, scatter):
    """(gradient of hidden [N, D] in float32, of head), a chunk of the vocabulary at a time.

    Left to XLA, which needs three matmuls for it: one makes the chunk's logits, with exp() and 1[v = y] fused into it,
    and two read it.  Two kernels, one for each gradient, would need four: each would make the logits for itself.
    weight: the gradient of each token's log π(y), [N].  `gather` and `scatter`: of head_exchange.
    """
    tokens = hidden.shape[0]
    vocabulary = head.shape[vocab_axis]
    width = vocab_chunk(tokens, vocabulary, hidden.dtype.itemsize)
    running_max, log_sum = stats[:, RUNNING_MAX:LOG_SUM], stats[:, LOG_SUM:ENTROPY]

    def add_chunk(start, size, gradient_hidden, gradient_head):
        part = gather(jax.lax.dynamic_slice_in_dim(head, start, size, vocab_axis))
        probability = jnp.exp((matmul(hidden, part, vocab_axis) - running_max) * scale - log_sum)
        column = start + jax.lax.broadcasted_iota(jnp.int32, probability.shape, 1)
        slope = jnp.where(column == targets[:, None], 1.0 - probability, -probability)
        slope = (weight[:, None] * scale * slope).astype(hidden.dtype)
        gradient_hidden += matmul(slope, part, 1 - vocab_axis)
        both = (slope, hidden) if vocab_axis == 0 else (hidden, slope)
        gradient_part = jax.lax.dot_general(
            *both, (((0,), (0,)), ((), ())), precision=_precision(hidden), preferred_element_type=jnp.float32
        ).astype(head.dtype)
        return gradient_hidden, jax.lax.dynamic_update_slice_in_dim(
            gradient_head, scatter(gradient_part), start, vocab_axis
        )

    gradients = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head)
    whole, rest = divmod(vocabulary, width)
    gradients = jax.lax.fori_loop(0, whole, lambda chunk, both: add_chunk(chunk * width, width, *both), gradients)
    return add_chunk(whole * width, rest, *gradients) if rest else gradients


def vocab_chunk(tokens: int, vocabulary: int, itemsize: int) -> int:
    """How much of the vocabulary the gradient takes at a time: CHUNK_BYTES bytes of logits at most."""
    return min(vocabulary, max(MULTIPLE, CHUNK_BYTES // (tokens * itemsize) // MULTIPLE * MULTIPLE))


@functools.partial(custom_vjp, nondiff_argnums=(3, 4, 5))
def _from_hidden(hidden, head, target_ids, temperature, vocab_axis, partition):
    return _from_hidden_fwd(hidden, head, target_ids, temperature, vocab_axis, partition)[0]


def _from_hidden_fwd(hidden, head, target_ids, temperature, vocab_axis, partition):
    scale = 1 / temperature
    split, gather, _ = head_exchange(head, vocab_axis, partition)

    def local(hidden, head, ids):
        targets = _own_targets(ids, head.shape[vocab_axis], partition)
        stats = _fused_forward(_flat(hidden), gather(head), targets.reshape(-1), scale, vocab_axis)
        return combine_shards(stats.reshape(*ids.shape, NUM_STATS), partition, scale)

    tokens = token_spec(partition)
    stats = sharded(local, partition, (tokens, split, tokens), tokens)(hidden, head, target_ids)
    return finalize(stats, scale), (hidden, head, target_ids, stats)


def _from_hidden_bwd(temperature, vocab_axis, partition, residuals, gradients):
    hidden, head, target_ids, stats = residuals
    split, gather, scatter = head_exchange(head, vocab_axis, partition)

    def local(hidden, head, ids, stats, weight):
        targets = _own_targets(ids, head.shape[vocab_axis], partition)
        gradient_hidden, gradient_head = _fused_backward(
            _flat(hidden), head, targets.reshape(-1), _flat(stats), weight.reshape(-1),
            1 / temperature, vocab_axis, gather, scatter,
        )  # fmt: skip
        if partition and partition.vocabulary:
            gradient_hidden = jax.lax.psum(gradient_hidden, partition.vocabulary)
        return gradient_hidden.reshape(hidden.shape).astype(hidden.dtype), gradient_head

    tokens = token_spec(partition)
    run = sharded(local, partition, (tokens, split, tokens, tokens, tokens), (tokens, split))
    return *run(hidden, head, target_ids, stats, gradients[0]), None


_from_hidden.defvjp(_from_hidden_fwd, _from_hidden_bwd)


# Over several devices.


def sharded(function, partition, in_specs, out_specs) -> Callable[..., Any]:
    if partition is None:
        return function
    return jax.shard_map(function, mesh=partition.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def token_spec(partition: Partition | None) -> P | None:
    """How an array [B, T, …] is sharded."""
    return partition and P(partition.batch)


def head_exchange(head, vocab_axis, partition):
    """(how a head is sharded, what gathers a part of it, what adds up and splits a part's gradient).

    As MaxText lays it: D over the axes of the batch, V over those of the vocabulary.
    """
    if partition is None:
        return None, lambda part: part, lambda part: part
    width_axis = 1 - vocab_axis
    spec: list = [None, None]
    spec[vocab_axis] = partition.vocabulary or None
    # libtpu 0.0.44 dies of a reduce-scatter over one device.
    axes = tuple(axis for axis in partition.batch if partition.mesh.shape[axis] > 1)
    if not axes:
        return P(*spec), lambda part: part, lambda part: part
    if head.shape[width_axis] % math.prod(partition.mesh.shape[axis] for axis in axes):
        return P(*spec), lambda part: part, lambda part: jax.lax.psum(part, axes)
    spec[width_axis] = axes
    return (
        P(*spec),
        lambda part: jax.lax.all_gather(part, axes, axis=width_axis, tiled=True),
        lambda part: jax.lax.psum_scatter(part, axes, scatter_dimension=width_axis, tiled=True),
    )


def _own_targets(ids, vocabulary, partition):
    """Targets counted from the first column of this device's part of the vocabulary; others match no column."""
    if partition and partition.vocabulary:
        ids = ids - jax.lax.axis_index(partition.vocabulary) * vocabulary
    return jnp.where((ids >= 0) & (ids < vocabulary), ids, -1).astype(jnp.int32)


def combine_shards(stats, partition, scale):
    """What all parts of the vocabulary keep of a token, as if one device had seen them all."""
    if not (partition and partition.vocabulary):
        return stats
    axes = partition.vocabulary
    target, running_max, log_sum, entropy = (stats[..., index] for index in range(NUM_STATS))
    highest = jax.lax.pmax(running_max, axes)
    log_part = log_sum + (running_max - highest) * scale  # of this part's z, seen from the highest logit
    log_total = jnp.log(jax.lax.psum(jnp.exp(log_part), axes))
    log_share = jnp.maximum(log_part - log_total, NEGLIGIBLE)
    entropy = jax.lax.psum(jnp.exp(log_share) * (entropy - log_share), axes)
    return jnp.stack([jax.lax.psum(target, axes), highest, log_total, entropy], -1)


def finalize(stats, scale):
    logps = (stats[..., TARGET] - stats[..., RUNNING_MAX]) * scale - stats[..., LOG_SUM]
    return logps, stats[..., ENTROPY]


def _flat(array):
    return array.reshape(-1, array.shape[-1])
