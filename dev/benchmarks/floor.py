"""The floor: grpo_lib.plain_grpo with the levers of the course's trainer, and nothing around it.

    python dev/benchmarks/step_time.py --write-job /tmp/job.json
    python dev/benchmarks/floor.py /tmp/job.json

The update computes rows of groups: the prompt without its last token, then for each completion the last prompt token
and the completion, which sees the prompt and itself.  Loss and gradient are plain_grpo's (tests/test_benchmarks.py).
The sampler computes each prompt once and keeps its keys and values apart from the completions', so that no step copies
them, and a group's queries meet them in one product.  The texts are plain_grpo's.

Shapes as in plain_grpo, and: N prompts, T tokens of a row, K heads of keys and values, Q queries of each, H head size.
"""

from __future__ import annotations

import functools
from typing import Any

import hand_jitted  # prepares the environment, so before jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from job import Job, worker_main

from grpo_lib import plain_grpo
from grpo_lib.plain_grpo import rms_norm

PROMPT = 1  # segment of a row's prompt; its completions are 2, 3, ...; padding is 0


@jax.custom_vjp
def project(x, w):
    return x @ w


def project_backward(saved, dy):
    x, w = saved
    # XLA's CPU compiler copies the first operand of a weight gradient transposed; the narrower one costs less.
    narrow, wide = (x, dy) if x.shape[-1] <= dy.shape[-1] else (dy, x)
    gradient = jnp.tensordot(narrow, wide, ([0, 1], [0, 1]))
    return dy @ w.T, gradient if narrow is x else gradient.T


project.defvjp(lambda x, w: (x @ w, (x, w)), project_backward)


def rope_table(weights, config, places: int):  # sin and cos [places, 1, H / 2]: computed once for all layers and steps
    half = weights["layers.0.self_attn.q_norm"].size // 2
    angles = jnp.arange(places)[:, None, None] * config.rope_theta ** (-jnp.arange(half) / half)
    return jnp.sin(angles), jnp.cos(angles)


def transformer(weights, config, tokens, rope, attend):
    """Logits [B, T, V] of tokens [B, T]; `rope`: sin and cos at their positions, [B, T, 1, H / 2].

    attend(layer, q, k, v), which are [B, T, K Q, H] and [B, T, K, H], gives [B, T, K Q H] in any shape.
    """
    (sin, cos), eps, (B, T) = rope, config.rms_norm_eps, tokens.shape

    def rotate(x):
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["embed_tokens"][tokens]
    for i in range(config.layers):
        w = {name.removeprefix(f"layers.{i}."): weights[name] for name in weights if name.startswith(f"layers.{i}.")}
        h = rms_norm(x, w["input_layernorm"], eps)
        q, k, v = (project(h, w[f"self_attn.{name}_proj"]).reshape(B, T, -1, 2 * sin.shape[-1]) for name in "qkv")
        q, k = (rotate(rms_norm(y, w[f"self_attn.{name}_norm"], eps)) for name, y in (("q", q), ("k", k)))
        x = x + project(attend(i, q, k, v).reshape(B, T, -1), w["self_attn.o_proj"])
        h = rms_norm(x, w["post_attention_layernorm"], eps)
        x = x + project(jax.nn.silu(project(h, w["mlp.gate_proj"])) * project(h, w["mlp.up_proj"]), w["mlp.down_proj"])
    head = weights.get("lm_head", weights["embed_tokens"].astype(jnp.bfloat16))  # rounded as in plain_grpo
    return project(rms_norm(x, weights["norm"], eps), head.T.astype(jnp.float32))


def attention(q, k, v, mask):  # mask [B, T, T]: the keys that a query sees
    q = q.reshape(*k.shape[:3], -1, k.shape[3])  # [B, T, K, Q, H]
    scores = jnp.einsum("btkqd,bskd->bkqts", q, k) * k.shape[3] ** -0.5
    return jnp.einsum("bkqts,bskd->btkqd", jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30)), v)


@functools.partial(jax.jit, static_argnames=("config", "length", "temperature", "group_size"))
def sample(weights, config, prompts, key, length: int, temperature: float, group_size: int):
    """plain_grpo.sample above temperature 0, for prompts that come `group_size` times each."""
    B, P = prompts.shape
    G = group_size
    C = length
    ends = jnp.array(config.ends)
    first = prompts[::G]  # [N, P], each prompt once
    valid = first != config.pad
    cache = []  # keys and values [N, P, K, H] by layer
    table = rope_table(weights, config, P + C)
    positions = jnp.cumsum(valid, 1) - 1

    def prefill(_, q, k, v):
        cache.append((k, v))
        return attention(q, k, v, valid[:, None] & jnp.tri(P, dtype=bool))

    def choose(logits, index):  # as jax.random.categorical, whose argmax is slow on a CPU
        noise = jax.random.gumbel(jax.random.fold_in(key, index), (B, logits.shape[-1]))
        scores = logits[:, 0] / temperature + noise
        places = jnp.arange(logits.shape[-1])
        return jnp.where(scores == scores.max(-1, keepdims=True), places, len(places)).min(-1)

    def next_token(state):
        index, token, ended, completions, own = state
        new = []
        at = index - 1
        seen = jnp.concatenate([valid, jnp.broadcast_to(jnp.arange(C) <= at, (B // G, C))], 1)[:, None, None, None]

        def attend(i, q, k, v):
            (keys, values), (N, _, K, H) = cache[i], cache[i][0].shape
            q, k, v = (x.reshape(N, G, K, -1, H) for x in (q, k, v))
            # Those of the completions are [N, G, K, H, C] and [N, G, K, C, H]: sums below then run over whole vectors.
            own_keys = jax.lax.dynamic_update_slice_in_dim(own[i][0], k.swapaxes(3, 4), at, 4)
            own_values = jax.lax.dynamic_update_slice_in_dim(own[i][1], v, at, 3)
            new.append((own_keys, own_values))
            scores = jnp.einsum("ngkqd,npkd->ngkqp", q, keys), (q[..., None] * own_keys[:, :, :, None]).sum(4)
            w = jax.nn.softmax(jnp.where(seen, jnp.concatenate(scores, -1) * H**-0.5, -1e30))
            out = jnp.einsum("ngkqp,npkd->ngkqd", w[..., :P], values)
            return out + (w[..., P:, None] * own_values[:, :, :, None]).sum(4)

        rope = [jnp.repeat(x[positions[:, -1] + index], G, 0)[:, None] for x in table]
        token = jnp.where(ended, config.pad, choose(transformer(weights, config, token[:, None], rope, attend), index))
        return index + 1, token, ended | jnp.isin(token, ends), completions.at[:, index].set(token), new

    logits = transformer(weights, config, first, [x[positions] for x in table], prefill)[:, -1:]
    token = choose(jnp.repeat(logits, G, 0), 0)
    completions = jnp.full((B, C), config.pad)
    shapes = [(k.shape[0], G, *k.shape[2:], C) for k, _ in cache]
    own = [(jnp.zeros(shape), jnp.zeros(shape).swapaxes(3, 4)) for shape in shapes]
    state = (1, token, jnp.isin(token, ends), completions.at[:, 0].set(token), own)
    return jax.lax.while_loop(lambda state: (state[0] < C) & ~state[2].all(), next_token, state)[3]


def group_rows(prompts, completions, pad: int):
    """Prompts [N, P], completions [N, G, C] -> tokens, segments, positions [N, T], and where completions begin [N, G].

    They begin with the last token of the prompt, again: it predicts their first one.
    """
    N, P = prompts.shape
    _, G, C = completions.shape
    lengths = np.column_stack([(prompts != pad).sum(1) - 1, 1 + (completions != pad).sum(2)])  # of segments [N, 1 + G]
    begins = np.cumsum(lengths, 1) - lengths
    needed = lengths.sum(1)
    # Two widths are compiled; most batches fit into the first.
    longest = P - 1 + G * (1 + C)
    narrow = -(-longest * 4 // 5 // 16) * 16
    wide = -(-longest // 16) * 16
    T = next(width for width in (narrow, wide) if needed.max() <= width)
    starts = begins[:, 1:]
    tokens = np.zeros((N, T), np.int32)
    n, p = np.nonzero(prompts[:, :-1] != pad)
    tokens[n, p - (P - 1 - lengths[n, 0])] = prompts[n, p]
    tokens[np.arange(N)[:, None], starts] = prompts[:, -1:]
    n, g, c = np.nonzero(completions != pad)
    tokens[n, starts[n, g] + 1 + c] = completions[n, g, c]
    segments = (np.arange(T) >= begins[..., None]).sum(1) * (np.arange(T) < needed[:, None])
    skipped = np.maximum(begins - lengths[:, :1], 0)  # completions before this one
    return tokens, segments, np.arange(T) - np.take_along_axis(skipped, np.maximum(segments - 1, 0), 1), starts


def loss_of(weights, config, settings, rows, completions, advantages):
    (tokens, segments, positions, starts), (N, G, C) = rows, completions.shape
    queries, keys, T = segments[:, :, None], segments[:, None], tokens.shape[1]
    mask = jnp.tri(T, dtype=bool) & ((queries == keys) | (keys == PROMPT))
    rope = [x[positions] for x in rope_table(weights, config, T)]
    logits = (
        transformer(weights, config, tokens, rope, lambda _, q, k, v: attention(q, k, v, mask)) / settings.temperature
    )
    columns = jnp.minimum(starts[..., None] + jnp.arange(C), T - 1)  # [N, G, C]; padding's are masked
    logps = jax.nn.log_softmax(logits)[jnp.arange(N)[:, None, None], columns, completions].reshape(N * G, C)
    mask = completions.reshape(N * G, C) != config.pad
    return plain_grpo.policy_loss(logps, jax.lax.stop_gradient(logps), advantages, mask, settings)


@functools.partial(jax.jit, static_argnums=range(2, 5), donate_argnums=(0, 1))
def update_rows(weights, opt_state, config, optimizer, *batch):
    loss, gradient = jax.value_and_grad(loss_of)(weights, config, *batch)
    changes, opt_state = optimizer.update(gradient, opt_state, weights)
    return optax.apply_updates(weights, changes), opt_state, loss


def update(weights, opt_state, config, *settings_and_batch, group_size: int):
    """plain_grpo.update; filling the rows is part of its time."""
    *settings, prompts, completions, advantages = settings_and_batch
    completions = completions.reshape(-1, group_size, completions.shape[1])
    rows = group_rows(prompts[::group_size], completions, config.pad)
    return update_rows(weights, opt_state, config, *settings, rows, completions, advantages)


def train(job: Job) -> dict[str, Any]:
    size = job.recipe["grpo"]["group_size"]
    levers = (functools.partial(function, group_size=size) for function in (sample, update))
    return hand_jitted.train(job, "floor", *levers)


if __name__ == "__main__":
    worker_main(train, __doc__)
