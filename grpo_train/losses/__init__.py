"""GRPO's policy loss with three log-probability implementations; Tunix's learner takes it by name.

    engines.learner.policy_loss_config(recipe.grpo, "chunked")    # names it to Tunix

token_logps      log-probability and entropy of each token: `jax`, `chunked` and `pallas`
pallas_kernel    the TPU kernel of `pallas`
policy           the loss, from log-probabilities
hidden_states    the adapter around a MaxText model that makes no logits, for `chunked` and `pallas`
model_logps      log-probabilities of completions under a model
for_tunix        the loss as Tunix's learner calls it
packing          micro-batches in rows of real tokens
slots            on one CPU, their attention without what its mask throws away

This file only imports, and prepares the environment before JAX is imported by one of them.
"""

from grpo_lib.common import environment

environment.prepare()

# isort: split

from grpo_train.losses.for_tunix import grpo_loss, in_micro_batches, policy_loss_name, reference_logps  # noqa: E402
from grpo_train.losses.model_logps import left_out, logps_at, mass_left_out, model_statistics, per_token_logps  # noqa: E402
from grpo_train.losses.policy import (  # noqa: E402
    GRPO,
    KL_ESTIMATORS,
    RATIOS,
    PolicyBatch,
    PolicyLossSettings,
    policy_loss,
)
from grpo_train.losses.token_logps import IMPLEMENTATIONS, chunk_length, token_statistics  # noqa: E402

__all__ = [
    "GRPO", "IMPLEMENTATIONS", "KL_ESTIMATORS", "RATIOS", "PolicyBatch", "PolicyLossSettings",
    "chunk_length", "grpo_loss", "in_micro_batches", "left_out", "logps_at", "mass_left_out", "model_statistics",
    "per_token_logps", "policy_loss", "policy_loss_name", "reference_logps", "token_statistics",
]  # fmt: skip
