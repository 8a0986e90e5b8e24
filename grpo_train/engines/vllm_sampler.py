"""Sampling with vLLM-TPU (tpu-inference): in training, with the MaxText actor's weights, and alone.

`VllmSampler` has the interface of tunix_sampler.TunixSampler.  MaxText maps its weights to the engine's, Tunix copies
them.  `standalone_generate` samples a Hugging Face directory with vLLM's own loader: no MaxText, no Tunix, no sync.

Sampling parameters are always explicit.  vLLM would otherwise take them from the model's generation_config.json
(Qwen2.5 ships top_k 20 and a repetition penalty), and the importance ratio would refer to another distribution.
"""

import dataclasses
import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate import mappings
from tunix.rl.rollout import base_rollout, vllm_rollout
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from grpo_lib.common.errors import CourseError
from grpo_lib.prompts import end_tokens
from grpo_lib.records import Generation
from grpo_train.engines import compat
from grpo_train.engines.model_files import model_directory, read_config
from grpo_train.engines.tokens import encode, load_tokenizer
from grpo_train.engines.weight_sync import Scored, by_name, padded
from grpo_train.recipes import ModelRecipe
from grpo_train.recipes.schema import MAX_BATCHED_TOKENS, HardwareRecipe, VllmRecipe

# vLLM's top_k that cuts nothing.
ALL_TOKENS = -1
# Upper limit of gpu_memory_utilization: the sampler plus what was on the device before it.
FULL = 0.98


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What vLLM's engine needs to know in addition to what Tunix gives it."""

    model: ModelRecipe
    vllm: VllmRecipe
    max_length: int  # tokens of the longest prompt plus completion, including those of the evaluation
    tensor: int | None  # devices of a replica; None: all of them
    seed: int


class VllmSampler(vllm_rollout.VllmRollout):
    """Tunix's vLLM rollout, extended:

    - Every call draws fresh noise from the seed and the number of the call, so that a resumed run repeats it.
    - The text has no end-of-turn token, which would break every reward that looks at the end of the text.
    - It reports lengths, truncation and time per completion batch, and its weights can be checked after a sync.
    """

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, *, engine: EngineSettings):
        """The first four are what Tunix gives its rollout engine."""
        model, settings = engine.model, engine.vllm
        self.mapping = mappings.MappingConfig.build(model=rollout_actor, backend="vllm_jax")
        self.mapping.to_hf_mappings = compat.untied_lm_head_mapping(
            self.mapping.to_hf_mappings, rollout_actor.base.config.model_name
        )
        compat.reshard_on_devices()
        compat.end_forks_with_the_run()
        tensor = engine.tensor or mesh.size
        complete_config = dataclasses.replace(
            rollout_config,
            rollout_mapping_config=self.mapping,
            return_logprobs=True,
            tensor_parallel_size=tensor,
            data_parallel_size=mesh.size // tensor,
            rollout_vllm_model_version=str(model_directory(model)),
            rollout_vllm_tpu_backend_type="jax",
            rollout_vllm_hbm_utilization=utilization(mesh, settings.memory_fraction),
            rollout_vllm_max_num_seqs=settings.max_sequences,
            # The distribution before temperature and cuts, which is what the trainer computes.
            rollout_vllm_logprobs_mode="raw_logprobs",
            rollout_vllm_kwargs=engine_options(settings, model.dtype, engine.seed),
        )
        super().__init__(rollout_actor, tokenizer, engine.max_length, mesh, complete_config)
        self.seed = engine.seed
        self.dtype = model.dtype
        self.calls = 0
        self.scored_rows = 0  # how many completions of a call the engine also scores
        self.seconds: dict[str, float] = defaultdict(float)  # "generating" and "syncing"

    def generate(self, prompts, rollout_config, *, scored: int | None = None, **_: Any) -> base_rollout.RolloutOutput:
        """One completion for each prompt; the engine also scores the first `scored`, by default `scored_rows`, of them:
        each sampled token's log-probability at temperature 1, without top-k or top-p."""
        started = time.perf_counter()
        key = jax.random.fold_in(jax.random.key(self.seed), self.calls)
        self.calls += 1
        scored = self.scored_rows if scored is None else scored
        sampling = []
        for row in range(len(prompts)):
            parameters = SamplingParams(
                max_tokens=rollout_config.max_tokens_to_generate,
                temperature=float(rollout_config.temperature),
                top_k=rollout_config.top_k or ALL_TOKENS,
                top_p=rollout_config.top_p,
                logprobs=1 if row < scored else None,
            )
            sampling.append(parameters)
        ids, completions = _complete(self._sampler.llm, self.hf_tokenizer, prompts, sampling, key)
        width = max(rollout_config.max_prompt_length, *(len(row) for row in ids))
        ends = end_tokens(self.hf_tokenizer)
        generations = [_generation(completion, self.hf_tokenizer, ends) for completion in completions]
        self.truncated = [generation.truncated for generation in generations]
        self.lengths = [generation.tokens for generation in generations]  # with the end token
        self.logps = [_logps(completion) for completion in completions[:scored]]
        left_padded = [[self.pad_id()] * (width - len(row)) + row for row in ids]
        self.last = base_rollout.RolloutOutput(
            text=[generation.text for generation in generations],
            logits=None,
            tokens=[np.asarray(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=np.array(left_padded, np.int32),
            logprobs=None,
        )
        self.seconds["generating"] += time.perf_counter() - started
        return self.last

    def last_scored(self, rows: int, width: int, temperature: float = 1.0) -> Scored:
        """As TunixSampler.last_scored; as many rows at most as `generate` scored, temperature 1 (a recipe asks for no
        other)."""
        completion_ids = padded(self.last.tokens[:rows], width, self.pad_id())
        return Scored(self.last.left_padded_prompt_tokens[:rows], completion_ids, self.logps[:rows])

    def greedy_generate(self, *, max_completion_length: int, **_: Any) -> Callable[..., list[Generation]]:
        """The `generate` of grpo_lib.evaluation, with the weights of the last sync."""
        return _generate_with(lambda: self._sampler.llm, self.hf_tokenizer, max_completion_length)

    @property
    def hf_tokenizer(self) -> Any:
        return self._sampler.tokenizer.tokenizer

    def update_params(self, params, filter_types=None) -> None:
        started = time.perf_counter()
        # Tunix converts what it moves, but after it has moved it.
        super().update_params(jax.tree.map(lambda weight: weight.astype(self.dtype), params), filter_types)
        self.seconds["syncing"] += time.perf_counter() - started

    def weights(self) -> dict[str, jax.Array]:
        """The engine's weights by tpu-inference's names."""
        weights = by_name(self._sampler.transformer_state)
        return {name: value for name, value in weights.items() if "rng" not in name.split(".")}

    def expected(self, actor: dict[str, jax.Array]) -> Iterator[tuple[str, str, jax.Array]]:
        """(actor's name, engine's name, expected value), from MaxText's mapping itself, not through Tunix's sync code:
        it is there to find what that code silently skips."""
        shapes = {name: weight.shape for name, weight in self.weights().items()}
        for source, (target, axes) in self.mapping.to_hf_mappings.items():
            name = source.removeprefix("base.")
            if name not in actor:
                continue
            layers = axes.index("layer") if axes and "layer" in axes else None
            for layer in range(1 if layers is None else actor[name].shape[layers]):
                value = actor[name] if layers is None else jnp.take(actor[name], layer, axis=layers)
                if hook := (self.mapping.to_hf_hook_fns or {}).get(source):
                    value = hook(value)
                where = target.replace("*", str(layer))
                yield name, where, _repeated(value, shapes.get(where, value.shape))


def standalone_generate(
    model: ModelRecipe,
    settings: VllmRecipe,
    hardware: HardwareRecipe,
    *,
    max_length: int,
    max_completion_length: int,
    seed: int,
) -> Callable[..., list[Generation]]:
    """The `generate` of grpo_lib.evaluation for the model's Hugging Face directory, with vLLM's own loader.

    Greedy, or sampled from the whole distribution with a `temperature`.  One replica samples, on as many devices as
    `hardware.sampler_tensor` (or fewer, if the model has fewer key-value heads).  The engine starts at the first
    call.  `max_length`: tokens of the longest prompt plus its completion.
    """
    return _generate_with(
        functools.cache(lambda: _start_engine(model, settings, hardware, max_length, seed)),
        load_tokenizer(model),
        max_completion_length,
    )


def _start_engine(
    model: ModelRecipe, settings: VllmRecipe, hardware: HardwareRecipe, max_length: int, seed: int
) -> LLM:
    # The engine in JAX, and in this process, as it is in a training.
    os.environ |= {"TPU_BACKEND_TYPE": "jax", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    devices = jax.local_devices()
    directory = model_directory(model)
    # The loader of tpu-inference 0.31.0 cannot use more devices than the model has key-value heads.
    config = read_config(directory)
    tensor = math.gcd(hardware.sampler_tensor or hardware.sampler_count(len(devices)), config["num_key_value_heads"])
    if tensor > len(devices):
        raise CourseError(f"hardware.sampler_tensor={tensor}, but JAX finds {len(devices)} devices here")
    indexes = [device.id for device in devices[:tensor]]
    with compat.weights_in(model.dtype, directory) as loaded:
        return LLM(
            model=str(loaded),
            max_model_len=max_length,
            max_num_seqs=settings.max_sequences,
            tensor_parallel_size=tensor,
            gpu_memory_utilization=settings.memory_fraction,
            additional_config={"sharding": {"sharding_strategy": {"device_indexes": indexes}}},
            **engine_options(settings, model.dtype, seed),
        )


def _generate_with(
    engine: Callable[[], LLM], tokenizer: Any, max_completion_length: int
) -> Callable[..., list[Generation]]:
    def generate(
        prompts: list[str], *, temperature: float | None = None, seed: int = 0, **cuts: Any
    ) -> list[Generation]:
        sampling = SamplingParams(max_tokens=max_completion_length, temperature=temperature or 0.0, **cuts)
        _, completions = _complete(engine(), tokenizer, prompts, [sampling] * len(prompts), jax.random.key(seed))
        ends = end_tokens(tokenizer)
        return [_generation(completion, tokenizer, ends) for completion in completions]

    return generate


def _complete(
    llm: LLM, tokenizer: Any, prompts: list[str], sampling: list[SamplingParams], key: jax.Array
) -> tuple[list[list[int]], list[Any]]:
    """(token ids of the prompts, vLLM's completions), both in the order of the prompts; `key` seeds the noise."""
    compat.set_noise(llm, key)
    ends = end_tokens(tokenizer)
    for parameters in sampling:
        parameters.detokenize = False
        parameters.stop_token_ids = ends
        parameters.include_stop_str_in_output = True  # the model also learns when to stop
    ids = encode(tokenizer, prompts)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=row) for row in ids], sampling, use_tqdm=False)
    return ids, [output.outputs[0] for output in outputs]


def _logps(completion: Any) -> np.ndarray:
    """The log-probability of each sampled token, as the engine gives it."""
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return np.array([step[token].logprob for token, step in steps])


def _generation(completion: Any, tokenizer: Any, ends: list[int]) -> Generation:
    ids = list(completion.token_ids)
    truncated = ids[-1] not in ends
    return Generation(tokenizer.decode(ids if truncated else ids[:-1]), len(ids), truncated)


def engine_options(settings: VllmRecipe, dtype: str, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's LLM that are the same in training and alone."""
    return {
        "dtype": dtype,
        "seed": seed,
        "generation_config": "vllm",  # not the model's own sampling defaults
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "hf_overrides": compat.untied_qwen2_config,
        **{key: value for key, value in settings.options.items() if key != "max_num_seqs"},
    }


def utilization(mesh: jax.sharding.Mesh, fraction: float) -> float:
    """The gpu_memory_utilization that leaves `fraction` of a device's memory to the sampler.

    vLLM counts everything on the device, and a colocated actor is there before the engine starts.
    """
    stats = [device.memory_stats() or {} for device in mesh.local_devices]  # a CPU device has none
    used = max(device.get("bytes_in_use", 0) / device.get("bytes_limit", 1) for device in stats)
    return min(used + fraction, FULL)


def _repeated(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Key and value heads repeated to the engine's shape: it repeats them until each shard has one."""
    if len(value.shape) == len(shape):
        for axis, (have, want) in enumerate(zip(value.shape, shape, strict=True)):
            if want > have and want % have == 0:
                value = jnp.repeat(value, want // have, axis=axis)
    return value
