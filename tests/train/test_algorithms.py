"""The switches of the `grpo` section: which of them are the same thing, and what they are where they are not."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import B, C, batch, pack, prompts_of
from tunix.rl import common, function_registry, rl_cluster
from tunix.rl.grpo import dapo_learner
from tunix.rl.grpo.grpo_learner import GRPOConfig

from grpo_lib import plain_grpo
from grpo_lib.common.errors import CourseError
from grpo_lib.problems import load_problems
from grpo_lib.rewards import overlong_penalty
from grpo_train import checks, losses, pipeline, training
from grpo_train.engines import learner, weight_sync
from grpo_train.losses.for_tunix import completion_keys
from grpo_train.losses.packing import to_example
from grpo_train.recipes import load_recipe

whole_lengths = st.lists(st.integers(1, C), min_size=B, max_size=B)


def compared(example, **fields):
    """What the loss takes of an example, with other values in some fields."""
    names = ("old_per_token_logps", "ref_per_token_logps", "advantages", "completion_mask")
    return losses.PolicyBatch(**{name: getattr(example, name) for name in names} | fields)


def gradient(logps, padded, **changes):
    """Of the loss with respect to log π [B, C]."""
    settings = losses.PolicyLossSettings(**changes)
    return jax.grad(lambda logps: losses.policy_loss(logps, compared(padded), settings)[0])(logps)


def drawn(seed):
    return jnp.asarray(-np.abs(np.random.default_rng(seed).normal(3, 1, (B, C))), jnp.float32)


@settings(max_examples=30)
@given(whole_lengths, st.integers(0, 99), st.sampled_from(list(learner.AGGREGATIONS.values())))
def test_with_one_update_per_batch_clip_higher_and_gspo_are_grpo(lengths, seed, aggregation):
    padded = batch(lengths, [3, 4], seed, old=False, ref=False)
    plain = gradient(drawn(seed), padded, aggregation=aggregation)
    assert np.array_equal(plain, gradient(drawn(seed), padded, aggregation=aggregation, epsilon_high=0.28))
    # Of one completion: the mean gradient of its tokens, at each of them.
    sequence = np.asarray(gradient(drawn(seed), padded, aggregation=aggregation, ratio="sequence"))
    np.testing.assert_allclose(sequence, plain, rtol=1e-5, atol=1e-9)


def test_off_policy_they_differ():
    padded = batch([4] * B, [3, 4], ref=False)
    near = padded.old_per_token_logps + jnp.where(jnp.arange(C) % 2, 0.22, -0.1)  # ratios of 1.25 and 0.90
    gradients = [gradient(near, padded, **changes) for changes in ({}, {"epsilon_high": 0.28}, {"ratio": "sequence"})]
    assert all(np.abs(one - other).max() > 1e-3 for one, other in itertools.combinations(gradients, 2))


@settings(max_examples=30)
@given(whole_lengths, prompts_of, st.integers(0, 99), st.sampled_from(["packed", "groups"]))
def test_a_sequence_s_ratio_is_the_same_in_rows_of_several(lengths, prompts, seed, layout):
    padded = batch(lengths, prompts, seed)
    packed = pack(padded, layout)
    logps = drawn(seed) / 10 + padded.old_per_token_logps
    # Values of the same order in both: pack them like another field.
    rows = pack(padded.replace(ref_per_token_logps=logps), layout).ref_per_token_logps
    sequence = losses.PolicyLossSettings(ratio="sequence")
    keys = completion_keys(packed.segment_positions)
    in_rows = compared(packed, ref_per_token_logps=None, weights=packed.weights, completions=keys)
    ours, aux = losses.policy_loss(rows, in_rows, sequence)
    theirs, their_aux = losses.policy_loss(logps, compared(padded, ref_per_token_logps=None), sequence)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5, abs=1e-6)
    for key in ("is_ratio/max", "is_ratio/min", "pg_clipfrac"):
        assert float(aux[key]) == pytest.approx(float(their_aux[key]), rel=1e-5), key


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.integers(2, 4))
def test_advantages_are_those_of_the_page_and_leave_one_out_a_multiple_of_no_std(rewards, group_size):
    rewards = np.tile(np.array(rewards[:group_size], np.float64), 2)
    of = {name: function_registry.get_advantage_estimator(own) for name, own in learner.ADVANTAGES.items()}
    mean, out = (
        np.asarray(of[name](rewards=rewards, num_generations=group_size)) for name in ("mean", "leave-one-out")
    )
    np.testing.assert_allclose(out, mean * group_size / (group_size - 1), rtol=1e-5, atol=1e-6)
    for name, function in of.items():
        ours = plain_grpo.group_advantages(rewards, group_size, name)
        np.testing.assert_allclose(ours, function(rewards=rewards, num_generations=group_size), rtol=1e-5, atol=1e-6)


def test_maxrl_refuses_a_mean_that_would_turn_signs():
    with pytest.raises(CourseError, match=r"maxrl.*a reward is -0\.5"):
        learner.maxrl_advantages(np.array([1.0, -0.5]), 2)


# --- length -------------------------------------------------------------------------------------------------------


def test_the_overlong_penalty_by_hand():
    # Limit 20, buffer 8: nothing is taken off up to 12 tokens, half at 16, all of it at 20.
    assert overlong_penalty([1, 12, 14, 16, 20], 20, 8) == [0, 0, -0.25, -0.5, -1]
    assert overlong_penalty([16], 20, 8, penalty=0.2) == pytest.approx([-0.1])


def test_the_overlong_penalty_is_of_tokens_and_not_of_characters(root):
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["grpo.overlong_buffer=8"])
    sampler = SimpleNamespace(lengths=[20, 20])  # of one batch, whatever its texts are
    function = training._overlong_reward(sampler, recipe.grpo, recipe.rollout.max_completion_length)
    short, long = function(prompts=["", ""], completions=["a", "a" * 500])
    assert short == long == -0.5
    assert function.__name__ == "overlong_penalty"


@pytest.mark.parametrize(
    ("step", "share", "changes", "said"),
    [
        (1, 0.3, [], ["30% ", "cut at 24", "rollout.max_completion_length=48", "grpo.mask_truncated=true"]),
        (1, 0.3, ["grpo.mask_truncated=true"], ["rollout.max_completion_length=48 and look again"]),
        (1, 0.01, [], []),
        (2, 0.3, [], []),
    ],
)
def test_the_first_step_says_what_share_was_cut(root, step, share, changes, said):
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", changes)
    rows = [{"step": step, "completions/clipped_ratio": share}]
    lines = []
    alerts = pipeline._NewAlerts(SimpleNamespace(recipe=recipe, recorder=SimpleNamespace(rows=rows)), lines.append)
    alerts.log_new()
    alerts.log_new()  # a row comes again when its validation joins it
    assert len(lines) == bool(said)
    assert [part for part in said if part not in "".join(lines)] == []


@pytest.mark.long(minutes=1)
@settings(max_examples=10)
@given(
    whole_lengths,
    st.lists(st.booleans(), min_size=B, max_size=B),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from(list(learner.AGGREGATIONS)),
    st.sampled_from(["padded", "packed"]),
)
def test_masked_completions_are_as_if_they_were_not_there(lengths, cut, size, aggregation, layout):
    """Loss and gradient of all micro-batches of a step, against the batch without the truncated rows."""
    kept = ~np.array(cut)
    whole = batch(lengths, [3, 4], seed=5)
    logps = drawn(6)
    masked = to_example(whole, completion_mask=whole.completion_mask * kept[:, None])
    parts = [jax.tree.map(lambda array: array[at : at + size], masked) for at in range(0, B, size)]  # noqa: B023
    sources = [np.arange(at, at + size) for at in range(0, B, size)]
    config = losses.PolicyLossSettings(beta=0.1, aggregation=learner.AGGREGATIONS[aggregation])

    def loss(logps):
        total = 0
        for part, rows in zip(learner.weight_tokens(parts, aggregation), sources, strict=True):
            if layout == "padded":
                total += losses.policy_loss(logps[rows], compared(part, weights=part.weights), config)[0]
            else:  # the policy's log-probabilities are carried into the rows in the place of the sampler's
                own = pack(to_example(part, sampler_per_token_logps=logps[rows]), "packed", shapes=[(size, 16)])
                packed = compared(own, weights=own.weights, completions=completion_keys(own.segment_positions))
                total += losses.policy_loss(jnp.asarray(own.sampler_per_token_logps), packed, config)[0]
        return total / len(parts)

    def wanted(logps):
        rest = jax.tree.map(lambda array: array[kept], whole)
        return losses.policy_loss(logps[kept], compared(rest), config)[0]

    if not kept.any():
        assert loss(logps) == 0
        return
    assert float(loss(logps)) == pytest.approx(float(wanted(logps)), rel=1e-5, abs=1e-6)
    if layout == "padded":  # `pack` is computed with NumPy
        np.testing.assert_allclose(jax.grad(loss)(logps), jax.grad(wanted)(logps), rtol=1e-5, atol=1e-6)


def test_a_step_masks_what_the_sampler_cut(root, monkeypatch):
    """The rewards of cut completions stay in the advantages of their groups."""
    whole = batch([5, 1, 3, 2, 4, 5], [3, 4])
    monkeypatch.setattr(learner.GRPOLearner, "_generate_and_compute_advantage", lambda self, *_: whole)
    made = object.__new__(learner.Learner)
    made._grpo = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["grpo.mask_truncated=true"]).grpo
    made.rl_cluster = SimpleNamespace(rollout=SimpleNamespace(truncated=[True, False, False, False, False, True]))
    example = made._sampled_once({}, None)
    assert example.completion_mask.sum(1).tolist() == [0, 1, 3, 2, 4, 0]
    np.testing.assert_array_equal(example.advantages, whole.advantages)


# --- the mean over the tokens of a step -------------------------------------------------------------------------


@settings(max_examples=30)
@given(whole_lengths, st.sampled_from([1, 2, 3, 6]))
def test_the_step_s_mean_is_the_same_for_every_micro_batch(lengths, size):
    padded = batch(lengths, [3, 4], old=False, ref=False)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(B, C)), jnp.float32)
    parts = [jax.tree.map(lambda array: array[at : at + size], padded) for at in range(0, B, size)]  # noqa: B023
    means = []
    for index, part in enumerate(learner.weight_tokens(parts, "step")):
        of_part = values[index * size : (index + 1) * size]
        means.append(float((of_part * part.weights).sum()))
    expected = common.aggregate_loss(values, padded.completion_mask, "token-mean")
    assert np.mean(means) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_the_update_of_a_run_does_not_depend_on_the_micro_batch(root, converted_base, tmp_path):
    def gradient(size: int) -> dict[str, np.ndarray]:
        changes = [
            *("training.steps=1", "training.validate_every=0", "problems.train=200", "grpo.aggregation=step"),
            *(f"training.micro_batch_size={size}", "training.max_grad_norm=1e9"),
        ]
        recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", changes)
        problems = load_problems(recipe.problems, "train")
        session = training.build_session(checks.check(recipe, problems), tmp_path / str(size), converted_base)
        training.train(session)
        state = session.cluster.actor_trainer.optimizer.opt_state
        return weight_sync.by_name(optax.tree_utils.tree_get(state, "mu"))  # Adam's mean of the gradient

    whole, parts = gradient(128), gradient(16)
    for name in whole:
        apart = np.linalg.norm(whole[name] - parts[name]) / np.linalg.norm(whole[name])
        # MaxText rounds the gradient of a tied embedding to bfloat16, of each micro-batch: 8 bits.
        assert apart < (2**-8 if "embedding" in name else 1e-4), name


def test_tunix_still_takes_the_token_mean_of_a_micro_batch():
    values = jnp.array([[1.0, 1, 1, 1], [5, 0, 0, 0]])
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]])
    each = [float(common.aggregate_loss(values[i : i + 1], mask[i : i + 1], "token-mean")) for i in range(2)]
    assert np.mean(each) == 3.0  # what MultiSteps makes of two micro-batches
    assert float(common.aggregate_loss(values, mask, "token-mean")) == pytest.approx(9 / 5)  # of the step's tokens


# --- upstream: each fails on the day it is repaired -----------------------------------------------------------------


def test_tunix_still_has_epsilon_high_in_dapo_only():
    with pytest.raises(TypeError, match="epsilon_high"):
        GRPOConfig(epsilon_high=0.28)


def test_tunix_s_dapo_still_counts_characters_and_still_wants_a_reference():
    buffer = {"overlong_buffer_length": 10, "overlong_buffer_penalty": 1.0, "max_response_length": 20}
    long, short = dapo_learner.reward_shaping([], ["a" * 15, "b" * 5], rl_cluster.Mode.TRAIN, buffer)
    assert (long, short) == (-0.5, 0)  # by their characters, whatever their tokens are
    assert dapo_learner.DAPOConfig(overlong_buffer=None).beta is None  # None != 0.0, so the learner asks a reference


# --- the sampler's probabilities ----------------------------------------------------------------------------------


def test_truncated_importance_sampling_by_hand():
    half = np.log(0.5)
    one = jnp.ones((1, 3))
    logps = jnp.full((1, 3), half)
    sampled = jnp.asarray([[np.log(0.25), half, np.log(0.05)]])  # ratios of 2, 1 and 10
    batch = losses.PolicyBatch(None, None, jnp.ones(1), one, sampler_per_token_logps=sampled)
    loss, aux = losses.policy_loss(logps, batch, losses.PolicyLossSettings(correction_cap=4.0))
    assert float(loss) == pytest.approx(-(2 + 1 + 4) / 3)
    assert float(aux["importance_ratio"]) == pytest.approx(13 / 3)


@pytest.mark.parametrize("layout", ["packed", "groups"])
def test_the_sampler_s_probabilities_of_rows_of_several(layout):
    padded = to_example(batch([5, 1, 3, 2, 4, 5], [3, 4]), sampler_per_token_logps=drawn(3))
    packed = pack(padded, layout)

    def loss(example, logps, **fields):
        batch = compared(example, sampler_per_token_logps=example.sampler_per_token_logps, **fields)
        return losses.policy_loss(logps, batch, losses.PolicyLossSettings(beta=0.1))[0]

    # The policy's: those of the old one, carried into the rows with it.
    rows = loss(packed, packed.old_per_token_logps, weights=packed.weights)
    assert float(rows) == pytest.approx(float(loss(padded, padded.old_per_token_logps)), rel=1e-5)


def test_packing_keeps_the_weights_of_a_step():
    (example,) = learner.weight_tokens([batch([5, 1, 3, 2, 4, 5], [3, 4])], "step")
    packed = pack(to_example(example, weights=3 * example.weights), "packed")
    assert np.asarray(packed.weights)[np.asarray(packed.completion_mask)] == pytest.approx(3 / 20)  # of 20 tokens


# --- dynamic sampling ---------------------------------------------------------------------------------------------


class Sampled(learner.Learner):
    """A learner whose sampler answers as a table says: `table[step]` has the verdicts of each group of that step."""

    def __init__(self, recipe, table):
        self._grpo = recipe.grpo
        self._steps = recipe.training.steps
        self._calls_per_step = 1
        self._temperature_of_step = None
        self.table = table
        self.algo_config = SimpleNamespace(num_generations=2)
        self.logged = {}
        self.rl_cluster = SimpleNamespace(
            rollout=SimpleNamespace(calls=0, last=None),
            buffer_metrics=lambda values, mode=None: self.logged.update({k: v[0] for k, v in values.items()}),
        )
        self._batch_of_step = self.prompts

    def prompts(self, step):
        count = len(self.table[0])
        return {"prompts": np.array([f"{step}-{i}" for i in range(count)]), "answer": np.array(["1"] * count),
                "kind": np.array(["tagged"] * count)}  # fmt: skip

    def step(self, step):
        self.rl_cluster.rollout.calls = step
        batch_ = {name: np.repeat(column, 2) for name, column in self.prompts(step).items()}
        return self._generate_and_compute_advantage(batch_, None)

    def _sampled_once(self, training_input, mode):
        step = self.rl_cluster.rollout.calls
        self.rl_cluster.rollout.calls += 1
        right = np.array(self.table[step]).reshape(-1)
        texts = [f"<reasoning>a</reasoning><answer>{int(each)}</answer>" for each in right]
        self.rl_cluster.rollout.last = SimpleNamespace(text=texts)
        assert [str(prompt).split("-")[0] for prompt in training_input["prompts"]] == [str(step)] * len(right)
        ids = jnp.asarray(100 * step + np.arange(len(right)))[:, None]  # tells where a completion is from
        return common.TrainExample(ids, ids, ids, ids, jnp.asarray(right - 0.5, jnp.float32), None, None)


MIXED, RIGHT, WRONG = [1, 0], [1, 1], [0, 0]


@given(st.lists(st.lists(st.sampled_from([MIXED, RIGHT, WRONG]), min_size=3, max_size=3), min_size=4, max_size=4))
def test_dynamic_sampling_keeps_what_it_has_and_asks_no_more_than_it_must(root, tables):
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["grpo.dynamic_sampling=4", "training.steps=10"])
    sampled = Sampled(recipe, {10 * number: table for number, table in enumerate(tables)})
    example = sampled.step(0)
    passes = sampled.logged["step/dynamic_sampling/passes"]
    found = [table.count(MIXED) for table in tables]
    assert passes == next((n for n in range(1, 4) if sum(found[:n]) >= 3), 4)
    assert sampled.logged["step/dynamic_sampling/uniform_groups"] == max(0, 3 - sum(found[:passes]))
    assert sampled.rl_cluster.rollout.calls == 1  # the next step draws its own noise
    used = example.completion_ids[::2, 0].tolist()
    assert len(set(used)) == 3
    for group, first in enumerate(tables[0]):
        if first == MIXED:
            assert used[group] == 2 * group
        source = tables[used[group] // 1000][used[group] % 100 // 2]
        assert (source == MIXED) == bool(np.abs(example.advantages[2 * group : 2 * group + 2]).sum() > 0)
