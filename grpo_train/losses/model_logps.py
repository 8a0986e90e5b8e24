"""Log-probabilities of completions under a model, and what top-k and top-p leave out of its distribution."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import common

from grpo_lib.common.errors import CourseError
from grpo_train.losses import hidden_states, slots
from grpo_train.losses.token_logps import chunk_length, project, token_statistics


def model_statistics(
    model: Any,
    prompt_ids: jax.Array,
    completion_ids: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float | jax.Array = 1.0,
    implementation: str = "jax",
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    unscored: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(per_token_logps [B, C], entropy [B, C]) of completions under a model, in float32 nats.

    Args:
      model: a TunixMaxTextAdapter; for `chunked` and `pallas` one from hidden_states.adapter_for.
      prompt_ids: [B, P], padded on the left; completion_ids: [B, C], padded on the right.
      temperature: a number is a constant of the compiled program; an array, [] or [B, C], is an argument.
      segment_ids, segment_positions: of packed rows [B, C] (see `packing`), whose prompt_ids are [B, 0].  A row's first
        token is predicted by none, and gets 0.
      unscored: places at the front of packed rows that predict nothing that counts; the tokens after them get 0.

    Raises CourseError for a model that gives no hidden states.
    """
    # Packed rows have no prompts of their own: their first tokens are not asked for.
    skipped = 0 if segment_ids is None else 1 + unscored
    targets = completion_ids[:, skipped:]
    given, divisor = _before_targets(
        model, prompt_ids, completion_ids, pad_id, eos_id, implementation, segment_ids, segment_positions, skipped
    )
    if isinstance(temperature, jax.Array):
        if segment_ids is not None:
            temperature = temperature[:, skipped:]
        if "hidden" in given:
            given["hidden"] = _over_temperature(given["hidden"], temperature)
            temperature = divisor
    else:
        temperature = (temperature or 1.0) * divisor  # Tunix divides by no 0
    logps, entropy = token_statistics(targets, temperature=temperature, implementation=implementation, **given)
    first = ((0, 0), (skipped, 0))  # a 0 for each of these tokens
    return jnp.pad(logps, first), jnp.pad(entropy, first)


def _over_temperature(hidden: jax.Array, temperature: jax.Array) -> jax.Array:
    """Hidden states [B, T, D] whose logits are those of `hidden` over a temperature, [] or [B, T].

    `chunked` and `pallas` have a temperature as a constant of their programs.  The result is rounded to the dtype of
    hidden states, as these are.
    """
    return (hidden.astype(jnp.float32) / temperature[..., None]).astype(hidden.dtype)


def _before_targets(
    model: Any,
    prompt_ids: jax.Array,
    completion_ids: jax.Array,
    pad_id: int,
    eos_id: int,
    implementation: str,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    skipped: int = 0,
) -> tuple[dict[str, Any], float]:
    """(what predicts the tokens, as token_statistics takes it: logits, or hidden states and a head; a number by which
    the logits that the head makes are still to be divided)."""
    # MaxText changes its modules when it hands out hidden states: those of a copy.
    model = nnx.merge(*nnx.split(model))
    tokens, positions, attention_mask, not_padding = common.process_ids(
        prompt_ids, completion_ids, pad_id, eos_id, segment_ids, segment_positions
    )
    segments = not_padding if segment_ids is None else segment_ids
    # What predicts a token stands one place before it.
    end = tokens.shape[1] - 1
    before = slice(end - completion_ids.shape[1] + skipped, end)
    if segment_ids is None:
        slots.leave_rows_whole(model)
    if implementation == "jax":
        narrowed = hidden_states.narrow_head(model, before)
        logits, _ = model(tokens, positions=positions, cache=None, attention_mask=attention_mask, segment_ids=segments)
        return {"logits": logits if narrowed else logits[:, before]}, 1.0
    if not hasattr(model, "hidden_states"):
        raise CourseError(f"loss.implementation={implementation} needs a model made with hidden_states.adapter_for")
    hidden = model.hidden_states(tokens, positions, attention_mask, segments)
    head, vocab_axis, divisor = model.head()
    given = {
        "hidden": model.normalised(hidden[:, before]),
        "head": head,
        "vocab_axis": vocab_axis,
        "partition": model.partition(),
    }
    return given, divisor


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "temperature", "implementation"))
def per_token_logps(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float = 1.0,
    implementation: str = "jax",
) -> jax.Array:
    """log π(token) of completion tokens, [B, C], without a gradient: what Tunix's compute_per_token_logps gives."""
    logps, _ = model_statistics(
        nnx.merge(graphdef, state), prompt_tokens, completion_tokens, pad_id, eos_id, temperature, implementation
    )
    return jax.lax.stop_gradient(logps)


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "temperature", "implementation", "top_k", "top_p"))
def left_out(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float,
    implementation: str,
    top_k: int | None,
    top_p: float,
) -> jax.Array:
    """The probability that top-k and top-p leave out where each token of the completions is sampled, [B, C].

    A few positions at a time, as in `_chunked`: the logits are sorted.
    """
    given, divisor = _before_targets(
        nnx.merge(graphdef, state), prompt_tokens, completion_tokens, pad_id, eos_id, implementation
    )
    from_logits = "logits" in given
    states = given["logits"] if from_logits else given["hidden"]  # [B, C, V] or [B, C, D]

    def of_part(part: jax.Array) -> jax.Array:
        logits = part if from_logits else project(part, given["head"], given["vocab_axis"])
        return mass_left_out(logits, temperature * divisor, top_k, top_p)

    rows, length, _ = states.shape
    vocabulary = states.shape[-1] if from_logits else given["head"].shape[given["vocab_axis"]]
    step = chunk_length(rows, length, vocabulary)
    count = -(-length // step)
    parts = jnp.pad(states, ((0, 0), (0, count * step - length), (0, 0)))
    parts = jnp.moveaxis(parts.reshape(rows, count, step, -1), 1, 0)  # [count, B, step, V or D]
    masses = jax.lax.map(of_part, parts)
    return jnp.moveaxis(masses, 0, 1).reshape(rows, -1)[:, :length]


def mass_left_out(logits: jax.Array, temperature: float, top_k: int | None, top_p: float) -> jax.Array:
    """The probability of the tokens that top-k and top-p leave out of softmax(logits / temperature), [..., V] -> [...].

    As Tunix and vLLM cut: first the k most likely tokens; of their probabilities, which then add up to 1, those before
    which less than top_p has been counted.
    """
    vocabulary = logits.shape[-1]
    probabilities = jax.nn.softmax(logits.astype(jnp.float32) / temperature)
    largest, _ = jax.lax.top_k(probabilities, min(top_k or vocabulary, vocabulary))  # [..., k], in falling order
    among_k = largest / largest.sum(-1, keepdims=True)
    counted_before = jnp.cumsum(among_k, -1) - among_k
    return 1 - jnp.sum(jnp.where(counted_before <= top_p, largest, 0.0), -1)


# The same function, compiled with the temperature as an argument, an array []: a schedule would compile a program for
# each step.
_compiled: Any = per_token_logps
_per_token_logps_at = jax.jit(_compiled.__wrapped__, static_argnames=("pad_id", "eos_id", "implementation"))


def logps_at(temperature: float | jax.Array) -> Callable[..., jax.Array]:
    """`per_token_logps` for a temperature that is a number, or an array."""
    return _per_token_logps_at if isinstance(temperature, jax.Array) else per_token_logps
