"""β adapted to a KL: its rule and bounds, what decides, and that its value is an argument of a compiled loss."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from test_packing import batch
from tunix.sft.peft_trainer import TrainingConfig

from grpo_train import losses
from grpo_train.engines.adaptive_beta import RANGE, STEP, AdaptiveBeta, keep_factor, next_factor

TARGET = 0.02


@given(st.lists(st.floats() | st.floats(0, 0.05), max_size=60), st.floats(1e-6, 10))
def test_the_factor_moves_by_its_rule_and_stays_within_its_bounds(kls, target):
    factor = 1.0
    for kl in kls:
        before = factor
        factor = next_factor(before, kl, target)
        assert 1 / RANGE <= factor <= RANGE
        if kl > target:
            assert factor == min(before * STEP, RANGE)
        elif kl < target / 2:
            assert factor == max(before / STEP, 1 / RANGE)
        else:
            assert factor == before  # within the target, or not a number


@pytest.mark.parametrize(("kl", "bound"), [(1.0, RANGE), (0.0, 1 / RANGE)])
def test_the_bounds_are_reached(kl, bound):
    factor = 1.0
    for _ in range(12):
        factor = next_factor(factor, kl, TARGET)
    assert factor == bound


# --- in a trainer ---


class Trainer:
    """As much of Tunix's trainer as is adapted: two micro-batches an update, an optimizer with the factor."""

    def __init__(self):
        optimizer = optax.MultiSteps(optax.chain(optax.adam(1e-3), keep_factor()), 2)
        self.optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optimizer, wrt=nnx.Param)
        self.config = TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=2)
        self.seen = []

    def _prepare_inputs(self, example):
        return example

    def _post_process_train_step(self, aux):
        self.seen.append(float(aux["kl"]))

    def step(self, *kls):
        for kl in kls:
            self._post_process_train_step({"kl": jnp.float32(kl)})


def adapt(trainer, updates=2):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    return AdaptiveBeta(trainer, mesh, start=0.04, target=TARGET, updates=updates)


def test_the_mean_over_all_micro_batches_of_a_step_decides():
    trainer = Trainer()
    adaptive = adapt(trainer)
    assert adaptive.beta == 0.04
    trainer.step(0.0, 0.0, 0.05)
    assert adaptive.beta == 0.04  # in mid-step
    trainer.step(0.05)  # a mean of 0.025, above the target
    assert adaptive.beta == pytest.approx(0.06)
    trainer.step(0.06, 0.0, 0.0, 0.0)  # 0.015: within it
    assert adaptive.beta == pytest.approx(0.06)
    trainer.step(0.01, 0.01, 0.01, 0.0)  # below half of it
    assert adaptive.beta == pytest.approx(0.04)
    assert len(trainer.seen) == 12  # Tunix's own work is still done
    assert adaptive.metrics(prompts=[])["step/beta"][0] == adaptive.beta


def test_it_goes_on_from_the_factor_that_the_optimizer_has():
    first, second = Trainer(), Trainer()
    adaptive = adapt(first)
    first.step(*[1.0] * 4)
    nnx.update(second.optimizer, nnx.state(first.optimizer))  # as from a checkpoint
    again = adapt(second)
    assert again.beta == adaptive.beta == pytest.approx(0.06)
    for trainer in (first, second):
        trainer.step(*[0.0] * 4)
    assert again.beta == adaptive.beta == pytest.approx(0.04)


def test_each_micro_batch_takes_beta_with_it():
    trainer = Trainer()
    adapt(trainer)
    example = batch([5, 1, 3, 2, 4, 5], [3, 4])
    alone: Any = trainer._prepare_inputs(example)
    assert alone.beta.shape == ()
    assert float(alone.beta) == np.float32(0.04)
    several: Any = jax.tree.map(lambda array: jnp.stack([array] * 3), example)  # [M, R, W]
    several = trainer._prepare_inputs(several)
    assert several.beta.tolist() == [np.float32(0.04)] * 3


def test_another_beta_is_not_compiled_again():
    example = batch([5, 1, 3, 2, 4, 5], [3, 4])
    logps, reference = example.old_per_token_logps, example.ref_per_token_logps
    compared = losses.PolicyBatch(None, reference, example.advantages, example.completion_mask)
    compiled = 0

    @jax.jit
    def loss(beta):
        nonlocal compiled
        compiled += 1
        return losses.policy_loss(logps, compared, losses.PolicyLossSettings(beta=beta))[0]

    for beta in (0.04, 0.06, 0.5):
        expected, _ = losses.policy_loss(logps, compared, losses.PolicyLossSettings(beta=beta))
        assert float(loss(np.float32(beta))) == pytest.approx(float(expected), rel=1e-6)
    assert compiled == 1
    assert not math.isnan(float(expected))
