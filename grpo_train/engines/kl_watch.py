"""The KL of the policy from the base model in a recipe without a KL penalty, measured now and then (grpo.watch_kl).

The base model's weights wait in host memory and are on the devices only while they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from tunix.rl import utils
from tunix.rl.rollout.base_rollout import RolloutConfig

from grpo_train.engines import maxtext_model
from grpo_train.engines.weight_sync import padded
from grpo_train.runs import multihost


def on_host(model: maxtext_model.Actor) -> maxtext_model.Actor:
    """The model with its weights in host memory, each process's part of them."""
    graphdef, state = nnx.split(model.module)
    return dataclasses.replace(model, module=(graphdef, utils.put_params_on_memory_kind(state, "pinned_host")))


def kl_from_base(
    sampler: Any, actor: maxtext_model.Actor, base: maxtext_model.Actor, rows: int, config: RolloutConfig
) -> float:
    """Mean of k3 over the tokens of the first `rows` completions just sampled, nats per token.

    `base`: of `on_host`; `config`: by which they were sampled: both models are taken at its temperature.  In a
    multi-process run all processes call it together.
    """
    tokens = sampler.last.tokens[:rows]
    prompt_ids = sampler.last.left_padded_prompt_tokens[:rows]
    ids = padded(tokens, config.max_tokens_to_generate, sampler.pad_id())
    graphdef, state = base.module
    placed = utils.put_params_on_memory_kind(state, "device")
    models = (actor, dataclasses.replace(base, module=nnx.merge(graphdef, placed)))
    policy, reference = (
        multihost.to_numpy(
            maxtext_model.per_token_logps(
                model, prompt_ids, ids, sampler.pad_id(), sampler.eos_id(), config.temperature
            )
        )
        for model in models
    )
    mask = np.arange(ids.shape[1]) < np.array([len(row) for row in tokens])[:, None]
    difference = (reference - policy)[mask]
    return float(np.mean(np.exp(difference) - difference - 1))


def every(steps: int, cluster: Any, kl: Callable[[], float]) -> Callable[..., dict[str, tuple[float, Callable]]]:
    """As a metric function of Tunix's learner: once in the first step, and in every `steps`-th after it."""
    last = None

    def measured(**_: Any) -> dict[str, tuple[float, Callable]]:
        nonlocal last
        step = cluster.global_steps
        if step % steps or step == last:  # a step samples in several calls
            return {}
        last = step
        return {"step/kl_from_base": (kl(), np.mean)}

    return measured
