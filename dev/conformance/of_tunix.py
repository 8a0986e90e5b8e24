"""Adapter: Tunix's own GRPO loss and advantage estimators."""

import dataclasses

import numpy as np
from given_logps import example, loss_and_gradient
from tunix.rl import function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig  # registers loss and estimators

ADVANTAGES = {"std": "grpo", "mean": "drgrpo", "leave-one-out": "rloo"}
AGGREGATIONS = {
    "completion": "sequence-mean-token-mean", "tokens": "token-mean",
    "constant": "sequence-mean-token-scale", "completion-sum": "seq-mean-token-sum",
}  # fmt: skip
RATIOS = {"token": "grpo", "sequence": "gspo-token"}
KL = {"none": "low_var_kl", "k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}
OFFERED = {"advantage", "aggregation", "ratio", "epsilon_high", "clip", "kl", "micro_batches"}


def adapter(case, variant):
    if set(variant.asks) - OFFERED or variant.aggregation not in AGGREGATIONS or variant.kl not in KL:
        return None
    if variant.clip not in ("clip", "dual") or variant.advantage not in ("given", *ADVANTAGES):
        return None
    if variant.advantage != "given":
        estimate = function_registry.get_advantage_estimator(ADVANTAGES[variant.advantage])
        return {"advantages": np.asarray(estimate(rewards=case.rewards.sum(1), num_generations=case.group_size))}
    config = Config(
        beta=0.0 if variant.kl == "none" else variant.beta, kl_loss_mode=KL[variant.kl],
        epsilon_high=variant.epsilon_high, epsilon_c=variant.dual_clip if variant.clip == "dual" else None,
        loss_agg_mode=AGGREGATIONS[variant.aggregation], loss_algo=RATIOS[variant.ratio],
    )  # fmt: skip
    parts = case.parts() if variant.micro_batches == "several" else [case]
    found = [loss_and_gradient("grpo", config, part, example(part, part.max_length)) for part in parts]
    losses, slopes = zip(*found, strict=True)
    return {"loss": np.mean(losses), "gradient": np.concatenate(slopes) / len(parts)}  # optax.MultiSteps takes the mean


@dataclasses.dataclass(slots=True, kw_only=True)
class Config(GRPOConfig):  # what Tunix has in DAPOConfig only, with other fixed values
    epsilon_high: float = 0.2
    epsilon_c: float | None = None
