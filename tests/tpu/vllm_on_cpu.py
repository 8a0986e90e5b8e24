"""Lets vllm-tpu 0.31.0 sample a small dense model on JAX's CPU backend: the engine is real, its kernels are not.

    python tests/tpu/vllm_on_cpu.py -m grpo_lib.cli train recipes/tiny-cpu.yaml rollout.engine=vllm

    import vllm_on_cpu
    vllm_on_cpu.install()                        # before anything imports vllm or asks JAX for its devices

What is replaced, each with its reason in the function that does it: asynchronous dispatch, the compiler options of the
TPU, the mesh maker, the memory reader, the two attention kernels, and the transfer guards around a weight sync.
Scheduler, KV cache, sampling, model code and weight sync are the ones that run on a TPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable

# Attention scores that the causal mask removes.
MASKED = -1e30
# What the memory reader says a CPU device has; vLLM sizes its KV cache by it unless the recipe sets kv_blocks.
MEMORY_BYTES = 2 * 2**30

VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, as the weight sync needs
    "SKIP_JAX_PRECOMPILE": "1",  # compile what is used, when it is used
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def install() -> None:
    """Replace what a CPU does not have.  Calling it again does nothing."""
    if "vllm" in sys.modules:
        if getattr(sys.modules["vllm"], "on_cpu", False):
            return
        raise RuntimeError("vllm_on_cpu.install() comes before the first import of vllm")
    from grpo_lib import environment

    for name, value in VARIABLES.items():
        os.environ[name] = value
    environment.prepare()
    _inputs_read_at_once()
    _no_compiler_options()

    import vllm

    _plain_mesh()
    _memory_reader()
    _plain_attention()
    _transfers_in_a_sync()
    vllm.on_cpu = True


def _inputs_read_at_once() -> None:
    """On a CPU, JAX reads a numpy array where it lies, when the computation comes to it; tpu-inference fills the same
    array again for the next step meanwhile.  A TPU has a copy of its own by then."""
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _no_compiler_options() -> None:
    """tpu-inference compiles its step with options that only the TPU compiler knows."""
    from tpu_inference.models.common import compiler_options

    compiler_options.get_step_fn_compiler_options = dict


def _plain_mesh() -> None:
    """tpu-inference sorts devices by their place on the board (`coords`), which a CPU device does not have."""
    import jax
    import numpy as np
    from tpu_inference import utils
    from tpu_inference.runner import tpu_runner

    def make_mesh(axis_shapes, axis_names, *, devices=None):
        devices = np.array(list(devices or jax.devices())[: int(np.prod(axis_shapes))])
        return jax.sharding.Mesh(devices.reshape(axis_shapes), axis_names)

    utils.make_optimized_mesh = tpu_runner.make_optimized_mesh = make_mesh


def _memory_reader() -> None:
    """A CPU device reports no memory statistics."""
    from tpu_inference import utils

    utils.hbm_usage_bytes = lambda devices: [(0, MEMORY_BYTES)] * len(devices)


def _plain_attention() -> None:
    """The two ragged paged attention kernels are Pallas programs for the TPU; interpret mode does not run them."""
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel as any_head
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 as head_64
    from tpu_inference.layers.common import attention_interface

    def keys_and_values(rows, heads, size):
        # Rows of the cache alternate: key of head 0, value of head 0, key of head 1, ..., each padded to 128.
        pairs = rows[:, :, : 2 * heads].reshape(*rows.shape[:2], heads, 2, -1)
        return pairs[..., 0, :size], pairs[..., 1, :size]

    def halves(rows, heads, size):
        return rows[:, :, :heads, :size], rows[:, :, :heads, size:]  # one row a head: its key, then its value

    attention_interface.ragged_paged_attention = ragged_paged_attention(any_head.merge_kv, keys_and_values)
    attention_interface.ragged_paged_attention_hd64 = ragged_paged_attention(head_64.merge_kv, halves)


def ragged_paged_attention(merge_kv: Callable, split_kv: Callable) -> Callable:
    """Causal attention over a paged KV cache in plain JAX, with the arguments of tpu-inference's kernels.

    T tokens of up to S sequences lie one after the other; a sequence's keys and values fill `page_indices` in order.

    Args:
      merge_kv: (keys, values), each [T, heads, size], to the rows of the cache.
      split_kv: (rows [S, length, ...], heads, size) back to keys and values, [S, length, heads, size].
    """
    import jax
    import jax.numpy as jnp

    def attend(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *, sm_scale=1.0,
        sliding_window=None, soft_cap=None, q_scale=None, k_scale=None, v_scale=None, **_,
    ):  # fmt: skip
        if any(setting is not None for setting in (sliding_window, soft_cap, q_scale, k_scale, v_scale)):
            raise NotImplementedError("the CPU's attention knows no window, soft cap or quantised cache")
        tokens, query_heads, size = queries.shape
        heads, sequences = keys.shape[1], kv_lens.shape[0]
        pages, page_size = kv_cache.shape[:2]
        pages_each = page_indices.shape[0] // sequences
        length = pages_each * page_size

        # Which sequence a token belongs to, and where it stands in it.
        token = jnp.arange(tokens)
        sequence = jnp.clip(jnp.searchsorted(cu_q_lens[1:], token, side="right"), 0, sequences - 1)
        real = token < cu_q_lens[distribution[-1]]
        first = cu_q_lens[sequence]
        new = cu_q_lens[sequence + 1] - first
        position = jnp.where(real, kv_lens[sequence] - new + token - first, 0)

        page = jnp.where(real, page_indices[sequence * pages_each + position // page_size], pages)  # else dropped
        rows = merge_kv(keys, values).astype(kv_cache.dtype)
        kv_cache = kv_cache.at[page, position % page_size].set(rows, mode="drop")
        cached = kv_cache[page_indices.reshape(sequences, pages_each)]
        keys, values = split_kv(cached.reshape(sequences, length, -1, kv_cache.shape[-1]), heads, size)
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        grouped = queries.reshape(tokens, heads, query_heads // heads, size).astype(jnp.float32)

        if tokens <= sequences:  # one new token a sequence
            scores = jnp.einsum("thgd,tlhd->thgl", grouped, keys[sequence]) * sm_scale
            seen = jnp.arange(length)[None] <= position[:, None]
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
            output = jnp.einsum("thgl,tlhd->thgd", weights, values[sequence])
        else:  # prompts: lay the queries out by sequence
            spread = jnp.zeros((sequences, length, *grouped.shape[1:]), jnp.float32)
            spread = spread.at[jnp.where(real, sequence, sequences), position].set(grouped, mode="drop")
            scores = jnp.einsum("sqhgd,slhd->shgql", spread, keys) * sm_scale
            seen = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
            output = jnp.einsum("shgql,slhd->sqhgd", weights, values)[sequence, position]
        output = output.reshape(tokens, query_heads, size).astype(queries.dtype)
        return jnp.where(real[:, None, None], output, 0), kv_cache

    return attend


def _transfers_in_a_sync() -> None:
    """Tunix forbids transfers during a sync unless the backend is a TPU or a GPU; slicing scanned layers makes some."""
    import jax
    from tunix.generate.vllm_sampler import VllmSampler

    update_params = VllmSampler.update_params

    def with_transfers(self, *args, **kwargs):
        with jax.transfer_guard("allow"):
            return update_params(self, *args, **kwargs)

    VllmSampler.update_params = with_transfers


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        sys.exit("usage: python tests/tpu/vllm_on_cpu.py -m MODULE [ARGUMENT ...]")
    install()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
