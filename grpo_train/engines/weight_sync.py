"""Weights from the MaxText actor to the sampler, and the check that both then compute the same model.

Actor and sampler are two implementations of one model. `check_sync` answers two questions: did every weight arrive, and
do both sides give the same log-probability to the same tokens? A weight can arrive and be read wrongly.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpo_lib.common.errors import CourseError
from grpo_train.runs import multihost

# Tunix name -> MaxText name.  MaxText scans its layers: one array holds all of them, stacked on axis 1.
LAYER_WEIGHTS = {
    "input_layernorm.w": "pre_self_attention_layer_norm.scale",
    "attn.q_proj.w": "self_attention.query.kernel",
    "attn.k_proj.w": "self_attention.key.kernel",
    "attn.v_proj.w": "self_attention.value.kernel",
    "attn.q_bias": "self_attention.query.bias",  # Qwen2.5 only, as the next two
    "attn.k_bias": "self_attention.key.bias",
    "attn.v_bias": "self_attention.value.bias",
    "attn.q_norm.w": "self_attention.query_norm.scale",  # Qwen3 only, as the next one
    "attn.k_norm.w": "self_attention.key_norm.scale",
    "attn.o_proj.w": "self_attention.out.kernel",
    "post_attention_layernorm.w": "post_self_attention_layer_norm.scale",
    "mlp.gate_proj.kernel": "mlp.wi_0.kernel",
    "mlp.up_proj.kernel": "mlp.wi_1.kernel",
    "mlp.down_proj.kernel": "mlp.wo.kernel",
}
# Tunix name -> MaxText name, outside of the layers.
OTHER_WEIGHTS = {
    "embedder.input_embedding": "token_embedder.embedding",
    "final_norm.w": "decoder.decoder_norm.scale",
    "lm_head.w": "decoder.logits_dense.kernel",  # untied models only
}
KV_WEIGHTS = ("attn.k_proj.w", "attn.v_proj.w", "attn.k_bias", "attn.v_bias")
ROTATED_WEIGHTS = ("attn.q_proj.w", "attn.k_proj.w")
STACKED = "decoder.layers."
SCAN_AXIS = 1

# Measured on the tiny model: 2e-4 on average in float32, since MaxText multiplies by a tied embedding in bfloat16;
# 1.6e-3 to 9.4e-3 in bfloat16, where the two round in other places.  A weight in the wrong place gives 3.9 and more, so
# the limits leave room for deeper models.
MAX_MEAN_GAP = {"float32": 0.02, "bfloat16": 0.1}


@dataclass(frozen=True)
class SyncCheck:
    """What `check_sync` found.  Gaps are absolute differences of log-probabilities, in nats."""

    weights: int
    tokens: int
    mean_gap: float
    max_gap: float
    percentiles: tuple[float, ...] = ()  # of the gaps: 50, 90 and 99 %


@dataclass(frozen=True)
class Scored:
    """Completions and what the sampler makes of them."""

    prompt_ids: np.ndarray  # [B, P], padded on the left
    completion_ids: np.ndarray  # [B, C], padded on the right
    logps: list[np.ndarray]  # one array per completion, nats


@dataclass(frozen=True)
class HeadLayout:
    """How the actor's heads become the sampler's."""

    repeats: int = 1  # of each key-value head
    interleaved: bool = False  # the actor's: the rotary embedding turns neighbours (tunix_models.has_llama_heads)


AS_THEY_ARE = HeadLayout()


def translate(
    actor: dict[str, jax.Array], heads: HeadLayout = AS_THEY_ARE, dtype: Any = None
) -> Iterator[tuple[str, str, jax.Array]]:
    """(Tunix's name, MaxText's name, value) of each weight that both know, one layer at a time, as it is asked for.

    `dtype` is the sampler's, None: as they are.  In a multi-process run all processes ask together: a layer is a
    program that they run on a sharded array.
    """
    with jax.transfer_guard("allow"):  # the number of the layer; Tunix forbids transfers while it syncs
        for name, source in OTHER_WEIGHTS.items():
            if source in actor:
                yield name, source, actor[source].astype(dtype or actor[source].dtype)
        for name, part in LAYER_WEIGHTS.items():
            source = STACKED + part
            layers = actor[source].shape[SCAN_AXIS] if source in actor else 0
            change = HeadLayout(
                repeats=heads.repeats if name in KV_WEIGHTS else 1,
                interleaved=heads.interleaved and name in ROTATED_WEIGHTS,
            )
            is_flat = name.endswith("_bias")
            for layer in range(layers):
                yield f"layers.{layer}.{name}", source, _layer_of(actor[source], layer, change, is_flat, dtype)


@functools.partial(jax.jit, static_argnames=("heads", "flat", "dtype"))
def _layer_of(stack: jax.Array, layer: int, heads: HeadLayout, flat: bool, dtype: Any = None) -> jax.Array:
    """[..., L, heads, size] -> [..., heads x repeats, size] for heads; Tunix's biases are flat, MaxText's by head."""
    weight = jax.lax.dynamic_index_in_dim(stack, layer, SCAN_AXIS, keepdims=False).astype(dtype or stack.dtype)
    if heads.repeats > 1:
        weight = jnp.repeat(weight, heads.repeats, axis=-2)
    if heads.interleaved:
        weight = jnp.concatenate([weight[..., ::2], weight[..., 1::2]], axis=-1)
    return weight.reshape(-1) if flat else weight


@functools.partial(jax.jit, static_argnames=("heads", "dtype"))
def _translated(actor: dict[str, jax.Array], heads: HeadLayout, dtype: Any) -> dict[str, jax.Array]:
    """All of `translate` in one program."""
    return {name: value for name, _, value in translate(actor, heads, dtype)}


def copy_weights(
    actor: dict[str, jax.Array],
    state: nnx.State,
    shardings: dict[tuple, jax.sharding.NamedSharding],
    heads: HeadLayout = AS_THEY_ARE,
) -> None:
    """Write the actor's weights into the sampler's state, in place and one by one, each with its sharding.

    So a device holds at most one layer's weight more than the sampler's own; one CPU, where a small model's weights
    take less time than a program for each, holds all of them.  A weight without a counterpart keeps its value (zeros
    in a new sampler), and `check_sync` names it.
    """
    places = {".".join(map(str, path)): (variable, shardings[path]) for path, variable in state.flat_state()}
    devices = set().union(*(array.devices() for array in actor.values()), *(s.device_set for s in shardings.values()))
    one_cpu = len(devices) == 1 and devices.pop().platform == "cpu"
    dtype = next(iter(places.values()))[0].get_value().dtype
    layers = ((name, value) for name, _, value in translate(actor, heads, dtype))
    for name, value in _translated(actor, heads, dtype).items() if one_cpu else layers:
        if name in places:
            variable, sharding = places.pop(name)
            variable.set_value(jax.block_until_ready(value if one_cpu else multihost.reshard_locally(value, sharding)))
    for variable, sharding in places.values():
        old = variable.get_value()
        if isinstance(old, jax.ShapeDtypeStruct):
            variable.set_value(jnp.zeros(old.shape, old.dtype, device=sharding))


def check_sync(
    sampler: Any,
    weights: nnx.State,
    prompts: list[str],
    config,
    logps: Callable,
    limit: float = MAX_MEAN_GAP["float32"],
    at_once: int | None = None,
) -> SyncCheck:
    """Compare sampler and trainer after a sync, and refuse to go on when they differ.

    Args:
      sampler: a TunixSampler or a VllmSampler.
      weights: of the actor.
      prompts: rendered prompts to sample one completion each from.
      config: Tunix RolloutConfig used for sampling.
      logps: (prompt_ids [B, P], completion_ids [B, C]) -> [B, C], the trainer's log-probabilities.
      limit: the mean gap that is allowed, in nats.
      at_once: how many prompts are sampled together, all by default; a sampling of more might not fit into memory.

    Raises:
      CourseError: a weight of the actor has no place in the sampler or arrived with another value (it is named), or
        the mean gap of the log-probabilities is above the limit.
    """
    actor = by_name(weights)
    check_weights(sampler, actor)
    count = len(actor)
    del weights, actor  # of adapters they are matrices of their own: memory for what is computed next
    parts = []
    for together in itertools.batched(prompts, at_once or len(prompts)):
        sampler.generate(list(together), config, scored=len(together))
        scored = sampler.last_scored(len(together), config.max_tokens_to_generate)
        parts.append(gaps(scored, logps(scored.prompt_ids, scored.completion_ids)))
    gap = np.concatenate(parts)
    percentiles = tuple(map(float, np.percentile(gap, (50, 90, 99))))
    check = SyncCheck(count, int(gap.size), float(gap.mean()), float(gap.max()), percentiles)
    if not check.mean_gap <= limit:  # also true for NaN
        raise CourseError(
            f"sampler and trainer disagree: log-probabilities of the same {check.tokens} tokens differ by "
            f"{check.mean_gap:.3g} on average (limit {limit}), by {', '.join(f'{gap:.2g}' for gap in percentiles)} at "
            "50, 90 and 99 % of them; the two do not compute the same model. A large gap at 50 % is a wrong weight; "
            "where only the last is large, it is rounding, and rollout.max_mean_gap may be higher"
        )
    return check


def gaps(scored: Scored, trained: Sequence[np.ndarray]) -> np.ndarray:
    """Absolute differences from the trainer's log-probabilities [B, C], of all tokens in one array."""
    return np.concatenate(
        [np.abs(ours - theirs[: len(ours)]) for ours, theirs in zip(scored.logps, trained, strict=True)]
    )


def check_weights(sampler: Any, actor: dict[str, jax.Array]) -> None:
    """Refuse, with its name, a weight that was not synced: on either side, or with another value."""
    weights = sampler.weights()
    synced = {}  # the sampler's name -> the actor's
    for source, name, value in sampler.expected(actor):
        if name not in weights:
            raise CourseError(f"weight {source} of the actor would never be synced: the sampler has no {name}")
        weight = weights[name]
        if value.shape != weight.shape or not bool(
            jnp.array_equal(jax.device_put(value, weight.sharding).astype(weight.dtype), weight)
        ):
            raise CourseError(f"weight {name} of the sampler differs from the actor's {source} after a sync")
        synced[name] = source
    if unknown := sorted(actor.keys() - set(synced.values())):
        raise CourseError(
            f"weight {unknown[0]} of the actor has no counterpart in the sampler: it would never be synced"
        )
    if never_written := sorted(weights.keys() - synced.keys()):
        raise CourseError(f"weight {never_written[0]} of the sampler has no weight of the actor as its source")


def padded(tokens: Sequence[np.ndarray], width: int, pad: int, dtype: Any = np.int32) -> np.ndarray:
    """[B, width], padded on the right."""
    return np.array([np.pad(ids, (0, width - len(ids)), constant_values=pad) for ids in tokens], dtype).reshape(
        -1, width
    )


def by_name(state: nnx.State) -> dict[str, jax.Array]:
    """Dotted name -> array; the adapter's own level, `base`, is left out of MaxText's names."""
    return {
        ".".join(str(part) for part in path if part != "base"): variable.get_value()
        for path, variable in state.flat_state()
    }
