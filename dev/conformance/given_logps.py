"""What the adapters of Tunix and of the course share: a model whose parameters are the log-probabilities of a case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import function_registry

from grpo_lib.conformance.cases import WORDS, Case
from grpo_train.losses.packing import Example


class GivenLogps(nnx.Module):
    """A model for which the log-probability of each token [B, T] is a parameter; all others share what is left."""

    def __init__(self, tokens: np.ndarray, logps: np.ndarray):
        self.logps = nnx.Param(jnp.asarray(logps, jnp.float32))
        self.tokens = jnp.asarray(tokens)

    def __call__(self, *arguments: Any, **named: Any):
        logps = self.logps.get_value()
        here = jax.nn.one_hot(self.tokens, WORDS, dtype=bool)  # [B, T, WORDS]
        others = jnp.log(-jnp.expm1(logps)) - np.log(WORDS - 1)  # [B, T]
        logits = jnp.where(here, logps[..., None], others[..., None])
        return jnp.pad(logits, ((0, 0), (0, 1), (0, 0))), None  # after the last token nothing is asked for


def example(case: Case, width: int) -> Example:
    """A micro-batch of Tunix's; completions are padded to `width`, as its sampler pads them."""
    beyond = ((0, 0), (0, width - case.mask.shape[1]))
    arrays = {
        name: jnp.asarray(np.pad(getattr(case, name), beyond)) for name in ("tokens", "mask", "old_logps", "ref_logps")
    }
    return Example(
        prompt_ids=jnp.ones((len(case.mask), 1), int),
        prompt_mask=jnp.ones((len(case.mask), 1), bool),
        completion_ids=arrays["tokens"],
        completion_mask=arrays["mask"],
        advantages=jnp.asarray(case.advantages, jnp.float32),
        ref_per_token_logps=arrays["ref_logps"],
        old_per_token_logps=arrays["old_logps"],
    )


def loss_and_gradient(name: str, config: Any, case: Case, given: Example) -> tuple[float, np.ndarray]:
    """Of a loss in Tunix's registry, for one micro-batch; the gradient is [B, T] of the case."""
    config.temperature = 1.0
    rows, width = case.mask.shape
    logps = np.pad(case.logps, ((0, 0), (0, given.completion_ids.shape[1] - width)), constant_values=-1.0)
    loss = function_registry.get_policy_loss_fn(name)
    run = nnx.value_and_grad(lambda model: loss(model, given, algo_config=config, pad_id=0, eos_id=-1), has_aux=True)
    (value, _), slope = run(GivenLogps(np.asarray(given.completion_ids), logps))
    return float(value), np.asarray(slope["logps"].get_value())[:rows, :width]
