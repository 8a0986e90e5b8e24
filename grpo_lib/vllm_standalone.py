"""A Hugging Face directory sampled by vLLM alone: its own loader, no MaxText, no Tunix and no weight sync in between.

What `grpo evaluate` and notebook 04 use where a recipe says `rollout.engine: vllm`: any model that vLLM-TPU reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.generation import Generation
from grpo_lib.models import load_tokenizer, model_directory
from grpo_lib.recipes import Recipe

environment.prepare()

import jax  # noqa: E402


def standalone_generate(recipe: Recipe, max_length: int) -> Callable[..., list[Generation]]:
    """The `generate` of grpo_lib.evaluation: greedy, or sampled from the whole distribution with a `temperature`.

    One replica samples, on as many devices as the recipe's `sampler_tensor` (or fewer, if the model has fewer key-value
    heads).  The engine starts at the first call.

    Args:
      max_length: tokens of the longest prompt and its completion.
    """
    engine: Any = None
    tokenizer = load_tokenizer(recipe.model)

    def generate(prompts: list[str], *, temperature: float | None = None, seed: int = 0) -> list[Generation]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        from grpo_lib.vllm_engine import set_noise

        nonlocal engine
        engine = engine or _start(recipe, max_length)
        set_noise(_Runner(engine), jax.random.key(seed))
        sampling = SamplingParams(
            max_tokens=recipe.evaluation_completion_length, temperature=temperature or 0.0,
            stop_token_ids=[tokenizer.eos_token_id], include_stop_str_in_output=True, detokenize=False,
        )  # fmt: skip
        ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        answers = engine.generate([TokensPrompt(prompt_token_ids=row) for row in ids], sampling, use_tqdm=False)
        return [_generation(list(answer.outputs[0].token_ids), tokenizer) for answer in answers]

    return generate


class _Runner:
    """What `set_noise` asks of Tunix's sampler, from an engine without it."""

    def __init__(self, engine: Any):
        self._model_runner = engine.llm_engine.model_executor.driver_worker.model_runner


def _start(recipe: Recipe, max_length: int) -> Any:
    # The engine in JAX, and in this process, as it is in a training.
    os.environ |= {"TPU_BACKEND_TYPE": "jax", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    from grpo_lib.vllm_engine import engine_options

    settings, hardware, devices = recipe.rollout.vllm, recipe.hardware, jax.local_devices()
    wanted = hardware.sampler_tensor or hardware.sampler_count(len(devices))
    # The loader of tpu-inference 0.31.0 cannot give more devices a key-value head than the model has of them.
    directory = model_directory(recipe.model)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensor = math.gcd(wanted, config["num_key_value_heads"])
    if tensor > len(devices):
        raise CourseError(f"hardware.sampler_tensor={tensor}, and JAX finds {len(devices)} devices here")
    sharding = {"sharding_strategy": {"device_indexes": [device.id for device in devices[:tensor]]}}
    return LLM(
        model=str(directory),
        max_model_len=max_length,
        max_num_seqs=settings.max_sequences,
        tensor_parallel_size=tensor,
        gpu_memory_utilization=settings.memory_fraction,
        additional_config={"sharding": sharding},
        **engine_options(recipe),
    )


def _generation(ids: list[int], tokenizer: Any) -> Generation:
    truncated = ids[-1] != tokenizer.eos_token_id
    return Generation(tokenizer.decode(ids if truncated else ids[:-1]), len(ids), truncated)
