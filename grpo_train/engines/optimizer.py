"""The optimizer of a recipe: AdamW after clipping by the global norm, and its learning rates."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from grpo_train.recipes.schema import TrainingRecipe


def learning_rate_schedule(training: TrainingRecipe) -> optax.Schedule:
    """The learning rate of a step, counted from 0. The first step already moves: it does not start at zero.

    Linear warm-up, then constant, or half a cosine that would reach 0 at the step after the last. A step is one batch
    of completions; all its updates (`grpo.iterations`) have the step's rate.
    """
    first = training.learning_rate / max(training.warmup_steps, 1)
    if training.schedule == "cosine" and training.steps > training.warmup_steps:  # else it ends in the warm-up
        return optax.warmup_cosine_decay_schedule(
            first, training.learning_rate, training.warmup_steps, decay_steps=training.steps
        )
    return optax.warmup_constant_schedule(first, training.learning_rate, training.warmup_steps)


def learning_rates(training: TrainingRecipe) -> np.ndarray:
    """The learning rates of all steps, [steps], for the rows of metrics.jsonl.

    Computed at once: one by one, each would wait on the device for the update that is under way.
    """
    rates = learning_rate_schedule(training)(jnp.arange(training.steps))
    return np.broadcast_to(np.asarray(rates), training.steps)


def make_optimizer(training: TrainingRecipe, iterations: int) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, for `iterations` updates a step; preflight compiles the same."""
    schedule = learning_rate_schedule(training)
    rate = schedule if iterations == 1 else lambda update: schedule(update // iterations)
    return optax.chain(
        optax.clip_by_global_norm(training.max_grad_norm),
        optax.adamw(rate, b1=training.b1, b2=training.b2, weight_decay=training.weight_decay),
    )
