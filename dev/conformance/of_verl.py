"""Adapter: verl's core algorithms, with what its actor adds up around them (verl.workers.utils.losses.ppo_loss)."""

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl_advantages import advantages

AGGREGATIONS = {
    "completion": "seq-mean-token-mean", "tokens": "token-mean",
    "constant": "seq-mean-token-sum-norm", "completion-sum": "seq-mean-token-sum",
}  # fmt: skip
LOSSES = {"clip": "vanilla", "dual": "vanilla", "cispo-both": "cispo"}
OFFERED = {"advantage", "rewards", "aggregation", "ratio", "clip", "epsilon_high", "kl", "micro_batches"}


def adapter(case, variant):
    known = variant.aggregation in AGGREGATIONS and variant.clip in LOSSES
    if set(variant.asks) - OFFERED or not known or variant.kl == "k3-ratio":
        return None
    if variant.advantage != "given":
        return advantages(case, variant)
    loss_name = "gspo" if variant.ratio == "sequence" else LOSSES[variant.clip]
    dual = variant.dual_clip if variant.clip == "dual" else 1e9  # its default is 3: vanilla is the dual clip
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=variant.epsilon_low,
                         clip_ratio_high=variant.epsilon_high, clip_ratio_c=dual)  # fmt: skip
    mode, mask = AGGREGATIONS[variant.aggregation], torch.tensor(case.mask)
    whole = {
        "batch_num_tokens": mask.sum(),
        "global_batch_size": mask.any(1).sum(),
        "loss_scale_factor": case.max_length,
    }
    config.global_batch_info.update(whole)
    total, slopes = 0.0, []
    for part in case.parts() if variant.micro_batches == "several" else [case]:
        arrays = part.old_logps, part.ref_logps, part.advantages[:, None] + 0 * part.logps
        old, ref, A = (torch.tensor(one) for one in arrays)
        logps, mask = torch.tensor(part.logps, requires_grad=True), torch.tensor(part.mask)
        loss, _ = core_algos.get_policy_loss_fn(loss_name)(old, logps, A, mask, mode, config)
        if variant.kl != "none":
            penalty = core_algos.kl_penalty(logps, ref, variant.kl)
            loss = loss + variant.beta * core_algos.agg_loss(penalty, mask, mode, **whole)
        loss.backward()
        total, slopes = total + loss.item(), [*slopes, logps.grad.numpy()]
    return {"loss": total, "gradient": np.concatenate(slopes)}
