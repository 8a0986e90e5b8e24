"""The rollout engine of the CPU tier: Tunix's sampler on Tunix's Qwen3, fed with the MaxText actor's weights.

Actor and sampler are two implementations of one model, as they are on a TPU with vLLM.  So the same two questions
arise, and the same two checks answer them after the first sync: did every weight arrive, and do both sides give the
same log-probability to the same tokens?  Arrival alone is not enough: a weight can arrive and be read wrongly.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import environment, processes
from grpo_lib.errors import CourseError
from grpo_lib.generation import Generation

environment.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.generate import sampler as tunix_sampler  # noqa: E402
from tunix.models.qwen3 import model as qwen3  # noqa: E402
from tunix.rl.rollout import base_rollout, vanilla_rollout  # noqa: E402

# Tunix name -> MaxText name.  MaxText scans its layers: one array holds all of them, stacked on axis 1.
LAYER_WEIGHTS = {
    "input_layernorm.w": "pre_self_attention_layer_norm.scale",
    "attn.q_proj.w": "self_attention.query.kernel",
    "attn.k_proj.w": "self_attention.key.kernel",
    "attn.v_proj.w": "self_attention.value.kernel",
    "attn.q_norm.w": "self_attention.query_norm.scale",
    "attn.k_norm.w": "self_attention.key_norm.scale",
    "attn.o_proj.w": "self_attention.out.kernel",
    "post_attention_layernorm.w": "post_self_attention_layer_norm.scale",
    "mlp.gate_proj.kernel": "mlp.wi_0.kernel",
    "mlp.up_proj.kernel": "mlp.wi_1.kernel",
    "mlp.down_proj.kernel": "mlp.wo.kernel",
}
OTHER_WEIGHTS = {
    "embedder.input_embedding": "token_embedder.embedding",
    "final_norm.w": "decoder.decoder_norm.scale",
    "lm_head.w": "decoder.logits_dense.kernel",  # untied models only
}
STACKED = "decoder.layers."
SCAN_AXIS = 1
LAYER_NAME = re.compile(r"layers\.\d+\.(.+)")

# In float32 the two implementations differ by 6e-3 at most and 2e-4 in the mean, because MaxText multiplies by a tied
# embedding in bfloat16; a weight in the wrong place gives a mean of several nats.
#
# bfloat16 keeps 8 bits, and the two round in other places: .0016 to .0094 in the mean on the tiny model.  Wrong runs
# had 3.9 and more, so the limit leaves room for deeper models.
MAX_MEAN_GAP = {"float32": 0.02, "bfloat16": 0.1}

# Tokens from which on greedy_generate makes its batches smaller, since attention needs memory in their square.
LONG_PROMPT = 128


@dataclass(frozen=True)
class SyncCheck:
    """What `check_sync` found.  Gaps are absolute differences of log-probabilities, in nats."""

    weights: int
    tokens: int
    mean_gap: float
    max_gap: float


@dataclass(frozen=True)
class Scored:
    """Completions and what the sampler makes of them.

    prompt_ids [B, P], padded on the left; completion_ids [B, C], padded on the right; logps: one array per completion,
    nats, at temperature 1.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logps: list[np.ndarray]


class Seconds:
    """Time spent, by what it was spent on."""

    def __init__(self):
        self.spent: dict[str, float] = {}

    def add(self, what: str, started: float) -> None:
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - started

    def take(self, what: str) -> float:
        """Seconds since the last time this was asked."""
        return self.spent.pop(what, 0.0)


class RowSampler(tunix_sampler.Sampler):
    """Tunix's sampler with a random key for each row, so that a completion does not depend on its neighbours.

    `seed` is then [B, 2], see `row_keys`: the same completions come out in one batch, in several passes, over several
    processes.  Tunix draws the noise of a whole batch from one key.

    With a `sharding` of the weights, which is replicated, the rows of a batch are spread over the devices that hold
    them, where they divide.
    """

    sharding: jax.sharding.NamedSharding | None = None

    def init_sample_state(self, all_input_ids, *arguments, **more):
        state = super().init_sample_state(all_input_ids, *arguments, **more)
        mesh, rows = self.sharding and self.sharding.mesh, len(all_input_ids)
        if mesh is None or rows % mesh.size:
            return state
        by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))

        def spread(leaf):
            has_rows = isinstance(leaf, jax.Array) and leaf.ndim and len(leaf) == rows
            return jax.device_put(leaf, by_row) if has_rows else leaf

        return jax.tree.map(spread, state)

    def _sample(self, logits, eos, cache, sampler_state):
        if sampler_state.sampling_mode != "top_p" or sampler_state.seed.ndim == 1:  # greedy, or one key for all
            return super()._sample(logits, eos, cache, sampler_state)
        scores = _cut(
            logits[:, -1].astype(jnp.float32) / sampler_state.temperature,
            sampler_state.sampling_parameters["top_p"],
            sampler_state.sampling_parameters["top_k"],
        )
        keys = jax.vmap(jax.random.fold_in, (0, None))(sampler_state.seed, sampler_state.decoding_step)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
        # The largest of scores and Gumbel noise is a sample of softmax(scores).
        greedy = dataclasses.replace(sampler_state, sampling_mode="greedy")
        state = super()._sample((scores + noise)[:, None], eos, cache, greedy)
        return dataclasses.replace(state, sampling_mode="top_p")


def row_keys(key: jax.Array, rows: np.ndarray) -> jax.Array:
    """A random key for each row of a step, [B, 2]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(rows))


def _cut(scores: jax.Array, top_p: float, top_k: int | None) -> jax.Array:
    """[B, V]: -inf for all but the `top_k` best, and for those beyond a probability of `top_p` together."""
    if not top_k and top_p >= 1:
        return scores
    best = jax.lax.top_k(scores, top_k or scores.shape[-1])[0]
    probabilities = jax.nn.softmax(best, axis=-1)
    kept = jnp.cumsum(probabilities, axis=-1) - probabilities <= top_p
    worst = jnp.min(jnp.where(kept, best, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scores >= worst, scores, -jnp.inf)


class TunixSampler(vanilla_rollout.VanillaRollout):
    """Tunix's vanilla rollout, with what the released 0.1.7 lacks for a MaxText actor.

    - Weights are translated at every sync (`update_params`), on the device: Tunix syncs under transfer guards.
    - Every completion draws noise of its own, which the seed, the step and its place in the step decide (`RowSampler`):
      without a seed the stock engine samples with PRNGKey(0) each time.
    - Completions keep their end-of-sequence token, so that stopping is learned too; the stock engine cuts it off.
    - Of several processes each samples its share on its own devices, and receives the others' completions.
    """

    def __init__(
        self, rollout_actor, tokenizer, mesh, rollout_config, *,
        seed: int = 0, passes: int = 1, **_: Any,
    ):  # fmt: skip
        """`mesh`: of this process's devices; `passes`: calls of `generate` per step."""
        module = sampler_module(rollout_actor.base.config)
        # Several devices: each holds the whole model.  This engine is for models that are small.
        self.sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()) if mesh.size > 1 else None
        nnx.update(module, self._translate(nnx.state(rollout_actor, nnx.Param), nnx.state(module, nnx.Param)))
        config = module.config
        cache = base_rollout.CacheConfig(
            rollout_config.kv_cache_size, config.num_layers, config.num_kv_heads, config.head_dim
        )
        super().__init__(module, tokenizer, cache)
        self._sampler = RowSampler(module, tokenizer, tunix_sampler.CacheConfig(**dataclasses.asdict(cache)))
        self._sampler.sharding = self.sharding
        self.seed, self.passes = seed, passes
        self.calls = 0  # of generate, so far; a run that goes on after a step sets it
        self.seconds = Seconds()
        self.truncated: list[bool] = []  # of the last call, one per completion
        self.lengths: list[int] = []  # likewise, in tokens, the end token included

    def generate(self, prompts, rollout_config, **kwargs) -> base_rollout.RolloutOutput:
        started = time.perf_counter()
        step, passed = divmod(self.calls, self.passes)
        rows = passed * len(prompts) + np.arange(len(prompts))
        keys = row_keys(jax.random.fold_in(jax.random.PRNGKey(self.seed), step), rows)
        self.calls += 1
        own = processes.share(len(prompts))
        output = super().generate(prompts[own], dataclasses.replace(rollout_config, seed=keys[own]), **kwargs)
        if processes.several():
            output = _gathered(output)
        limit = rollout_config.max_tokens_to_generate
        # Tunix cuts a completion at its end token; one that fills the limit never had one.
        self.truncated = [len(tokens) >= limit for tokens in output.tokens]
        tokens = [
            ids if truncated else np.append(ids, np.int32(self.eos_id()))
            for ids, truncated in zip(output.tokens, self.truncated, strict=True)
        ]
        self.lengths = [len(ids) for ids in tokens]
        self.last = dataclasses.replace(output, tokens=tokens)
        self.seconds.add("generating", started)
        return self.last

    def last_scored(self, rows: int, width: int) -> Scored:
        """The first `rows` completions of the last call, `width` tokens wide, as the sampler scores them."""
        prompt_ids = self.last.left_padded_prompt_tokens[:rows]
        tokens = self.last.tokens[:rows]
        completion_ids = padded(tokens, width, self.pad_id())
        return Scored(prompt_ids, completion_ids, self._logps(prompt_ids, completion_ids, tokens))

    def _logps(self, prompt_ids, completion_ids, tokens) -> list[np.ndarray]:
        """Log-probabilities of `tokens`, at temperature 1."""
        logps = np.asarray(self.get_per_token_logps(jnp.asarray(prompt_ids), jnp.asarray(completion_ids)))
        return [row[: len(ids)] for row, ids in zip(logps, tokens, strict=True)]

    def update_params(self, params, filter_types=None) -> None:
        started = time.perf_counter()
        self._sampler.transformer_state = self._translate(params, self._sampler.transformer_state)
        self.seconds.add("syncing", started)

    def _translate(self, params: nnx.State, state: nnx.State) -> nnx.State:
        state = translate_weights(params, state)
        return processes.copied_here(state, self.sharding) if self.sharding else state

    def take_seconds(self, what: str) -> float:
        """Seconds spent "generating" or "syncing" since the last time this was asked."""
        return self.seconds.take(what)

    def model(self) -> None:
        """None says that weights are not shared; Tunix's own comparison fails when the two trees differ in shape."""
        return None

    def module_and_state(self) -> tuple[nnx.Module, nnx.State]:
        """The sampler's module and its weights as of the last sync."""
        return self._sampler.transformer, self._sampler.transformer_state

    def weights(self) -> dict[str, jax.Array]:
        """The sampler's weights by Tunix name."""
        return by_name(self._sampler.transformer_state)

    def expected(self, actor: dict[str, jax.Array]) -> Iterator[tuple[str, str, jax.Array]]:
        """(actor's name, sampler's name, the value that it should have), for every weight that has a place here."""
        translated = _translate(actor)
        if self.sharding:
            translated = processes.copied_here(translated, self.sharding)
        for name, value in translated.items():
            layer = LAYER_NAME.fullmatch(name)
            source = STACKED + LAYER_WEIGHTS[layer[1]] if layer else OTHER_WEIGHTS[name]
            yield source, name, value

    def scored(self, prompts, rollout_config) -> tuple[base_rollout.RolloutOutput, list[np.ndarray]]:
        """Completions, and the sampler's log-probability of each of their tokens, at temperature 1."""
        output = self.generate(prompts, rollout_config)
        completions = padded(output.tokens, rollout_config.max_tokens_to_generate, self.pad_id())
        return output, self._logps(output.left_padded_prompt_tokens, completions, output.tokens)

    def greedy_generate(self, *, max_completion_length: int, batch_size: int) -> Callable[..., list[Generation]]:
        """The `generate` of grpo_lib.evaluation, from the weights of the last sync."""
        tokenizer = self._sampler.tokenizer.tokenizer
        return greedy_generate(
            self.module_and_state, tokenizer, max_completion_length=max_completion_length, batch_size=batch_size,
            sharding=self.sharding,
        )  # fmt: skip


def sampler_module(config: Any) -> qwen3.Qwen3:
    """An uninitialised Tunix Qwen3 of the same sizes as a MaxText config.

    Raises CourseError for another architecture than Qwen3 (vLLM is the engine for those).
    """
    _require_qwen3(config.model_name, config.rope_max_timescale)
    return qwen3.Qwen3(
        qwen3.ModelConfig(
            num_layers=config.num_decoder_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.emb_dim,
            hidden_dim=config.mlp_dim,
            num_heads=config.num_query_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            rope_theta=config.rope_max_timescale,
            norm_eps=config.normalization_layer_epsilon,
            use_tied_embedding=config.logits_via_embedding,
        ),
        rngs=nnx.Rngs(0),
    )


def translate_weights(actor_state: nnx.State, sampler_state: nnx.State) -> nnx.State:
    """MaxText's parameters in the tree of Tunix's Qwen3.  A weight without a counterpart keeps its old value
    here and is named by `check_sync`."""
    arrived = _translate(by_name(actor_state))
    return nnx.State.from_flat_path(
        {
            path: variable.replace(arrived.get(".".join(map(str, path)), variable.get_value()))
            for path, variable in sampler_state.flat_state()
        }
    )


def _gathered(output: base_rollout.RolloutOutput) -> base_rollout.RolloutOutput:
    """The completions of all processes."""
    tables = (output.text, [ids.tolist() for ids in output.tokens], output.left_padded_prompt_tokens.tolist())
    text, tokens, prompts = zip(*processes.gather(list(zip(*tables, strict=True))), strict=True)
    tokens = [np.array(ids, np.int32) for ids in tokens]
    return dataclasses.replace(
        output, text=list(text), tokens=tokens, left_padded_prompt_tokens=np.array(prompts, np.int32),
        logits=None, logprobs=None,
    )  # fmt: skip


def check_sync(
    sampler: Any, actor_module: nnx.Module, prompts: list[str], config, logps: Callable, dtype: str = "float32"
) -> SyncCheck:
    """Compare sampler and trainer after a sync, and refuse to go on when they differ.

    Args:
      sampler: a TunixSampler or a VllmSampler.
      prompts: rendered prompts to sample one completion each from.
      config: Tunix RolloutConfig used for sampling.
      logps: (prompt_ids [B, P], completion_ids [B, C]) -> [B, C], the trainer's log-probabilities.
      dtype: of the weights; it decides the gap that is allowed.

    Raises:
      CourseError: a weight of the actor has no place in the sampler or arrived with another value (it is named), or
        the mean gap of the log-probabilities is above MAX_MEAN_GAP.
    """
    actor = by_name(nnx.state(actor_module, nnx.Param))
    check_weights(sampler, actor)
    output, sampled = sampler.scored(prompts, config)
    completions = padded(output.tokens, config.max_tokens_to_generate, sampler.pad_id())
    trained = logps(output.left_padded_prompt_tokens, completions)
    gap = np.concatenate([np.abs(ours - theirs[: len(ours)]) for ours, theirs in zip(sampled, trained, strict=True)])
    check = SyncCheck(len(actor), int(gap.size), float(gap.mean()), float(gap.max()))
    if not check.mean_gap <= MAX_MEAN_GAP[dtype]:  # also true for NaN
        raise CourseError(
            f"sampler and trainer disagree: log-probabilities of the same {check.tokens} tokens differ by "
            f"{check.mean_gap:.3g} in the mean (limit {MAX_MEAN_GAP[dtype]}); the two do not compute the same model"
        )
    return check


def check_weights(sampler: Any, actor: dict[str, jax.Array]) -> None:
    """Refuse, with its name, a weight that was not synced: on either side, or with another value."""
    weights, arrived, fed = sampler.weights(), set(), set()
    for source, name, value in sampler.expected(actor):
        if name not in weights:
            raise CourseError(
                f"weight {source} of the actor has no counterpart in the sampler, which has no {name}: "
                "it would never be synced"
            )
        weight = weights[name]
        if value.shape != weight.shape or not bool(
            jnp.array_equal(jax.device_put(value, weight.sharding).astype(weight.dtype), weight)
        ):
            raise CourseError(f"weight {name} of the sampler differs from the actor's {source} after a sync")
        arrived.add(source)
        fed.add(name)
    if unknown := sorted(actor.keys() - arrived):
        raise CourseError(
            f"weight {unknown[0]} of the actor has no counterpart in the sampler: it would never be synced"
        )
    if starved := sorted(weights.keys() - fed):
        raise CourseError(f"weight {starved[0]} of the sampler is fed by no weight of the actor")


def padded(tokens: list[np.ndarray], width: int, pad: int) -> np.ndarray:
    """[B, width], padded on the right."""
    rows = np.full((len(tokens), width), pad, np.int32)
    for row, ids in zip(rows, tokens, strict=True):
        row[: len(ids)] = ids
    return rows


@jax.jit
def _translate(actor: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Unstack MaxText's scanned layers and rename.  Weights that the actor lacks are left out."""
    moved = {tunix: actor[maxtext] for tunix, maxtext in OTHER_WEIGHTS.items() if maxtext in actor}
    for tunix, maxtext in LAYER_WEIGHTS.items():
        stack = actor.get(STACKED + maxtext)
        for layer in range(0 if stack is None else stack.shape[SCAN_AXIS]):
            moved[f"layers.{layer}.{tunix}"] = jnp.take(stack, layer, axis=SCAN_AXIS)
    return moved


def by_name(state: nnx.State) -> dict[str, jax.Array]:
    """Dotted name -> array; the adapter's own level, `base`, is left out of MaxText's names."""
    return {
        ".".join(str(part) for part in path if part != "base"): variable.get_value()
        for path, variable in state.flat_state()
    }


def greedy_generate(
    sampler_state: Callable[[], tuple[Any, nnx.State]],
    tokenizer,
    *,
    max_completion_length: int,
    batch_size: int,
    bucket: int = 16,
    sharding: jax.sharding.NamedSharding | None = None,
) -> Callable[..., list[Generation]]:
    """A `generate` for grpo_lib.evaluation: greedy completions from Tunix's sampler.

    The function that it returns samples when it is given a `temperature`, from the whole distribution (no top-k, no
    top-p); its `seed` and the prompts then decide what comes out.

    Args:
      sampler_state: gives (module, weights) at the time of each call, so that a policy in training is
        evaluated as it is.
      batch_size: prompts sampled at once; fewer when they are longer than LONG_PROMPT tokens.  Batches are filled up to
        their size, and prompts to multiples of `bucket` tokens, so that few shapes are compiled.  No prompt is cut.
      sharding: of the weights, where they are on several devices.

    Of several processes, each answers its share of the prompts; all of them call it, with the same ones.
    """
    samplers: dict[int, RowSampler] = {}

    def generate(prompts: list[str], *, temperature: float | None = None, seed: int = 0) -> list[Generation]:
        if not processes.several():
            return generate_here(prompts, temperature, seed)
        own = prompts[processes.share(len(prompts))]
        answers = generate_here(own, temperature, seed) if own else []
        return [Generation(**fields) for fields in processes.gather([dataclasses.asdict(a) for a in answers])]

    def generate_here(prompts: list[str], temperature: float | None, seed: int) -> list[Generation]:
        longest = max(len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"])
        width = -(-longest // bucket) * bucket
        module, state = sampler_state()
        if width not in samplers:
            config = module.config
            cache = tunix_sampler.CacheConfig(
                width + max_completion_length, config.num_layers, config.num_kv_heads, config.head_dim
            )
            samplers[width] = RowSampler(module, tokenizer, cache)
            samplers[width].sharding = sharding
        sampler = samplers[width]
        sampler.transformer_state = state
        generations = []
        rows = max(8, batch_size * LONG_PROMPT // max(width, LONG_PROMPT))
        for start in range(0, len(prompts), rows):
            chunk = prompts[start : start + rows]
            filled = chunk + chunk[:1] * (rows - len(chunk))
            sampling: dict[str, Any] = {}
            if temperature is not None:  # top_p is what makes Tunix sample; each chunk has noise of its own
                key = jax.random.fold_in(jax.random.PRNGKey(seed), start)
                sampling = {"temperature": temperature, "top_p": 1.0, "seed": key}
            output = sampler(filled, max_generation_steps=max_completion_length, max_prompt_length=width, **sampling)
            for text, ids in zip(output.text[: len(chunk)], output.tokens[: len(chunk)], strict=True):
                truncated = len(ids) >= max_completion_length
                generations.append(Generation(text, len(ids) + (not truncated), truncated))
        return generations

    return generate


def load_hugging_face(directory: str | Path) -> qwen3.Qwen3:
    """A Hugging Face directory as Tunix's Qwen3, by Tunix's own loader: no MaxText on the way.

    Raises CourseError for another architecture, or for a weight file that cannot be read.
    """
    from tunix.models.qwen3 import params

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta")
    _require_qwen3(config.get("model_type", ""), theta)
    try:
        return params.create_model_from_safe_tensors(
            str(directory),
            qwen3.ModelConfig(
                num_layers=config["num_hidden_layers"],
                vocab_size=config["vocab_size"],
                embed_dim=config["hidden_size"],
                hidden_dim=config["intermediate_size"],
                num_heads=config["num_attention_heads"],
                head_dim=config["head_dim"],
                num_kv_heads=config["num_key_value_heads"],
                rope_theta=theta,
                norm_eps=config["rms_norm_eps"],
                use_tied_embedding=config["tie_word_embeddings"],
            ),
        )
    except Exception as error:  # safetensors and Tunix raise types of their own
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise CourseError(
            f"the weights in {directory} cannot be read ({reason}); copy or convert the model again"
        ) from error


def _require_qwen3(name: str, rope_theta: float | None) -> None:
    """Tunix 0.1.7 accepts a rope_theta and ignores it, so anything but Qwen3's own value would be silently wrong."""
    if not str(name).startswith("qwen3"):
        raise CourseError(f"rollout.engine=tunix samples Qwen3 models only, and this model is {name or 'unnamed'}")
    if rope_theta != 1_000_000:
        raise CourseError(f"rollout.engine=tunix needs rope_theta 1000000, and this model has {rope_theta}")
