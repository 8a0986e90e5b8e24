"""The policy losses: every implementation against float64, on inputs that are random and on those that are hard."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from flax import nnx
from helpers import Program, devices
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tunix.rl import common, function_registry
from tunix.rl.algo_core import grpo_loss_fn
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig

from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import suite
from grpo_lib.conformance.cases import cases
from grpo_train import losses
from grpo_train.engines import learner, maxtext_model
from grpo_train.losses import (
    hidden_states,
    model_logps,
    packing,
    pallas_kernel,
    policy_loss,
    token_logps,
    token_statistics,
)

# Of the largest gradient; what a dtype allows.
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2}
FROM_LOGITS = ("jax", "pallas")
# What the head's matmul is done with: implementation, axis of the vocabulary in the head.
FROM_HIDDEN = [("jax", 1), ("chunked", 1), ("chunked", 0), ("pallas", 1), ("pallas", 0)]
PAD, EOS = 0, 1
# These programs run for milliseconds and are compiled for seconds.
COMPILED_QUICKLY = {"xla_backend_optimization_level": 0}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that a test's arrays have several, and chunks of a few positions."""
    monkeypatch.setattr(kernels, "ROWS", 16)
    monkeypatch.setattr(kernels, "COLUMNS", 128)
    monkeypatch.setattr(pallas_kernel, "MULTIPLE", 128)
    monkeypatch.setattr(pallas_kernel, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pallas_kernel, "fused_tiles", lambda tokens, *_: (min(tokens, 16), 128))
    monkeypatch.setattr(token_logps, "CHUNK", 4 * 300 * 2 * 5)


# --- log-probability, entropy and their gradients -------------------------------------------------------------


def reference(logits, ids, weight, temperature):
    """(log π, entropy, gradient of Σ weight log π with respect to the logits), all in float64."""
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    probability = np.exp(scaled)
    total = probability.sum(-1, keepdims=True)
    probability /= total
    logps = scaled - np.log(total)
    entropy = -np.sum(probability * np.where(probability > 0, logps, 0), -1)
    slope = (ids[..., None] == np.arange(logits.shape[-1])) - probability
    return np.take_along_axis(logps, ids[..., None], -1)[..., 0], entropy, weight[..., None] / temperature * slope


def as_float64(array):
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def far(ours, theirs):
    """The largest difference, of the largest value."""
    assert np.isfinite(as_float64(ours)).all()
    return np.abs(as_float64(ours) - theirs).max() / max(np.abs(theirs).max(), 1e-30)


def statistics(ids, implementation, temperature=1.0, **given):
    """As token_statistics; `pallas` from logits is the kernel of notebook 07."""
    if implementation == "pallas" and "logits" in given:
        return kernels.from_logits(given["logits"], ids, temperature)
    return token_statistics(ids, temperature=temperature, implementation=implementation, **given)


def evaluated(weight, ids, temperature, implementation, vocab_axis=1):
    """(log π, entropy, gradients) of logits, or of hidden states and a head."""

    def total(*inputs):
        given = {"hidden": inputs[0], "head": inputs[-1], "vocab_axis": vocab_axis}
        given = {"logits": inputs[0]} if len(inputs) == 1 else given
        logps, entropy = statistics(jnp.asarray(ids), implementation, temperature, **given)
        return jnp.sum(jnp.where(weight == 0, 0, logps * weight)), (logps, entropy)

    def run(*inputs):
        grad = jax.value_and_grad(total, argnums=tuple(range(len(inputs))), has_aux=True)
        (_, (logps, entropy)), gradients = grad(*inputs)
        return logps, entropy, gradients

    return jax.jit(run, compiler_options=COMPILED_QUICKLY)


def check_logits(function, logits, ids, weight, temperature, what=""):
    """`function`: of evaluated(), so that arrays of one shape compile once."""
    expected = reference(as_float64(logits), ids, weight, temperature)
    logps, entropy, (gradient,) = function(logits)
    assert logps.dtype == entropy.dtype == jnp.float32, what
    assert gradient.dtype == logits.dtype, what
    assert far(logps, expected[0]) < 1e-5, what
    assert np.abs(as_float64(entropy) - expected[1]).max() < 1e-5, what
    assert far(gradient, expected[2]) < ALLOWED[logits.dtype.name], what


def check_hidden(hidden, head, ids, weight, temperature, implementation, vocab_axis):
    hidden, head = jnp.asarray(hidden), jnp.asarray(head)
    wide, matrix = as_float64(hidden), as_float64(head)
    logps, entropy, slope = reference(wide @ matrix, ids, weight, temperature)
    ours = evaluated(weight, ids, temperature, implementation, vocab_axis)(hidden, head if vocab_axis else head.T)
    allowed = ALLOWED[hidden.dtype.name]
    assert far(ours[0], logps) < allowed
    assert np.abs(as_float64(ours[1]) - entropy).max() < allowed * max(1, entropy.max())
    assert far(ours[2][0], slope @ matrix.T) < allowed
    gradient = ours[2][1] if vocab_axis else ours[2][1].T
    assert gradient.dtype == head.dtype
    assert far(gradient, np.einsum("btd,btv->dv", wide, slope)) < allowed


def draw(shape, seed=0, scale=1.0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), dtype)


def tokens(batch, length, vocabulary, seed=1):
    """(target ids, weights), some of the weights 0."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(batch, length)).astype(np.float32)
    return rng.integers(0, vocabulary, (batch, length)), weight * (rng.random((batch, length)) < 0.8)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("implementation", FROM_LOGITS)
@pytest.mark.parametrize("shape", [(2, 37, 300), (3, 1, 130), (1, 16, 256)], ids=str)
def test_from_logits(implementation, shape, dtype):
    ids, weight = tokens(*shape)
    check_logits(evaluated(weight, ids, 0.9, implementation), draw(shape, scale=3, dtype=dtype), ids, weight, 0.9)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 37, 300), "float32"), ((2, 37, 300), "bfloat16"), ((3, 1, 7), "float32")]
)
@pytest.mark.parametrize(("implementation", "vocab_axis"), FROM_HIDDEN)
def test_from_hidden_states(implementation, vocab_axis, shape, dtype):
    """300 words are two chunks and the rest of one; 7 are less than a tile."""
    batch, length, vocabulary = shape
    ids, weight = tokens(*shape)
    hidden = draw((batch, length, 32), 2, dtype=dtype)
    head = draw((32, vocabulary), 3, dtype=dtype)
    check_hidden(hidden, head, ids, weight, 0.9, implementation, vocab_axis)


def hard_logits():
    """Name -> logits [1, 8, 300] with target 5."""
    word = np.arange(300)
    normal = np.random.default_rng(5).normal(size=(1, 8, 300))
    surer = 5.0 * np.arange(8)[None, :, None]
    zeros = np.zeros((1, 8, 1))
    excluded = np.where(word % 3 == 2, normal, -np.inf)  # 5 is not excluded
    first_tile_excluded = np.where((word < 256) & (word != 5), -np.inf, excluded)
    return {
        "large": 1e4 * normal,
        "large and close together": 1e4 + normal,
        "surer of the target from token to token": np.where(word == 5, surer, 0.0),
        "sure of another": np.where(word == 290, 1e4, zeros),
        "all equal": np.zeros((1, 8, 300)),
        "-inf": excluded,
        "-inf in the first tile, which is passed before a finite one": first_tile_excluded,
        "-1e30": np.maximum(excluded, -1e30),
        "-1e30 for the target": np.where(word == 5, -1e30, normal),
    }


@pytest.mark.parametrize("implementation", FROM_LOGITS)
def test_hard_logits(implementation):
    ids = np.full((1, 8), 5)
    weight = np.linspace(-1, 2, 8, dtype=np.float32)[None]
    function = evaluated(weight, ids, 0.9, implementation)
    for name, logits in hard_logits().items():
        for dtype in ALLOWED:
            check_logits(function, jnp.asarray(logits, dtype), ids, weight, 0.9, (name, dtype))


@pytest.mark.parametrize(
    ("implementation", "vocab_axis", "dtype"),
    [
        *((*way, "float32") for way in FROM_HIDDEN),
        ("pallas", 1, "bfloat16"),  # the others round logits to bfloat16, as MaxText does
    ],
)
def test_large_logits_from_hidden_states(implementation, vocab_axis, dtype):
    """Whole numbers, so that the logits, up to 1e4, are the same in every order of summation."""
    rng = np.random.default_rng(7)
    hidden = rng.integers(-250, 251, (1, 9, 16))
    head = rng.integers(-8, 9, (16, 300))
    assert np.abs(hidden @ head).max() > 8000
    ids = (hidden @ head).argsort(-1)[..., -2]
    weight = rng.normal(size=(1, 9)).astype(np.float32)
    check_hidden(jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), ids, weight, 0.3, implementation, vocab_axis)


def test_the_entropy_has_no_gradient():
    ids, _ = tokens(1, 4, 20)
    for implementation in FROM_LOGITS:
        gradient = jax.grad(lambda logits, how=implementation: statistics(ids, how, logits=logits)[1].sum())(
            draw((1, 4, 20))
        )
        assert not np.asarray(gradient).any()


SEVERAL_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from grpo_train import losses
from grpo_train.losses import pallas_kernel, token_logps

pallas_kernel.MULTIPLE, token_logps.CHUNK = 128, 4 * 260 * 2 * 5
pallas_kernel.fused_tiles = lambda tokens, *_: (min(tokens, 16), 128)
rng = np.random.default_rng(0)
ids, weight = rng.integers(0, 260, (4, 9)), rng.normal(size=(4, 9))
hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 9, 16), (16, 260)))

def leaves(implementation, partition, *inputs, vocab_axis=1):
    def total(*inputs):
        given = {"hidden": inputs[0], "head": inputs[1]}
        out = losses.token_statistics(
            ids, temperature=0.9, implementation=implementation, vocab_axis=vocab_axis, partition=partition, **given)
        return (out[0] * weight).sum(), out
    return jax.tree.leaves(jax.jit(jax.value_and_grad(total, tuple(range(len(inputs))), has_aux=True))(*inputs))

for implementation, vocab_axis, shape, inputs in (
    ("pallas", 1, (2, 2), (hidden, head)),
    ("pallas", 0, (2, 2), (hidden, head.T)),
    ("chunked", 1, (2, 2), (hidden, head)),
):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("fsdp", "tensor"))
    partition = pallas_kernel.Partition(mesh, ("fsdp",), ("tensor",) if shape[1] > 1 else ())
    expected = leaves("jax", None, *inputs, vocab_axis=vocab_axis)
    for ours, theirs in zip(leaves(implementation, partition, *inputs, vocab_axis=vocab_axis), expected, strict=True):
        assert float(jnp.abs(ours - theirs).max()) < 1e-5 * float(jnp.abs(theirs).max()), (implementation, shape)
print("the same")
"""


def test_on_several_devices_the_numbers_are_the_same(tmp_path):
    """Sequences over one axis of a mesh, the vocabulary over the other."""
    program = Program(SEVERAL_DEVICES, output=tmp_path / "said.txt", XLA_FLAGS=devices(4))
    assert program.lines()[-1] == "the same"


# --- the loss: against the equations here, against Tunix's below, and plain_grpo's in test_plain_grpo.py ------


AGGREGATIONS = {
    "completion": "sequence-mean-token-mean",
    "tokens": "token-mean",
    "constant": "sequence-mean-token-scale",
}
OFFERED = {"aggregation", "ratio", "epsilon_high", "kl", "correction", "advantage"}


def of_policy_loss(case, variant):
    """An adapter: the loss by itself, compiled once for each shape.  Through Tunix it is dev/conformance's `course`."""
    known = variant.aggregation in AGGREGATIONS and variant.kl in ("none", *losses.KL_ESTIMATORS)
    if set(variant.asks) - OFFERED or not known or variant.correction == "mask":
        return None
    if variant.advantage != "given":
        name = learner.ADVANTAGES.get(variant.advantage)
        estimate = name and function_registry.get_advantage_estimator(name)
        more = {"rewards": case.rewards.sum(1), "num_generations": case.group_size}
        return estimate and {"advantages": np.asarray(estimate(**more))}
    width = case.max_length - case.mask.shape[1]  # the learner's arrays are as wide as a completion can be
    names = ("logps", "old_logps", "ref_logps", "sampler_logps", "mask")
    logps, old, ref, sampler, mask = (np.pad(getattr(case, name), ((0, 0), (0, width))) for name in names)
    compared = losses.PolicyBatch(
        *in_float32(old),
        ref_per_token_logps=None if variant.kl == "none" else in_float32(ref)[0],
        advantages=in_float32(case.advantages)[0],
        completion_mask=mask,
        sampler_per_token_logps=in_float32(sampler)[0] if variant.correction == "tis" else None,
    )
    settings = losses.PolicyLossSettings(
        epsilon_high=variant.epsilon_high,
        beta=variant.beta,
        aggregation=AGGREGATIONS[variant.aggregation],
        kl="k3" if variant.kl == "none" else variant.kl,
        ratio=variant.ratio,
    )
    run = jax.jit(
        jax.value_and_grad(lambda x: policy_loss(x, compared, settings)[0]), compiler_options=COMPILED_QUICKLY
    )
    loss, gradient = run(*in_float32(logps))
    return {"loss": loss, "gradient": np.asarray(gradient)[:, : case.mask.shape[1]]}


@pytest.mark.slow
def test_the_loss_agrees_with_the_conformance_suite():
    """Values and gradients of each variant on its hard cases too: one token, none, ratios of 10⁶, padding left."""
    found = {finding.row.name: finding for finding in suite.check(of_policy_loss)}
    assert {name: one.text for name, one in found.items() if one.status in (suite.DIFFERS, suite.ERROR)} == {}
    assert sum(one.status == suite.AGREES for one in found.values()) == 23


def batch():
    """log π, log π_old, log π_ref, advantages and a mask with empty rows and one of one token."""
    case = cases()["completions of no token"]
    return case.logps, case.old_logps, case.ref_logps, case.advantages, case.mask


def in_float32(*arrays_):
    return [jnp.asarray(array, jnp.float32) for array in arrays_]


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "sequence-mean-token-scale", "token-mean"])
@pytest.mark.parametrize("weights", [None, 0.01])
def test_entropy_and_kl_are_nats_per_token_whatever_the_aggregation(aggregation, weights):
    logps, old, ref, advantages, mask = batch()
    entropy = np.where(mask, 0.25, 99.0)
    weights = None if weights is None else jnp.full(mask.shape, weights)
    given = losses.PolicyBatch(*in_float32(old, ref, advantages), mask, weights)
    settings = losses.PolicyLossSettings(aggregation=aggregation)
    _, aux = policy_loss(*in_float32(logps), given, settings, *in_float32(entropy))
    assert float(aux["entropy"]) == pytest.approx(0.25)
    difference = (ref - logps)[mask]
    assert float(aux["kl"]) == pytest.approx(np.mean(np.exp(difference) - difference - 1), rel=1e-5)


@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_what_is_masked_is_never_looked_at(garbage):
    logps, old, ref, advantages, mask = batch()
    settings = losses.PolicyLossSettings(beta=0.1)
    clean, _ = policy_loss(*in_float32(logps), losses.PolicyBatch(*in_float32(old, ref, advantages), mask), settings)
    logps, old, ref = (np.where(mask, array, garbage) for array in (logps, old, ref))

    def loss(x):
        return policy_loss(x, losses.PolicyBatch(*in_float32(old, ref, advantages), mask), settings, entropy=x)

    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(*in_float32(logps))
    assert value == clean
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~mask].any()
    assert all(np.isfinite(number) for number in aux.values())


@settings(max_examples=60)
@given(
    arrays.arrays(np.float32, (3, 2, 4), elements=st.floats(-1e4, 0, width=32)),
    arrays.arrays(np.float32, (2,), elements=st.floats(-100, 100, width=32)),
    arrays.arrays(bool, (2, 4)),
)
def test_wild_log_probabilities_give_no_nan(logps, advantages, mask):
    logps[2] = np.minimum(logps[2], logps[0] + 80)  # beyond, k3 itself is above the largest float32
    compared = losses.PolicyBatch(logps[1], logps[2], advantages, mask)
    run = jax.value_and_grad(lambda x: policy_loss(x, compared, losses.PolicyLossSettings(beta=0.04))[0])
    value, gradient = run(jnp.asarray(logps[0]))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


# --- Tunix ----------------------------------------------------------------------------------------------------


class Given(nnx.Module):
    """A model whose logits are its parameter."""

    def __init__(self, logits):
        self.logits = nnx.Param(logits)

    def __call__(self, tokens, positions, cache, attention_mask, segment_ids=None):
        return self.logits.get_value() + 0.0, None


def example(rows=4, prompt=3, length=6, vocabulary=20, old=True, ref=True):
    rng = np.random.default_rng(3)
    ids = rng.integers(2, vocabulary, (rows, prompt + length))
    ids[1, prompt + 3 :] = PAD
    old_logps, ref_logps = -np.abs(rng.normal(1, 0.5, (2, rows, length)))
    advantages = rng.normal(size=rows)
    return TrainExample(
        prompt_ids=jnp.asarray(ids[:, :prompt]),
        prompt_mask=jnp.ones((rows, prompt), bool),
        completion_ids=jnp.asarray(ids[:, prompt:]),
        completion_mask=jnp.asarray(ids[:, prompt:] != PAD),
        advantages=jnp.asarray(advantages, jnp.float32),
        ref_per_token_logps=jnp.asarray(ref_logps - 2, jnp.float32) if ref else None,
        old_per_token_logps=jnp.asarray(old_logps - 2, jnp.float32) if old else None,
    )


def algorithm(**settings_):
    config = GRPOConfig(**({"kl_loss_mode": "low_var_kl"} | settings_))
    config.temperature = 0.9
    return config


@pytest.mark.parametrize(
    ("aggregation", "old", "ref", "high", "more"),
    [
        ("sequence-mean-token-mean", True, True, None, {}),
        ("sequence-mean-token-mean", False, True, None, {}),
        ("token-mean", True, False, 0.28, {}),
        ("sequence-mean-token-scale", True, True, 0.28, {}),
        ("sequence-mean-token-mean", True, True, 0.28, {"loss_algo": "gspo-token"}),
        ("sequence-mean-token-mean", False, False, None, {"loss_algo": "gspo-token"}),
        ("sequence-mean-token-mean", True, True, None, {"kl_loss_mode": "kl"}),
        ("token-mean", True, True, None, {"kl_loss_mode": "mse_kl"}),
    ],
)
def test_loss_is_tunix_own(aggregation, old, ref, high, more):
    config = algorithm(**({"loss_agg_mode": aggregation, "beta": 0.04 if ref else 0.0} | more))
    if high:
        config.epsilon_high = high
    results = []
    for function in (grpo_loss_fn, function_registry.get_policy_loss_fn(losses.policy_loss_name("jax"))):
        run = nnx.value_and_grad(functools.partial(function, algo_config=config, pad_id=PAD, eos_id=EOS), has_aux=True)
        results.append(run(Given(draw((4, 9, 20), 4, 2)), example(old=old, ref=ref)))
    ((theirs, their_aux), their_slope), ((ours, our_aux), our_slope) = results
    assert ours == pytest.approx(float(theirs), rel=1e-5)
    # Tunix logs the mean of the estimator that is in the loss, and the entropy as the loss is aggregated; here `kl` is
    # always k3, and the entropy a mean over tokens.
    differ = {"kl"} if "kl_loss_mode" in more else set()
    differ |= {"entropy"} if aggregation != "token-mean" else set()
    for key in set(our_aux) - differ:
        assert float(our_aux[key]) == pytest.approx(float(their_aux[key]), rel=1e-5, abs=1e-6), key
    np.testing.assert_allclose(our_slope["logits"].get_value(), their_slope["logits"].get_value(), rtol=1e-4, atol=1e-7)


def test_a_temperature_of_each_token_gives_the_loss_of_that_temperature():
    """As in a schedule: in the example, in place of the constant 0.9 of the algorithm."""
    constant, scheduled = algorithm(beta=0.04), algorithm(beta=0.04)
    constant.temperature = 0.7
    with_temperature = packing.Example(**vars(example()) | {"temperature": jnp.full((4, 6), 0.7)})
    loss = function_registry.get_policy_loss_fn(losses.policy_loss_name("jax"))
    found = []
    for config, one in ((constant, example()), (scheduled, with_temperature)):
        run = nnx.value_and_grad(functools.partial(loss, algo_config=config, pad_id=PAD, eos_id=EOS), has_aux=True)
        (value, aux), slope = run(Given(draw((4, 9, 20), 4, 2)), one)
        found.append((value, aux["entropy"], slope["logits"].get_value()))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_tunix_takes_the_loss_by_name_and_a_model_without_hidden_states_is_refused():
    loss = function_registry.get_policy_loss_fn(losses.policy_loss_name("pallas"))
    with pytest.raises(CourseError, match=r"pallas needs a model made with hidden_states\.adapter_for"):
        loss(Given(draw((4, 9, 20))), example(), algorithm(), PAD, EOS)


# --- MaxText --------------------------------------------------------------------------------------------------


def one_layer(recipe, layers=1, **more):
    """An actor of one layer of the tiny model, or of a few, its weights random; the same ones each time."""
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    with maxtext_model.quiet():
        maxtext_model.register_architecture(recipe.model)
        config = pyconfig.initialize(
            maxtext_model.maxtext_arguments(
                recipe.model, max_target_length=33, base_num_decoder_layers=layers, enable_checkpointing=False, **more
            )
        )
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
        module = model_creation_utils.from_pretrained(
            config, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=PAD
        )
    return maxtext_model.Actor(module, config, mesh)


def pair(recipe, **size):
    """The same model, as it is and with its hidden states."""
    size = {**size, "normalize_embedding_logits": True}  # with weights as random as these, logits would be far apart
    plain = one_layer(recipe, **size)
    other = one_layer(recipe, **size, **hidden_states.maxtext_settings("pallas", 33))
    module = hidden_states.adapter_for("pallas", other.module)
    return plain, maxtext_model.Actor(module, other.config, other.mesh, loss="chunked")


@pytest.mark.slow
def test_the_kernel_s_loss_of_a_maxtext_model_is_tunix_own(tiny_recipe):
    """A tied embedding, an odd number of tokens; a mean over tokens, as the entropy is here with any loss."""
    config = algorithm(beta=0.04, loss_agg_mode="token-mean")
    results = []
    given_ = example(rows=4, prompt=10, length=23, vocabulary=256)
    kernel = functools.partial(losses.grpo_loss, implementation="pallas")
    for actor, function in zip(pair(tiny_recipe), (grpo_loss_fn, kernel), strict=True):
        run = nnx.value_and_grad(functools.partial(function, algo_config=config, pad_id=PAD, eos_id=EOS), has_aux=True)
        graph, state = nnx.split(actor.module)
        with actor.scope():
            step = jax.jit(
                lambda state, given_, run=run, graph=graph: run(nnx.merge(graph, state), given_),
                compiler_options=COMPILED_QUICKLY,
            )
            results.append(step(state, given_))
    ((theirs, their_aux), their_slopes), ((ours, our_aux), our_slopes) = results
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert float(our_aux["entropy"]) == pytest.approx(float(their_aux["entropy"]), rel=1e-5)
    slopes = zip(jax.tree.leaves(our_slopes), jax.tree.leaves(their_slopes), strict=True)
    away = [far(one, as_float64(another)) for one, another in slopes]
    # MaxText rounds the gradient of a tied embedding to bfloat16, some of it the other way.
    assert sorted(away)[-2] < 1e-5
    assert max(away) < 2**-8


@pytest.mark.slow
def test_log_probabilities_of_a_maxtext_model_are_tunix_own(tiny_recipe):
    """A head of its own; from logits, from hidden states, and as the reference's."""
    actors = plain, other = pair(tiny_recipe, logits_via_embedding=False)
    given_ = example(rows=4, prompt=10, length=23, vocabulary=256)
    ids = (given_.prompt_ids, given_.completion_ids)
    with plain.scope():
        logps = common.compute_per_token_logps(*nnx.split(plain.module), *ids, PAD, EOS, temperature=0.9)
    for actor in actors:
        ours = maxtext_model.per_token_logps(actor, *ids, PAD, EOS, temperature=0.9)
        np.testing.assert_allclose(ours, logps, atol=1e-5)
        with actor.scope():
            compute = functools.partial(losses.logps_at(jnp.float32(0.9)), *nnx.split(actor.module), *ids, PAD, EOS)
            np.testing.assert_allclose(compute(jnp.float32(0.9), actor.loss), logps, atol=1e-5)
            programs = model_logps._per_token_logps_at._cache_size()
            assert not np.allclose(compute(jnp.float32(0.5), actor.loss), logps, atol=0.1)
        assert model_logps._per_token_logps_at._cache_size() == programs  # another temperature compiles nothing
    worker = SimpleNamespace(get_model={"reference": other.module}.get)
    with other.scope():
        scored = losses.reference_logps(worker, "chunked")(*ids, PAD, EOS, temperature=0.9)
    np.testing.assert_allclose(scored, logps, atol=1e-5)
