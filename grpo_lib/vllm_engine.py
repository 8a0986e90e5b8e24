"""The rollout engine of the TPU tier: vLLM-TPU (tpu-inference), fed with the MaxText actor's weights through Tunix.

`VllmSampler` stands behind the same seam as rollout.TunixSampler: a class that Tunix's RLCluster makes, with the same
methods for sampling, syncing and checking.  MaxText says which of its weights is which of the engine's, Tunix moves
them; where the released versions do not fit each other, one named function says which and why.

Sampling parameters are written out here.  vLLM would otherwise fill them in from the model's generation_config.json
(Qwen2.5 ships top_k 20 and a repetition penalty), and the importance ratio would be taken to another distribution.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from grpo_lib import environment
from grpo_lib.generation import Generation
from grpo_lib.models import model_directory
from grpo_lib.recipes import Recipe

environment.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from tunix.generate import mappings  # noqa: E402
from tunix.rl.rollout import base_rollout, vllm_rollout  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

from grpo_lib.rollout import Scored, Seconds, by_name, padded  # noqa: E402

# MaxText's name of the output layer of an untied model, and tpu-inference's of Qwen2.5's and Qwen3's.
ACTOR_HEAD = "base.decoder.logits_dense.kernel"
QWEN_HEAD = "lm_head.weight"

# Of a device's memory, at most this much is ever given to the sampler and what was there before it.
FULL = 0.98


class VllmSampler(vllm_rollout.VllmRollout):
    """Tunix's vLLM rollout, with what the course needs of an engine.

    - Every call draws fresh noise from the seed and the number of the call, so that a resumed run repeats it.
    - The text has no end-of-turn token: it would stand in the way of every reward that looks at the end.
    - It says how long completions were, which were cut off, and where the time went; and it can be checked.
    """

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, *, recipe: Recipe, max_length: int):
        """
        Args:
          max_length: tokens of the longest prompt and completion, those of the evaluation included.
        """
        self.mapping = mappings.MappingConfig.build(model=rollout_actor, backend="vllm_jax")
        self.mapping.to_hf_mappings = untied_lm_head_mapping(
            self.mapping.to_hf_mappings, rollout_actor.base.config.model_name
        )
        settings, tensor = recipe.rollout.vllm, recipe.hardware.sampler_tensor or mesh.size
        super().__init__(
            rollout_actor,
            tokenizer,
            max_length,
            mesh,
            dataclasses.replace(
                rollout_config,
                rollout_mapping_config=self.mapping,
                return_logprobs=True,
                tensor_parallel_size=tensor,
                data_parallel_size=mesh.size // tensor,
                rollout_vllm_model_version=str(model_directory(recipe.model)),
                rollout_vllm_tpu_backend_type="jax",
                rollout_vllm_hbm_utilization=utilization(mesh, settings.memory_fraction),
                rollout_vllm_max_num_seqs=settings.max_sequences,
                # The distribution before temperature and cuts, which is what the trainer computes.
                rollout_vllm_logprobs_mode="raw_logprobs",
                rollout_vllm_kwargs=engine_options(recipe),
            ),
        )
        self.seed = recipe.seed
        self.calls = 0
        self.scored_rows = 0  # of a call, how many the engine also scores
        self.seconds = Seconds()
        self.truncated: list[bool] = []  # of the last call, one per completion
        self.lengths: list[int] = []  # likewise, in tokens, the end token included

    def generate(self, prompts, rollout_config, *, scored: int | None = None, **_: Any) -> base_rollout.RolloutOutput:
        """Sample one completion for each prompt.

        Args:
          scored: of so many, the first ones, also return each sampled token's log-probability, under the model as it is
            (temperature 1, no cuts); None: as `scored_rows` says.
        """
        started = time.perf_counter()
        set_noise(self._sampler, jax.random.fold_in(jax.random.key(self.seed), self.calls))
        self.calls += 1
        scored = self.scored_rows if scored is None else scored
        ids, completions = self._complete(
            prompts,
            [
                SamplingParams(
                    max_tokens=rollout_config.max_tokens_to_generate,
                    temperature=rollout_config.temperature,
                    top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
                    top_k=rollout_config.top_k or -1,
                    logprobs=1 if row < scored else None,
                )
                for row in range(len(prompts))
            ],
        )
        width = max(rollout_config.max_prompt_length, *(len(row) for row in ids))
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        self.truncated = [self._truncated(completion) for completion in completions]
        self.lengths = [len(completion.token_ids) for completion in completions]
        self.logps = [_logprobs(completion) for completion in completions[:scored]]
        self.last = base_rollout.RolloutOutput(
            text=[self._text(completion) for completion in completions],
            logits=None,
            tokens=[np.asarray(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=padded,
            logprobs=None,
        )
        self.seconds.add("generating", started)
        return self.last

    def last_scored(self, rows: int, width: int) -> Scored:
        """As TunixSampler.last_scored; at most `scored_rows` of them."""
        tokens = self.last.tokens[:rows]
        return Scored(
            self.last.left_padded_prompt_tokens[:rows], padded(tokens, width, self.pad_id()), self.logps[:rows]
        )

    def scored(self, prompts, rollout_config) -> tuple[base_rollout.RolloutOutput, list[np.ndarray]]:
        """Completions, and the engine's log-probability of each of their tokens, at temperature 1."""
        output = self.generate(prompts, rollout_config, scored=len(prompts))
        return output, self.logps

    def greedy_generate(self, *, max_completion_length: int, **_: Any) -> Callable[..., list[Generation]]:
        """The `generate` of grpo_lib.evaluation, from the weights of the last sync; as rollout.greedy_generate."""

        def generate(prompts: list[str], *, temperature: float | None = None, seed: int = 0) -> list[Generation]:
            set_noise(self._sampler, jax.random.key(seed))
            sampling = SamplingParams(max_tokens=max_completion_length, temperature=temperature or 0.0)
            return [
                Generation(self._text(completion), len(completion.token_ids), self._truncated(completion))
                for completion in self._complete(prompts, [sampling] * len(prompts))[1]
            ]

        return generate

    def update_params(self, params, filter_types=None) -> None:
        started = time.perf_counter()
        super().update_params(params, filter_types)
        self.seconds.add("syncing", started)

    def take_seconds(self, what: str) -> float:
        """Seconds spent "generating" or "syncing" since the last time this was asked."""
        return self.seconds.take(what)

    def weights(self) -> dict[str, jax.Array]:
        """The engine's weights by tpu-inference's names."""
        weights = by_name(self._sampler.transformer_state)
        return {name: value for name, value in weights.items() if "rng" not in name.split(".")}

    def expected(self, actor: dict[str, jax.Array]) -> Iterator[tuple[str, str, jax.Array]]:
        """(actor's name, engine's name, the value that it should have), from MaxText's mapping.

        Reads the mapping for itself, not through the code of Tunix that moves the weights: what that code silently
        leaves out is what this is for.
        """
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

    def _complete(self, prompts: list[str], sampling: list[SamplingParams]) -> tuple[list[list[int]], list[Any]]:
        """(token ids of the prompts, vLLM's completions), both in the order of the prompts."""
        for one in sampling:
            one.detokenize = False
            one.stop_token_ids = [self.eos_id()]
            one.include_stop_str_in_output = True  # stopping is learned too
        ids = self._sampler.tokenizer.tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        outputs = self._sampler.llm.generate(
            [TokensPrompt(prompt_token_ids=row) for row in ids], sampling, use_tqdm=False
        )
        return ids, [output.outputs[0] for output in outputs]

    def _truncated(self, completion: Any) -> bool:
        return completion.token_ids[-1] != self.eos_id()

    def _text(self, completion: Any) -> str:
        ids = list(completion.token_ids)
        return self._sampler.tokenizer.decode(ids if self._truncated(completion) else ids[:-1])


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """Arguments of vLLM's LLM that do not depend on where it runs."""
    settings = recipe.rollout.vllm
    optional = {"block_size": settings.block_size, "num_gpu_blocks_override": settings.kv_blocks}
    return {
        "dtype": recipe.model.dtype,
        "seed": recipe.seed,
        "generation_config": "vllm",  # none of the model's own
        "hf_overrides": untied_qwen2_config,
        **{key: value for key, value in optional.items() if value},
    }


def untied_lm_head_mapping(mapping: dict[str, tuple], model_name: str) -> dict[str, tuple]:
    """MaxText's weight mapping, with the output layer of untied Qwen2.5 and Qwen3 models where the engine keeps it.

    MaxText 0.2.5 sends it to `model.lm_head`; tpu-inference 0.31.0 calls it `lm_head.weight` in these two families
    (in Llama's, `model.lm_head` is right); google-tunix 0.1.7 only logs that there is no such key.  The engine then
    samples from a random output layer.
    """
    if not model_name.startswith(("qwen2.5", "qwen3")) or ACTOR_HEAD not in mapping:
        return mapping
    _, axes = mapping[ACTOR_HEAD]
    return mapping | {ACTOR_HEAD: (QWEN_HEAD, axes)}


def untied_qwen2_config(config: Any) -> Any:
    """A Hugging Face config that tpu-inference can make an untied Qwen2.5 from; for vLLM's `hf_overrides`.

    tpu-inference 0.31.0 (models/jax/qwen2.py) reads `hf_config.text_config.hidden_size` as the default of a getattr, so
    it is read also when it is not needed, and a text model has no text_config: AttributeError.
    """
    if config.model_type == "qwen2" and not config.tie_word_embeddings and not hasattr(config, "text_config"):
        config.text_config = copy.deepcopy(config)
    return config


def set_noise(sampler: Any, key: jax.Array) -> None:
    """Give the engine the random key of its next call.

    tpu-inference 0.31.0 takes no seed with a request; its runner splits one key from step to step, made from the
    engine's own seed.  Without this a resumed run would sample the noise of its first steps again.
    """
    runner = sampler._model_runner
    replicated = jax.sharding.NamedSharding(runner.mesh, jax.sharding.PartitionSpec())
    runner.rng_params_for_sampling = jax.device_put(key, replicated)


def utilization(mesh: jax.sharding.Mesh, fraction: float) -> float:
    """The share of a device's memory that vLLM may see in use, for the sampler to have `fraction` of it.

    vLLM counts all that lies on the device, and a colocated actor lies there before the engine starts.
    """
    used = 0.0
    for device in mesh.local_devices:
        if stats := device.memory_stats():  # a CPU device has none
            used = max(used, stats["bytes_in_use"] / stats["bytes_limit"])
    return min(used + fraction, FULL)


def _logprobs(completion: Any) -> np.ndarray:
    return np.array(
        [step[token].logprob for token, step in zip(completion.token_ids, completion.logprobs, strict=True)]
    )


def _repeated(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Key and value heads as often as the engine has them: it repeats them until each shard has one."""
    if len(value.shape) == len(shape):
        for axis, (have, want) in enumerate(zip(value.shape, shape, strict=True)):
            if want > have and want % have == 0:
                value = jnp.repeat(value, want // have, axis=axis)
    return value
