"""Run vllm-tpu 0.31.0 with a small dense model on JAX's CPU backend: the real engine, another attention.

    python -m grpo_train.tpu.vllm_on_cpu -m grpo_train.cli train recipes/tiny-cpu.yaml rollout.engine=vllm

    from grpo_train.tpu import vllm_on_cpu
    vllm_on_cpu.install()                        # before anything imports vllm or asks JAX for its devices

Scheduler, KV cache, sampling, model code and weight sync are the ones that run on a TPU.  The model's head_dim must be
64, as in assets/tiny-base: the attention kernel for other sizes is not replaced.
"""

import os
import runpy
import sys

from grpo_lib.common import environment

# Memory that a CPU device reports; vLLM sizes its KV cache by it unless num_gpu_blocks_override is set.
MEMORY_BYTES = 2 * 2**30

VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, as the weight sync needs
    "SKIP_JAX_PRECOMPILE": os.environ.get("SKIP_JAX_PRECOMPILE", "1"),  # 1: compile what is used, when it is used
    # Of no slice.  On import tpu-inference 0.31.0 would ask Google's metadata server for them, without a timeout.
    "TPU_ACCELERATOR_TYPE": "none",
    "TPU_NAME": "none",
    "TPU_WORKER_ID": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the command
}


def install() -> None:
    """Replace what needs a TPU."""
    if "vllm" in sys.modules:
        raise RuntimeError("vllm_on_cpu.install() comes before the first import of vllm")
    os.environ.update(VARIABLES)
    environment.prepare()

    import jax
    import numpy as np
    from tpu_inference.models.common import compiler_options

    # On a CPU, JAX reads a numpy array in place, when the computation reaches it; meanwhile tpu-inference fills the
    # same array for the next step.  A TPU has its own copy by then.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # tpu-inference compiles its step with options that only the TPU compiler knows.
    compiler_options.get_step_fn_compiler_options = dict

    from tpu_inference import utils
    from tpu_inference.layers.common import attention_interface
    from tpu_inference.runner import tpu_runner
    from tunix.generate.vllm_sampler import VllmSampler

    def make_mesh(axis_shapes, axis_names, *, devices=None):
        devices = np.array(list(devices or jax.devices())[: int(np.prod(axis_shapes))])
        return jax.sharding.Mesh(devices.reshape(axis_shapes), axis_names)

    # tpu-inference sorts devices by their place on the board (`coords`), which a CPU device does not have, ...
    utils.make_optimized_mesh = tpu_runner.make_optimized_mesh = make_mesh
    # ... nor does it report memory statistics.
    utils.hbm_usage_bytes = lambda devices: [(0, MEMORY_BYTES)] * len(devices)
    # The kernel is a Pallas program for the TPU; interpret mode does not run it.
    attention_interface.ragged_paged_attention_hd64 = ragged_paged_attention

    update_params = VllmSampler.update_params

    def with_transfers(self, *args, **kwargs):
        # Tunix forbids transfers during a sync unless the backend is a TPU or a GPU; slicing scanned layers makes some.
        with jax.transfer_guard("allow"):
            return update_params(self, *args, **kwargs)

    VllmSampler.update_params = with_transfers


def ragged_paged_attention(
    queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *, sm_scale=1.0, **settings
):
    """Causal attention over a paged KV cache in plain JAX, with the arguments of tpu-inference's kernel.

    T tokens of up to S sequences follow one another; a sequence's keys and values fill `page_indices` in order.
    """
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 import merge_kv

    if any(setting is not None for setting in settings.values()):
        raise NotImplementedError("the CPU's attention knows no window, soft cap or quantised cache")
    tokens, _, size = queries.shape
    heads = keys.shape[1]
    sequences = kv_lens.shape[0]
    pages, page_size = kv_cache.shape[:2]
    pages_each = page_indices.shape[0] // sequences
    length = pages_each * page_size

    # The sequence that a token belongs to, and its position in it: the last new token is the last of its sequence.
    token = jnp.arange(tokens)
    sequence = jnp.clip(jnp.searchsorted(cu_q_lens[1:], token, side="right"), 0, sequences - 1)
    real = token < cu_q_lens[distribution[-1]]
    position = jnp.where(real, kv_lens[sequence] - cu_q_lens[sequence + 1] + token, 0)

    page = jnp.where(real, page_indices[sequence * pages_each + position // page_size], pages)  # else dropped
    rows = merge_kv(keys, values).astype(kv_cache.dtype)
    kv_cache = kv_cache.at[page, position % page_size].set(rows, mode="drop")
    cached = kv_cache[page_indices.reshape(sequences, pages_each)].astype(jnp.float32)
    cached = cached.reshape(sequences, length, -1, kv_cache.shape[-1])[:, :, :heads]  # a row a head: its key, its value
    keys, values = cached[..., :size], cached[..., size:]
    asked = queries.astype(jnp.float32)

    if tokens <= sequences:  # one new token a sequence
        seen = jnp.arange(length) <= position[:, None]  # [tokens, length]
        output = jax.nn.dot_product_attention(
            asked[:, None], keys[sequence], values[sequence], mask=seen[:, None, None], scale=sm_scale
        )[:, 0]
    else:  # prompts: lay the queries out by sequence
        spread = jnp.zeros((sequences, length, *asked.shape[1:]), jnp.float32)
        spread = spread.at[jnp.where(real, sequence, sequences), position].set(asked, mode="drop")
        output = jax.nn.dot_product_attention(spread, keys, values, is_causal=True, scale=sm_scale)
        output = output[sequence, position]
    return jnp.where(real[:, None, None], output.astype(queries.dtype), 0), kv_cache


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        sys.exit("usage: python -m grpo_train.tpu.vllm_on_cpu -m MODULE [ARGUMENT ...]")
    install()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
