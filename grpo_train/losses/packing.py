"""A micro-batch without padding: its completions in few rows of real tokens, for the layouts `packed` and `groups`.

    packed = pack(example, layout="groups", shapes=[(16, 192), (16, 240)], group_size=8)
    loss, aux = losses.grpo_loss(model, packed, ...)     # equal to that of `example`, up to rounding

Row of `packed`:  prompt, completion | prompt, completion | ...
Row of `groups`:  prompt without its last token | its last token, completion | its last token, completion | ...

The position before a token predicts it; therefore a group's completions each begin with the last token of the prompt.
`segment_ids` say which tokens see each other (between two bars above), `segment_positions` where a token stood in its
sequence: both are fields of Tunix's TrainExample.  In `groups` a completion also sees its prompt, see `SharedPrompt`.

Tunix 0.1.7 has sequence packing of its own (`max_seq_token_per_tpu`), which is not used: it puts a whole micro-batch
into one row, and sequence-mean-token-mean is then a mean over rows and not over completions.  Grain packs streams of
examples, not a batch that is given.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxtext.layers.attention_op import AttentionOp
from tunix.rl import common

from grpo_train.recipes.layouts import Layout

# With N of them, a segment id is N * k for the prompt that the completions of group k share, and N * k + j for its j-th
# completion.  Padding is 0.
SEGMENTS_PER_GROUP = 2**12
PER_TOKEN = ("ref_per_token_logps", "old_per_token_logps", "sampler_per_token_logps", "temperature")


@flax.struct.dataclass(frozen=True)
class Example(common.TrainExample):
    """A micro-batch of Tunix's, [B, C], with what the policy loss takes in addition; None where it does not.

    Packed rows [R, W] hold prompts and completions in `completion_ids`; prompt ids are then [R, 0], and every other
    field but beta is [R, W], too.
    """

    weights: Any = None  # [B, C], of tokens: in place of an aggregation that the micro-batch does not show itself
    sampler_per_token_logps: Any = None  # [B, C], of the sampler when it wrote them
    beta: Any = None  # [], of this update, where it is not the configuration's (see engines.adaptive_beta)
    temperature: Any = None  # [B, C], at which they were sampled, where it changes from step to step
    # Of packed rows: places at the front of each that predict no token of a completion.  A constant of the program.
    unscored: int = flax.struct.field(pytree_node=False, default=0)


def to_example(example: common.TrainExample, **more: Any) -> Example:
    """As our own example, with more fields."""
    return Example(**vars(example) | more)


@functools.partial(jax.jit, static_argnames="aggregation")
def token_weights(completion_mask: jax.Array, aggregation: str) -> jax.Array:
    """What each token's loss counts for in Tunix's aggregate_loss, [B, C].  All its modes are linear in the losses."""
    mask = completion_mask.astype(jnp.float32)
    return jax.grad(lambda losses: common.aggregate_loss(losses, mask, aggregation))(jnp.zeros_like(mask))


def first_fit(sizes: Sequence[int], rows: int, width: int) -> list[tuple[int, int]] | None:
    """(row, start) for each size, the largest placed first, each in the first row with room; None: they do not fit."""
    used = [0] * rows
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        row = next((row for row in range(rows) if used[row] + sizes[index] <= width), None)
        if row is None:
            return None
        places[index] = row, used[row]
        used[row] += sizes[index]
    return places


def pack(
    example: common.TrainExample,
    *,
    layout: Layout,
    shapes: Sequence[tuple[int, int]],
    group_size: int,
    aggregation: str = "sequence-mean-token-mean",
    micro_batches: int = 1,
    unscored: int = 0,
) -> Example:
    """The completions of `example` [B, C] and their prompts [B, P] in rows of the first shape that they fit.

    Args:
      example: completions of a group are neighbours.  If it has weights, they stay; else `aggregation` makes them.
      shapes: [rows, tokens], smallest first; of recipes.layouts.row_shapes.
      micro_batches: above 1, the example is cut into so many (M), each with rows of its own: fields are [M, R, W].
      unscored: places at the front of each row whose logits nobody needs: at most a prompt's tokens but its last one.

    Raises ValueError when they fit none.
    """
    host: Any = jax.device_get(example)
    prompts = [ids[mask] for ids, mask in zip(host.prompt_ids, host.prompt_mask.astype(bool), strict=True)]
    mask = host.completion_mask.astype(bool)
    lengths = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)  # up to the last token that counts
    lengths = np.where(mask.any(axis=1), lengths, 0)
    together = group_size if layout == "groups" else 1  # completions behind one prompt
    shared = int(layout == "groups")  # tokens of the prompt that each completion repeats
    firsts = range(0, len(prompts), together)
    sizes = [len(prompts[i]) - shared + int((shared + lengths[i : i + together]).sum()) for i in firsts]
    fit = _first_shape(sizes, shapes, micro_batches)
    if fit is None:
        raise ValueError(f"{len(prompts)} completions do not fit rows of the shapes {list(shapes)}")
    shape, places = fit

    weights = getattr(host, "weights", None)
    weights = token_weights(example.completion_mask, aggregation) if weights is None else weights
    # So that the mean over micro-batches is the loss.
    source = _per_token(host, mask, np.asarray(weights) * np.float32(micro_batches))
    filled = {name: np.zeros(shape, values.dtype) for name, values in source.items()}
    if "temperature" in filled:
        filled["temperature"][:] = 1  # padding, too, is divided by it
    ids, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    for unit, (first, (row, at)) in enumerate(zip(firsts, places, strict=True), start=1):
        prompt = prompts[first]
        if shared:
            end = at + len(prompt) - 1
            ids[row, at:end] = prompt[:-1]
            segments[row, at:end] = SEGMENTS_PER_GROUP * unit
            positions[row, at:end] = np.arange(len(prompt) - 1)
            at = end
        begin = prompt[-1:] if shared else prompt
        for member, index in enumerate(range(first, first + together), start=1):
            tokens = np.concatenate([begin, host.completion_ids[index, : lengths[index]]])
            end = at + len(tokens)
            ids[row, at:end] = tokens
            segments[row, at:end] = SEGMENTS_PER_GROUP * unit + member
            positions[row, at:end] = len(prompt) - len(begin) + np.arange(len(tokens))
            for name, values in source.items():
                filled[name][row, at + len(begin) : end] = values[index, : lengths[index]]
            at = end
    empty = np.zeros((shape[0], 0), np.int32)
    make: Any = Example  # flax.struct hides its fields
    packed = make(
        prompt_ids=empty, prompt_mask=empty, completion_ids=ids, segment_ids=segments, segment_positions=positions,
        unscored=unscored,
        **(dict.fromkeys(PER_TOKEN) | filled),
    )  # fmt: skip
    if micro_batches == 1:
        return packed
    return jax.tree.map(lambda array: np.stack(np.split(array, micro_batches)), packed)


def _one_each(sizes: Sequence[int], rows: int, width: int) -> list[tuple[int, int]] | None:
    """As first_fit, with as many rows as sizes."""
    return [(row, 0) for row in range(rows)] if max(sizes) <= width else None


def _first_shape(
    sizes: Sequence[int], shapes: Sequence[tuple[int, int]], micro_batches: int
) -> tuple[tuple[int, int], list[tuple[int, int]]] | None:
    """The first shape that holds units of these sizes, and their places in it; None: they fit none.

    A unit is a prompt with its completions.  Returns ((rows, width) of all micro-batches, (row, start) of each unit).
    """
    for rows, width in shapes:
        # With a row for each unit, each has its own: attention in slots (see slots) knows one group a row.
        place = _one_each if rows * micro_batches == len(sizes) else first_fit
        fits = [place(part.tolist(), rows, width) for part in np.split(np.array(sizes), micro_batches)]
        places = []
        for number, units in enumerate(fits):
            places += [(number * rows + row, at) for row, at in units or ()]
        if None not in fits:
            return (micro_batches * rows, width), places
    return None


def _per_token(host: Any, mask: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """What packed rows hold for each token of completions, [B, C] each."""
    source = {}
    for name in PER_TOKEN:
        values = getattr(host, name, None)
        if values is not None:
            source[name] = values
    source["weights"] = weights
    source["completion_mask"] = mask
    source["advantages"] = np.broadcast_to(host.advantages[:, None], mask.shape)
    return source


class SharedPrompt(AttentionOp):
    """MaxText's attention, in which the completions of a group also see the prompt that they share."""

    def generate_attention_mask(self, query, key, decoder_segment_ids, *arguments, **named):
        make = functools.partial(super().generate_attention_mask, query, key)
        mask = make(decoder_segment_ids, *arguments, **named)
        if decoder_segment_ids is None:
            return mask
        ours, theirs = decoder_segment_ids[:, :, None], decoder_segment_ids[:, None, :]  # [B, T, 1], [B, 1, T]
        prompt = (
            (ours // SEGMENTS_PER_GROUP == theirs // SEGMENTS_PER_GROUP)
            & (theirs % SEGMENTS_PER_GROUP == 0)
            & (theirs > 0)
        )
        return jnp.where(prompt[:, None, None], make(None, *arguments, **named), mask)


def share_prompts(module: nnx.Module) -> None:
    """Let the attention of a MaxText model see shared prompts; batches of the other layouts give what they gave.

    It must be dot_product, as `maxtext_overrides` sets it: flash and splash attention take segment ids and no mask.
    """
    for _, part in nnx.iter_graph(module):
        if type(part) is AttentionOp:
            part.__class__ = SharedPrompt
