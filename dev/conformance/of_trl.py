"""Adapter: TRL's GRPOTrainer.  Completions, rewards and log-probabilities are those of the case; all else is TRL's."""

import numpy as np
import torch
from trl_trainer import HELD, trainer

LOSSES = {"completion": "grpo", "tokens": "dapo", "constant": "dr_grpo", "completion-sum": "luspo"}
SCALES = {"std": "group", "std-batch": "batch", "mean": "none"}
SUMS = {"sum": "sum_then_normalize", "each-batch": "normalize_then_sum"}
KL = ("none", "k3", "k3-ratio")
OFFERED = {"advantage", "rewards", "aggregation", "ratio", "clip", "epsilon_high", "kl", "truncated", "micro_batches"}


def adapter(case, variant):
    asked = variant.aggregation in LOSSES and variant.advantage in ("given", *SCALES) and variant.kl in KL
    if set(variant.asks) - OFFERED or not asked or variant.clip == "cispo-both" or variant.rewards not in SUMS:
        return None
    parts, cispo = case.parts() if variant.micro_batches == "several" else [case], variant.clip == "cispo"
    of = trainer(
        len(case.mask), len(parts), case.group_size, case.max_length, case.rewards.shape[1],
        loss_type="cispo" if cispo else LOSSES[variant.aggregation], importance_sampling_level=variant.ratio,
        epsilon_high=variant.epsilon_high + cispo, delta=variant.dual_clip if variant.clip == "dual" else None,
        beta=0.0 if variant.kl == "none" else variant.beta, use_bias_correction_kl=variant.kl == "k3-ratio",
        scale_rewards=SCALES.get(variant.advantage, "group"), multi_objective_aggregation=SUMS[variant.rewards],
        mask_truncated_completions=variant.truncated == "out",
    )  # fmt: skip
    HELD.update(case=case, logps=torch.tensor(case.logps))
    mask = torch.tensor(case.mask)
    if variant.advantage != "given" or variant.truncated == "out":
        scored = of._generate_and_score_completions([{"prompt": "?"}] * len(case.mask))
        if variant.advantage != "given":
            return {"advantages": scored["advantages"].numpy()}
        mask = scored["completion_mask"]
    total, slopes = 0.0, []
    for part, own in zip(parts, mask.chunk(len(parts)), strict=True):
        HELD["logps"] = torch.tensor(part.logps, requires_grad=True)
        prompt = torch.ones(len(own), 1).long()
        names = {"advantages": "advantages", "old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}
        inputs = {theirs: torch.tensor(getattr(part, ours)) for theirs, ours in names.items()}
        inputs |= dict.fromkeys(("prompt_ids", "prompt_mask"), prompt)
        inputs |= dict.fromkeys(("completion_ids", "completion_mask"), own.long())
        loss = of.compute_loss(of.model, inputs | {"num_items_in_batch": mask.sum()})
        loss.backward()
        total, slopes = total + loss.item(), [*slopes, HELD["logps"].grad.numpy()]
    return {"loss": total, "gradient": np.concatenate(slopes)}
