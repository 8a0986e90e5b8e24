"""GRPO in one file of plain JAX: sample, reward, advantages, loss, update.  Read it from top to bottom.

GRPO is equation 3 of DeepSeekMath (arXiv:2402.03300).  Left out: the KL penalty with its reference model (β = 0) and
several updates per batch (μ = 1).  The policy is a dense Qwen3 (arXiv:2505.09388) or a Llama without scaled rotary
embeddings, in float32, on one device.  MaxText and Tunix take the same step in `training.train`:
tests/lib/test_plain_grpo.py compares the two.

Shapes: G group_size, B = prompts x G completions, P tokens of a prompt (padded on the left), C of a completion (padded
on the right), V vocabulary, D hidden size, H heads.  Log-probabilities are in nats.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer
except ModuleNotFoundError as error:  # all else of grpo_lib does without them
    text = f"plain_grpo needs {error.name}, which comes with the extra train: pip install '.[train]' in a clone"
    raise ModuleNotFoundError(text, name=error.name) from None

from grpo_lib.common.files import read_json
from grpo_lib.problems import Problem, training_batches
from grpo_lib.prompts import end_tokens, padding_token, render, system_prompt
from grpo_lib.records import Generation
from grpo_lib.rewards import get_rewards


@dataclass(frozen=True)
class Settings:
    """A run.  The symbols are those of DeepSeekMath."""

    steps: int = 50
    prompts_per_step: int = 16
    group_size: int = 8  # G
    max_completion_length: int = 512  # C
    temperature: float = 1.0
    rewards: tuple[str, ...] = ("correct_answer",)  # functions of grpo_lib.rewards, added up
    # "mean": Dr. GRPO (arXiv:2503.20783); "leave-one-out": RLOO (arXiv:2402.14740); "maxrl" (arXiv:2602.02710)
    advantage: str = "std"
    aggregation: str = "completion"  # "constant": Dr. GRPO; "step": DAPO (arXiv:2503.14476, equation 12)
    mask_truncated: bool = False  # True: truncated completions are left out of the loss (DAPO, section 3.4)
    epsilon: float = 0.2  # ε
    epsilon_high: float | None = None  # the upper side of the clip, where it is wider (DAPO, equation 10)
    learning_rate: float = 1e-4
    warmup_steps: int = 5
    b1: float = 0.9  # AdamW
    b2: float = 0.99  # AdamW
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    system: str = "default"  # system prompt
    seed: int = 0


class Config(NamedTuple):  # model settings that the shapes of the weights do not show
    layers: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    pad: int  # token id
    ends: tuple[int, ...]  # token ids: each of them ends a completion


@dataclass
class Policy:
    weights: dict[str, jax.Array]  # `train` replaces them
    config: Config
    tokenizer: Any


def load_policy(directory: str | Path) -> Policy:
    """Read a Hugging Face directory.  Raises ValueError for another architecture than Qwen3 and Llama."""
    config = read_json(Path(directory) / "config.json", "copy or download the model again")
    rope = config.get("rope_parameters") or config
    if config["model_type"] not in ("qwen3", "llama") or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{directory}: a {config['model_type']} model; plain_grpo reads qwen3, llama without scaled rope"
        )
    weights = {}
    for name, x in (item for file in Path(directory).glob("*.safetensors") for item in load_file(file).items()):
        x = jnp.asarray(x.T if name.endswith("_proj.weight") else x, jnp.float32)  # matrices: [out, in] -> [in, out]
        weights[name.removeprefix("model.").removesuffix(".weight")] = x
    if config["tie_word_embeddings"]:  # then the embedding is the output matrix as well
        weights.pop("lm_head", None)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    tokenizer.pad_token = padding_token(tokenizer)
    model = Config(
        layers=config["num_hidden_layers"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rope_theta=float(rope["rope_theta"]),
        rms_norm_eps=config["rms_norm_eps"],
        pad=tokenizer.pad_token_id,
        ends=tuple(end_tokens(tokenizer)),
    )
    return Policy(weights, model, tokenizer)


def rms_norm(x, scale, eps):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def rope(x, positions, theta):  # rotary embedding of x [B, T, heads, head_dim] at positions [B, T]
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half) / half)  # [B, T, 1, head_dim / 2]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, -1)  # [B, T, heads, head_dim / 2] each
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def forward(weights, config: Config, tokens, valid, last: int, cache=None, start=0):
    """Tokens [B, T] -> logits [B, last, V] of the last of them, and the cache: the keys and values of each layer.

    valid [B, S]: which keys are not padding.  S = T, or the length of a cache in which the tokens are at `start`.
    """
    B, T = tokens.shape
    S = valid.shape[1]
    eps = config.rms_norm_eps
    new_cache = []
    positions = jax.lax.dynamic_slice_in_dim(jnp.cumsum(valid, 1) - 1, start, T, 1)  # [B, T], padding not counted
    mask = valid[:, None] & (jnp.arange(S) <= start + jnp.arange(T)[:, None])  # [B, T, S]: no token sees a later one
    x = weights["embed_tokens"][tokens]  # [B, T, D]
    for i in range(config.layers):
        w = {name.removeprefix(f"layers.{i}."): weights[name] for name in weights if name.startswith(f"layers.{i}.")}
        h = rms_norm(x, w["input_layernorm"], eps)  # [B, T, D]
        q, k, v = ((h @ w[f"self_attn.{name}_proj"]).reshape(B, T, -1, config.head_dim) for name in "qkv")
        if "self_attn.q_norm" in w:  # Qwen3's; Llama has none
            q, k = rms_norm(q, w["self_attn.q_norm"], eps), rms_norm(k, w["self_attn.k_norm"], eps)
        q, k = (rope(heads, positions, config.rope_theta) for heads in (q, k))  # [B, T, H or KV heads, head_dim]
        if cache is not None:  # [B, S, KV heads, head_dim]: those of the tokens before are not computed again
            k, v = (jax.lax.dynamic_update_slice_in_dim(cache[i][n], new, start, 1) for n, new in enumerate((k, v)))
        new_cache.append((k, v))
        # Grouped-query attention: several queries share a key and value.
        q = q.reshape(B, T, k.shape[2], -1, config.head_dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * config.head_dim**-0.5
        scores = jnp.where(mask[:, None, None], scores, -1e30)  # not -inf: padding sees no key, which would give NaN
        x = x + jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v).reshape(B, T, -1) @ w["self_attn.o_proj"]
        h = rms_norm(x, w["post_attention_layernorm"], eps)
        x = x + (jax.nn.silu(h @ w["mlp.gate_proj"]) * (h @ w["mlp.up_proj"])) @ w["mlp.down_proj"]  # SwiGLU
    # MaxText 0.2.5 rounds a tied embedding to bfloat16; so does this file, to give the same result.
    head = weights.get("lm_head", weights["embed_tokens"].astype(jnp.bfloat16))  # [V, D]
    return rms_norm(x[:, -last:], weights["norm"], eps) @ head.T, new_cache


# 1. Sample completions.
@functools.partial(jax.jit, static_argnames=("config", "length", "temperature"))
def sample(weights, config: Config, prompts, key, length: int, temperature: float):
    """Completions [B, C = length] of prompts [B, P]; padding follows the end token.  Temperature 0 is greedy."""
    B, P = prompts.shape
    ends = jnp.array(config.ends)
    valid = jnp.pad(prompts != config.pad, ((0, 0), (0, length)), constant_values=True)  # [B, P + C]

    def choose(logits, index):  # [B, 1, V] -> [B]; one key for the batch (the course's sampler: one per completion)
        if temperature == 0:
            return logits[:, 0].argmax(-1)
        # No top-k, no top-p: sampled with the probabilities that the loss computes.
        return jax.random.categorical(jax.random.fold_in(key, index), logits[:, 0] / temperature)

    def next_token(state):  # one for each completion; keys and values of the tokens before are in the cache
        index, token, ended, completions, cache = state
        logits, cache = forward(weights, config, token[:, None], valid, 1, cache, P + index - 1)
        token = jnp.where(ended, config.pad, choose(logits, index))
        return index + 1, token, ended | jnp.isin(token, ends), completions.at[:, index].set(token), cache

    logits, cache = forward(weights, config, prompts, valid[:, :P], 1)  # the whole prompt at once
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, 0))), cache)  # and room for C tokens
    token = choose(logits, 0)  # [B]
    completions = jnp.full((B, length), config.pad)  # [B, C]
    state = (1, token, jnp.isin(token, ends), completions.at[:, 0].set(token), cache)
    return jax.lax.while_loop(lambda state: (state[0] < length) & ~state[2].all(), next_token, state)[3]


def encode(policy: Policy, texts: Sequence[str], length: int = 0) -> np.ndarray:
    """Token ids [B, P] of prompts, padded on the left: all completions begin at one place."""
    rows = policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    length = max(length, *map(len, rows))
    return np.array([[policy.config.pad] * (length - len(ids)) + ids for ids in rows], np.int32)


def generate(policy: Policy, prompts: Sequence[str], max_completion_length: int) -> list[Generation]:
    """Greedy completions. evaluation.evaluate takes it once functools.partial has fixed `policy` and the length."""
    ids = encode(policy, prompts)
    ids = np.pad(ids, ((0, 0), (-ids.shape[1] % 16, 0)), constant_values=policy.config.pad)  # few shapes to compile
    ids = np.asarray(sample(policy.weights, policy.config, ids, jax.random.PRNGKey(0), max_completion_length, 0.0))
    tokens = (ids != policy.config.pad).sum(1)  # [B]
    truncated = ~np.isin(ids, policy.config.ends).any(1)  # [B]
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)  # without end token and padding
    return [Generation(*row) for row in zip(texts, tokens.tolist(), truncated.tolist(), strict=True)]


# 2. Rewards: grpo_lib.rewards.  3. Advantages: better or worse than the other completions of the same prompt?
def group_advantages(rewards: np.ndarray, group_size: int, kind: str = "std") -> np.ndarray:  # [B] -> [B]
    """How much better each completion is than the others of its prompt; "std" is A of DeepSeekMath, section 4.1.2."""
    groups = rewards.reshape(-1, group_size)  # [prompts, G]
    mean, std = groups.mean(1, keepdims=True), groups.std(1, ddof=1, keepdims=True)  # [prompts, 1]
    # 1e-6: where all earn the same it is 0, not 0 / 0.  Minus the mean of the others is the same times G / (G - 1).
    leave_one_out = group_size / (group_size - 1)
    scale = {"std": 1 / (std + 1e-6), "mean": 1.0, "leave-one-out": leave_one_out, "maxrl": 1 / (mean + 1e-6)}[kind]
    return ((groups - mean) * scale).reshape(-1)


# 4. Loss.
def per_token_logps(weights, config: Config, prompts, completions, temperature: float):
    """log π(token) of the completions, [B, C]: in one forward pass, because all their tokens are known now."""
    tokens = jnp.concatenate([prompts, completions], 1)[:, :-1]  # [B, P + C - 1]; the last one predicts nothing
    logits, _ = forward(weights, config, tokens, tokens != config.pad, completions.shape[1])  # [B, C, V]
    return jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), completions[..., None], -1)[..., 0]


def policy_loss(logps, old_logps, advantages, mask, settings: Settings):
    """- mean over completions of the mean over tokens of min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A), ρ = π / π_old."""
    ratio = jnp.exp(logps - old_logps)  # [B, C]
    A = advantages[:, None]  # [B, 1]
    low = settings.epsilon
    high = low if settings.epsilon_high is None else settings.epsilon_high
    objective = jnp.minimum(ratio * A, jnp.clip(ratio, 1 - low, 1 + high) * A) * mask  # [B, C]
    if settings.aggregation == "step":  # every token counts the same
        return -objective.sum() / jnp.maximum(mask.sum(), 1)
    lengths = mask.sum(1) if settings.aggregation == "completion" else mask.shape[1]
    of_completions = objective.sum(1) / jnp.maximum(lengths, 1)  # [B]
    if settings.mask_truncated:  # the mean over those that are left
        return -of_completions.sum() / jnp.maximum(mask.any(1).sum(), 1)
    return -jnp.mean(of_completions)


# 5. Update.
@functools.partial(jax.jit, static_argnums=range(2, 5), donate_argnums=(0, 1))  # donated: new weights replace the old
def update(weights, opt_state, config, optimizer, settings, prompts, completions, advantages):
    """One step of the optimizer on a batch: the new weights, the new optimizer state and the loss."""
    mask = completions != config.pad  # [B, C]
    if settings.mask_truncated:
        mask &= jnp.isin(completions, jnp.array(config.ends)).any(1, keepdims=True)

    def loss_of(weights):
        logps = per_token_logps(weights, config, prompts, completions, settings.temperature)  # [B, C]
        # One update per batch: the policy that learns is the one that sampled.  The ratio is 1; its gradient is not 0.
        old_logps = jax.lax.stop_gradient(logps)
        return policy_loss(logps, old_logps, advantages, mask, settings)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    changes, opt_state = optimizer.update(gradient, opt_state, weights)
    return optax.apply_updates(weights, changes), opt_state, loss


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    peak, warmup = settings.learning_rate, settings.warmup_steps
    rate = optax.warmup_constant_schedule(peak / max(warmup, 1), peak, warmup)  # the first step already moves
    adamw = optax.adamw(rate, settings.b1, settings.b2, weight_decay=settings.weight_decay)
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)


def train(settings: Settings, problems: Sequence[Problem], policy: Policy) -> Iterator[dict]:
    """Train `policy`; one row per step.  `problems` have one number as their answer (kind "tagged")."""
    G = settings.group_size
    to_prompt = functools.partial(render, policy.tokenizer, system=system_prompt(settings.system))
    batches = training_batches(problems, to_prompt, settings.prompts_per_step, settings.seed)
    P = encode(policy, [to_prompt(problem.question) for problem in problems]).shape[1]  # one shape for all steps
    reward_functions = get_rewards(settings.rewards)
    optimizer = make_optimizer(settings)
    opt_state = optimizer.init(policy.weights)
    key = jax.random.PRNGKey(settings.seed)
    for step in range(1, settings.steps + 1):
        batch = next(batches)
        prompts = np.repeat(encode(policy, batch["prompts"], P), G, 0)  # [B, P], each group together
        golds = np.repeat(batch["answer"], G)  # [B]

        # 1. Sample completions.
        step_key = jax.random.fold_in(key, step)
        length = settings.max_completion_length
        ids = sample(policy.weights, policy.config, prompts, step_key, length, settings.temperature)  # [B, C]
        ids = np.asarray(ids)
        completions = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)

        # 2. Rewards.
        sent = np.repeat(batch["prompts"], G)  # [B], as text
        rewards = np.sum([reward(sent, completions, answer=golds) for reward in reward_functions], 0)  # [B]

        # 3. Advantages.
        advantages = group_advantages(rewards, G, settings.advantage)  # [B]

        # 4. Loss.  5. Update.
        policy.weights, opt_state, loss = update(
            policy.weights, opt_state, policy.config, optimizer, settings, prompts, ids, advantages
        )
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "loss": float(loss),
            "prompts": batch["prompts"].tolist(),
            "completions": completions,  # B of each from here on
            "rewards": rewards,
            "advantages": advantages,
            "completion_ids": ids,
        }
