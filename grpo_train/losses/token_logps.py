"""Log-probability and entropy of each token, with three implementations that give the same.

What takes memory is on the way to them: the logits, [B, T, V], which with a vocabulary of 150,000 are more than all
activations of the model.

- `jax`: the plain reference.  Logits, log-softmax in float32, as one would write it on paper.
- `chunked`: the head's matmul and the log-softmax for a few tokens at a time, computed again in the backward pass.
- `pallas`: a TPU kernel (pallas_kernel) that streams the vocabulary in tiles.

`chunked` and `pallas` start from the last hidden states, see `hidden_states`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from grpo_train.losses import pallas_kernel
from grpo_train.losses.pallas_kernel import Partition

IMPLEMENTATIONS = ("jax", "chunked", "pallas")

# Of float32 logits, what `chunked` makes at a time.
CHUNK = 384 * 2**20


def token_statistics(
    target_ids: jax.Array,
    *,
    logits: jax.Array | None = None,
    hidden: jax.Array | None = None,
    head: jax.Array | None = None,
    temperature: float = 1.0,
    implementation: str = "jax",
    vocab_axis: int = 1,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(per_token_logps [B, T], entropy [B, T]), both in float32 nats, of softmax(logits / temperature).

    Differentiable with respect to logits, or to hidden and head.  The entropy is for logging and has no gradient.

    Args:
      target_ids: int [B, T], the tokens whose log-probabilities are asked for.
      logits: [B, T, V]; or in their place
      hidden: [B, T, D], and
      head: [D, V] with vocab_axis 1, [V, D] with vocab_axis 0.
      temperature: one number; with `jax` also an array, [] or [B, T].
      partition: how the arrays lie over several devices; `jax` needs none.

    Raises ValueError for an unknown implementation, and for others than `jax` from logits: nothing is left to save.
    """
    if implementation == "jax":
        if logits is None:
            logits = project(hidden, head, vocab_axis)
        return _plain(logits, target_ids, temperature)
    if implementation == "chunked" and hidden is not None:
        return _chunked(hidden, head, target_ids, temperature, vocab_axis, partition)
    if implementation == "pallas" and hidden is not None:
        return pallas_kernel.from_hidden(hidden, head, target_ids, temperature, vocab_axis, partition)
    raise ValueError(f"no implementation {implementation!r} from {'logits' if hidden is None else 'hidden states'}")


def _plain(logits, target_ids, temperature) -> tuple[jax.Array, jax.Array]:
    """log π = (l_y - max l) / τ - log Σ exp((l - max l) / τ), and the entropy, from all of [B, T, V] at once."""
    if jnp.ndim(temperature):
        temperature = temperature[..., None]  # [B, T, 1]
    logits = logits.astype(jnp.float32)  # [B, T, V]
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))  # [B, T, 1]; exp() of what is left cannot overflow
    total = jnp.exp((logits - peak) / temperature).sum(-1)  # [B, T]
    target = jnp.take_along_axis(logits, target_ids[..., None], -1)  # [B, T, 1]
    # The target is picked before normalising: log_softmax would write [B, T, V] once more.
    logps = ((target - peak) / temperature)[..., 0] - jnp.log(total)  # [B, T]
    # A logit of -inf has probability 0 and adds nothing: 0 log 0 is 0.
    distance = jnp.maximum(jax.lax.stop_gradient(logits - peak) / temperature, pallas_kernel.NEGLIGIBLE)
    total = jax.lax.stop_gradient(total)
    return logps, jnp.log(total) - jnp.sum(jnp.exp(distance) * distance, -1) / total


def project(hidden, head, vocab_axis):
    """Logits in the dtype of the hidden states, as MaxText makes them."""
    logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), (((2,), (1 - vocab_axis,)), ((), ())))
    return logits.astype(jnp.float32)


def _chunked(hidden, head, target_ids, temperature, vocab_axis, partition) -> tuple[jax.Array, jax.Array]:
    """`_plain`, a few positions of all sequences at a time; each chunk's logits are made again for its gradient.

    Chunks are cut along T, since B is sharded over the devices. Each device gathers the head once, and exchanges its
    gradient once. Devices that share a vocabulary gather it whole and all compute the same.
    """
    partition = partition and dataclasses.replace(partition, vocabulary=())
    split, gather, _ = pallas_kernel.head_exchange(head, vocab_axis, partition)

    def local(hidden, head, ids):
        sequences, length = ids.shape
        head = gather(head)
        count = -(-length // chunk_length(sequences, length, head.shape[vocab_axis]))
        step = -(-length // count)

        def cut(array):  # [B, T, ...] -> [count, B, step, ...]
            padding = [(0, 0), (0, count * step - length), *[(0, 0)] * (array.ndim - 2)]
            parts = jnp.pad(array, padding).reshape(sequences, count, step, *array.shape[2:])
            return jnp.moveaxis(parts, 1, 0)

        def join(parts):  # [count, B, step] -> [B, T]
            return jnp.moveaxis(parts, 0, 1).reshape(sequences, -1)[:, :length]

        @functools.partial(jax.checkpoint, prevent_cse=False)  # a loop's body is compiled by itself
        def statistics(hidden, ids):
            return _plain(project(hidden, head, vocab_axis), ids, temperature)

        logps, entropy = jax.lax.map(lambda chunk: statistics(*chunk), (cut(hidden), cut(ids)))
        return join(logps), join(entropy)

    tokens = pallas_kernel.token_spec(partition)
    compute = pallas_kernel.sharded(local, partition, (tokens, split, tokens), (tokens, tokens))
    return compute(hidden, head, target_ids)


def chunk_length(sequences: int, length: int, vocabulary: int) -> int:
    """Positions in a chunk of `sequences` sequences, so that its float32 logits are CHUNK bytes at most."""
    return max(1, min(length, CHUNK // (4 * vocabulary * sequences)))
