"""The floor: GRPO on a Qwen3 model in plain JAX, with nothing around it.

    python benchmarks/step_time.py --write-job /tmp/job.json
    python benchmarks/hand_jitted.py /tmp/job.json

Two compiled functions do the work of a step: `sample` (prefill, then one token at a time with a KV cache, until every
completion has ended) and `update` (log-probabilities, GRPO loss, gradient, AdamW).  What a library adds to a step is
what it takes longer than this, at equal padding.

Left out, and why: the KL term and a reference model (the recipe has beta = 0), several updates per batch (mu = 1),
checkpoints and metrics (not part of a step's work), sharding (one device).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import Job, only_result_on_stdout, result

from grpo_lib import environment

environment.prepare()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

Weights = dict[str, Any]
NEGATIVE = -1e30  # instead of -inf: a row of padding attends to nothing, and the softmax of -inf only is NaN


@dataclass(frozen=True)
class Sizes:
    """What the weights do not say.  Hashable, so that a compiled function can take it as a static argument."""

    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    rope_theta: float
    epsilon: float  # of the normalisations
    pad: int
    eos: int


# ---------------------------------------------------------------------------------------------------------- the model


def load_model(directory: str | Path) -> tuple[Weights, Sizes]:
    """Read a Hugging Face directory of a dense Qwen3 with tied embeddings.  Matrices become [in, out]."""
    from safetensors.numpy import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3" or not config["tie_word_embeddings"]:
        raise ValueError(f"{directory}: hand_jitted.py reads Qwen3 with tied embeddings only")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)

    def take(name: str) -> jax.Array:
        tensor = jnp.asarray(tensors[f"model.{name}.weight"], jnp.float32)
        return tensor.T if tensor.ndim == 2 and name != "embed_tokens" else tensor

    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
        **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    }
    weights = {
        "embedding": take("embed_tokens"),  # [V, d], and the output matrix as well
        "norm": take("norm"),
        "layers": [
            {name: take(f"layers.{layer}.{theirs}") for name, theirs in names.items()}
            for layer in range(config["num_hidden_layers"])
        ],
    }
    rope = config.get("rope_parameters") or config
    return weights, Sizes(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=float(rope["rope_theta"]),
        epsilon=config["rms_norm_eps"],
        pad=config["pad_token_id"],
        eos=config["eos_token_id"],
    )


def normalise(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last axis."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding.  x: [B, T, heads, head_dim], positions: [B, T]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half) / half)  # [B, T, 1, head_dim / 2]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def forward(weights: Weights, sizes: Sizes, tokens, positions, mask, cache=None, start=0):
    """Hidden states [B, T, d] of tokens [B, T], and the cache with their keys and values at `start`.

    Args:
      positions: [B, T], counted from the first token that is not padding.
      mask: bool[B, T, S], which of the S keys each token may see.  S is T, or with a cache the cache's length.
      cache: per layer (keys, values), each [B, S, kv_heads, head_dim]; None computes without one.
    """
    batch, length = tokens.shape
    per_head = sizes.heads // sizes.kv_heads
    x, filled = weights["embedding"][tokens], []
    for index, layer in enumerate(weights["layers"]):
        h = normalise(x, layer["norm_1"], sizes.epsilon)
        q = (h @ layer["q_proj"]).reshape(batch, length, sizes.heads, sizes.head_dim)
        k = (h @ layer["k_proj"]).reshape(batch, length, sizes.kv_heads, sizes.head_dim)
        v = (h @ layer["v_proj"]).reshape(batch, length, sizes.kv_heads, sizes.head_dim)
        q = rotate(normalise(q, layer["q_norm"], sizes.epsilon), positions, sizes.rope_theta)
        k = rotate(normalise(k, layer["k_norm"], sizes.epsilon), positions, sizes.rope_theta)
        if cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
                for old, new in zip(cache[index], (k, v), strict=True)
            )
            filled.append((k, v))
        q = q.reshape(batch, length, sizes.kv_heads, per_head, sizes.head_dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * sizes.head_dim**-0.5
        attention = jax.nn.softmax(jnp.where(mask[:, None, None], scores, NEGATIVE), -1)
        x = x + jnp.einsum("bkgts,bskd->btkgd", attention, v).reshape(batch, length, -1) @ layer["o_proj"]
        h = normalise(x, layer["norm_2"], sizes.epsilon)
        x = x + (jax.nn.silu(h @ layer["gate_proj"]) * (h @ layer["up_proj"])) @ layer["down_proj"]
    return normalise(x, weights["norm"], sizes.epsilon), filled


def positions_of(valid: jax.Array) -> jax.Array:
    """Position of each token in its sequence, with padding on the left.  valid: bool[B, T]."""
    return jnp.maximum(jnp.cumsum(valid, 1) - 1, 0)


def causal(valid: jax.Array) -> jax.Array:
    """bool[B, T, T]: each token sees itself and what stands before it, except padding."""
    length = valid.shape[1]
    return jnp.tril(jnp.ones((length, length), bool))[None] & valid[:, None]


# --------------------------------------------------------------------------------------------------------- two programs


@functools.partial(jax.jit, static_argnames=("sizes", "length", "temperature"))
def sample(weights: Weights, sizes: Sizes, prompts, key, *, length: int, temperature: float) -> jax.Array:
    """Completions int32[B, length] of prompts [B, P]; padding follows the end token.  Temperature 0 is greedy."""
    batch, width = prompts.shape
    total = width + length
    valid = prompts != sizes.pad
    last_position = valid.sum(1) - 1
    shape = (batch, total, sizes.kv_heads, sizes.head_dim)
    cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(sizes.layers)]

    def pick(hidden, index):  # hidden: [B, d]
        logits = hidden @ weights["embedding"].T
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        noise = jax.random.fold_in(key, index)
        return jax.random.categorical(noise, logits / temperature).astype(jnp.int32)

    # The slots of the completion are in the cache from the start; no prompt token may look there.
    mask = jnp.pad(causal(valid), ((0, 0), (0, 0), (0, length)))
    hidden, cache = forward(weights, sizes, prompts, positions_of(valid), mask, cache, 0)
    first = pick(hidden[:, -1], 0)
    completions = jnp.full((batch, length), sizes.pad, jnp.int32).at[:, 0].set(first)
    slots, valid = jnp.arange(total), jnp.pad(valid, ((0, 0), (0, length)))

    def unfinished(state):
        index, _, _, done, _ = state
        return (index < length) & ~jnp.all(done)

    def one_token(state):
        index, completions, cache, done, last = state
        seen = valid | ((slots >= width) & (slots < width + index))
        hidden, cache = forward(
            weights, sizes, last[:, None], (last_position + index)[:, None], seen[:, None], cache, width + index - 1
        )
        token = jnp.where(done, sizes.pad, pick(hidden[:, 0], index))
        return index + 1, completions.at[:, index].set(token), cache, done | (token == sizes.eos), token

    return jax.lax.while_loop(unfinished, one_token, (1, completions, cache, first == sizes.eos, first))[1]


def completion_logps(weights: Weights, sizes: Sizes, prompts, completions, temperature: float = 1.0) -> jax.Array:
    """log pi(token) of each completion token, [B, C]."""
    tokens = jnp.concatenate([prompts, completions], 1)
    valid = tokens != sizes.pad
    hidden, _ = forward(weights, sizes, tokens, positions_of(valid), causal(valid))
    width = completions.shape[1]
    logits = hidden[:, -width - 1 : -1] @ weights["embedding"].T / temperature  # the token before predicts
    chosen = jnp.take_along_axis(logits, completions[..., None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, -1)


def make_update(optimizer: optax.GradientTransformation, sizes: Sizes, epsilon: float, temperature: float) -> Callable:
    """The compiled update: (weights, state, prompts, completions, advantages) -> (weights, state, loss).

    The loss is GRPO's (arXiv:2402.03300, equation 3, beta = 0): the mean over completions of the mean over tokens.
    """

    def loss_of(weights, prompts, completions, advantages):
        mask = completions != sizes.pad
        logps = completion_logps(weights, sizes, prompts, completions, temperature)
        ratio = jnp.exp(logps - jax.lax.stop_gradient(logps))  # the policy that sampled is the one that is updated
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
        gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -jnp.mean((gain * mask).sum(1) / jnp.maximum(mask.sum(1), 1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, state, prompts, completions, advantages):
        loss, gradient = jax.value_and_grad(loss_of)(weights, prompts, completions, advantages)
        changes, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    return update


# ------------------------------------------------------------------------------------------------------------ the loop


def encode(tokenizer, prompts: list[str], width: int, pad: int) -> np.ndarray:
    """Token ids int32[B, width], padded on the left.  Raises ValueError for a prompt that is longer."""
    rows = np.full((len(prompts), width), pad, np.int32)
    for row, ids in zip(rows, tokenizer(prompts, add_special_tokens=False)["input_ids"], strict=True):
        if len(ids) > width:
            raise ValueError(f"a prompt has {len(ids)} tokens; max_prompt_length is {width}")
        row[width - len(ids) :] = ids
    return rows


def decode(tokenizer, completions: np.ndarray, sizes: Sizes) -> list[str]:
    """Completions as text, without their end token and padding."""
    ended = (completions == sizes.eos) | (completions == sizes.pad)
    lengths = np.where(ended.any(1), ended.argmax(1), completions.shape[1])
    return tokenizer.batch_decode([ids[:n] for ids, n in zip(completions, lengths, strict=True)])


def group_advantages(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """(r - mean) / std within each group of completions of one prompt; float32[prompts * G] both ways."""
    groups = rewards.reshape(-1, group_size)
    spread = groups.std(1, ddof=1, keepdims=True) + 1e-6
    return ((groups - groups.mean(1, keepdims=True)) / spread).reshape(-1).astype(np.float32)


def train(job: Job) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from grpo_lib.rewards import get_rewards

    rollout, grpo, training = (job.recipe[section] for section in ("rollout", "grpo", "training"))
    if grpo["beta"] or rollout["top_p"] != 1 or rollout["top_k"]:
        raise ValueError("the hand-jitted loop has no KL term, top_p or top_k; use grpo.beta=0.0 and pure sampling")
    group, rewards = grpo["group_size"], get_rewards(job.recipe["rewards"])
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    weights, sizes = load_model(job.model)
    rate = training["learning_rate"]
    schedule = optax.warmup_constant_schedule(rate / max(training["warmup_steps"], 1), rate, training["warmup_steps"])
    optimizer = optax.chain(
        optax.clip_by_global_norm(training["clip"]),
        optax.adamw(schedule, b1=training["b1"], b2=training["b2"], weight_decay=training["weight_decay"]),
    )
    state = optimizer.init(weights)
    update = make_update(optimizer, sizes, grpo["epsilon"], rollout["temperature"])
    key = jax.random.PRNGKey(job.recipe["seed"])
    rows = []
    for step, (texts, answers) in enumerate(zip(job.prompts, job.answers, strict=True)):
        started = time.perf_counter()
        prompts = np.repeat(encode(tokenizer, texts, job.max_prompt_length, sizes.pad), group, 0)
        completions = sample(
            weights,
            sizes,
            prompts,
            jax.random.fold_in(key, step),
            length=rollout["max_completion_length"],
            temperature=rollout["temperature"],
        )
        completions = np.asarray(completions)  # waits for the device
        sampled = time.perf_counter()
        decoded, golds = decode(tokenizer, completions, sizes), [gold for gold in answers for _ in range(group)]
        reward = np.sum([reward([], decoded, answer=golds) for reward in rewards], axis=0, dtype=np.float32)
        advantages = group_advantages(reward, group)
        rewarded = time.perf_counter()
        weights, state, loss = update(weights, state, prompts, completions, advantages)
        jax.block_until_ready((weights, loss))
        ended = time.perf_counter()
        length = (completions != sizes.pad).sum(1).mean()
        rows.append((ended - started, sampled - started, ended - rewarded, float(reward.mean()), float(length)))
    return result("hand_jitted", *zip(*rows, strict=True), packages=("jax", "optax", "transformers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="file made by step_time.py --write-job")
    arguments = parser.parse_args()
    with only_result_on_stdout() as stdout:
        print(json.dumps(train(Job.load(arguments.job))), file=stdout)


if __name__ == "__main__":
    main()
