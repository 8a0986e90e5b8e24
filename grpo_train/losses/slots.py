"""Attention of rows of groups without the part that its mask throws away.

A row of the layout `groups` (see packing) is a prompt and G completions.  Attention of the whole row, [W, W], computes
what each completion makes of every other one, and a mask then throws it away.  Here each token has a place in a slot:

    prompt, P places | completion 1, C places | ... | completion G, C places

so that the prompt meets itself, [P, P], and a completion the prompt and itself, [C, P + C].  Everything but attention
stays in rows: queries, keys and values are moved into slots, and the output is moved back.  The gradient of moving
along a permutation is moving back, which XLA's CPU compiler does much faster than the scatter that JAX would make.

An update of SmolLM2-135M on two cores takes 0.87 to 0.89 of its time with it (dev/benchmarks/levers.py).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.layers.attention_op import AttentionOp

from grpo_train.losses.packing import SEGMENTS_PER_GROUP, SharedPrompt

MASKED = -1e30


@dataclass(frozen=True)
class SlotSizes:
    """Places for the longest group of a run."""

    prompt: int  # P: tokens of a prompt but its last one
    group: int  # G: completions
    completion: int  # C: tokens of a completion, and the prompt's last one before it

    def pays(self, width: int) -> bool:
        """Whether slots are so much smaller than the square of a row that moving is worth it."""
        computed = self.prompt**2 + self.group * self.completion * (self.prompt + self.completion)
        return 2 * computed <= width**2


class SlotAttention(SharedPrompt):
    """MaxText's attention, which computes rows of groups in slots, and other batches as it did."""

    slots: SlotSizes | None = None  # None: the batch is no rows of groups

    def apply_attention(self, query, key, value, decoder_segment_ids, *arguments: Any, **named: Any):
        """query [R, W, heads, H], scaled; key and value [R, W, K heads, H]; decoder_segment_ids [R, W]."""
        if self.slots is None or not self.slots.pays(query.shape[1]):
            return super().apply_attention(query, key, value, decoder_segment_ids, *arguments, **named)

        def of_row(*row: jax.Array) -> jax.Array:
            return _row_attention(*row, self.slots)

        return jax.vmap(of_row)(query, key, value, decoder_segment_ids), None, None


def attend_in_slots(module: nnx.Module, sizes: SlotSizes) -> None:
    """Let a MaxText model compute rows of groups in slots, where that pays; the rows hold one group each.

    Its attention must be dot_product in float32, as `maxtext_overrides` sets it.
    """
    for _, part in nnx.iter_graph(module):
        if type(part) in (AttentionOp, SharedPrompt):
            part.__class__ = SlotAttention
            part.slots = sizes


def leave_rows_whole(module: nnx.Module) -> None:
    """Let a copy of such a model compute a batch that is no rows of groups."""
    for _, part in nnx.iter_graph(module):
        if type(part) is SlotAttention:
            part.slots = None


def _row_attention(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, sizes: SlotSizes):
    """Attention of one row: query [W, heads, H], key and value [W, K, H], segments [W]; returns [W, heads, H]."""
    width, heads, size = query.shape
    kv_heads = key.shape[1]
    to_slot, to_row = _places(segments, sizes)
    flat = jnp.concatenate([part.reshape(width, -1) for part in (query, key, value)], axis=1)
    queries, keys, values = jnp.split(_move(flat, to_slot, to_row), [heads * size, (heads + kv_heads) * size], axis=1)
    of_prompt, of_completions = _slots_attention(
        queries.reshape(len(to_slot), kv_heads, -1, size),
        keys.reshape(len(to_slot), kv_heads, size),
        values.reshape(len(to_slot), kv_heads, size),
        to_slot[: sizes.prompt] >= 0,
        sizes,
    )
    output = jnp.concatenate([of_prompt.reshape(sizes.prompt, -1), of_completions.reshape(-1, heads * size)])
    return _move(output, to_row, to_slot).reshape(width, heads, size)


def _places(segments: jax.Array, sizes: SlotSizes) -> tuple[jax.Array, jax.Array]:
    """(for each slot the place in the row, [P + G C], for each place in the row its slot, [W]); -1: none."""
    width = len(segments)
    member = segments % SEGMENTS_PER_GROUP
    begins = jnp.argmax(segments[None] == segments[:, None], axis=1)  # of each token's segment
    slot = jnp.where(member == 0, 0, sizes.prompt + (member - 1) * sizes.completion) + jnp.arange(width) - begins
    to_row = jnp.where(segments > 0, slot, -1)
    count = sizes.prompt + sizes.group * sizes.completion
    nowhere = jnp.full(count, -1, jnp.int32)
    filled = jnp.where(segments > 0, slot, count)  # padding has no slot: it falls out at the end
    return nowhere.at[filled].set(jnp.arange(width, dtype=jnp.int32), mode="drop"), to_row


@jax.custom_vjp
def _move(values: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
    """Rows of values [N, D] at `places` [M], 0 where that is -1: [M, D].  `back` [N] leads back."""
    return jnp.where(places[:, None] >= 0, values[jnp.maximum(places, 0)], 0)


def _move_forward(values: jax.Array, places: jax.Array, back: jax.Array):
    return _move(values, places, back), (places, back)


def _move_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array):
    places, back = kept
    return _move(gradient, back, places), None, None


_move.defvjp(_move_forward, _move_backward)


def _slots_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, in_prompt: jax.Array, sizes: SlotSizes
) -> tuple[jax.Array, jax.Array]:
    """Attention in slots: of the prompt [P, K, Q, H], of the completions [G, C, K, Q, H].

    Args:
      queries: [P + G C, K, Q, H], Q of them for each of K heads of keys; keys and values: [P + G C, K, H].
      in_prompt: [P], places that hold a token.
    """
    length, group, places = sizes.prompt, sizes.group, sizes.completion
    of_prompt = jnp.einsum("tkqd,skd->kqts", queries[:length], keys[:length])
    seen = in_prompt & jnp.tri(length, dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen, of_prompt, MASKED))
    prompt_output = jnp.einsum("kqts,skd->tkqd", weights, values[:length])

    def by_completion(part: jax.Array) -> jax.Array:
        return part[length:].reshape(group, places, *part.shape[1:])

    own_queries, own_keys, own_values = map(by_completion, (queries, keys, values))
    to_prompt = jnp.einsum("gtkqd,skd->kgqts", own_queries, keys[:length])
    to_prompt = jnp.where(in_prompt, to_prompt, MASKED)
    to_own = jnp.einsum("gtkqd,gskd->kgqts", own_queries, own_keys)
    to_own = jnp.where(jnp.tri(places, dtype=bool), to_own, MASKED)
    # One softmax over both, which are not joined: that would copy them.
    peak = jax.lax.stop_gradient(jnp.maximum(to_prompt.max(-1, initial=MASKED), to_own.max(-1)))[..., None]
    to_prompt, to_own = jnp.exp(to_prompt - peak), jnp.exp(to_own - peak)
    total = (to_prompt.sum(-1) + to_own.sum(-1))[..., None]
    output = jnp.einsum("kgqts,skd->gtkqd", to_prompt / total, values[:length])
    output += jnp.einsum("kgqts,gskd->gtkqd", to_own / total, own_values)
    return prompt_output, output
