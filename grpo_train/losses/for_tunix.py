"""The policy loss as Tunix's learner calls it.  Importing this module registers it, under a name per implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import function_registry
from tunix.sft import utils

from grpo_train.losses.model_logps import logps_at, model_statistics
from grpo_train.losses.policy import KL_ESTIMATORS, RATIOS, PolicyBatch, PolicyLossSettings, policy_loss
from grpo_train.losses.token_logps import IMPLEMENTATIONS

OF_TUNIX = {theirs: ours for ours, theirs in (KL_ESTIMATORS | RATIOS).items()}


def policy_loss_name(implementation: str) -> str:
    """The name under which Tunix finds the loss."""
    return f"grpo-{implementation}"


def reference_logps(worker: Any, implementation: str) -> Callable[..., jax.Array]:
    """What can stand in for `get_ref_per_token_logps` of Tunix's InferenceWorker, and needs no logits [B, T, V]."""

    def logps(prompt_tokens, completion_tokens, pad_id, eos_id, temperature=1.0):
        model = nnx.split(worker.get_model("reference"))
        compute = logps_at(temperature)
        return compute(*model, prompt_tokens, completion_tokens, pad_id, eos_id, temperature, implementation)

    return logps


def in_micro_batches(
    loss: Callable[[Any, Any], tuple[jax.Array, Any]],
    model: Any,
    examples: Any,
    teaches: Callable[[Any], jax.Array] | None = None,
):
    """The means of (loss, aux) over the micro-batches [M, ...] of `examples`, one after another.

    The gradient of each is taken together with its loss, so the activations of one are in memory at a time.

    Args:
      loss: of (model, example); what is trained are the adapters, or all weights.
      teaches: of an example, []: False where its gradient is known to be 0, and not computed.
    """
    trained = nnx.LoRAParam if utils.is_lora_enabled(model) else nnx.Param
    graphdef, weights, rest = nnx.split(model, trained, ...)

    def forward(weights, rest, examples):
        def of_one(weights, example):
            return loss(nnx.merge(graphdef, weights, rest), example)

        def learn(gradients, example):
            found, more = jax.value_and_grad(of_one, has_aux=True)(weights, example)
            return jax.tree.map(jnp.add, gradients, more), found

        def add(gradients, example):
            if teaches is None:
                return learn(gradients, example)
            return jax.lax.cond(
                teaches(example), learn, lambda *_: (gradients, of_one(weights, example)), gradients, example
            )

        gradients, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), examples)
        return jax.tree.map(lambda values: values.mean(0), found), gradients

    def backward(gradients, cotangents):
        # Of the loss, which is a mean over the M examples; `forward` has added up their gradients.
        scale = cotangents[0] / len(jax.tree.leaves(examples)[0])
        return jax.tree.map(lambda gradient: gradient * scale, gradients), None, None

    mean = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    mean.defvjp(forward, backward)
    return mean(weights, rest, examples)


def grpo_loss(model, train_example, algo_config, pad_id, eos_id, *, implementation: str, **_: Any):
    """A policy loss as Tunix's GRPOLearner calls it: (loss, aux) of a micro-batch, or of packed ones [M, R, W]."""
    if train_example.completion_ids.ndim == 3:
        of_one = functools.partial(
            grpo_loss, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id, implementation=implementation
        )
        # Completions of a group that all have one reward teach nothing, where there is no KL penalty either.
        teaches = None if algo_config.beta else lambda example: jnp.any(example.advantages)
        return in_micro_batches(of_one, model, train_example, teaches)
    temperature = getattr(train_example, "temperature", None)
    logps, entropy = model_statistics(
        model,
        train_example.prompt_ids,
        train_example.completion_ids,
        pad_id,
        eos_id,
        algo_config.temperature if temperature is None else temperature,
        implementation,
        train_example.segment_ids,
        train_example.segment_positions,
        getattr(train_example, "unscored", 0),
    )
    packed = train_example.segment_ids is not None
    batch = PolicyBatch(
        old_per_token_logps=train_example.old_per_token_logps,
        ref_per_token_logps=train_example.ref_per_token_logps,
        advantages=train_example.advantages,
        completion_mask=train_example.completion_mask,
        weights=getattr(train_example, "weights", None),
        completions=completion_keys(train_example.segment_positions) if packed else None,
        sampler_per_token_logps=getattr(train_example, "sampler_per_token_logps", None),
    )
    beta = getattr(train_example, "beta", None)
    settings = PolicyLossSettings(
        epsilon_low=algo_config.epsilon,
        epsilon_high=getattr(algo_config, "epsilon_high", None),
        beta=algo_config.beta if beta is None else beta,
        aggregation=algo_config.loss_agg_mode,
        kl=OF_TUNIX[algo_config.kl_loss_mode],
        ratio=OF_TUNIX[algo_config.loss_algo],
    )
    return policy_loss(logps, batch, settings, entropy)


def completion_keys(segment_positions: jax.Array) -> jax.Array:
    """For each token of packed rows [R, W] the place where its sequence begins, which no two completions share."""
    return jnp.arange(segment_positions.size).reshape(segment_positions.shape) - segment_positions


for _implementation in IMPLEMENTATIONS:
    function_registry.register_policy_loss_fn(policy_loss_name(_implementation))(
        functools.partial(grpo_loss, implementation=_implementation)
    )
