"""Self-check's comparison of vLLM's attention with tpu-inference's reference; plain JAX takes the kernel's place."""

import json
import subprocess
import sys

COMPARE = """
import dataclasses, json
from grpo_train.tpu import vllm_on_cpu
vllm_on_cpu.install()
import jax, jax.numpy as jnp
from tpu_inference.layers.common import attention_interface
from grpo_train.tpu import self_check
from grpo_train.tpu import machine_checks
from grpo_train.recipes import load_recipe

changes = ["hardware.accelerator=v6e-1", "rollout.engine=vllm", "rollout.max_prompt_length=64", "model.dtype=bfloat16"]
changes += ["rollout.vllm.options={max_num_seqs: 8}"]
recipe = load_recipe("recipes/tiny-cpu.yaml", changes)
jax.default_backend = lambda: "tpu"
for moved in (0, 1):
    def kernel(mesh, *arrays, attention_sink, sm_scale):
        output, cache = vllm_on_cpu.ragged_paged_attention(*arrays, sm_scale=sm_scale)
        return jnp.roll(output, moved, 0), cache

    attention_interface.sharded_ragged_paged_attention = kernel
    (check,) = machine_checks.examine({"attention": self_check._attention}, recipe)
    print(json.dumps(dataclasses.asdict(check)))
"""


def test_a_kernel_that_gives_each_token_the_output_of_the_one_before_is_found(root):
    done = subprocess.run([sys.executable, "-c", COMPARE], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    good, bad = map(json.loads, done.stdout.splitlines()[-2:])
    assert (good["outcome"], bad["outcome"]) == ("pass", "FAIL"), (good, bad)
    assert "8 sequences in blocks of 16" in good["text"] and "set rollout.engine=tunix" in bad["text"]
