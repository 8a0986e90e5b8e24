"""Worker of step_time.py: the matrix products of a step, and nothing else: what this machine could do at best.

    python dev/benchmarks/step_time.py --write-job /tmp/job.json
    python dev/benchmarks/products.py /tmp/job.json

Each weight matrix meets rows of the shapes that the course's trainer computes, in float32, by XLA.  An update has three
products for each matrix and row of a group: forward, and the gradients of the activations and of the weight.  A rollout
has one for the prompts and one for each token of the completions of a step, at full length.  Attention, norms, sampling
and the optimizer are left out, so `update` of this worker over `update` of another is the fraction of the peak that the
other one reaches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import Job, result, worker_main

from grpo_lib.common import environment

environment.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

SECONDS = 0.3  # that a product is repeated for, at least


def matrices(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """[inputs, outputs] of the weight matrices of a Llama or Qwen, and how many of each there are."""
    width, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return [
        (width, queries, layers), (width, keys, 2 * layers), (queries, width, layers), (width, mlp, 2 * layers),
        (mlp, width, layers), (width, config["vocab_size"], 1),
    ]  # fmt: skip


def seconds_of(rows: int, inputs: int, outputs: int) -> float:
    """Of one product [rows, inputs] x [inputs, outputs]: the fastest of several rounds."""
    a = jnp.ones((rows, inputs))
    b = jnp.ones((inputs, outputs))
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    rounds: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(rounds) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        product(a, b).block_until_ready()
        rounds.append(time.perf_counter() - started)
    return min(rounds)


def train(job: Job) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.model, trust_remote_code=False)
    config = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
    group = job.recipe["grpo"]["group_size"]
    completion = job.recipe["rollout"]["max_completion_length"]
    prompts = [len(ids) for step in job.prompts for ids in tokenizer(step, add_special_tokens=False)["input_ids"]]
    prompt = round(sum(prompts) / len(prompts))
    count = len(job.prompts[0])
    row = prompt - 1 + group * (1 + completion)
    sampled = count * group

    def all_of(rows: int, shapes: Sequence[tuple[int, int, int]], backward: bool = False) -> float:
        """The products of `rows` tokens with each matrix."""
        total = 0.0
        for inputs, outputs, number in shapes:
            forward = seconds_of(rows, inputs, outputs)
            gradients = 0.0
            if backward:
                gradients = seconds_of(rows, outputs, inputs) + seconds_of(inputs, rows, outputs)
            total += number * (forward + gradients)
        return total

    *layers, head = matrices(config)
    updates, rollouts = [], []
    for _ in range(job.steps):
        updates.append(count * (all_of(row, layers, True) + all_of(group * (1 + completion), [head], True)))
        rollouts.append(all_of(count * prompt, layers) + completion * all_of(sampled, [*layers, head]))
    seconds = [update + rollout for update, rollout in zip(updates, rollouts, strict=True)]
    nothing = [0.0] * job.steps
    return result("products", seconds, rollouts, updates, nothing, [completion] * job.steps, packages=("jax",))


if __name__ == "__main__":
    worker_main(train, __doc__)
