"""Liger-Kernel 0.8.5: loss_type="luspo" with a ratio per token counts padding; the gradient of a padded place is not 0.

    .venv-verl/bin/python dev/conformance/reports/liger_luspo_counts_padding.py

`weighted = per_token_loss * attention_mask.sum(1, keepdim=True)` is not multiplied by the mask.  With [B, 1], a ratio
per completion, that is TRL's loss; with [B, T], which importance_sampling_level="token" and any KL penalty give, it is
the mean over the width times the length.  TRL 1.16 has `(per_token_loss * mask).sum(-1).mean()`.
"""

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

logps = torch.tensor([[-1.0, -2.0, -0.5, -0.7]], requires_grad=True)
mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # two tokens, two places of padding
old, A = torch.tensor([[-1.0, -2.0, -0.6, -0.8]]), torch.tensor([1.0])  # both ratios are 1
loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
    logps, mask, A, mask, None, old, loss_type="luspo", beta=0.0, importance_sampling_level="token"
)
loss.backward()
of_trl = -(torch.exp(logps - old) * A * mask).sum(-1).mean()

print("loss:", loss.item(), "TRL's:", of_trl.item())
print("gradient:", logps.grad.tolist(), "where the mask is 0 it should be 0")
