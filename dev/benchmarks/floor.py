"""The floor: grpo_lib.plain_grpo with the levers of the course's trainer and more, and nothing around it.

    python dev/benchmarks/step_time.py --write-job /tmp/job.json
    python dev/benchmarks/floor.py /tmp/job.json

The sampler computes each prompt once and keeps its keys and values apart from the completions', so that no step copies
them, and a group's queries meet them in one product.  It also keeps the output of every product of activations and
weights, of each token, logits too.  There is one update, and it is on-policy, so its forward pass would compute the
same products again: it takes them from the sampler, and computes what is cheap (norms, rotations, attention, softmax)
and the gradient.  In it a completion meets its prompt and itself alone, only what predicts a token has logits, and the
optimizer is that of the course.  Texts, loss and gradient are plain_grpo's (tests/test_benchmarks.py).

Shapes as in plain_grpo, and: N prompts, G completions of each, M tokens of any, K heads of keys and values, Q queries
of each, H head size.  B = N G.  Tokens of completions are [C, B]: those of a step are neighbours in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hand_jitted  # prepares the environment, so before jax
import jax
import jax.numpy as jnp
import optax
from job import Job, worker_main

from grpo_lib import plain_grpo
from grpo_lib.plain_grpo import rms_norm

MASKED = -1e30


@jax.custom_vjp
def kept_product(x, w, kept):
    """x @ w, of which the value is known and the gradient is not: `kept`, [M, F]."""
    return kept


def kept_product_backward(saved, dy):
    x, w = saved
    # XLA's CPU compiler copies the first operand of a weight gradient transposed; the narrower one costs less.
    gradient = x.T @ dy if x.shape[1] <= dy.shape[1] else (dy.T @ x).T
    return dy @ w.T, gradient, None


kept_product.defvjp(lambda x, w, kept: (kept, (x, w)), kept_product_backward)


def rope_table(config, places: int):  # sin and cos [places, 1, H / 2]: computed once for all layers and steps
    half = config.head_dim // 2
    angles = jnp.arange(places)[:, None, None] * config.rope_theta ** (-jnp.arange(half) / half)
    return jnp.sin(angles), jnp.cos(angles)


def layer_product(product: Callable, layer: int, w, name: str, x):
    return product(f"{layer}.{name}", x, w[name])


def transformer(weights, config, tokens, rope, attend: Callable, product: Callable):
    """Last hidden states [M, D] of tokens [M]; `rope`: sin and cos at their positions, [M, 1, H / 2].

    attend(layer, q, k, v), which are [M, K Q, H] and [M, K, H], gives [M, K Q H] in any shape.
    product(name, x, w) gives x @ w.
    """
    (sin, cos), eps, M = rope, config.rms_norm_eps, len(tokens)

    def rotate(x):
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["embed_tokens"][tokens]
    for i in range(config.layers):
        w = {name.removeprefix(f"layers.{i}."): weights[name] for name in weights if name.startswith(f"layers.{i}.")}
        layer = functools.partial(layer_product, product, i, w)
        h = rms_norm(x, w["input_layernorm"], eps)
        q, k, v = (layer(f"self_attn.{name}_proj", h).reshape(M, -1, config.head_dim) for name in "qkv")
        q, k = (rotate(rms_norm(y, w[f"self_attn.{name}_norm"], eps)) for name, y in (("q", q), ("k", k)))
        x = x + layer("self_attn.o_proj", attend(i, q, k, v).reshape(M, -1))
        h = rms_norm(x, w["post_attention_layernorm"], eps)
        x = x + layer("mlp.down_proj", jax.nn.silu(layer("mlp.gate_proj", h)) * layer("mlp.up_proj", h))
    return rms_norm(x, weights["norm"], eps)


def logits_of(weights, hidden, product: Callable):
    head = weights.get("lm_head", weights["embed_tokens"].astype(jnp.bfloat16))  # rounded as in plain_grpo
    return product("head", hidden, head.T.astype(jnp.float32))


def prompt_attention(q, k, v, valid):
    """Of prompts with themselves: q [N P, K Q, H], k and v [N P, K, H], valid [N, P] -> [N, P, K, Q, H]."""
    N, P = valid.shape
    k, v = (x.reshape(N, P, *x.shape[1:]) for x in (k, v))
    q = q.reshape(*k.shape[:3], -1, k.shape[3])
    scores = jnp.einsum("ntkqh,nskh->nkqts", q, k) * k.shape[3] ** -0.5
    mask = (valid[:, None] & jnp.tri(P, dtype=bool))[:, None, None]
    return jnp.einsum("nkqts,nskh->ntkqh", jax.nn.softmax(jnp.where(mask, scores, MASKED)), v)


@functools.partial(jax.jit, static_argnames=("config", "length", "temperature", "group_size"))
def sample(weights, config, prompts, key, length: int, temperature: float, group_size: int):
    """plain_grpo.sample above temperature 0, for prompts that come `group_size` times each: completions [B, C], and the
    products by name, those of the prompts [N P, F] and of the completions [C - 1, B, F].

    The last token of a completion is not computed: it predicts nothing.
    """
    B, P = prompts.shape
    G = group_size
    C = length
    ends = jnp.array(config.ends)
    first = prompts[::G]  # [N, P], each prompt once
    N = B // G
    valid = first != config.pad
    cache = []  # keys and values [N, P, K, H] by layer
    table = rope_table(config, P + C)
    positions = jnp.cumsum(valid, 1) - 1

    def product_into(made: dict):
        def product(name, x, w):
            made[name] = x @ w
            return made[name]

        return product

    def prefill(_, q, k, v):
        cache.append([x.reshape(N, P, *x.shape[1:]) for x in (k, v)])
        return prompt_attention(q, k, v, valid)

    def choose(logits, index):  # as jax.random.categorical, whose argmax is slow on a CPU
        scores = logits / temperature + jax.random.gumbel(jax.random.fold_in(key, index), logits.shape)
        places = jnp.arange(logits.shape[-1])
        return jnp.where(scores == scores.max(-1, keepdims=True), places, len(places)).min(-1)

    def next_token(state):
        index, token, ended, completions, own, kept = state
        new, made = [], {}
        at = index - 1
        seen = jnp.concatenate([valid, jnp.broadcast_to(jnp.arange(C) <= at, (N, C))], 1)[:, None, None, None]

        def attend(i, q, k, v):
            keys, values = cache[i]
            K, H = keys.shape[2:]
            q, k, v = (x.reshape(N, G, K, -1, H) for x in (q, k, v))
            # Those of the completions are [N, G, K, H, C] and [N, G, K, C, H]: sums below then run over whole vectors.
            own_keys = jax.lax.dynamic_update_slice_in_dim(own[i][0], k.swapaxes(3, 4), at, 4)
            own_values = jax.lax.dynamic_update_slice_in_dim(own[i][1], v, at, 3)
            new.append((own_keys, own_values))
            scores = jnp.einsum("ngkqd,npkd->ngkqp", q, keys), (q[..., None] * own_keys[:, :, :, None]).sum(4)
            w = jax.nn.softmax(jnp.where(seen, jnp.concatenate(scores, -1) * H**-0.5, MASKED))
            out = jnp.einsum("ngkqp,npkd->ngkqd", w[..., :P], values)
            return out + (w[..., P:, None] * own_values[:, :, :, None]).sum(4)

        rope = [jnp.repeat(x[positions[:, -1] + index], G, 0) for x in table]
        hidden = transformer(weights, config, token, rope, attend, product_into(made))
        logits = logits_of(weights, hidden, product_into(made))
        token = jnp.where(ended, config.pad, choose(logits, index))
        kept = {name: jax.lax.dynamic_update_index_in_dim(kept[name], made[name], at, 0) for name in made}
        return index + 1, token, ended | jnp.isin(token, ends), completions.at[:, index].set(token), new, kept

    of_prompts: dict[str, jax.Array] = {}
    rope = [x[positions.reshape(-1)] for x in table]
    hidden = transformer(weights, config, first.reshape(-1), rope, prefill, product_into(of_prompts))
    logits = logits_of(weights, hidden.reshape(N, P, -1)[:, -1], product_into(of_prompts))
    token = choose(jnp.repeat(logits, G, 0), 0)
    completions = jnp.full((B, C), config.pad)
    shapes = [(N, G, *k.shape[2:], C) for k, _ in cache]
    own = [(jnp.zeros(shape), jnp.zeros(shape).swapaxes(3, 4)) for shape in shapes]
    kept = {name: jnp.zeros((C - 1, B, made.shape[1])) for name, made in of_prompts.items()}
    state = (1, token, jnp.isin(token, ends), completions.at[:, 0].set(token), own, kept)
    state = jax.lax.while_loop(lambda state: (state[0] < C) & ~state[2].all(), next_token, state)
    return state[3], (of_prompts, state[5])


def loss_of(weights, config, settings, prompts, completions, advantages, from_sampler):
    """plain_grpo's loss of prompts [N, P] and completions [B, C], with what `sample` has kept of them."""
    (N, P), (B, C) = prompts.shape, completions.shape
    G = B // N
    T = C - 1  # of each completion: its last token predicts nothing
    of_prompts, of_completions = from_sampler
    valid = prompts != config.pad
    positions = jnp.cumsum(valid, 1) - 1
    later = jnp.repeat(positions[:, -1], G) + 1 + jnp.arange(T)[:, None]  # [T, B]
    places = jnp.concatenate([positions.reshape(-1), later.reshape(-1)])
    tokens = jnp.concatenate([prompts.reshape(-1), completions[:, :-1].T.reshape(-1)])

    def product(name, x, w):
        values = of_completions[name]
        kept = jnp.concatenate([of_prompts[name], values.reshape(-1, values.shape[2])])
        return kept_product(x, w, kept)

    def attend(_, q, k, v):
        of_prompt = prompt_attention(q[: N * P], k[: N * P], v[: N * P], valid)
        K, H = k.shape[1:]
        keys, values = (x[: N * P].reshape(N, P, K, H) for x in (k, v))
        q, k, v = (x[N * P :].reshape(T, N, G, K, -1, H) for x in (q, k, v))
        to_prompt = jnp.einsum("tngkqh,npkh->ngkqtp", q, keys)
        to_own = jnp.einsum("tngkqh,sngkh->ngkqts", q, k[..., 0, :])
        to_prompt = jnp.where(valid[:, None, None, None, None], to_prompt, MASKED)
        to_own = jnp.where(jnp.tri(T, dtype=bool), to_own, MASKED)
        w = jax.nn.softmax(jnp.concatenate([to_prompt, to_own], -1) * H**-0.5)
        out = jnp.einsum("ngkqtp,npkh->tngkqh", w[..., :P], values)
        out += jnp.einsum("ngkqts,sngkh->tngkqh", w[..., P:], v[..., 0, :])
        return jnp.concatenate([of_prompt.reshape(N * P, -1), out.reshape(T * B, -1)])

    rope = [x[places] for x in rope_table(config, P + C)]
    hidden = transformer(weights, config, tokens, rope, attend, product)
    # What predicts a token: the last one of a prompt, and all but the last one of a completion.
    predicts = jnp.concatenate([hidden[: N * P].reshape(N, P, -1)[:, -1], hidden[N * P :]])
    logps = jax.nn.log_softmax(logits_of(weights, predicts, product) / settings.temperature)
    of_first = jnp.take_along_axis(jnp.repeat(logps[:N], G, 0), completions[:, :1], 1)  # [B, 1]
    of_others = jnp.take_along_axis(logps[N:].reshape(T, B, -1), completions[:, 1:].T[..., None], 2)  # [T, B, 1]
    logps = jnp.concatenate([of_first, of_others[..., 0].T], 1)
    mask = completions != config.pad
    return plain_grpo.policy_loss(logps, jax.lax.stop_gradient(logps), advantages, mask, settings)


@functools.partial(jax.jit, static_argnums=range(2, 5), donate_argnums=(0, 1))
def update(weights, opt_state, config, optimizer, *settings_and_batch):
    loss, gradient = jax.value_and_grad(loss_of)(weights, config, *settings_and_batch)
    changes, opt_state = optimizer.update(gradient, opt_state, weights)
    return optax.apply_updates(weights, changes), opt_state, loss


class Floor:
    """plain_grpo.sample and plain_grpo.update; the first keeps for the second what it has computed."""

    def __init__(self, group_size: int):
        self.group_size = group_size

    def sample(self, *arguments):
        completions, self.kept = sample(*arguments, group_size=self.group_size)
        return completions

    def update(self, weights, opt_state, config, optimizer, settings, prompts, completions, advantages):
        batch = (prompts[:: self.group_size], completions, advantages, self.kept)
        return update(weights, opt_state, config, optimizer, settings, *batch)


def make_optimizer(settings) -> optax.GradientTransformation:
    """plain_grpo's, with the course's clipping."""
    from grpo_train.engines.optimizer import clip_by_global_norm

    peak, warmup = settings.learning_rate, settings.warmup_steps
    rate = optax.warmup_constant_schedule(peak / max(warmup, 1), peak, warmup)
    adamw = optax.adamw(rate, settings.b1, settings.b2, weight_decay=settings.weight_decay)
    return optax.chain(clip_by_global_norm(settings.max_grad_norm), adamw)


def train(job: Job) -> dict[str, Any]:
    floor = Floor(job.recipe["grpo"]["group_size"])
    plain_grpo.make_optimizer = make_optimizer
    return hand_jitted.train(job, "floor", floor.sample, floor.update)


if __name__ == "__main__":
    worker_main(train, __doc__)
