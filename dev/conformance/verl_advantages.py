"""The half of verl's adapter that goes from rewards to advantages."""

import torch
from verl.trainer.ppo import core_algos


def advantages(case, variant):
    names = {
        ("std", "sum"): "grpo",
        ("mean", "sum"): "grpo",
        ("leave-one-out", "sum"): "rloo",
        ("std", "each-batch"): "gdpo",
    }
    name = names.get((variant.advantage, variant.rewards))
    if name is None or variant.kl != "none":
        return None
    mask, columns = torch.tensor(case.mask), {str(k): case.rewards[:, k] for k in range(case.rewards.shape[1])}
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[:, 0] = torch.tensor(case.rewards.sum(1))
    more = {"norm_adv_by_std_in_grpo": variant.advantage == "std"} if name == "grpo" else {}
    if name == "gdpo":
        batch = {
            "prompts": torch.zeros(len(mask), 1),
            "attention_mask": torch.cat([torch.ones(len(mask), 1), mask], 1).long(),
        }
        more = {"config": {"gdpo_reward_keys": list(columns)}, "non_tensor_batch": columns, "batch": batch}
    found, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=case.groups, **more
    )
    return {"advantages": found[:, 0].numpy()}
