"""GRPO's policy loss with three log-probability implementations; Tunix's learner takes it by name.

    GRPOConfig(policy_loss_fn=policy_loss_name("chunked"), kl_loss_mode="low_var_kl", ...)

The loss itself is a few numbers per token.  What takes memory is on the way to them: the logits, [B, T, V], which with
a vocabulary of 150,000 are more than all activations of the model.

- `jax`: the plain reference.  Logits, log-softmax in float32, as one would write it on paper.
- `chunked`: the head's matmul and the log-softmax for a few tokens at a time, computed again in the backward pass.
- `pallas`: a TPU kernel (pallas_kernel) that streams the vocabulary in tiles.

`chunked` and `pallas` start from the last hidden states, see `hidden_states`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError

environment.prepare()  # before this module, or another of this folder, imports JAX

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.rl import common, function_registry  # noqa: E402
from tunix.sft import utils  # noqa: E402

from grpo_train.losses import pallas_kernel  # noqa: E402
from grpo_train.losses.pallas_kernel import Partition  # noqa: E402

IMPLEMENTATIONS = ("jax", "chunked", "pallas")

# Of float32 logits, what `chunked` makes at a time.
CHUNK = 384 * 2**20

# Recipe's names of the KL estimators and ratios, and those that Tunix 0.1.7 gives them.
KL_ESTIMATORS = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}
RATIOS = {"token": "grpo", "sequence": "gspo-token"}
OF_TUNIX = {theirs: ours for ours, theirs in (KL_ESTIMATORS | RATIOS).items()}

# Tunix 0.1.7 bounds log π/π_old by this, so that exp() of it stays finite.
MAX_LOG_RATIO = 20.0


def policy_loss_name(implementation: str) -> str:
    """The name under which Tunix finds the loss."""
    return f"grpo-{implementation}"


# Log-probability and entropy of each token.


def token_statistics(
    target_ids: jax.Array,
    *,
    logits: jax.Array | None = None,
    hidden: jax.Array | None = None,
    head: jax.Array | None = None,
    temperature: float = 1.0,
    implementation: str = "jax",
    vocab_axis: int = 1,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(per_token_logps [B, T], entropy [B, T]), both in float32 nats, of softmax(logits / temperature).

    Differentiable with respect to logits, or to hidden and head.  The entropy is for logging and has no gradient.

    Args:
      target_ids: int [B, T], the tokens whose log-probabilities are asked for.
      logits: [B, T, V]; or in their place
      hidden: [B, T, D], and
      head: [D, V] with vocab_axis 1, [V, D] with vocab_axis 0.
      temperature: one number; with `jax` also an array, [] or [B, T].
      partition: how the arrays lie over several devices; `jax` needs none.

    Raises ValueError for an unknown implementation, and for others than `jax` from logits: nothing is left to save.
    """
    if implementation == "jax":
        return _plain(_project(hidden, head, vocab_axis) if logits is None else logits, target_ids, temperature)
    if implementation == "chunked" and hidden is not None:
        return _chunked(hidden, head, target_ids, temperature, vocab_axis, partition)
    if implementation == "pallas" and hidden is not None:
        return pallas_kernel.from_hidden(hidden, head, target_ids, temperature, vocab_axis, partition)
    raise ValueError(f"no implementation {implementation!r} from {'logits' if hidden is None else 'hidden states'}")


def _plain(logits, target_ids, temperature) -> tuple[jax.Array, jax.Array]:
    """log π = (l_y - max l) / τ - log Σ exp((l - max l) / τ), and the entropy, from all of [B, T, V] at once."""
    if jnp.ndim(temperature):
        temperature = temperature[..., None]  # [B, T, 1]
    logits = logits.astype(jnp.float32)  # [B, T, V]
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))  # [B, T, 1]; exp() of what is left cannot overflow
    total = jnp.exp((logits - peak) / temperature).sum(-1)  # [B, T]
    target = jnp.take_along_axis(logits, target_ids[..., None], -1)  # [B, T, 1]
    # The target is picked before normalising: log_softmax would write [B, T, V] once more.
    logps = ((target - peak) / temperature)[..., 0] - jnp.log(total)  # [B, T]
    # A logit of -inf has probability 0 and adds nothing: 0 log 0 is 0.
    distance = jnp.maximum(jax.lax.stop_gradient(logits - peak) / temperature, pallas_kernel.NEGLIGIBLE)
    total = jax.lax.stop_gradient(total)
    return logps, jnp.log(total) - jnp.sum(jnp.exp(distance) * distance, -1) / total


def _project(hidden, head, vocab_axis):
    """Logits in the dtype of the hidden states, as MaxText makes them."""
    logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), (((2,), (1 - vocab_axis,)), ((), ())))
    return logits.astype(jnp.float32)


def _chunked(hidden, head, target_ids, temperature, vocab_axis, partition) -> tuple[jax.Array, jax.Array]:
    """`_plain`, a few positions of all sequences at a time; each chunk's logits are made again for its gradient.

    Chunks are cut along T, since B is sharded over the devices. Each device gathers the head once, and exchanges its
    gradient once. Devices that share a vocabulary gather it whole and all compute the same.
    """
    partition = partition and dataclasses.replace(partition, vocabulary=())
    split, gather, _ = pallas_kernel.head_exchange(head, vocab_axis, partition)

    def local(hidden, head, ids):
        sequences, length = ids.shape
        head = gather(head)
        count = -(-length // chunk_length(sequences, length, head.shape[vocab_axis]))
        step = -(-length // count)

        def cut(array):
            array = jnp.pad(array, ((0, 0), (0, count * step - length)) + ((0, 0),) * (array.ndim - 2))
            return jnp.moveaxis(array.reshape(sequences, count, step, *array.shape[2:]), 1, 0)

        @functools.partial(jax.checkpoint, prevent_cse=False)  # a loop's body is compiled by itself
        def statistics(hidden, ids):
            return _plain(_project(hidden, head, vocab_axis), ids, temperature)

        return tuple(
            jnp.moveaxis(part, 0, 1).reshape(sequences, -1)[:, :length]
            for part in jax.lax.map(lambda chunk: statistics(*chunk), (cut(hidden), cut(ids)))
        )

    tokens = pallas_kernel.token_spec(partition)
    return pallas_kernel.sharded(local, partition, (tokens, split, tokens), (tokens, tokens))(hidden, head, target_ids)


def chunk_length(sequences: int, length: int, vocabulary: int) -> int:
    """Positions in a chunk of `sequences` sequences, so that its float32 logits are CHUNK bytes at most."""
    return max(1, min(length, CHUNK // (4 * vocabulary * sequences)))


# The loss, from log-probabilities.


def policy_loss(
    per_token_logps: jax.Array,
    old_per_token_logps: jax.Array | None,
    ref_per_token_logps: jax.Array | None,
    advantages: jax.Array,
    completion_mask: jax.Array,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    beta: float | jax.Array = 0.0,
    aggregation: str = "sequence-mean-token-mean",
    entropy: jax.Array | None = None,
    weights: jax.Array | None = None,
    kl: str = "k3",
    ratio: str = "token",
    completions: jax.Array | None = None,
    sampler_per_token_logps: jax.Array | None = None,
    correction_cap: float = 2.0,  # TRL's default (vllm_importance_sampling_cap), too
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, aux): GRPO's objective, negated (DeepSeekMath, arXiv:2402.03300, equations 3 and 4):

        - mean over completions i, mean over tokens t of
            min(ρ A_i, clip(ρ, 1 - ε_low, 1 + ε_high) A_i) - β k3,
        ρ = π(y_t) / π_old(y_t),      k3 = π_ref(y_t) / π(y_t) - log π_ref(y_t) / π(y_t) - 1.

    An algorithm is a choice of switches, which can be combined.  Where the column `here` is empty, it acts before the
    loss: on advantages, rewards or sampling.

    | algorithm | recipe, section `grpo` | here | paper |
    |---|---|---|---|
    | GRPO | the defaults | kl=k3, sequence-mean-token-mean | arXiv:2402.03300, eq. 3, 4 |
    | Dr. GRPO | advantage: mean, aggregation: constant | sequence-mean-token-scale | arXiv:2503.20783 |
    | RLOO | advantage: leave-one-out | | arXiv:2402.14740 |
    | MaxRL | advantage: maxrl | | arXiv:2602.02710 |
    | GSPO | ratio: sequence | ratio=sequence | arXiv:2507.18071, eq. 7 |
    | DAPO, clip-higher | epsilon_high: 0.28 | epsilon_high | arXiv:2503.14476, eq. 10 |
    | DAPO, token mean | aggregation: step | weights, see `learner.weight_by_tokens` | arXiv:2503.14476, eq. 12 |
    | DAPO, overlong penalty | overlong_buffer | | arXiv:2503.14476, eq. 13 |
    | DAPO, dynamic sampling | dynamic_sampling | | arXiv:2503.14476, eq. 11 |
    | KL estimators | kl: k1, k2, k3 | kl | J. Schulman, "Approximating KL divergence", 2020 |
    | TIS | correction: tis | sampler_per_token_logps | F. Yao et al., "Your efficient RL framework secretly |
    | | | | brings you off-policy RL training", 2025 |

    Same values as Tunix 0.1.7's grpo_loss_fn with the kl_loss_mode and the loss_algo of the same meaning.

    Args:
      per_token_logps: log π of the tokens, [B, T].
      old_per_token_logps: of the policy that sampled them; None: the same policy, ρ = 1 and its gradient stays.
      ref_per_token_logps: of the reference model; None: no KL.
      advantages: [B]; or [B, T], for rows that hold several completions.
      completion_mask: [B, T], true for tokens of a completion.  Everything else is ignored.
      epsilon_high: None: as epsilon_low.
      beta: a number, or an array [] that may be another one in the next call of a compiled loss.
      aggregation: of Tunix's aggregate_loss; sequence-mean-token-scale divides by a constant.
      entropy: [B, T], for aux alone.
      weights: [B, T], what each token counts for in the loss; then `aggregation` is not looked at (see `packing`).
      kl: in the place of k3 also k1 = log(π / π_ref) or k2 = k1² / 2.
      ratio: "sequence" takes the geometric mean of a completion's ratios as the ratio of each of its tokens.
      completions: int [B, T], a number below B T that tells the completions of a row apart; None: one to a row.
      sampler_per_token_logps: [B, T], of the engine that sampled, where that is not the old policy: the first term of a
        token is multiplied by min(π_old / π_sampler, correction_cap) (truncated importance sampling).

    Returns aux with `pg_loss`, `pg_clipfrac` (part of the tokens whose ratio was clipped), `ppo_kl` (mean of
    log π_old/π), `is_ratio/max` and `is_ratio/min`, and `entropy` (aggregated like the loss).  With
    `ref_per_token_logps` also `kl` (mean of k3 over tokens) and `kl_loss` (what is penalised, aggregated like the
    loss); with `sampler_per_token_logps` `importance_ratio`, the mean of π_old / π_sampler before the cap.

    Raises ValueError for another name of a kl, ratio or aggregation.
    """
    if kl not in KL_ESTIMATORS or ratio not in RATIOS:
        raise ValueError(f"kl must be one of {', '.join(KL_ESTIMATORS)}, ratio one of {', '.join(RATIOS)}")
    mask = completion_mask.astype(jnp.float32)
    epsilon_high = epsilon_low if epsilon_high is None else epsilon_high

    def masked(logps):  # where the mask is 0, a number that is harmless: 0 · inf would be NaN
        return jnp.where(mask > 0, logps.astype(jnp.float32), 0.0)

    def aggregate(values):
        if weights is not None:
            return (values * weights).sum()
        return common.aggregate_loss(values, mask, aggregation)

    def mean(values):
        return (values * mask).sum() / jnp.maximum(mask.sum(), 1)

    logps = masked(per_token_logps)  # [B, T]
    old = jax.lax.stop_gradient(logps) if old_per_token_logps is None else masked(old_per_token_logps)
    # [B, T], or [B, 1]: one for all tokens of a completion.
    advantages = advantages.astype(jnp.float32).reshape(len(advantages), -1)
    log_ratio = logps - old
    if ratio == "sequence":
        log_ratio = _completion_mean(log_ratio, mask, completions)

    # 1. The ratio and its clip.
    r = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B, T]
    unclipped = -advantages * r  # [B, T]
    clipped = -advantages * jnp.clip(r, 1 - epsilon_low, 1 + epsilon_high)  # [B, T]
    terms = jnp.maximum(unclipped, clipped)  # [B, T]; the max of the negated terms: PPO's pessimistic bound

    # 2. The correction for a sampler that is not the old policy.
    more = {}
    if sampler_per_token_logps is not None:
        difference = jax.lax.stop_gradient(old) - masked(sampler_per_token_logps)
        importance = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B, T]
        terms = terms * jnp.minimum(importance, correction_cap)
        more = {"importance_ratio": mean(importance)}

    # 3. One number of all tokens.
    loss = pg_loss = aggregate(terms)
    aux = more | {
        "pg_loss": pg_loss,
        "pg_clipfrac": mean(clipped > unclipped),
        "ppo_kl": mean(old - logps),
        "is_ratio/max": jnp.max(jnp.where(mask > 0, r, 0.0)),
        "is_ratio/min": jnp.min(jnp.where(mask > 0, r, jnp.inf)),
    }

    # 4. The KL penalty.
    if ref_per_token_logps is not None:
        difference = masked(ref_per_token_logps) - logps  # [B, T]
        k3 = jnp.exp(difference) - difference - 1
        penalty = {"k1": -difference, "k2": difference**2 / 2, "k3": k3}[kl]
        aux |= {"kl": mean(k3), "kl_loss": aggregate(penalty)}
        loss = loss + beta * aux["kl_loss"]
    if entropy is not None:
        aux["entropy"] = aggregate(masked(entropy))
    return loss, aux


def _completion_mean(values: jax.Array, mask: jax.Array, completions: jax.Array | None) -> jax.Array:
    """The mean over each completion's tokens, at each of them; [B, T]."""
    if completions is None:
        total, count = ((array * mask).sum(1, keepdims=True) for array in (values, jnp.ones_like(mask)))
    else:
        keys = jnp.where(mask > 0, completions, 0).reshape(-1)
        sums = functools.partial(jax.ops.segment_sum, segment_ids=keys, num_segments=keys.size)
        total, count = (
            sums((array * mask).reshape(-1))[keys].reshape(mask.shape) for array in (values, jnp.ones_like(mask))
        )
    return jnp.where(mask > 0, total / jnp.maximum(count, 1), 0.0)


# From a model.


def model_statistics(
    model: Any,
    prompt_ids: jax.Array,
    completion_ids: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float | jax.Array = 1.0,
    implementation: str = "jax",
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(per_token_logps [B, C], entropy [B, C]) of completions under a model, in float32 nats.

    Args:
      model: a TunixMaxTextAdapter; for `chunked` and `pallas` one from hidden_states.adapter_for.
      prompt_ids: [B, P], padded on the left; completion_ids: [B, C], padded on the right.
      temperature: a number is a constant of the compiled program; an array, [] or [B, C], is an argument.
      segment_ids, segment_positions: of packed rows [B, C] (see `packing`), whose prompt_ids are [B, 0].  A row's first
        token is predicted by none, and gets 0.

    Raises CourseError for a model that gives no hidden states.
    """
    targets = completion_ids if segment_ids is None else completion_ids[:, 1:]
    given, divisor = _before_targets(
        model, prompt_ids, completion_ids, pad_id, eos_id, implementation, segment_ids, segment_positions
    )
    if isinstance(temperature, jax.Array):
        if segment_ids is not None:
            temperature = temperature[:, 1:]
        if "hidden" in given:
            given["hidden"], temperature = _over_temperature(given["hidden"], temperature), divisor
    else:
        temperature = (temperature or 1.0) * divisor  # Tunix divides by no 0
    found = token_statistics(targets, temperature=temperature, implementation=implementation, **given)
    if segment_ids is None:
        return found
    logps, entropy = (jnp.pad(values, ((0, 0), (1, 0))) for values in found)
    return logps, entropy


def _over_temperature(hidden: jax.Array, temperature: jax.Array) -> jax.Array:
    """Hidden states [B, T, D] whose logits are those of `hidden` over a temperature, [] or [B, T].

    `chunked` and `pallas` have a temperature as a constant of their programs.  The result is rounded to the dtype of
    hidden states, as these are.
    """
    return (hidden.astype(jnp.float32) / temperature[..., None]).astype(hidden.dtype)


def _before_targets(
    model: Any,
    prompt_ids: jax.Array,
    completion_ids: jax.Array,
    pad_id: int,
    eos_id: int,
    implementation: str,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
) -> tuple[dict[str, Any], float]:
    """(what predicts the tokens, as token_statistics takes it: logits, or hidden states and a head; a number by which
    the logits that the head makes are still to be divided)."""
    # MaxText changes its modules when it hands out hidden states: those of a copy.
    model = nnx.merge(*nnx.split(model))
    tokens, positions, attention_mask, not_padding = common.process_ids(
        prompt_ids, completion_ids, pad_id, eos_id, segment_ids, segment_positions
    )
    segments = not_padding if segment_ids is None else segment_ids
    predicted = completion_ids.shape[1] if segment_ids is None else completion_ids.shape[1] - 1
    # What predicts a token stands one place before it.
    before = slice(-predicted - 1, -1)
    if implementation == "jax":
        logits, _ = model(tokens, positions=positions, cache=None, attention_mask=attention_mask, segment_ids=segments)
        return {"logits": logits[:, before]}, 1.0
    if not hasattr(model, "hidden_states"):
        raise CourseError(f"loss.implementation={implementation} needs a model made with hidden_states.adapter_for")
    hidden = model.hidden_states(tokens, positions, attention_mask, segments)
    head, vocab_axis, divisor = model.head()
    given = {
        "hidden": model.normalised(hidden[:, before]),
        "head": head,
        "vocab_axis": vocab_axis,
        "partition": model.partition(),
    }
    return given, divisor


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "temperature", "implementation"))
def per_token_logps(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float = 1.0,
    implementation: str = "jax",
) -> jax.Array:
    """log π(token) of completion tokens, [B, C], without a gradient: what Tunix's compute_per_token_logps gives."""
    logps, _ = model_statistics(
        nnx.merge(graphdef, state), prompt_tokens, completion_tokens, pad_id, eos_id, temperature, implementation
    )
    return jax.lax.stop_gradient(logps)


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "temperature", "implementation", "top_k", "top_p"))
def left_out(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    temperature: float,
    implementation: str,
    top_k: int | None,
    top_p: float,
) -> jax.Array:
    """The probability that top-k and top-p leave out where each token of the completions is sampled, [B, C].

    A few positions at a time, as in `_chunked`: the logits are sorted.
    """
    given, divisor = _before_targets(
        nnx.merge(graphdef, state), prompt_tokens, completion_tokens, pad_id, eos_id, implementation
    )
    from_logits = "logits" in given
    states = given["logits"] if from_logits else given["hidden"]  # [B, C, V] or [B, C, D]

    def of_part(part: jax.Array) -> jax.Array:
        logits = part if from_logits else _project(part, given["head"], given["vocab_axis"])
        return mass_left_out(logits, temperature * divisor, top_k, top_p)

    rows, length, _ = states.shape
    vocabulary = states.shape[-1] if from_logits else given["head"].shape[given["vocab_axis"]]
    step = chunk_length(rows, length, vocabulary)
    count = -(-length // step)
    parts = jnp.pad(states, ((0, 0), (0, count * step - length), (0, 0)))
    parts = jnp.moveaxis(parts.reshape(rows, count, step, -1), 1, 0)  # [count, B, step, V or D]
    masses = jax.lax.map(of_part, parts)
    return jnp.moveaxis(masses, 0, 1).reshape(rows, -1)[:, :length]


def mass_left_out(logits: jax.Array, temperature: float, top_k: int | None, top_p: float) -> jax.Array:
    """The probability of the tokens that top-k and top-p leave out of softmax(logits / temperature), [..., V] -> [...].

    As Tunix and vLLM cut: first the k most likely tokens; of their probabilities, which then add up to 1, those before
    which less than top_p has been counted.
    """
    vocabulary = logits.shape[-1]
    probabilities = jax.nn.softmax(logits.astype(jnp.float32) / temperature)
    largest, _ = jax.lax.top_k(probabilities, min(top_k or vocabulary, vocabulary))  # [..., k], in falling order
    among_k = largest / largest.sum(-1, keepdims=True)
    counted_before = jnp.cumsum(among_k, -1) - among_k
    return 1 - jnp.sum(jnp.where(counted_before <= top_p, largest, 0.0), -1)


# The same with the temperature as an argument, an array []: a schedule would compile a program for each step.
_compiled: Any = per_token_logps
_per_token_logps_at = jax.jit(_compiled.__wrapped__, static_argnames=("pad_id", "eos_id", "implementation"))


def logps_at(temperature: float | jax.Array) -> Callable[..., jax.Array]:
    """`per_token_logps` for a temperature that is a number, or an array."""
    return _per_token_logps_at if isinstance(temperature, jax.Array) else per_token_logps


def reference_logps(worker: Any, implementation: str) -> Callable[..., jax.Array]:
    """What can stand in for `get_ref_per_token_logps` of Tunix's InferenceWorker, and needs no logits [B, T, V]."""

    def logps(prompt_tokens, completion_tokens, pad_id, eos_id, temperature=1.0):
        model = nnx.split(worker.get_model("reference"))
        compute = logps_at(temperature)
        return compute(*model, prompt_tokens, completion_tokens, pad_id, eos_id, temperature, implementation)

    return logps


# For Tunix.


def in_micro_batches(
    loss: Callable[[Any, Any], tuple[jax.Array, Any]],
    model: Any,
    examples: Any,
    teaches: Callable[[Any], jax.Array] | None = None,
):
    """The means of (loss, aux) over the micro-batches [M, ...] of `examples`, one after another.

    The gradient of each is taken together with its loss, so the activations of one are in memory at a time.

    Args:
      loss: of (model, example); what is trained are the adapters, or all weights.
      teaches: of an example, []: False where its gradient is known to be 0, and not computed.
    """
    trained = nnx.LoRAParam if utils.is_lora_enabled(model) else nnx.Param
    graphdef, weights, rest = nnx.split(model, trained, ...)

    def forward(weights, rest, examples):
        def of_one(weights, example):
            return loss(nnx.merge(graphdef, weights, rest), example)

        def learn(gradients, example):
            found, more = jax.value_and_grad(of_one, has_aux=True)(weights, example)
            return jax.tree.map(jnp.add, gradients, more), found

        def add(gradients, example):
            if teaches is None:
                return learn(gradients, example)
            return jax.lax.cond(
                teaches(example), learn, lambda *_: (gradients, of_one(weights, example)), gradients, example
            )

        gradients, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), examples)
        return jax.tree.map(lambda values: values.mean(0), found), gradients

    def backward(gradients, cotangents):
        scale = cotangents[0] / len(jax.tree.leaves(examples)[0])
        return jax.tree.map(lambda gradient: gradient * scale, gradients), None, None

    mean = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    mean.defvjp(forward, backward)
    return mean(weights, rest, examples)


def grpo_loss(model, train_example, algo_config, pad_id, eos_id, *, implementation: str, **_: Any):
    """A policy loss as Tunix's GRPOLearner calls it: (loss, aux) of a micro-batch, or of packed ones [M, R, W]."""
    if train_example.completion_ids.ndim == 3:
        of_one = functools.partial(
            grpo_loss, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id, implementation=implementation
        )
        # Completions of a group that all have one reward teach nothing, where there is no KL penalty either.
        teaches = None if algo_config.beta else lambda example: jnp.any(example.advantages)
        return in_micro_batches(of_one, model, train_example, teaches)
    temperature = getattr(train_example, "temperature", None)
    logps, entropy = model_statistics(
        model,
        train_example.prompt_ids,
        train_example.completion_ids,
        pad_id,
        eos_id,
        algo_config.temperature if temperature is None else temperature,
        implementation,
        train_example.segment_ids,
        train_example.segment_positions,
    )
    beta = getattr(train_example, "beta", None)
    return policy_loss(
        logps,
        train_example.old_per_token_logps,
        train_example.ref_per_token_logps,
        train_example.advantages,
        train_example.completion_mask,
        epsilon_low=algo_config.epsilon,
        epsilon_high=getattr(algo_config, "epsilon_high", None),
        beta=algo_config.beta if beta is None else beta,
        aggregation=algo_config.loss_agg_mode,
        entropy=entropy,
        weights=getattr(train_example, "weights", None),
        kl=OF_TUNIX[algo_config.kl_loss_mode],
        ratio=OF_TUNIX[algo_config.loss_algo],
        completions=None if train_example.segment_ids is None else _completion_keys(train_example.segment_positions),
        sampler_per_token_logps=getattr(train_example, "sampler_per_token_logps", None),
    )


def _completion_keys(segment_positions: jax.Array) -> jax.Array:
    """For each token of packed rows [R, W] the place where its sequence begins, which no two completions share."""
    return jnp.arange(segment_positions.size).reshape(segment_positions.shape) - segment_positions


for _implementation in IMPLEMENTATIONS:
    function_registry.register_policy_loss_fn(policy_loss_name(_implementation))(
        functools.partial(grpo_loss, implementation=_implementation)
    )
