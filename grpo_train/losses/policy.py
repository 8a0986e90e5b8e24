"""GRPO's policy loss: a few numbers per token, from log-probabilities."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from tunix.rl import common

# Recipe's names of the KL estimators and ratios, and those that Tunix 0.1.7 gives them.
KL_ESTIMATORS = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}
RATIOS = {"token": "grpo", "sequence": "gspo-token"}

# Tunix 0.1.7 bounds log π/π_old by this, so that exp() of it stays finite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLossSettings:
    """Which policy loss it is; the defaults are those of GRPO without a KL penalty.

    Raises ValueError for another name of a kl or ratio.
    """

    epsilon_low: float = 0.2
    epsilon_high: float | None = None  # None: as epsilon_low
    # A number, or an array [] that may be another one in the next call of a compiled loss.
    beta: float | jax.Array = 0.0
    aggregation: str = "sequence-mean-token-mean"  # of Tunix's aggregate_loss; ...-token-scale divides by a constant
    kl: str = "k3"  # in its place also k1 = log(π / π_ref) or k2 = k1² / 2
    ratio: str = "token"  # "sequence": the geometric mean of a completion's ratios is the ratio of each of its tokens
    correction_cap: float = 2.0  # of π_old / π_sampler; TRL's default (vllm_importance_sampling_cap), too

    def __post_init__(self) -> None:
        if self.kl not in KL_ESTIMATORS or self.ratio not in RATIOS:
            raise ValueError(f"kl must be one of {', '.join(KL_ESTIMATORS)}, ratio one of {', '.join(RATIOS)}")


GRPO = PolicyLossSettings()


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """What the log-probabilities of the policy are compared with; names as in Tunix's TrainExample.

    B rows of T tokens.
    """

    # [B, T], of the policy that sampled; None: the same policy, ρ = 1 and its gradient stays.
    old_per_token_logps: jax.Array | None
    ref_per_token_logps: jax.Array | None  # [B, T], of the reference model; None: no KL
    advantages: jax.Array  # [B]; or [B, T], for rows that hold several completions
    completion_mask: jax.Array  # [B, T], true for tokens of a completion; everything else is ignored
    # [B, T], what each token counts for in the loss; then the settings' `aggregation` is not looked at (see `packing`).
    weights: jax.Array | None = None
    # int [B, T], a number below B T that tells the completions of a row apart; None: one to a row.
    completions: jax.Array | None = None
    # [B, T], of the engine that sampled, where that is not the old policy: the first term of a token is multiplied by
    # min(π_old / π_sampler, correction_cap) (truncated importance sampling).
    sampler_per_token_logps: jax.Array | None = None


def policy_loss(
    per_token_logps: jax.Array,
    batch: PolicyBatch,
    settings: PolicyLossSettings = GRPO,
    entropy: jax.Array | None = None,
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
    | DAPO, token mean | aggregation: step | weights, see `learner.weight_tokens` | arXiv:2503.14476, eq. 12 |
    | DAPO, overlong filtering | mask_truncated | completion_mask, weights | arXiv:2503.14476, section 3.4 |
    | DAPO, overlong penalty | overlong_buffer | | arXiv:2503.14476, eq. 13 |
    | DAPO, dynamic sampling | dynamic_sampling | | arXiv:2503.14476, eq. 11 |
    | KL estimators | kl: k1, k2, k3 | kl | J. Schulman, "Approximating KL divergence", 2020 |
    | TIS | correction: tis | sampler_per_token_logps | F. Yao et al., "Your efficient RL framework secretly |
    | | | | brings you off-policy RL training", 2025 |

    Same values as Tunix 0.1.7's grpo_loss_fn with the kl_loss_mode and the loss_algo of the same meaning.

    Args:
      per_token_logps: log π of the tokens, [B, T].
      entropy: [B, T], for aux alone.

    Returns aux with `pg_loss`, `pg_clipfrac` (part of the tokens whose ratio was clipped), `ppo_kl` (mean of
    log π_old/π), `is_ratio/max` and `is_ratio/min`, and `entropy` (mean over tokens, in nats, whatever the
    aggregation).  With `ref_per_token_logps` also `kl` (mean of k3 over tokens) and `kl_loss` (what is penalised,
    aggregated like the loss); with `sampler_per_token_logps` `importance_ratio`, the mean of π_old / π_sampler before
    the cap.

    Raises ValueError for another name of an aggregation.
    """
    mask = batch.completion_mask.astype(jnp.float32)
    epsilon_low = settings.epsilon_low
    epsilon_high = epsilon_low if settings.epsilon_high is None else settings.epsilon_high

    def masked(logps):  # where the mask is 0, a number that is harmless: 0 · inf would be NaN
        return jnp.where(mask > 0, logps.astype(jnp.float32), 0.0)

    def aggregate(values):
        if batch.weights is not None:
            return (values * batch.weights).sum()
        return common.aggregate_loss(values, mask, settings.aggregation)

    def mean(values):
        return (values * mask).sum() / jnp.maximum(mask.sum(), 1)

    logps = masked(per_token_logps)  # [B, T]
    on_policy = batch.old_per_token_logps is None
    old = jax.lax.stop_gradient(logps) if on_policy else masked(batch.old_per_token_logps)
    # [B, T], or [B, 1]: one for all tokens of a completion.
    advantages = batch.advantages.astype(jnp.float32).reshape(len(batch.advantages), -1)
    log_ratio = logps - old
    if settings.ratio == "sequence":
        log_ratio = _completion_mean(log_ratio, mask, batch.completions)

    # 1. The ratio and its clip.
    r = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B, T]
    unclipped = -advantages * r  # [B, T]
    clipped = -advantages * jnp.clip(r, 1 - epsilon_low, 1 + epsilon_high)  # [B, T]
    terms = jnp.maximum(unclipped, clipped)  # [B, T]; the max of the negated terms: PPO's pessimistic bound

    # 2. The correction for a sampler that is not the old policy.
    aux = {}
    if batch.sampler_per_token_logps is not None:
        difference = jax.lax.stop_gradient(old) - masked(batch.sampler_per_token_logps)
        importance = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B, T]
        terms = terms * jnp.minimum(importance, settings.correction_cap)
        aux["importance_ratio"] = mean(importance)

    # 3. One number of all tokens.
    loss = aggregate(terms)
    aux["pg_loss"] = loss
    aux["pg_clipfrac"] = mean(clipped > unclipped)
    aux["ppo_kl"] = mean(old - logps)
    aux["is_ratio/max"] = jnp.max(jnp.where(mask > 0, r, 0.0))
    aux["is_ratio/min"] = jnp.min(jnp.where(mask > 0, r, jnp.inf))

    # 4. The KL penalty.
    if batch.ref_per_token_logps is not None:
        difference = masked(batch.ref_per_token_logps) - logps  # [B, T]
        k3 = jnp.exp(difference) - difference - 1
        penalty = {"k1": -difference, "k2": difference**2 / 2, "k3": k3}[settings.kl]
        aux |= {"kl": mean(k3), "kl_loss": aggregate(penalty)}
        loss = loss + settings.beta * aux["kl_loss"]
    if entropy is not None:
        aux["entropy"] = mean(masked(entropy))
    return loss, aux


def _completion_mean(values: jax.Array, mask: jax.Array, completions: jax.Array | None) -> jax.Array:
    """The mean over each completion's tokens, at each of them; [B, T]."""
    if completions is None:
        total = (values * mask).sum(1, keepdims=True)
        count = mask.sum(1, keepdims=True)
    else:
        keys = jnp.where(mask > 0, completions, 0)
        total = _sum_by_key(values * mask, keys)
        count = _sum_by_key(mask, keys)
    return jnp.where(mask > 0, total / jnp.maximum(count, 1), 0.0)


def _sum_by_key(values: jax.Array, keys: jax.Array) -> jax.Array:
    """The sum of all values with the same key, at each of them; [B, T]."""
    sums = jax.ops.segment_sum(values.reshape(-1), segment_ids=keys.reshape(-1), num_segments=keys.size)
    return sums[keys.reshape(-1)].reshape(values.shape)
