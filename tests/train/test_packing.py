"""Layouts of the policy update: rows of real tokens give what padded rows give."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_losses import COMPILED_QUICKLY, algorithm, one_layer
from tunix.rl import common
from tunix.rl.common import TrainExample

from grpo_train import losses
from grpo_train.losses import hidden_states, packing, slots
from grpo_train.recipes.layouts import choose_layout, row_shapes

PAD, EOS = 0, 1
GROUPS, G, P, C = 2, 3, 6, 5
B = GROUPS * G
# One shape each, so that few programs are compiled.
SHAPES = {"packed": [(B, P + C)], "groups": [(1, GROUPS * (P - 1 + G * (1 + C)))]}
AGGREGATIONS = (
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "seq-mean-token-sum",
    "sequence-mean-token-sum-norm",
)  # fmt: skip


def batch(lengths, prompt_lengths, seed=0, old=True, ref=True):
    """Completions of these lengths after prompts of these lengths, as Tunix pads them."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    ids = rng.integers(2, 250, (count, P + C))
    prompts = np.repeat(ids[::G, :P], G, axis=0)
    prompts[np.arange(P) < P - np.repeat(prompt_lengths, G)[:, None]] = PAD
    completions = ids[:, P:]
    completions[np.arange(C) >= np.array(lengths)[:, None]] = PAD

    def logps():
        return jnp.asarray(-np.abs(rng.normal(3, 1, (count, C))), jnp.float32)

    return TrainExample(
        prompt_ids=jnp.asarray(prompts),
        prompt_mask=jnp.asarray(prompts != PAD),
        completion_ids=jnp.asarray(completions),
        completion_mask=jnp.asarray(completions != PAD),
        advantages=jnp.asarray(rng.normal(size=count), jnp.float32),
        ref_per_token_logps=logps() if ref else None,
        old_per_token_logps=logps() if old else None,
    )


def pack(padded, layout, aggregation="sequence-mean-token-mean", shapes=None, **more):
    packed = packing.pack(
        padded, layout=layout, shapes=shapes or SHAPES[layout], group_size=G, aggregation=aggregation, **more
    )
    return jax.tree.map(jnp.asarray, packed)


# Completions: none, one token, all; a group that is truncated as a whole.
HARD = ([0] * B, [1] * B, [C] * B, [C] * G + [0, 1, 2], [0, 3, 1, 0, 0, 5])
lengths_of = st.lists(st.integers(0, C), min_size=B, max_size=B)
prompts_of = st.lists(st.integers(1, P), min_size=GROUPS, max_size=GROUPS)


@settings(max_examples=50)
@given(lengths_of, prompts_of, st.sampled_from(["packed", "groups"]), st.sampled_from(AGGREGATIONS))
def test_every_token_stands_in_one_place_with_all_that_belongs_to_it(lengths, prompts, layout, aggregation):
    padded = batch(lengths, prompts)
    temperature = jnp.asarray(np.random.default_rng(2).uniform(0.5, 1.5, (B, C)), jnp.float32)
    padded = packing.Example(**vars(padded) | {"temperature": temperature})
    packed = pack(padded, layout, aggregation)
    mask, there = np.asarray(padded.completion_mask), np.asarray(packed.completion_mask)
    assert (np.asarray(packed.temperature)[~there] == 1).all()  # padding, too, is divided by it
    for name in ("ref_per_token_logps", "old_per_token_logps", "temperature"):
        values = np.asarray(getattr(padded, name))[mask]
        assert sorted(values) == sorted(np.asarray(getattr(packed, name))[there])
    # A loss that is another number for each token: its aggregate is the same.
    values = jnp.asarray(np.random.default_rng(1).normal(size=mask.shape), jnp.float32)
    expected = common.aggregate_loss(values, padded.completion_mask, aggregation)
    weights = packing.token_weights(padded.completion_mask, aggregation)
    assert float((values * weights).sum()) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    assert sorted(np.asarray(weights)[mask]) == sorted(np.asarray(packed.weights)[there])
    # Of each segment: the end of a prompt, then a whole completion, at the positions that they had.
    segments, positions = np.asarray(packed.segment_ids), np.asarray(packed.segment_positions)
    for index, length in enumerate(lengths):
        unit, member = (index // G + 1, index % G + 1) if layout == "groups" else (index + 1, 1)
        at = np.nonzero(segments == packing.SEGMENTS_PER_GROUP * unit + member)
        own = np.asarray(padded.completion_ids)[index][:length]
        assert np.array_equal(np.asarray(packed.completion_ids)[at][len(at[0]) - length :], own)
        start = prompts[index // G] - (1 if layout == "groups" else prompts[index // G])
        assert np.array_equal(positions[at], start + np.arange(len(at[0])))
        assert (np.asarray(packed.advantages)[at][len(at[0]) - length :] == padded.advantages[index]).all()


def test_what_does_not_fit_is_an_error_and_the_smallest_shape_that_fits_is_taken():
    padded = batch([2] * B, [3] * GROUPS)
    assert pack(padded, "packed", shapes=[(2, 14), (2, 15), (6, 11)]).completion_ids.shape == (2, 15)
    with pytest.raises(ValueError, match="6 completions do not fit"):
        pack(padded, "packed", shapes=[(2, 14)])


@given(
    st.sampled_from(["packed", "groups"]), st.integers(1, 6), st.integers(2, 6), st.integers(1, 700),
    st.integers(1, 700), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_last_shape_holds_any_batch(layout, groups, group_size, prompt, completion, replicas, random):
    groups *= replicas
    sequences = groups * group_size
    shapes = row_shapes(
        layout, sequences=sequences, group_size=group_size, prompt_length=prompt, completion_length=completion,
        replicas=replicas,
    )  # fmt: skip
    sizes = [math.prod(shape) for shape in shapes]
    assert sizes == sorted(sizes)
    assert all(rows % replicas == 0 for rows, _ in shapes)
    if layout == "groups":
        full = [prompt - 1 + group_size * (1 + completion)] * groups
    else:
        full = [prompt + completion] * sequences
    assert packing.first_fit(full, *shapes[-1]) is not None
    some = [random.randint(1, size) for size in full]
    places = packing.first_fit(some, *shapes[-1])
    taken = sorted((row, start, start + size) for (row, start), size in zip(places, some, strict=True))
    assert all(one[0] < other[0] or one[2] <= other[1] for one, other in itertools.pairwise(taken))


def test_rows_of_groups_have_no_two_widths_that_are_nearly_the_same():
    """A second one would be compiled for a few tokens of padding."""
    sizes = {"sequences": 128, "group_size": 8, "completion_length": 24}
    widths = [width for _, width in row_shapes("groups", prompt_length=41, **sizes)]
    assert widths == [64, 96, 128, 160, 192, 240]  # not 224, 7/8 of the widest, rounded up
    assert [width for _, width in row_shapes("groups", prompt_length=1, **sizes)][-2:] == [176, 208]


def test_micro_batches_have_rows_of_their_own_and_their_mean_is_the_loss():
    padded = batch([5, 3, 1, 0, 2, 4], [3, 6])
    shapes = {"layout": "groups", "shapes": [(1, 12), (1, 24)], "group_size": G}
    packed = packing.pack(padded, micro_batches=2, **shapes)
    halves = [packing.pack(jax.tree.map(lambda x: x[i : i + G], padded), **shapes) for i in (0, G)]  # noqa: B023
    assert np.array_equal(packed.completion_ids, np.stack([half.completion_ids for half in halves]))
    assert packed.completion_ids.shape == (2, 1, 24)
    assert packed.weights.sum() / 2 == pytest.approx(1)


def test_groups_need_whole_groups_in_each_replica():
    assert choose_layout("auto", accelerator=False, groups=4, replicas=2) == "groups"
    assert choose_layout("auto", accelerator=False, groups=1, replicas=2) == "packed"
    assert choose_layout("auto", accelerator=True, groups=4, replicas=2) == "packed"
    with pytest.raises(
        ValueError, match=r"training\.layout=groups .* 2 trainer replicas, and a micro-batch has 3: use"
    ):
        choose_layout("groups", accelerator=False, groups=3, replicas=2)


# --- with a MaxText model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compute(tiny_recipe):
    """(loss, aux, gradient) of a batch, by an implementation; one layer and an untied head (a tied one's gradient is
    rounded to bfloat16 by MaxText)."""
    size = {"logits_via_embedding": False}
    plain = one_layer(tiny_recipe, **size)
    other = one_layer(tiny_recipe, **size, **hidden_states.maxtext_settings("pallas", 33))
    fast = one_layer(tiny_recipe, **size)  # as on one CPU
    modules = {
        "jax": plain.module,
        "slots": fast.module,
        "pallas": hidden_states.adapter_for("pallas", other.module),
    }
    for module in modules.values():
        packing.share_prompts(module)
    slots.attend_in_slots(fast.module, slots.SlotSizes(P - 1, G, 1 + C))
    hidden_states.allow_narrow_head(fast.module)

    @functools.cache
    def step(implementation, beta):
        module = modules["pallas" if implementation == "chunked" else implementation]
        implementation = "jax" if implementation == "slots" else implementation
        config = algorithm(beta=beta)
        graph, state = nnx.split(module)

        def run(state, given):
            value_and_grad = nnx.value_and_grad(
                functools.partial(
                    losses.grpo_loss, algo_config=config, pad_id=PAD, eos_id=EOS, implementation=implementation
                ),
                has_aux=True,
            )
            return value_and_grad(nnx.merge(graph, state), given)

        return functools.partial(jax.jit(run, compiler_options=COMPILED_QUICKLY), state)

    def compute(given, implementation="jax", beta=0.04):
        with plain.scope():
            (loss, aux), slopes = step(implementation, beta)(given)
        return float(loss), aux, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(slopes)])

    return compute


def check_same(padded, packed):
    loss, aux, slope = packed
    their_loss, their_aux, their_slope = padded
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    for name, value in aux.items():
        assert float(value) == pytest.approx(float(their_aux[name]), rel=1e-4, abs=1e-6), name
    assert np.linalg.norm(slope - their_slope) <= 1e-5 * max(np.linalg.norm(their_slope), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "groups"])
def test_loss_and_gradient_are_those_of_padded_rows(compute, layout):
    """With old log-probabilities and a KL penalty; also clip fraction, KL and entropy."""

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(lengths_of, prompts_of)
    @example(HARD[0], [1, P])
    @example(HARD[1], [1, 1])
    @example(HARD[2], [P, P])
    @example(HARD[3], [2, 5])
    @example(HARD[4], [P, 1])
    def check(lengths, prompts):
        padded = batch(lengths, prompts, seed=sum(lengths))
        check_same(compute(padded), compute(pack(padded, layout)))

    check()


ROWS_OF_ONE_GROUP = [(GROUPS, P - 1 + G * (1 + C))]


@pytest.mark.slow
def test_so_they_are_in_slots_and_with_the_head_at_some_places(compute):
    assert slots.SlotSizes(P - 1, G, 1 + C).pays(ROWS_OF_ONE_GROUP[0][1])
    for lengths in HARD:
        for prompts in ([P, 4], [3, P]):
            padded = batch(lengths, prompts, seed=sum(lengths))
            expected = compute(padded)
            packed = pack(padded, "groups", shapes=ROWS_OF_ONE_GROUP, unscored=min(prompts) - 1)
            check_same(expected, compute(packed, "slots"))
            check_same(expected, compute(padded, "slots"))  # the same model with rows that are no groups


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "layout"), [("chunked", "groups"), ("pallas", "packed")])
def test_so_they_are_with_the_other_implementations(compute, layout, implementation):
    for lengths in HARD[2:]:
        padded = batch(lengths, [P, 3], seed=sum(lengths))
        check_same(compute(padded), compute(pack(padded, layout), implementation))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("silent", "packed"),
    [
        (slice(0), {"layout": "packed"}),
        # Micro-batches: both teach something, one does, none.
        *((slice(end), {"layout": "groups", "micro_batches": 2}) for end in (0, G, 2 * G)),
    ],
)
def test_on_policy_without_a_reference_and_where_micro_batches_teach_nothing(compute, silent, packed):
    padded = batch(HARD[3], [P, 3], old=False, ref=False)
    padded = padded.replace(advantages=padded.advantages.at[silent].set(0))
    loss, aux, slope = compute(pack(padded, **packed), beta=0.0)
    if "micro_batches" in packed:  # each has its mean over tokens, and the metric is the mean of these
        assert aux.pop("entropy") > 0
    check_same(compute(padded, beta=0.0), (loss, aux, slope))
