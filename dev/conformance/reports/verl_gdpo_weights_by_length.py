"""verl 0.9.1: GDPO's last step takes mean and std over tokens, so that a long completion counts for more.

    .venv-verl/bin/python dev/conformance/reports/verl_gdpo_weights_by_length.py

Equation 6 of GDPO (arXiv:2601.05242) is over the completions of the batch.  Two completions whose advantages are
opposite have a mean of 0 whatever their lengths; with masked_whiten they have not.
"""

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

lengths = torch.tensor([1, 9])
mask = (torch.arange(9) < lengths[:, None]).long()
attended = torch.cat([torch.ones(2, 1).long(), mask], 1)  # a prompt of one token before each
found, _ = get_adv_estimator_fn("gdpo")(
    token_level_rewards=torch.zeros(2, 9),
    response_mask=mask,
    index=np.array([0, 0]),
    config={"gdpo_reward_keys": ["right"]},
    non_tensor_batch={"right": np.array([1.0, 0.0])},
    batch={"prompts": torch.zeros(2, 1), "attention_mask": attended},
)
print("verl:", found[:, 0].tolist())
print("equation 6:", [0.7071, -0.7071])
