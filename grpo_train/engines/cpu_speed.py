"""What makes the course faster on one CPU, and nothing else: the numbers and the texts are the same without it.

- `Sampler` and `share_prompts`: the completions of a group share their prompt; a token is drawn on all threads.
- `multiply_in_two_dimensions`, `unroll_layers`: the trainer's products and layers in a form that XLA's CPU compiler
  handles better.

Together with rows of groups in the update (losses.packing) a step of recipes/tiny-cpu.yaml takes 0.55 of the time of
plain_grpo, which has none of them, on the two cores of docs/results.md (dev/benchmarks/step_time.py).

Tunix 0.1.7 computes the prompt of every row again, and keeps keys and values of prompt and completion in one array,
which XLA's CPU compiler copies several times a token.  Here a prompt is computed once, and its keys and values lie
apart from those of its completions (`split_cache`): decoding does not change them, and all queries of a group meet them
in one product.  Only the order differs in which a sum is added up, so the last bits of a logit.

For float32 on one CPU (tunix_models.abstract_model).  Everything else is Tunix's: bfloat16, whose texts depend on the
number of rows that are computed together; rows spread over several devices; and a TPU, where preflight compiles what
runs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.generate import utils
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

UNROLLED = 32  # layers; more would be slow to compile


def split_cache(layer: dict[str, jax.Array], group: int, places: int) -> dict[str, jax.Array]:
    """A layer's cache for decoding `places` tokens (C) in each of `group` completions (G) a prompt.

    Args:
      layer: Tunix's cache of N prompts; k and v are [N, P, K heads, H].
    """
    prompts, length, heads, size = layer["k"].shape
    rows = (prompts, group, heads)
    # Cosines and sines of all positions, which is (1, 0) rotated: Tunix computes them anew in every layer and step.
    unit = jnp.ones((1, length + places, 1, size)).at[..., size // 2 :].set(0)
    rope = qwen3.apply_rope(unit, jnp.arange(length + places)[None], head_dim=size)
    return {
        "prompt_keys": layer["k"].swapaxes(1, 2),  # [N, K, P, H]
        "prompt_values": layer["v"].swapaxes(1, 2),
        "keys": jnp.zeros((*rows, size, places)),  # C last: the sum over H is then one over vectors
        "values": jnp.zeros((*rows, places, size)),
        "rope": rope[0, :, 0],  # [P + C, H]
        "end_index": jnp.int32(0),
    }


def _decode(attention: Any, queries: jax.Array, key: jax.Array, value: jax.Array, cache: Any, attn_mask: Any):
    """Attention of one token in each of N G rows to what a cache of `split_cache` holds; returns (cache, output).

    Args:
      queries, key, value: [N G, 1, heads, H], the first two rotated.
    """
    prompts, group, heads, size, _ = cache["keys"].shape
    rows = (prompts, group, heads)
    at = cache["end_index"]
    queries = queries.reshape(*rows, -1, size)
    keys = jax.lax.dynamic_update_slice(cache["keys"], key.reshape(*rows, size, 1), (0, 0, 0, 0, at))
    values = jax.lax.dynamic_update_slice(cache["values"], value.reshape(*rows, 1, size), (0, 0, 0, at, 0))

    # G completions with Q queries a head, and S = P + C tokens.
    of_prompt = jnp.einsum("ngkqh,nkph->ngkqp", queries, cache["prompt_keys"])
    of_completion = (queries[..., None] * keys[:, :, :, None]).sum(-2)
    scores = jnp.concatenate([of_prompt, of_completion], axis=-1) * attention.scale  # [N, G, K, Q, S]
    mask = attn_mask[:, 0, : scores.shape[-1]].reshape(prompts, group, 1, 1, -1)
    weights = jax.nn.softmax(jnp.where(mask, scores, qwen3.K_MASK), axis=-1)
    of_prompt, of_completion = jnp.split(weights, [of_prompt.shape[-1]], axis=-1)
    mixed = jnp.einsum("ngkqp,nkph->ngkqh", of_prompt, cache["prompt_values"])
    mixed += (of_completion[..., None] * values[:, :, :, None]).sum(-2)
    output = attention.o_proj(mixed.reshape(prompts * group, 1, -1, size))
    return cache | {"keys": keys, "values": values, "end_index": at + 1}, output


class Attention2(qwen2.Attention):
    """That of Qwen2.5 and of Llama; with a cache of `split_cache` it decodes one token a row."""

    def block(self, x, cache, attn_mask: Any, sin, cos, segment_ids=None):
        if cache is None or "prompt_keys" not in cache:
            return super().block(x, cache, attn_mask, sin, cos, segment_ids)

        def projected(layer, bias):  # [N G, 1, heads, H]
            return (layer(x).reshape(len(x), 1, -1) + bias[...]).reshape(len(x), 1, -1, self.head_dim)

        queries, key = projected(self.q_proj, self.q_bias), projected(self.k_proj, self.k_bias)
        queries, key = (qwen2.apply_rotary_embedding(heads, sin, cos) for heads in (queries, key))
        return _decode(self, queries, key, projected(self.v_proj, self.v_bias), cache, attn_mask)


class Attention3(qwen3.Attention):
    """That of Qwen3; with a cache of `split_cache` it decodes one token a row."""

    def block(self, x, segment_pos, cache, attn_mask: Any, segment_ids=None):
        if cache is None or "prompt_keys" not in cache:
            return super().block(x, segment_pos, cache, attn_mask, segment_ids)
        cos, sin = jnp.split(cache["rope"][segment_pos], 2, axis=-1)
        queries = qwen2.apply_rotary_embedding(self.q_norm(self.q_proj(x)), sin, cos)
        key = qwen2.apply_rotary_embedding(self.k_norm(self.k_proj(x)), sin, cos)
        return _decode(self, queries, key, self.v_proj(x), cache, attn_mask)


def share_prompts(model: Any) -> None:
    """Let a model of Tunix's compute a group's prompt once, with `Sampler`."""
    model.init_cache = lambda *_: {}  # the sampler makes one when it computes the prompts
    for layer in model.layers:
        layer.attn.__class__ = {qwen2.Attention: Attention2, qwen3.Attention: Attention3}[type(layer.attn)]


class Sampler(tunix_sampler.Sampler):
    """Tunix's sampler; with `share_prompts` it computes a prompt once for `group` neighbouring rows that have it.

    A batch that does not consist of such groups has groups of one: other prompts, or a process's slice that cuts a
    group.  There is no beam search with it.
    """

    group = 1

    def init_sample_state(self, all_input_ids, *arguments, **more):
        state = super().init_sample_state(all_input_ids, *arguments, **more)
        if state.cache:  # a model without `share_prompts`
            return state
        ids = np.asarray(all_input_ids)
        equal = np.array_equal(np.repeat(ids[:: self.group], self.group, axis=0), ids)
        # Prefill is compiled for both numbers; Tunix gives the first as an array.
        return dataclasses.replace(
            state,
            num_input_tokens=ids.shape[1],
            sampling_parameters=state.sampling_parameters | {"group": self.group if equal else 1},
        )

    def _prefill_fn(self, params: Any, sampler_state, images=None, echo=True):
        state = sampler_state
        if state.cache:
            return super()._prefill_fn(params, state, images, echo)
        length = state.num_input_tokens
        group = state.sampling_parameters["group"]
        tokens, positions = state.token_buffer[::group, :length], state.positions[::group, :length]
        graph: Any = self._transformer_graphdef
        model = nnx.merge(graph, params)
        cache = qwen3.Qwen3.init_cache(model, len(tokens), length, model.config.dtype)
        mask = utils.make_causal_attn_mask(tokens != self.tokenizer.pad_id(), length)
        norm = model.final_norm
        model.final_norm = lambda x: norm(x[:, -1:])  # a vocabulary is wide, and only the last logits are needed
        logits, cache = model(tokens, positions, cache, mask)
        cache = {
            name: split_cache(layer, group, places=state.token_buffer.shape[1] - length)
            for name, layer in cache.items()
        }
        return self._sample(
            logits=jnp.repeat(logits, group, axis=0), cache=cache, eos=self.eos_ids, sampler_state=state
        )

    def _sample(self, logits, eos, cache, sampler_state):
        state = sampler_state
        shares_prompts = any("prompt_keys" in layer for layer in cache.values())
        plain = state.logprobs_buffer is None and not state.forbidden_token_ids
        if state.sampling_mode != "greedy" or not shares_prompts or not plain:
            return super()._sample(logits, eos, cache, state)
        tokens = first_largest(logits[:, -1])
        at = state.decoding_step + 1
        return dataclasses.replace(
            state,
            decoding_step=at,
            token_buffer=state.token_buffer.at[:, at].set(tokens),
            cache=cache,
            done=state.done | jnp.isin(tokens, eos),
        )


def first_largest(values: jax.Array) -> jax.Array:
    """The place of the largest of values [B, V], the first of equal ones: jnp.argmax, [B].

    XLA's CPU compiler computes an argmax on one thread, and a maximum and a minimum on all of them, which counts with a
    vocabulary of 49,152 words.  Not taken: one uniform number a row and sums of blocks of probabilities, in place of
    noise for each word.  It is faster still and draws from the same distribution, but other texts for a seed.
    """
    vocabulary = values.shape[-1]
    places = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    largest = values.max(-1, keepdims=True)
    return jnp.where(values == largest, places, vocabulary - 1).min(-1)


# The trainer's MaxText model.


def multiply_in_two_dimensions(module: Any) -> None:
    """CPU: let a MaxText model's dense layers fold batch and position into one dimension, [B, T, D] -> [B T, D].

    JAX 0.11, XLA's CPU compiler: a weight's gradient is the product dy^T x, summed over batch and position.  Summed
    over two dimensions, its first operand is copied transposed, and all that computes it is fused into that copy, which
    then reads memory in strides.  With one dimension XLA makes no copy.  The numbers are the same.
    MaxText calls a layer's `quant_dot_general` in place of its product where a model is quantized; it is used here.
    Test: test_xla_still_copies_the_operand_of_a_weight_gradient.
    """
    from maxtext.layers.linears import DenseGeneral

    class TwoDimensions(DenseGeneral):
        @property
        def quant_dot_general(self):
            def product(x, weight, dimensions, **_):
                (inner, _), _ = dimensions  # x [*rows, *inner], weight [*inner, *outer]
                rows, outer = x.shape[: x.ndim - len(inner)], weight.shape[len(inner) :]
                size = math.prod(weight.shape[: len(inner)])
                return jax.lax.dot(
                    x.reshape(-1, size), weight.reshape(size, -1), precision=jax.lax.Precision(self.matmul_precision)
                ).reshape(*rows, *outer)

            return product

    for _, part in nnx.iter_graph(module):
        if type(part) is DenseGeneral and part.quant is None:
            part.__class__ = TwoDimensions


def unroll_layers(module: Any) -> None:
    """CPU: let a MaxText model of at most UNROLLED layers compute them as straight code, not as a scan.

    A scan stacks what each layer keeps for the gradient and slices it again, and XLA fuses nothing across its border.
    Unrolled in parts it would still stack and slice, so a model is unrolled as a whole or not at all.
    Weights and checkpoints stay stacked.  Where model.remat is `minimal` nothing is computed twice: the layers of a
    model that trains on a CPU are small.  Where it is `full` the scan stays: in straight code XLA finds that a layer is
    computed twice, and keeps what it has of the first time (8.0 GiB for four completions of Qwen2.5-0.5B with adapters,
    and 2.5 with the scan).
    MaxText's decoder has the argument and MaxText 0.2.5 no setting for it.
    Test: test_maxtext_still_has_no_setting_for_unrolled_layers.
    """
    from maxtext.layers.nnx_decoders import NNXDecoder

    class Unrolled(NNXDecoder):
        def _apply_layers_sequentially(self, *arguments, length: int, **named):
            keeps_all = self.config.remat_policy == "minimal"
            named["unroll"] = length if keeps_all and length <= UNROLLED else 1
            named["skip_block_remat"] = keeps_all
            return super()._apply_layers_sequentially(*arguments, length=length, **named)

    for _, part in nnx.iter_graph(module):
        if type(part) is NNXDecoder:
            part.__class__ = Unrolled
