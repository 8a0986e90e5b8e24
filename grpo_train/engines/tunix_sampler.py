"""Tunix's own rollout engine: its sampler on a model of tunix_models, fed with the MaxText actor's weights."""

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models import safetensors_loader
from tunix.rl import common
from tunix.rl.rollout import base_rollout, vanilla_rollout

from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.prompts import end_tokens
from grpo_lib.records import Generation
from grpo_train.engines import compat, cpu_speed, model_files, tunix_models, weight_sync
from grpo_train.engines.tokens import encode
from grpo_train.engines.weight_sync import HeadLayout, Scored, by_name, padded, translate
from grpo_train.losses import token_statistics
from grpo_train.runs import multihost

# Tokens from which on greedy_generate makes its batches smaller, since attention needs memory in their square.
LONG_PROMPT = 128
# greedy_generate pads prompts to multiples of so many tokens, so that few shapes are compiled.
BUCKET = 16
# Completions scored at once: their logits, [rows, tokens, vocabulary], take 3.7 GB for 8 x 768 tokens of a Qwen2.5.
SCORED_ROWS = 8
# Bytes of their float32 logits on one CPU, where the machine's memory is also the trainer's.
SCORED_LOGITS = 2**28
# Leave the trainer's mesh, in which RLCluster samples: Tunix's models have other axis names.  Sharding follows from the
# inputs, the same on every platform (and in what preflight compiles).
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


class RowNoise(NamedTuple):
    """Keys of rows, and a temperature that changes from call to call: of Tunix's sampler it would be a constant, for
    each value of which prefill and decoding are compiled again."""

    keys: jax.Array  # [B, 2]
    temperature: jax.Array  # [B]


def _is_of_rows(seed: Any) -> bool:
    """Not one key for all rows, as Tunix has it."""
    return isinstance(seed, RowNoise) or (isinstance(seed, jax.Array) and seed.ndim == 2)


class PerSequenceKeySampler(cpu_speed.Sampler):
    """Tunix's sampler with a random key for each row, so that a completion does not depend on its neighbours.

    `seed` is then [B, 2], see `row_keys`, or RowNoise: the same completions come out in one batch, in several
    micro-batches, in several processes. Tunix draws the noise of a whole batch from one key.

    With a `mesh` (tunix_models.sampler_mesh) the rows of a batch are spread over its axis `fsdp`; missing rows are
    filled up, and left out of the result.

    A prompt is its text alone (tokens.encode); Tunix puts the tokenizer's BOS in front of it.  Each of the model's end
    tokens ends a completion (prompts.end_tokens).
    """

    mesh: jax.sharding.Mesh | None = None
    scored = 0  # rows at the front of a batch whose log-probabilities are kept (R); those of a call with keys of rows
    _compiled_decode_fn: Any
    # Of the last call:
    sampled: np.ndarray  # [B, C], with the end tokens, which its output leaves out
    logps: np.ndarray  # [R, C], log-probabilities of these tokens at temperature 1, whatever they were drawn at

    def tokenize(self, input_string: str) -> np.ndarray:
        return np.array(encode(self.tokenizer.tokenizer, [input_string])[0], np.int32)

    def __call__(self, input_strings, *arguments, seed=None, eos_tokens=None, **more):
        rows = len(input_strings)
        missing = 0 if self.mesh is None else -len(input_strings) % self.mesh.shape["fsdp"]
        if missing:
            input_strings = [*input_strings, *input_strings[:1] * missing]
            if _is_of_rows(seed):
                seed = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[:1], missing, axis=0)]), seed)
        ends = eos_tokens or end_tokens(self.tokenizer.tokenizer)
        decode = self._compiled_decode_fn
        self._compiled_decode_fn = functools.partial(self._decode_and_keep, decode)
        try:
            with NO_MESH:
                output = super().__call__(input_strings, *arguments, seed=seed, eos_tokens=ends, **more)
        finally:
            self._compiled_decode_fn = decode
        output.text, output.tokens = output.text[:rows], output.tokens[:rows]
        output.padded_prompt_tokens = output.padded_prompt_tokens[:rows]
        length = output.padded_prompt_tokens.shape[1]
        self.sampled = np.asarray(self._drawn.token_buffer)[:rows, length:]
        kept = self._drawn.logprobs_buffer
        self.logps = np.zeros((0, self.sampled.shape[1])) if kept is None else np.asarray(kept)[:, length:]
        return output

    def _decode_and_keep(self, decode: Callable[..., Any], *arguments: Any) -> Any:
        self._drawn = decode(*arguments)
        return self._drawn

    def init_sample_state(self, all_input_ids, *arguments, **more):
        state = super().init_sample_state(all_input_ids, *arguments, **more)
        rows = len(all_input_ids)
        if self.scored and _is_of_rows(state.seed):
            shape = min(self.scored, rows), state.token_buffer.shape[1]  # [R, P + C]
            state = dataclasses.replace(state, logprobs_buffer=jnp.zeros(shape))
        if self.mesh is None:
            return state

        def spread(leaf):
            has_rows = isinstance(leaf, jax.Array) and leaf.ndim and len(leaf) == rows
            return jax.device_put(leaf, tunix_models.row_sharding(self.mesh)) if has_rows else leaf

        # The cache is where it belongs.
        return dataclasses.replace(jax.tree.map(spread, dataclasses.replace(state, cache=None)), cache=state.cache)

    def _sample(self, logits, eos, cache, sampler_state):
        seed = sampler_state.seed
        if sampler_state.sampling_mode != "top_p" or not _is_of_rows(seed):  # greedy, or one key for all
            return super()._sample(logits, eos, cache, sampler_state)
        if isinstance(seed, RowNoise):
            of_rows, temperature = seed.keys, seed.temperature[:, None]  # [B, 2], [B, 1]
        else:
            of_rows = seed
            temperature = sampler_state.temperature
        keys = jax.vmap(jax.random.fold_in, (0, None))(of_rows, sampler_state.decoding_step)
        scores = logits[:, -1].astype(jnp.float32) / temperature
        if cuts := _cuts(sampler_state.sampling_parameters, scores.shape[1]):
            scores = _draw_from_cut(scores, keys, **cuts)
        else:
            # The largest of scores and Gumbel noise is a sample of softmax(scores).
            scores += jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
        greedy = dataclasses.replace(sampler_state, sampling_mode="greedy", logprobs_buffer=None)
        state = super()._sample(scores[:, None], eos, cache, greedy)
        kept = _with_last(sampler_state.logprobs_buffer, logits[:, -1], state)
        return dataclasses.replace(state, sampling_mode="top_p", logprobs_buffer=kept)


def _with_last(kept: jax.Array | None, logits: jax.Array, state: Any) -> jax.Array | None:
    """Log-probabilities [R, P + C] with those of the tokens that a state has just drawn from logits [B, V]."""
    if kept is None:
        return None
    at = state.decoding_step
    tokens = state.token_buffer[: len(kept), at]
    logps = jax.nn.log_softmax(logits[: len(kept)].astype(jnp.float32))
    of_tokens = jnp.take_along_axis(logps, tokens[:, None], axis=1)
    return kept.at[:, at].set(of_tokens[:, 0])


def _cuts(parameters: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The top-k and top-p of Tunix's sampling parameters; empty where all tokens may be sampled."""
    top_k, top_p = parameters["top_k"] or vocabulary, parameters["top_p"]
    return {"top_k": min(top_k, vocabulary), "top_p": top_p} if top_k < vocabulary or top_p < 1 else {}


def _draw_from_cut(scores: jax.Array, keys: jax.Array, **cuts: Any) -> jax.Array:
    """A token for each row by Tunix's own top-k and top-p, as numbers [B, V] of which it has the largest.

    Args:
      scores: [B, V], logits over temperature; keys: [B, 2], one for each row.
    """

    def draw(row: jax.Array, key: jax.Array) -> jax.Array:
        token, _ = tunix_sampler.sample_top_p(row[None, None], key, temperature=1.0, **cuts)
        return token[0]

    return jax.nn.one_hot(jax.vmap(draw)(scores, keys), scores.shape[1])


@jax.jit
def row_keys(key: jax.Array, rows: np.ndarray) -> jax.Array:
    """A random key for each row of a step, [B, 2]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(rows))


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id"))
def _logps_at(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt_ids: Any,
    completion_ids: Any,
    temperature: Any,
    pad_id: int,
    eos_id: int,
) -> jax.Array:
    """As Tunix's compute_per_token_logps, [B, C], for a temperature [] that is no constant of the program."""
    _, logits = common.compute_per_token_logps(
        graphdef, state, prompt_ids, completion_ids, pad_id=pad_id, eos_id=eos_id, return_logits=True
    )
    logps, _ = token_statistics(completion_ids, logits=logits, temperature=temperature)
    return logps


class TunixSampler(vanilla_rollout.VanillaRollout):
    """Tunix's vanilla rollout, with what the released 0.1.7 lacks for a MaxText actor.

    - Weights are translated at every sync (`update_params`), layer by layer and on the devices.
    - In float32 on one CPU a group's prompt is computed once (`cpu_speed`).  With rows spread over
      several devices, and on a TPU, each row computes its own.
    - With `tensor` above 1 so many devices hold the model and its KV cache together; more devices are more rows.
    - Every completion draws noise of its own, which the seed, the step and its place in the step decide
      (`PerSequenceKeySampler`): without a seed the stock engine samples with PRNGKey(0) each time.
    - In float32 on one CPU it keeps log-probabilities as it draws, so that nothing scores the same tokens again.
    - Completions keep their end-of-sequence token, so that stopping is learned too; the stock engine cuts it off.
    - In a multi-process run each process samples its slice on its own devices, and all completions are gathered.
    """

    def __init__(
        self, rollout_actor, tokenizer, mesh, rollout_config, *,
        seed: int = 0, num_rollout_micro_batches: int = 1, tensor: int = 1, group_size: int = 1, **_: Any,
    ):  # fmt: skip
        """`mesh`: this process's devices; `num_rollout_micro_batches`: calls of `generate` per step; `tensor`: devices
        of a replica; `group_size`: neighbouring prompts that are equal."""
        config = rollout_actor.base.config
        settings = tunix_models.maxtext_settings(config)
        self.mesh = tunix_models.sampler_mesh(mesh.devices.flatten(), tensor)
        on_several = self.mesh if self.mesh.size > 1 else None
        model = tunix_models.model_config(config.model_name, config.rope_max_timescale, settings, config.dtype, tensor)
        self.heads = HeadLayout(
            repeats=model.num_kv_heads // settings["num_kv_heads"], interleaved=tunix_models.has_llama_heads(config)
        )
        module = tunix_models.abstract_model(model, on_several)
        self.shardings = tunix_models.weight_shardings(module, self.mesh)
        self.seconds: dict[str, float] = defaultdict(float)  # "generating" and "syncing"
        # Without super().__init__, which would make a sampler of its own, of another class.
        self._sampler = make_sampler(module, tokenizer, rollout_config.kv_cache_size, on_several)
        self._sampler.group = group_size
        self.update_params(nnx.state(rollout_actor, nnx.Param))
        self.seed = seed
        self.num_rollout_micro_batches = num_rollout_micro_batches
        self.calls = 0  # of generate, so far; a run that goes on after a step sets it
        self.scored_rows = 0  # how many completions of a call keep their log-probabilities
        # Elsewhere they are made when they are asked for: on a TPU preflight compiles what runs.
        self._keeps_logps = tunix_models.is_float32_on_one_cpu(model, on_several) and not multihost.is_distributed()

    def generate(self, prompts, rollout_config, *, scored: int | None = None, **_: Any) -> base_rollout.RolloutOutput:
        """One completion for each prompt.  A temperature that is an array, of a schedule, compiles nothing new.

        Args:
          scored: completions that `last_scored` will be asked for at temperature 1, by default `scored_rows`.
        """
        started = time.perf_counter()
        self._sampler.scored = (self.scored_rows if scored is None else scored) if self._keeps_logps else 0
        step, micro_batch = divmod(self.calls, self.num_rollout_micro_batches)
        rows = micro_batch * len(prompts) + np.arange(len(prompts))
        keys = row_keys(jax.random.fold_in(jax.random.PRNGKey(self.seed), step), rows)
        self.calls += 1
        own = multihost.process_slice(len(prompts))
        own_keys = keys[own]
        temperature = rollout_config.temperature
        if isinstance(temperature, jax.Array):
            noise = RowNoise(own_keys, jnp.full(len(own_keys), temperature, jnp.float32))
            config = dataclasses.replace(rollout_config, seed=noise, temperature=1.0)
        else:
            config = dataclasses.replace(rollout_config, seed=own_keys)
        output = super().generate(prompts[own], config)
        output = compat.keep_end_tokens(output, self._sampler.sampled)
        if multihost.is_distributed():
            output = _gathered(output)
        self.last = output
        self._kept_logps = self._sampler.logps
        ends = end_tokens(self._sampler.tokenizer.tokenizer)
        self.truncated = [int(ids[-1]) not in ends for ids in output.tokens]
        self.lengths = [len(ids) for ids in self.last.tokens]  # with the end token
        self.seconds["generating"] += time.perf_counter() - started
        return self.last

    def last_scored(self, rows: int, width: int, temperature: float = 1.0) -> Scored:
        """The first `rows` completions of the last call, `width` tokens wide, as the sampler scores them.

        Those that it has kept as it drew them cost nothing.  In a multi-process run all processes call it together;
        each scores its slice.
        """
        prompt_ids = self.last.left_padded_prompt_tokens[:rows]
        tokens = self.last.tokens[:rows]
        completion_ids = padded(tokens, width, self.pad_id())
        at_policy = not isinstance(temperature, jax.Array) and temperature == 1
        if at_policy and len(tokens) <= len(self._kept_logps):
            of_tokens = zip(self._kept_logps, tokens, strict=False)
            return Scored(prompt_ids, completion_ids, [row[: len(ids)] for row, ids in of_tokens])
        graphdef, state = self._sampler.model_def_and_state()
        at_once = self._scored_rows(width)
        of_process = multihost.process_slice(len(tokens))
        logps = []  # [C] each
        with NO_MESH:
            for first in range(of_process.start, of_process.stop, at_once):
                part = slice(first, min(first + at_once, of_process.stop))
                compute = _logps_at if isinstance(temperature, jax.Array) else common.compute_per_token_logps
                scored = compute(
                    graphdef, state, jnp.asarray(prompt_ids[part]), jnp.asarray(completion_ids[part]),
                    pad_id=self.pad_id(), eos_id=self.eos_id(), temperature=temperature,
                )  # fmt: skip
                logps.extend(np.asarray(scored).tolist())
        of_all = zip(multihost.gather(logps), tokens, strict=True)
        return Scored(prompt_ids, completion_ids, [np.array(row[: len(ids)], np.float32) for row, ids in of_all])

    def update_params(self, params, filter_types=None) -> None:
        started = time.perf_counter()
        weight_sync.copy_weights(by_name(params), self._sampler.transformer_state, self.shardings, self.heads)
        self._kept_logps: Any = ()  # they were those of other weights
        self.seconds["syncing"] += time.perf_counter() - started

    def _scored_rows(self, width: int) -> int:
        """How many completions of `width` tokens are scored at once: on one CPU as many as SCORED_LOGITS allow."""
        if self._sampler.mesh is not None or jax.default_backend() != "cpu":
            return SCORED_ROWS
        tokens = self.last.left_padded_prompt_tokens.shape[1] + width
        model: Any = self._sampler.transformer
        return max(1, min(SCORED_ROWS, SCORED_LOGITS // (4 * tokens * model.config.vocab_size)))

    @property
    def has_weights(self) -> bool:
        """False between `drop_weights` and the next sync."""
        first = jax.tree.leaves(self._sampler.transformer_state)[0]
        return not isinstance(first, jax.ShapeDtypeStruct)

    def drop_weights(self) -> None:
        """Let the weights go until the next sync: for the update that comes before it."""
        for variable in jax.tree.leaves(
            self._sampler.transformer_state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        ):
            weight = variable.get_value()
            variable.set_value(jax.ShapeDtypeStruct(weight.shape, weight.dtype))

    def model(self) -> None:
        """None says that weights are not shared; Tunix's own comparison fails when the two trees differ in shape."""

    def module_and_state(self) -> tuple[nnx.Module, nnx.State]:
        """The sampler's module and its weights as of the last sync."""
        return self._sampler.transformer, self._sampler.transformer_state

    def weights(self) -> dict[str, jax.Array]:
        """The sampler's weights by Tunix name."""
        return by_name(self._sampler.transformer_state)

    def expected(self, actor: dict[str, jax.Array]) -> Iterator[tuple[str, str, jax.Array]]:
        """(actor's name, sampler's name, the value that it should have), for every weight that has a place here."""
        shardings = {".".join(map(str, path)): sharding for path, sharding in self.shardings.items()}
        for name, source, value in translate(actor, self.heads):
            yield source, name, multihost.reshard_locally(value, shardings[name]) if name in shardings else value

    def greedy_generate(self, *, max_completion_length: int, batch_size: int) -> Callable[..., list[Generation]]:
        """The `generate` of grpo_lib.evaluation, from the weights of the last sync."""
        return greedy_generate(
            self.module_and_state, self._sampler.tokenizer.tokenizer, max_completion_length=max_completion_length,
            batch_size=batch_size, mesh=self._sampler.mesh,
        )  # fmt: skip


def make_sampler(
    module: Any, tokenizer: Any, length: int, mesh: jax.sharding.Mesh | None = None
) -> PerSequenceKeySampler:
    """A sampler with room for `length` tokens of prompt and completion."""
    config = module.config
    sampler = PerSequenceKeySampler(
        module,
        tokenizer,
        tunix_sampler.CacheConfig(length, config.num_layers, config.num_kv_heads, config.head_dim),
    )
    sampler.mesh = mesh
    sampler.tokenize = functools.lru_cache(maxsize=1)(sampler.tokenize)  # neighbours often have the same prompt
    return sampler


def _gathered(output: base_rollout.RolloutOutput) -> base_rollout.RolloutOutput:
    """The completions of all processes."""
    tables = (output.text, [ids.tolist() for ids in output.tokens], output.left_padded_prompt_tokens.tolist())
    text, tokens, prompts = zip(*multihost.gather(list(zip(*tables, strict=True))), strict=True)
    return dataclasses.replace(
        output, text=list(text), tokens=[np.array(ids, np.int32) for ids in tokens],
        left_padded_prompt_tokens=np.array(prompts, np.int32), logits=None, logprobs=None,
    )  # fmt: skip


def greedy_generate(
    sampler_state: Callable[[], tuple[Any, nnx.State]],
    tokenizer,
    *,
    max_completion_length: int,
    batch_size: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., list[Generation]]:
    """A `generate` for grpo_lib.evaluation: greedy completions from Tunix's sampler.

    The function that it returns samples when it is given a `temperature`, by default from the whole distribution
    (`top_p` 1, no `top_k`); its `seed` and the prompts then decide what comes out.

    Args:
      sampler_state: gives (module, weights) at the time of each call, so that a policy in training is evaluated as is.
      batch_size: prompts sampled at once; fewer when they are longer than LONG_PROMPT tokens.  Batches are filled up to
        their size, so that few shapes are compiled.  No prompt is cut.
      mesh: of the weights, where they are on several devices (tunix_models.sampler_mesh).

    In a multi-process run all processes call it with the same prompts; each answers its slice of them.
    """

    @functools.cache
    def sampler_for(width: int) -> PerSequenceKeySampler:
        return make_sampler(sampler_state()[0], tokenizer, width + max_completion_length, mesh)

    def generate(
        prompts: list[str], *, temperature: float | None = None, seed: int = 0, **cuts: Any
    ) -> list[Generation]:
        of_process = prompts[multihost.process_slice(len(prompts))]
        answers = generate_here(of_process, temperature, seed, **cuts) if of_process else []
        gathered = multihost.gather([dataclasses.asdict(answer) for answer in answers])
        return [Generation(**fields) for fields in gathered]

    def generate_here(
        prompts: list[str], temperature: float | None, seed: int, top_p: float = 1.0, top_k: int | None = None
    ) -> list[Generation]:
        longest = max(map(len, encode(tokenizer, prompts)))
        width = -(-longest // BUCKET) * BUCKET
        sampler = sampler_for(width)
        sampler.transformer_state = sampler_state()[1]
        generations = []
        rows = max(8, batch_size * LONG_PROMPT // max(width, LONG_PROMPT))
        for start in range(0, len(prompts), rows):
            chunk = prompts[start : start + rows]
            filled_up = chunk + chunk[:1] * (rows - len(chunk))
            output = sampler(
                filled_up,
                max_generation_steps=max_completion_length,
                max_prompt_length=width,
                temperature=temperature or 0.0,
                top_p=None if temperature is None else top_p,  # with it Tunix samples
                top_k=top_k,
                seed=jax.random.fold_in(jax.random.PRNGKey(seed), start),  # each chunk has noise of its own
            )
            for text, ids in zip(output.text[: len(chunk)], output.tokens[: len(chunk)], strict=True):
                # With the end token, which Tunix cuts off; one that fills the limit has none.
                length = min(len(ids) + 1, max_completion_length)
                generations.append(Generation(text, length, truncated=len(ids) >= max_completion_length))
        return generations

    return generate


def load_hugging_face(directory: str | Path) -> Any:
    """A Hugging Face directory as Tunix's model, float32, by Tunix's own loader: no MaxText on the way.

    Raises CourseError for another architecture, or for a weight file that cannot be read.
    """
    config = model_files.read_config(Path(directory))
    scaling, rope = model_files.rotary_embedding(config)
    kind = config.get("model_type", "") if scaling == "default" else f"{config.get('model_type')} ({scaling})"
    family = tunix_models.require_family(kind)
    settings = tunix_models.hugging_face_settings(config)
    converted = tunix_models.model_config(kind, rope.get("rope_theta"), settings)
    try:
        return safetensors_loader.load_and_create_model(
            str(directory), family.model, converted, key_mapping=family.loader._get_key_and_transform_mapping
        )
    except Exception as error:  # safetensors and Tunix raise types of their own
        raise CourseError(
            f"the weights in {directory} cannot be read ({first_line(error)}); copy or convert the model again"
        ) from error
