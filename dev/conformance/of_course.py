"""Adapter: the course's losses as Tunix's learner runs them, in all that a recipe's section `grpo` can say."""

import jax.numpy as jnp
import numpy as np
from given_logps import example, loss_and_gradient
from tunix.rl import function_registry

from grpo_train.engines.learner import ADVANTAGES, policy_loss_config, weight_tokens
from grpo_train.losses.packing import to_example
from grpo_train.recipes.schema import GRPORecipe

AGGREGATIONS = {"completion": "completion", "tokens": "step", "constant": "constant"}
OFFERED = {"advantage", "aggregation", "ratio", "epsilon_high", "kl", "correction", "truncated", "micro_batches"}


def adapter(case, variant):
    known = variant.aggregation in AGGREGATIONS and variant.advantage in ("given", *ADVANTAGES)
    if set(variant.asks) - OFFERED or not known or variant.kl in ("k3-ratio", "reward") or variant.correction == "mask":
        return None
    if variant.advantage != "given":
        estimate = function_registry.get_advantage_estimator(ADVANTAGES[variant.advantage])
        return {"advantages": np.asarray(estimate(rewards=case.rewards.sum(1), num_generations=case.group_size))}
    out = variant.truncated == "out"
    kl = {"beta": variant.beta, "kl": variant.kl} if variant.kl != "none" else {}
    grpo = GRPORecipe(
        aggregation=AGGREGATIONS[variant.aggregation], ratio=variant.ratio, epsilon_high=variant.epsilon_high,
        correction=variant.correction, mask_truncated=out, **kl,
    )  # fmt: skip
    parts = case.parts() if variant.micro_batches == "several" else [case]
    examples = [prepared(part, out, variant.correction) for part in parts]
    if out or grpo.aggregation == "step":  # as Learner._prepare_data
        examples = weight_tokens(examples, grpo.aggregation)
    config = policy_loss_config(grpo, "jax")
    found = [loss_and_gradient("grpo-jax", config, *each) for each in zip(parts, examples, strict=True)]
    losses, slopes = zip(*found, strict=True)
    return {"loss": np.mean(losses), "gradient": np.concatenate(slopes) / len(parts)}  # optax.MultiSteps takes the mean


def prepared(part, out, correction):  # as Learner._sampled_once
    given = example(part, part.max_length)
    beyond = ((0, 0), (0, part.max_length - part.mask.shape[1]))
    more = {"completion_mask": given.completion_mask & ~part.truncated[:, None]} if out else {}
    if correction == "tis":
        more["sampler_per_token_logps"] = jnp.asarray(np.pad(part.sampler_logps, beyond))
    return to_example(given, **more)
