"""What is right: one plain NumPy function per variant, in float64, with its equation and where it was published.

Symbols: G completions o_i of a prompt, `|o_i|` tokens each; r_i rewards; A_i advantages; π the policy, π_old the policy
that sampled, π_ref the reference; ρ = π / π_old of a token.  A loss is the objective of a paper, negated.

A gradient is taken by a complex step: f(x + ih) = f(x) + ih f'(x), so the imaginary part over h is the derivative to
the last digit (W. Squire, G. Trapp: "Using Complex Variables to Estimate Derivatives of Real Functions", SIAM Review
40(1), 1998).  `.real` is therefore the stop-gradient of the papers.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_lib.conformance.cases import WEIGHTS, Case

LEARNING_RATE = 0.5  # of the step of gradient descent on the two weights
STEP = 1e-30  # h of the complex step: so small that its square is nothing


@dataclass(frozen=True)
class Variant:
    """Which GRPO is asked for.  The defaults are equation 3 of DeepSeekMath without a KL penalty, advantages given."""

    advantage: str = "given"  # "given": case.advantages; a name of ADVANTAGES: from case.rewards
    rewards: str = "sum"  # several rewards: their "sum", or "each" normalised by itself and then added
    aggregation: str = "completion"  # of AGGREGATIONS
    ratio: str = "token"  # of RATIOS
    clip: str = "clip"  # of OBJECTIVES
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float = 3.0  # c, of clip="dual"
    kl: str = "none"  # of KL_ESTIMATORS; or "reward": k1 of the completion, taken off its reward
    beta: float = 0.3
    correction: str = "none"  # of CORRECTIONS
    correction_cap: float = 2.0
    truncated: str = "in"  # "out": completions that were cut off are no part of the loss
    micro_batches: str = "one"  # "several": case.micro_batches, and the answer is that of the whole batch

    # What papers leave open: an implementation may do either, and the table says which.
    rows: str = "all"  # in a mean over completions those without tokens count; or only "with tokens"
    std_epsilon: float = 1e-6  # added to a standard deviation, so that it is not 0
    inside: bool = False  # ε is added to the variance, under the root

    # What is nobody's variant: known faults, which `naming` tries.
    fault: str = "none"

    @property
    def asks(self) -> dict[str, Any]:
        """What differs from plain GRPO, such as {"aggregation": "tokens"}."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


@dataclass(frozen=True, eq=False)
class Answer:
    """What an implementation computes, or should."""

    advantages: Any = None  # [B]
    loss: Any = None  # a number
    gradient: Any = None  # [B, T], of the loss with respect to case.logps
    weights: Any = None  # [2], of the model after one step


def by_group(values: np.ndarray, groups: np.ndarray, of_group: Callable[[np.ndarray], Any]) -> np.ndarray:
    """What `of_group` gives for the values of a completion's group, at each of them."""
    found = np.empty(len(values))
    for group in np.unique(groups):
        found[groups == group] = of_group(values[groups == group])
    return found


# ----- Advantages: from rewards [B] to advantages [B] -----


def _standard(centred: np.ndarray, spread: np.ndarray, variant: Variant) -> np.ndarray:
    divisor = np.sqrt(spread**2 + variant.std_epsilon) if variant.inside else spread + variant.std_epsilon
    return centred / divisor


def std(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean r) / std r of the group; std with n - 1.  DeepSeekMath (arXiv:2402.03300), section 4.1.2.

    The paper does not say whether n or n - 1; n - 1 is what PyTorch's std does.
    """
    spread = by_group(rewards, groups, functools.partial(np.std, ddof=1))
    return _standard(mean(rewards, groups, variant), spread, variant)


def std_n(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean r) / std r of the group; std with n.  DeepSeekMath (arXiv:2402.03300), section 4.1.2."""
    return _standard(mean(rewards, groups, variant), by_group(rewards, groups, np.std), variant)


def std_of_batch(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean r of the group) / std of all rewards of the batch.  Lite PPO (arXiv:2508.08221), as the
    documentation of AReaL and ROLL describes it, with n - 1 as in TRL 1.16; paper not seen."""
    return _standard(mean(rewards, groups, variant), np.full(len(rewards), rewards.std(ddof=1)), variant)


def mean(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = r_i - mean r of the group.  Dr. GRPO (arXiv:2503.20783), as in its authors' train_zero_math.py
    (sail-sg/understand-r1-zero); section 3.2 of the paper not seen."""
    return rewards - by_group(rewards, groups, np.mean)


def leave_one_out(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = r_i - mean of the others' r.  RLOO (arXiv:2402.14740)."""
    total, count = by_group(rewards, groups, np.sum), by_group(rewards, groups, len)
    return rewards - (total - rewards) / (count - 1)


def maxrl(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean r) / mean r of the group, for rewards of at least 0.  MaxRL (arXiv:2602.02710)."""
    return mean(rewards, groups, variant) / (by_group(rewards, groups, np.mean) + variant.std_epsilon)


def whole_batch(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean of the batch) / std of the batch: no group at all.  Nobody's GRPO; a known slip."""
    return std(rewards, np.zeros_like(groups), variant)


def over_variance(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = (r_i - mean r) / var r of the group: the root is forgotten.  Nobody's GRPO; a known slip."""
    variance = by_group(rewards, groups, functools.partial(np.var, ddof=1))
    return mean(rewards, groups, variant) / (variance + variant.std_epsilon)


def rewards_themselves(rewards: np.ndarray, groups: np.ndarray, variant: Variant) -> np.ndarray:
    """A_i = r_i: nothing is taken off.  Nobody's GRPO; a known slip."""
    return rewards


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray, Variant], np.ndarray]] = {
    "std": std,
    "std-n": std_n,
    "std-batch": std_of_batch,
    "mean": mean,
    "leave-one-out": leave_one_out,
    "maxrl": maxrl,
    "whole-batch": whole_batch,
    "the variance in place of std": over_variance,
    "the rewards themselves": rewards_themselves,
}


def reward_sum(case: Case, variant: Variant) -> np.ndarray:
    """The advantage of Σ_k r_k: several rewards are added, then compared."""
    return ADVANTAGES[variant.advantage](_rewards(case, variant), case.groups, variant)


def reward_each(case: Case, variant: Variant) -> np.ndarray:
    """Σ_k of the advantage of r_k: each reward is compared by itself.  GDPO (arXiv:2601.05242), equations 4 and 5."""
    one = ADVANTAGES[variant.advantage]
    return sum((one(column, case.groups, variant) for column in case.rewards.T), np.zeros(len(case.rewards)))


def reward_each_then_batch(case: Case, variant: Variant) -> np.ndarray:
    """reward_each, then minus its mean over the batch and over its std there.  GDPO (arXiv:2601.05242), equation 6."""
    added = reward_each(case, variant)
    return _standard(added - added.mean(), added.std(ddof=1), variant)


def reward_each_then_tokens(case: Case, variant: Variant) -> np.ndarray:
    """As reward_each_then_batch, but mean and std are over the tokens: a long completion counts for more."""
    added = reward_each(case, variant)
    of_tokens = np.repeat(added, case.mask.sum(1))
    return (added - of_tokens.mean()) / np.sqrt(of_tokens.var(ddof=1) + 1e-8)


REWARDS = {
    "sum": reward_sum,
    "each": reward_each,
    "each-batch": reward_each_then_batch,
    "each-tokens": reward_each_then_tokens,
}


def kl_in_reward(case: Case, variant: Variant) -> np.ndarray:
    """r_i - β Σ_t log(π_old / π_ref): the penalty is part of the reward.  RLOO (arXiv:2402.14740)."""
    k1 = np.where(case.mask, case.old_logps - case.ref_logps, 0.0)  # [B, T]
    return case.rewards.sum(1) - variant.beta * k1.sum(1)


def _rewards(case: Case, variant: Variant) -> np.ndarray:
    return kl_in_reward(case, variant) if variant.kl == "reward" else case.rewards.sum(1)


def advantages(case: Case, variant: Variant) -> np.ndarray:
    """Those of the case, or what the variant makes of its rewards; [B]."""
    if variant.advantage == "given":
        return case.advantages
    return REWARDS[variant.rewards](case, variant)


# ----- Ratio: from log-probabilities [B, T] to ρ [B, T] -----


def token_ratio(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """ρ_t = π(o_t) / π_old(o_t).  PPO (arXiv:1707.06347), equation 6; DeepSeekMath (arXiv:2402.03300), equation 3."""
    return np.exp(np.where(mask, logps - case.old_logps, 0.0))


def sequence_ratio(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """s = `(Π_t ρ_t)^(1/|o|)`, one for all tokens of a completion.  GSPO (arXiv:2507.18071), equation 7."""
    total = np.where(mask, logps - case.old_logps, 0.0).sum(1, keepdims=True)
    return np.exp(total / np.maximum(mask.sum(1, keepdims=True), 1)) * np.ones(mask.shape)


def sequence_ratio_bounded(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """s, at most e¹⁰, where its gradient ends.  What verl and Tunix do for stability."""
    return np.exp(np.minimum(np.log(sequence_ratio(logps, case, mask)), 10))


def sequence_ratio_over_padding(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """The mean of log ρ over all places, padding too.  Nobody's GSPO; a known slip."""
    return np.exp((logps - case.old_logps).mean(1, keepdims=True)) * np.ones(mask.shape)


def inverse_ratio(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """π_old / π.  Nobody's ratio; a known slip."""
    return 1 / token_ratio(logps, case, mask)


def ratio_to_itself(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """π / sg(π): 1, with the gradient of log π.  Right on policy; else a known slip."""
    return np.exp(np.where(mask, logps - case.logps, 0.0))


def log_ratio(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """log ρ: the exp is forgotten.  Nobody's ratio; a known slip."""
    return np.where(mask, logps - case.old_logps, 0.0)


def ratio_to_sampler(logps: np.ndarray, case: Case, mask: np.ndarray) -> np.ndarray:
    """π / π_sampler: the sampler is taken for the old policy."""
    return np.exp(np.where(mask, logps - case.sampler_logps, 0.0))


RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence up to e¹⁰": sequence_ratio_bounded,
    "sequence over padding": sequence_ratio_over_padding,
    "against the new policy": ratio_to_itself,
    "against the sampler": ratio_to_sampler,
    "inverse": inverse_ratio,
    "without exp": log_ratio,
}


# ----- Objective: a term for each token, [B, T] -----


def clipped(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A).  PPO (arXiv:1707.06347), equation 7; with two bounds DAPO
    (arXiv:2503.14476), equation 10."""
    return np.minimum(ratio * A, np.clip(ratio, 1 - variant.epsilon_low, 1 + variant.epsilon_high) * A)


def dual_clipped(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """max(clipped, c A) where A < 0, else clipped.  Dual-clip PPO, D. Ye et al. (arXiv:1912.09729), as in verl 0.9.1's
    core_algos; paper not seen."""
    single = clipped(ratio, A, logps, variant)
    return np.where(A < 0, np.maximum(single, variant.dual_clip * A), single)


def cispo(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """sg(min(ρ, 1 + ε_high)) A log π: the weight is bounded, and each token keeps its gradient.  CISPO, MiniMax-M1
    (arXiv:2506.13585), without a lower bound, as in TRL 1.16; paper not seen."""
    return np.minimum(ratio.real, 1 + variant.epsilon_high) * A * logps


def cispo_both(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """sg(clip(ρ, 1 - ε_low, 1 + ε_high)) A log π.  CISPO, MiniMax-M1 (arXiv:2506.13585), with both bounds, as in verl
    0.9.1's core_algos; paper not seen."""
    return np.clip(ratio.real, 1 - variant.epsilon_low, 1 + variant.epsilon_high) * A * logps


def unclipped(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """ρ A."""
    return ratio * A


def with_max(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """max(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A): the better of the two.  Nobody's objective; a known slip."""
    return np.maximum(ratio * A, np.clip(ratio, 1 - variant.epsilon_low, 1 + variant.epsilon_high) * A)


def without_min(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """clip(ρ, 1 - ε_low, 1 + ε_high) A, without the min: a bad step is not taken back.  A known slip."""
    return np.clip(ratio, 1 - variant.epsilon_low, 1 + variant.epsilon_high) * A


def without_ratio(ratio: np.ndarray, A: np.ndarray, logps: np.ndarray, variant: Variant) -> np.ndarray:
    """A log π: the policy gradient of a step on policy, without a ratio.  A known slip."""
    return A * logps


OBJECTIVES = {
    "clip": clipped,
    "dual": dual_clipped,
    "cispo": cispo,
    "cispo-both": cispo_both,
    "none": unclipped,
    "max in place of min": with_max,
    "without the min": without_min,
    "log π in place of the ratio": without_ratio,
}


# ----- Correction for a sampler that is not the old policy: a weight for each token, [B, T] -----


def tis(case: Case, variant: Variant) -> np.ndarray:
    """min(π_old / π_sampler, C).  F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025: truncated importance sampling."""
    return np.minimum(np.exp(case.old_logps - case.sampler_logps), variant.correction_cap)


def masked_correction(case: Case, variant: Variant) -> np.ndarray:
    """π_old / π_sampler, and 0 where it is above C.  IcePop, of Ring-1T (arXiv:2510.18855), with the upper bound."""
    weight = np.exp(case.old_logps - case.sampler_logps)
    return np.where(weight > variant.correction_cap, 0.0, weight)


CORRECTIONS = {"tis": tis, "mask": masked_correction}


# ----- KL: an estimate for each token, [B, T], from d = log π - log π_ref and ρ -----


def k1(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """d.  J. Schulman, "Approximating KL divergence", 2020."""
    return d


def k2(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """d² / 2.  J. Schulman, "Approximating KL divergence", 2020."""
    return d**2 / 2


def k3(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """exp(-d) + d - 1.  J. Schulman, 2020; DeepSeekMath (arXiv:2402.03300), equation 4."""
    return np.exp(-d) + d - 1


def k3_times_ratio(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """ρ (exp(-d) + d - 1), whose gradient is that of the divergence.  DeepSeek-V3.2 (arXiv:2512.02556), equation 7."""
    return ratio * k3(d, ratio)


def k3_reversed(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """exp(d) - d - 1: policy and reference exchanged.  Nobody's k3; a known slip."""
    return np.exp(d) - d - 1


def k3_bounded(d: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """min(k3, 10), whose gradient ends there.  What verl does for stability."""
    return np.minimum(k3(d, ratio), 10)


KL_ESTIMATORS = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3-ratio": k3_times_ratio,
    "k3-reversed": k3_reversed,
    "k3-bounded": k3_bounded,
}


# ----- Aggregation: from terms [B, T], 0 where there is padding, to one number -----


def _rows(mask: np.ndarray, variant: Variant) -> int:
    return len(mask) if variant.rows == "all" else max(int(mask.any(1).sum()), 1)


def completion_mean(terms: np.ndarray, mask: np.ndarray, case: Case, variant: Variant) -> Any:
    """`mean_i (1 / |o_i|) Σ_t`.  DeepSeekMath (arXiv:2402.03300), equation 3."""
    return (terms.sum(1) / np.maximum(mask.sum(1), 1)).sum() / _rows(mask, variant)


def token_mean(terms: np.ndarray, mask: np.ndarray, case: Case, variant: Variant) -> Any:
    """`Σ_i Σ_t / Σ_i |o_i|` over the batch.  DAPO (arXiv:2503.14476), equation 12, over all groups of a step."""
    return terms.sum() / max(mask.sum(), 1)


def group_token_mean(terms: np.ndarray, mask: np.ndarray, case: Case, variant: Variant) -> Any:
    """Mean over prompts of a group's `Σ_i Σ_t / Σ_i |o_i|`.  DAPO (arXiv:2503.14476), equation 12, as it stands."""
    groups = np.unique(case.groups)
    of_groups = [token_mean(terms[case.groups == g], mask[case.groups == g], case, variant) for g in groups]
    return sum(of_groups) / len(groups)


def constant(terms: np.ndarray, mask: np.ndarray, case: Case, variant: Variant) -> Any:
    """mean_i (1 / maximal length) Σ_t.  Dr. GRPO (arXiv:2503.20783), as in its authors' train_zero_math.py
    (sail-sg/understand-r1-zero); section 3.2 of the paper not seen."""
    return terms.sum() / _rows(mask, variant) / case.max_length


def completion_sum(terms: np.ndarray, mask: np.ndarray, case: Case, variant: Variant) -> Any:
    """mean_i Σ_t: the gradient of log π of a completion, not divided by a length.  RLOO (arXiv:2402.14740)."""
    return terms.sum() / _rows(mask, variant)


AGGREGATIONS = {
    "completion": completion_mean,
    "tokens": token_mean,
    "group-tokens": group_token_mean,
    "constant": constant,
    "completion-sum": completion_sum,
}


# ----- The whole -----


def tokens_in_loss(case: Case, variant: Variant) -> np.ndarray:
    """The tokens that are part of the loss, [B, T]."""
    return case.mask & ~case.truncated[:, None] if variant.truncated == "out" else case.mask


def loss(case: Case, variant: Variant, logps: np.ndarray) -> Any:
    """The loss of a batch as a function of log-probabilities; complex where they are."""
    if variant.micro_batches == "mean of means":  # nobody's variant; a known slip
        parts = case.parts()
        one = dataclasses.replace(variant, micro_batches="one")
        return sum(loss(part, one, logps[rows]) for part, rows in zip(parts, case.micro_batches, strict=True)) / len(
            parts
        )
    kept = tokens_in_loss(case, variant)
    everywhere = np.ones_like(kept)
    if variant.fault == "each completion is its length times a mean that counts padding":
        terms, _ = _terms(case, variant, logps, everywhere)
        return (terms * kept.sum(1, keepdims=True)).mean()
    summed = everywhere if variant.fault == "the sum counts padding" else kept
    counted = {"the denominator counts padding": everywhere, "the denominator counts what is left out": case.mask}
    divided = counted.get(variant.fault, kept)
    terms, ratio = _terms(case, variant, logps, summed)
    aggregate = AGGREGATIONS[variant.aggregation]
    found = aggregate(np.where(summed, terms, 0), divided, case, variant)
    if variant.kl in ("none", "reward"):
        return found
    estimates = KL_ESTIMATORS[variant.kl](logps - case.ref_logps, ratio)  # [B, T]
    if variant.fault == "the KL counts padding":
        return found + variant.beta * estimates.mean()
    return found + variant.beta * aggregate(np.where(summed, estimates, 0), divided, case, variant)


def _terms(case: Case, variant: Variant, logps: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The objective of each token, negated and corrected, and the ratio; [B, T] each."""
    A = advantages(case, variant)[:, None]  # [B, 1]
    ratio = RATIOS[variant.ratio](logps, case, mask)
    terms = -OBJECTIVES[variant.clip](ratio, A, logps, variant)
    if variant.correction != "none":
        terms = terms * CORRECTIONS[variant.correction](case, variant)
    return terms, ratio


def value_and_slope(case: Case, variant: Variant, direction: np.ndarray) -> tuple[float, float]:
    """The loss, and its derivative along a direction [B, T] of the log-probabilities; exact, by one complex step."""
    found = complex(loss(case, variant, case.logps + 1j * STEP * direction))
    return found.real, found.imag / STEP


def gradient(case: Case, variant: Variant) -> np.ndarray:
    """The derivative of the loss with respect to each log-probability, [B, T]; exact, by complex steps."""
    found = np.zeros(case.logps.shape)
    for place in np.ndindex(*found.shape):
        logps = case.logps.astype(complex)
        logps[place] += 1j * STEP
        found[place] = loss(case, variant, logps).imag / STEP
    return found


def step(case: Case, gradient: np.ndarray) -> np.ndarray:
    """The two weights after one step of gradient descent, [2]."""
    return np.array(WEIGHTS["logps"]) - LEARNING_RATE * (gradient[..., None] * case.slopes()).sum((0, 1))


def weights_after_step(case: Case, variant: Variant) -> np.ndarray:
    """As step, from the derivatives of the loss along the slopes of the two weights, [2]."""
    slopes = np.moveaxis(case.slopes(), -1, 0)  # [2, B, T]
    along = [value_and_slope(case, variant, slope)[1] for slope in slopes]
    return np.array(WEIGHTS["logps"]) - LEARNING_RATE * np.array(along)


@functools.cache
def expected(case: Case, variant: Variant) -> Answer:
    """All that is right for a case."""
    slope = gradient(case, variant)
    return Answer(advantages(case, variant), float(loss(case, variant, case.logps)), slope, step(case, slope))
