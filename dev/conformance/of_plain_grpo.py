"""Adapter: grpo_lib.plain_grpo, GRPO in one file of plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_lib.plain_grpo import Settings, group_advantages, policy_loss

AGGREGATIONS = {"completion": "completion", "tokens": "step", "constant": "constant"}
OFFERED = {"advantage", "aggregation", "epsilon_high", "truncated"}


def adapter(case, variant):
    advantage = variant.advantage
    if set(variant.asks) - OFFERED or variant.aggregation not in AGGREGATIONS:
        return None
    if advantage != "given":
        if advantage not in ("std", "mean", "leave-one-out", "maxrl"):
            return None
        return {"advantages": group_advantages(case.rewards.sum(1), case.group_size, advantage)}
    settings = Settings(
        aggregation=AGGREGATIONS[variant.aggregation],
        epsilon_high=variant.epsilon_high,
        mask_truncated=variant.truncated == "out",
    )
    # `train` samples completions of this length, and pads them to it.
    width = case.mask.shape[1]
    beyond = ((0, 0), (0, case.max_length - width))
    mask = case.mask & ~case.truncated[:, None] if settings.mask_truncated else case.mask
    logps, old = (jnp.asarray(np.pad(one, beyond), jnp.float32) for one in (case.logps, case.old_logps))
    run = jax.value_and_grad(policy_loss)
    loss, gradient = run(logps, old, jnp.asarray(case.advantages, jnp.float32), np.pad(mask, beyond), settings)
    return {"loss": loss, "gradient": np.asarray(gradient)[:, :width]}
