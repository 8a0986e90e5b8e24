"""Adapter: Liger-Kernel's GRPO loss of a chunk; a chunk knows the mask of the whole batch."""

import numpy as np
import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

LOSSES = {"completion": "grpo", "tokens": "dapo", "constant": "dr_grpo", "completion-sum": "luspo"}
OFFERED = {"aggregation", "ratio", "clip", "epsilon_high", "kl", "correction", "micro_batches"}


def adapter(case, variant):
    if set(variant.asks) - OFFERED or variant.kl in ("k1", "k2", "reward") or variant.clip == "cispo-both":
        return None
    if variant.aggregation not in LOSSES or variant.correction == "mask":
        return None
    cispo = variant.clip == "cispo"
    settings = {
        "loss_type": "cispo" if cispo else LOSSES[variant.aggregation],
        "epsilon_low": variant.epsilon_low,
        "epsilon_high": 1 + variant.epsilon_high if cispo else variant.epsilon_high,  # there it is the bound itself
        "delta": variant.dual_clip if variant.clip == "dual" else None,
        "beta": 0.0 if variant.kl == "none" else variant.beta,
        "use_bias_correction_kl": variant.kl == "k3-ratio",
        "importance_sampling_level": variant.ratio,
        "max_completion_length": case.max_length,
    }
    whole = torch.tensor(case.mask)
    total, slopes = 0.0, []
    for part in case.parts() if variant.micro_batches == "several" else [case]:
        logps = torch.tensor(part.logps, requires_grad=True)
        mask, A, ref, old = (torch.tensor(one) for one in (part.mask, part.advantages, part.ref_logps, part.old_logps))
        # The caller, TRL, computes the correction; Liger-Kernel multiplies by it.
        weight = np.minimum(np.exp(part.old_logps - part.sampler_logps), variant.correction_cap)
        more = {"vllm_is_ratio": torch.tensor(weight)} if variant.correction == "tis" else {}
        loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(logps, mask, A, whole, ref, old, **settings, **more)
        loss.backward()
        total, slopes = total + loss.item(), [*slopes, logps.grad.numpy()]
    return {"loss": total, "gradient": np.concatenate(slopes)}
