"""Steps that are smaller than bfloat16 can say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import Program, devices
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_train.engines.optimizer import (
    clip_by_global_norm,
    make_optimizer,
    nearest_moves,
    round_stochastically,
    rounded,
    sum_in,
)
from grpo_train.recipes.schema import TrainingRecipe

FLOATS = arrays(np.float32, 40, elements=st.floats(width=32, allow_subnormal=True))
DRAWS = 4000


def neighbours(values):
    """The bfloat16s next to float32 values, towards zero and away from it."""
    bits = np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32), (bits + np.uint32(0x10000)).view(np.float32)


def applied(state):
    return float(optax.tree.get(state, "applied"))


@given(FLOATS, st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_a_value_becomes_one_of_its_neighbours_or_stays(values, seed):
    found = np.asarray(round_stochastically(jnp.asarray(values), jax.random.key(seed)))
    low, high = neighbours(values)
    held = (values == low) | ~np.isfinite(values)  # zero, infinity, NaN, and what bfloat16 can hold
    np.testing.assert_array_equal(found[held], values[held])
    assert np.all((found == low) | (found == high) | held)


def test_it_is_right_on_average():
    generator = np.random.default_rng(0)
    values = (generator.normal(size=256) * np.exp2(generator.integers(-60, 60, 256))).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    found = np.asarray(jax.vmap(lambda key: round_stochastically(jnp.asarray(values), key))(keys), np.float64)
    low, high = (each.astype(np.float64) for each in neighbours(values))
    chance = (values - low) / (high - low)  # of the neighbour that is farther from zero
    error = np.abs(high - low) * np.sqrt(chance * (1 - chance) / DRAWS)
    common = (chance > 0.01) & (chance < 0.99)
    assert np.all(np.abs(found.mean(0) - values)[common] < 4 * error[common])


def test_the_mean_update_is_that_of_float32():
    """Of 200 draws, at a rate of which nearest rounding leaves almost nothing."""
    weights = {"w": jnp.asarray(np.random.default_rng(1).normal(size=20_000) * 0.05, jnp.bfloat16)}
    gradients = jax.tree.map(lambda w: jnp.sin(100 * w), weights)

    @jax.jit
    def step(rounding_seed):
        optimizer = rounded(optax.adamw(3e-6), "stochastic", "float32", 0)
        state = optimizer.init(weights)._replace(update=rounding_seed)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes)["w"].astype(jnp.float32), state

    before = np.asarray(weights["w"], np.float64)
    moved = np.mean([np.asarray(step(draw)[0], np.float64) - before for draw in range(200)], axis=0)
    full = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    wanted, _ = optax.adamw(3e-6).update(jax.tree.map(lambda g: g.astype(jnp.float32), gradients),
                                         optax.adamw(3e-6).init(full), full)  # fmt: skip
    wanted = np.asarray(wanted["w"], np.float64)
    assert (moved @ wanted) / (wanted @ wanted) == pytest.approx(1, abs=0.01)
    assert applied(step(0)[1]) == pytest.approx(1, abs=0.2)

    nearest = rounded(optax.adamw(3e-6), "nearest", "float32", 0)
    _, state = jax.jit(nearest.update)(gradients, nearest.init(weights), weights)
    foreseen, moved = nearest_moves(weights, 3e-6)
    assert 0 < moved < foreseen < 0.1
    assert applied(state) == pytest.approx(float(foreseen), abs=0.02)


PLACED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from grpo_train.engines.optimizer import rounded

values, mesh = np.random.default_rng(0).normal(size=(8, 12)), Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
optimizer = rounded(optax.adamw(1e-3), "stochastic", "bfloat16", 0)
for axes in ((), ("a", "b"), ("b", None), (None, ("a", "b"))):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    weights = {"w": jax.device_put(jnp.asarray(values, jnp.bfloat16), sharding)}
    gradients = {"w": jax.device_put(jnp.asarray(np.sin(9 * values), jnp.bfloat16), sharding)}
    changes, state = jax.jit(optimizer.update)(gradients, optimizer.init(weights), weights)
    print([np.asarray(each, np.float32).tolist() for each in (changes["w"], state.inner[0].nu["w"])])
"""


@pytest.mark.slow
def test_the_noise_does_not_depend_on_where_the_weights_are(tmp_path):
    """Nor on the number of processes, whose program is the same."""
    whole, *split = Program(PLACED, output=tmp_path / "said.txt", XLA_FLAGS=devices(4)).lines()[-4:]
    assert len(split) == 3
    assert set(split) == {whole}
    assert whole.count(",") == 2 * 8 * 12 - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lion_moves_each_weight_by_the_learning_rate_and_has_one_moment(dtype):
    training = TrainingRecipe(optimizer="lion", learning_rate=1e-3, warmup_steps=0, rounding="stochastic")
    weights = {"w": jnp.asarray(np.random.default_rng(2).normal(size=5000), dtype)}
    gradients = jax.tree.map(lambda w: jnp.sin(100 * w), weights)
    optimizer = make_optimizer(training, 1, 0, dtype)
    changes, state = jax.jit(optimizer.update)(gradients, optimizer.init(weights), weights)
    moved = -np.asarray(changes["w"], np.float64) * np.sign(np.asarray(gradients["w"], np.float64))
    if dtype == "float32":
        np.testing.assert_allclose(moved, 1e-3, rtol=1e-5)
    else:  # on average
        assert moved.mean() == pytest.approx(1e-3, rel=0.1)
        assert len(set(moved)) > 2
    assert sum(leaf.size == 5000 for leaf in jax.tree.leaves(state)) == 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_float32_weights_get_the_optimizers_own_steps(rounding):
    weights = {"w": jnp.linspace(-1, 1, 1000)}
    own = optax.adamw(1e-3)
    ours = rounded(optax.adamw(1e-3), rounding, "float32", 0)
    wanted, _ = own.update(weights, own.init(weights), weights)
    found, state = ours.update(weights, ours.init(weights), weights)
    np.testing.assert_array_equal(found["w"], wanted["w"])
    assert applied(state) == pytest.approx(1, abs=1e-4)


def test_moments_in_bfloat16_keep_small_changes():
    """b2 = 0.999 changes the second moment by a thousandth of it: less than half of what bfloat16 can say."""
    weights = {"w": jnp.ones(20_000, jnp.bfloat16)}
    gradients = {"w": jnp.full(20_000, 0.1, jnp.bfloat16)}
    optimizer = rounded(optax.adamw(3e-6, b2=0.999), "stochastic", "bfloat16", 0)
    state = optimizer.init(weights)
    update = jax.jit(optimizer.update)
    for _ in range(300):
        changes, state = update(gradients, state, weights)
    second = optax.tree.get(state, "nu")["w"]
    assert second.dtype == changes["w"].dtype == jnp.bfloat16
    wanted = float(gradients["w"][0]) ** 2 * (1 - 0.999**300)
    assert float(second.astype(jnp.float32).mean()) == pytest.approx(wanted, rel=0.01)


def test_gradients_of_micro_batches_are_added_up_in_float32():
    model = nnx.Linear(4, 4, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    inner = optax.MultiSteps(rounded(optax.sgd(1.0), "stochastic", "float32", 0), 256)
    optimizer = sum_in(nnx.Optimizer(model, inner, wrt=nnx.Param), "float32")
    gradients = nnx.state(model, nnx.Param)
    parts = [1.0] * 100 + [1.5]  # the mean of a bfloat16 would stay 1: it has steps of 1 / 128
    update = nnx.jit(
        lambda model, optimizer, part: optimizer.update(model, jax.tree.map(lambda g: 0 * g + part, gradients))
    )
    for part in parts:
        update(model, optimizer, jnp.bfloat16(part))
    (mean,) = jax.tree.leaves(nnx.as_pure(optimizer.opt_state.acc_grads))
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.mean(parts), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e18, np.inf, np.nan])
def test_clipping_is_that_of_optax(size):
    gradients = {"a": jnp.linspace(-1, 1, 7) * size, "b": jnp.ones((2, 3), jnp.bfloat16) * size}
    ours, _ = clip_by_global_norm(0.5).update(gradients, optax.EmptyState())
    theirs, _ = optax.clip_by_global_norm(0.5).update(gradients, optax.EmptyState())
    np.testing.assert_allclose(ours["a"], theirs["a"], rtol=3e-7)
    assert ours["b"].dtype == theirs["b"].dtype
    np.testing.assert_allclose(ours["b"].astype(jnp.float32), theirs["b"].astype(jnp.float32), rtol=2**-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_gradient_gives_what_it_gives_with_a_sum_and_without_the_memory_for_it(dtype):
    """In one program with the gradient and the new weights, as Tunix's update is."""
    own = make_optimizer(TrainingRecipe(learning_rate=1e-3, warmup_steps=0, optimizer_dtype=dtype), 1, 0, dtype)
    generator = np.random.default_rng(3)
    batch = jnp.asarray(generator.normal(size=(16, 64)), dtype)

    def train(chain):
        model = nnx.Linear(64, 64, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))
        optimizer = sum_in(nnx.Optimizer(model, chain, wrt=nnx.Param), dtype)

        @nnx.jit
        def step(model, optimizer):
            gradients = nnx.grad(lambda model: jnp.sin(model(batch)).astype(jnp.float32).sum())(model)
            optimizer.update(model, gradients)

        for _ in range(10):
            step(model, optimizer)
        return model.kernel.get_value(), optimizer.opt_state

    wanted, summed = train(optax.MultiSteps(own, 1))
    found, state = train(own)
    if dtype == "float32":
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-7)  # ten steps of 1e-3: 1e-5 of what they are
    else:
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.as_pure(each))) for each in (summed, state)]
    weights = 65 * 64 * jnp.dtype(dtype).itemsize
    assert sizes[0] - sizes[1] == weights + 8  # the sum, and the two counters of optax.MultiSteps
