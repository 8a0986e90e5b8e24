"""The baseline: grpo_lib.plain_grpo, GRPO in plain JAX with nothing around it.

    python dev/benchmarks/step_time.py --write-job /tmp/job.json
    python dev/benchmarks/hand_jitted.py /tmp/job.json

Two compiled functions do the work of a step, `plain_grpo.sample` and `plain_grpo.update`.  What a library adds to a
step is what it takes longer than this, at equal padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from job import Job, result, worker_main

from grpo_lib.common import environment

environment.prepare()

import jax  # noqa: E402

from grpo_lib import plain_grpo  # noqa: E402
from grpo_lib.problems import load_problems  # noqa: E402
from grpo_train.recipes import parse_recipe, plain_settings  # noqa: E402


def timed(function: Callable, seconds: list[float]) -> Callable:
    """`function`, which waits for its result and appends the seconds that it took to `seconds`."""

    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        output = jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - started)
        return output

    return call


def train(
    job: Job, name: str = "hand_jitted", sample: Callable = plain_grpo.sample, update: Callable = plain_grpo.update
) -> dict[str, Any]:
    """plain_grpo.train with these two functions, timed.  floor.py has others."""
    recipe = parse_recipe(job.recipe)
    policy = plain_grpo.load_policy(job.model)
    seconds, rollouts, updates, reward, length = ([] for _ in range(5))
    plain_grpo.sample = timed(sample, rollouts)
    plain_grpo.update = timed(update, updates)
    steps = plain_grpo.train(plain_settings(recipe), load_problems(recipe.problems, "train"), policy)
    started = time.perf_counter()  # the first step also finds the longest prompt; it compiles and does not count
    for row, prompts in zip(steps, job.prompts, strict=True):
        seconds.append(time.perf_counter() - started)
        if row["prompts"] != prompts:
            raise ValueError(f"step {row['step']} has other prompts than the job")
        reward.append(row["reward"])
        length.append(float((row["completion_ids"] != policy.config.pad).sum(1).mean()))
        started = time.perf_counter()
    return result(name, seconds, rollouts, updates, reward, length, packages=("jax", "optax", "transformers"))


if __name__ == "__main__":
    worker_main(train, __doc__)
