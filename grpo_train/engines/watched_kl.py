"""The KL from the base in a run without a KL penalty, measured now and then (`grpo.watch_kl`).

The base is the model that GRPO starts from; with a cold start, the one after it.  Its weights wait in the host's
memory, and are on the devices only while they are used.  With adapters the base is the actor without them, and takes
nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from tunix.rl import utils

from grpo_train.engines.maxtext_model import Actor, per_token_logps
from grpo_train.engines.weight_sync import padded

# Completions by which it is measured at most.  A few hundred tokens: the KL of a step with a penalty is of more.
ROWS = 32


def in_host_memory(base: Actor) -> Callable[[], Actor]:
    """Move a model to the host's memory, each process its part.  Returns what gives a copy of it on the devices."""
    graph, weights = nnx.split(base.module)
    kept = utils.put_params_on_memory_kind(weights, "pinned_host")
    without_weights = dataclasses.replace(base, module=None)

    def on_devices() -> Actor:
        module = nnx.merge(graph, utils.put_params_on_memory_kind(kept, "device"))
        return dataclasses.replace(without_weights, module=module)

    return on_devices


def without_adapters(actor: Actor) -> Callable[[], Actor]:
    """The base of an actor with adapters, in the same form."""
    return lambda: dataclasses.replace(actor, module=actor.base)


def kl_from_base(
    sampler: Any, actor: Actor, base: Actor, rows: int, width: int, temperature: float, at_once: int | None = None
) -> float:
    """The KL of the policy from the base by the k3 estimator, nats per token: the mean over the tokens of the first
    `rows` completions that were sampled last.

    In a multi-process run all processes call it together, and get the same number.

    Args:
      width: tokens to which completions are padded, so that one shape is compiled.
      temperature: of both models, as the loss has it.
      at_once: completions that are computed together, a divisor of `rows`; None: all.
    """
    tokens = sampler.last.tokens[:rows]
    prompt_ids = sampler.last.left_padded_prompt_tokens[:rows]
    completion_ids = padded(tokens, width, sampler.pad_id())
    lengths = np.array([len(ids) for ids in tokens])
    written = np.arange(width) < lengths[:, None]  # [B, C]

    def logps(model: Actor) -> np.ndarray:  # of all written tokens
        parts = []
        for first in range(0, len(tokens), at_once or rows):
            part = slice(first, first + (at_once or rows))
            ids = prompt_ids[part], completion_ids[part]
            parts.append(per_token_logps(model, *ids, sampler.pad_id(), sampler.eos_id(), temperature))
        return np.concatenate(parts)[written].astype(np.float64)

    difference = logps(base) - logps(actor)
    return float(np.mean(np.exp(difference) - difference - 1))


def measured_every(steps: int, cluster: Any, measure: Callable[[], float]) -> Callable[..., dict[str, Any]]:
    """A metric function of Tunix's learner that measures `kl` in the first step, and in every `steps`-th."""
    # A step samples several times where its completions do not fit at once; the first ones are measured.
    of_step = functools.cache(lambda step: measure())

    def metrics(**_: Any) -> dict[str, tuple[float, Callable]]:
        step = cluster.global_steps + 1
        due = step == 1 or step % steps == 0
        return {"step/kl": (of_step(step), np.mean)} if due else {}

    return metrics
