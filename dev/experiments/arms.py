"""What an arm changes that no recipe key says: rewards, advantages, losses, the optimizer, the sampler's weights.

The functions of BEFORE get a session, before it trains, and the name of its arm.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import function_registry

from grpo_lib import rewards
from grpo_train import losses, training
from grpo_train.engines import optimizer

# Arms of which GRPO takes no step.
UNTRAINED = ("base", "start", "start-no-spaces", "solutions", "imitation", "fine-tuning")
ROUNDS = {"rounds": 5, "one-round": 1000}  # steps of a round
SHORT = 20  # characters: an answer without the steps that lead to it, or with other tags

tosses = random.Random()  # seeded before each run


# --- rewards -------------------------------------------------------------------------------------------------------


@rewards.reward_function
def short_answer(completion: str, gold: str = "") -> rewards.Score:
    """0.1 for a completion of fewer than SHORT characters, right or wrong."""
    return (0.1, "short") if len(completion) < SHORT else (0.0, "long")


@rewards.reward_function
def coin(completion: str, gold: str = "") -> rewards.Score:
    """1 or 0, whatever the completion is."""
    return (1.0, "heads") if tosses.random() < 0.5 else (0.0, "tails")


rewards.REWARDS |= {"short_answer": short_answer, "coin": coin}


def toss_anew(session: training.Session, arm: str) -> None:
    tosses.seed(session.recipe.seed)
    only_evaluate(session, arm)


def only_evaluate(session: training.Session, arm: str) -> None:
    """What was not trained by GRPO as an arm: no step is taken."""
    if arm in UNTRAINED:
        session.cluster.actor_trainer._train_steps = session.recipe.training.steps


# --- advantages ----------------------------------------------------------------------------------------------------


def without_baseline(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """REINFORCE's (R. Williams, 1992) without a baseline.  Under a reward of 1 or 0: imitate what is right."""
    return np.asarray(rewards)


def less_batch_mean(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """The mean of all prompts as the baseline of each."""
    return rewards - np.mean(rewards)


BASELINES = {"none": without_baseline, "batch": less_batch_mean}
for name, function in BASELINES.items():
    function_registry.register_advantage_estimator(name)(function)


def use_baseline(session: training.Session, arm: str) -> None:
    """The advantages of an arm: of the recipe, or one of this program by its name."""
    if arm in BASELINES:
        session.learner.algo_config.advantage_estimator = arm


def imitate(session: training.Session, arm: str) -> None:
    """Expert iteration (arXiv:1705.08439): rounds of sampling, and of imitating what is right; all but `grpo` do it."""
    if arm != "grpo":
        use_baseline(session, "none")
        sync_every(session, arm, ROUNDS[arm])


def compare_real(session: training.Session, arm: str) -> None:
    toss_anew(session, arm)
    if arm == "expert":  # arXiv:1705.08439, a round being a step
        use_baseline(session, "none")


# --- the sampler: its weights, its temperature ---------------------------------------------------------------------


def sync_every(session: training.Session, arm: str, steps: int = 8) -> None:
    """Let the sampler have the same weights for so many steps; `measures.sync_now` gives it the newest ones at the end.

    It gets a copy of the old ones after each step, since on one CPU an update takes its weights away.
    """
    sampler = session.sampler
    update = sampler.update_params
    kept = jax.tree.map(jnp.copy, session.actor.weights())
    calls = 0

    def sometimes(params: Any, *others: Any, **named: Any) -> None:
        nonlocal calls, kept
        calls += 1
        if calls % steps == 0:
            kept = jax.tree.map(jnp.copy, params)
        update(kept, *others, **named)

    if arm != "synced":
        sampler.update_params = sometimes


def fall(session: training.Session, arm: str, last: float = 0.7, stages: int = 3) -> None:
    """Let the sampling temperature fall to `last` in stages of equally many steps."""
    learner = session.learner
    cluster = session.cluster
    steps = session.recipe.training.steps
    config = cluster.get_rollout_config(mode="train")
    generate = learner._generate_and_compute_advantage
    first = config.temperature

    def cooler(*arguments: Any) -> Any:
        part = cluster.global_steps * stages // steps / (stages - 1)
        temperature = first + part * (last - first)
        if temperature != config.temperature:  # a constant of compiled programs
            config.temperature = learner.algo_config.temperature = temperature
            cluster.actor_trainer.clear_jit_cache()
        return generate(*arguments)

    if arm == "falling":
        learner._generate_and_compute_advantage = cooler


# --- the loss ------------------------------------------------------------------------------------------------------


def mask_stale(session: training.Session, arm: str, factor: float = 2.0) -> None:
    """As `stale`; in the arm `mask` a token with π / π_sampler below 1 / factor or above factor gives no gradient.

    IcePop (Ring-1T, arXiv:2510.18855), with one factor for both sides.
    """
    sync_every(session, arm)
    if arm != "mask":
        return
    rollout = session.cluster.rollout
    config = session.learner.algo_config
    ends = {"pad_id": rollout.pad_id(), "eos_id": rollout.eos_id()}

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        logps, _ = losses.model_statistics(
            model,
            train_example.prompt_ids,
            train_example.completion_ids,
            *ends.values(),
            config.temperature,
            "jax",
            train_example.segment_ids,
            train_example.segment_positions,
        )
        log_ratio = jax.lax.stop_gradient(logps) - train_example.sampler_per_token_logps
        weights = train_example.weights * (jnp.abs(log_ratio) <= math.log(factor))  # dropped tokens count in the length
        example = dataclasses.replace(train_example, weights=weights)
        return losses.grpo_loss(model, example, config, **ends, implementation="jax")

    session.cluster.actor_trainer.with_loss_fn(loss, has_aux=True)


# --- the optimizer -------------------------------------------------------------------------------------------------


class Compensated(NamedTuple):
    """State of `compensated`: what rounding took from each weight so far, in bfloat16."""

    missing: Any
    inner: Any


def compensated(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Kahan summation (W. Kahan, 1965): what a step loses by rounding is added to the next one.

    Weights, and what they miss, are float32 arrays of what bfloat16 can hold, as `optimizer.rounded` gives them.
    """

    def init(weights: Any) -> Compensated:
        return Compensated(jax.tree.map(jnp.zeros_like, weights), inner.init(weights))

    def update(gradients: Any, state: Compensated, weights: Any = None) -> tuple[Any, Compensated]:
        steps, inner_state = inner.update(gradients, state.inner, weights)
        wanted = jax.tree.map(jnp.add, steps, state.missing)

        def lost(weight: jax.Array, step: jax.Array) -> jax.Array:
            return optimizer.round_to_nearest(step - (optimizer.round_to_nearest(weight + step) - weight))

        return wanted, Compensated(jax.tree.map(lost, weights, wanted), inner_state)

    return optax.GradientTransformation(init, update)


def store(session: training.Session, arm: str) -> None:
    """Give the trainer the optimizer of the arm `kahan` of `precision`; those of the others are the library's."""
    if arm != "kahan":
        return
    recipe = session.recipe
    trainer = session.cluster.actor_trainer
    chain = compensated(optimizer.make_optimizer(recipe.training, 1, recipe.seed))
    chain = optimizer.rounded(chain, "nearest", "float32", recipe.seed)
    trainer.optimizer = nnx.Optimizer(trainer.model, chain, wrt=nnx.Param)


BEFORE = {
    "compare_real": compare_real,
    "fall": fall,
    "imitate": imitate,
    "mask_stale": mask_stale,
    "only_evaluate": only_evaluate,
    "store": store,
    "sync_every": sync_every,
    "toss_anew": toss_anew,
    "use_baseline": use_baseline,
}
