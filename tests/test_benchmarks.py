"""The benchmarks: what they count, and that they start."""

import functools
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_lib import answers, plain_grpo, rewards
from grpo_lib.problems import load_problems
from grpo_lib.prompts import render
from grpo_train.recipes import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """A program as a module, by its name; the folder's modules import each other by name, as they do when run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("program", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_program_imports_what_is_there(benchmark, program) -> None:
    benchmark(program)


def test_summary_takes_ratios_within_rounds(benchmark) -> None:
    step_time = benchmark("step_time")

    def result(seconds: float) -> dict:
        return {
            "seconds": [9.0, 9.0, 9.0, seconds, seconds, 5.0, seconds],
            "seconds_rollout": [0.1] * 7,
            "seconds_update": [0.2] * 7,
            "reward": [0.1] * 7,
            "completion_length": [17.0] * 7,
            "process_seconds": 30.0,
            "peak_memory_gib": 1.0,
            "versions": {"python": "3.12.1"},
        }

    rounds = [{"course": result(a), "hand_jitted": result(b)} for a, b in ((1.0, 1.0), (2.2, 2.0), (1.2, 1.0))]
    summary = step_time.summarize(rounds)
    assert summary["ratios"] == {"course/hand_jitted": {"median": 1.1, "min": 1.0, "max": 1.2}}
    assert summary["seconds_per_step"]["course"] == [1.0, 2.2, 1.2]
    assert "1.100  1.000–1.200" in step_time.table(summary)

    rounds = [{"course": result(0.7), "floor": result(0.6), "trl": result(1.0)}]
    for units, bar, verdict in ((["AVX2", "AMX"], 0.8, "bar 0.8: met"), (["AVX2"], 0.6, "bar 0.6: not met")):
        summary = step_time.summarize(rounds, units)
        assert summary["ratios"]["course/trl"] == {
            "median": 0.7, "min": 0.7, "max": 0.7, "bar": bar, "met": "not" not in verdict,
        }  # fmt: skip
        assert verdict in step_time.table(summary)
        assert "bar 1.25: met" in step_time.table(summary)


def test_the_floor_samples_and_learns_as_plain_grpo(benchmark, root) -> None:
    floor, groups, G, C = benchmark("floor"), 4, 4, 24
    policy = plain_grpo.load_policy(root / "assets" / "tiny-base")
    recipe = load_recipe(root / "recipes" / "tiny-cpu.yaml", ["problems.train=200"])
    questions = [problem.question for problem in load_problems(recipe.problems, "train")[:groups]]
    prompts = np.repeat(plain_grpo.encode(policy, [render(policy.tokenizer, text) for text in questions]), G, 0)
    settings = policy.config, prompts, jax.random.PRNGKey(1), C, 1.3
    completions = np.array(plain_grpo.sample(policy.weights, *settings))
    assert np.unique(completions, axis=0).shape[0] > groups  # the group's members differ
    np.testing.assert_array_equal(floor.sample(policy.weights, *settings, group_size=G), completions)

    # An optimizer that changes nothing and keeps the gradient.
    keep = optax.GradientTransformation(
        lambda weights: jax.tree.map(jnp.zeros_like, weights),
        lambda gradient, state, weights: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )
    completions[0] = policy.config.pad  # one is empty, one is of full length
    completions[1] = 7
    warm = plain_grpo.Settings(temperature=1.3)
    batch = prompts, completions, np.random.default_rng(0).normal(size=groups * G) + 1

    def gradient_and_loss(update):
        weights = jax.tree.map(jnp.copy, policy.weights)
        return update(weights, keep.init(weights), policy.config, keep, warm, *batch)[1:]

    (gradient, loss), (ours, our_loss) = (
        gradient_and_loss(update) for update in (plain_grpo.update, functools.partial(floor.update, group_size=G))
    )
    assert float(our_loss) == pytest.approx(float(loss), rel=1e-5)
    difference = optax.global_norm(jax.tree.map(jnp.subtract, ours, gradient))
    assert difference < 1e-5 * optax.global_norm(gradient)


def test_rows_of_groups(benchmark) -> None:
    prompts, completions = np.array([[0, 5, 6, 7]]), np.array([[[8, 1, 0], [9, 0, 0]]])
    tokens, segments, positions, starts = benchmark("floor").group_rows(prompts, completions, 0)
    assert tokens.shape == (1, 16)
    assert tokens[0, :8].tolist() == [5, 6, 7, 8, 1, 7, 9, 0]
    assert segments[0, :8].tolist() == [1, 1, 2, 2, 2, 3, 3, 0]
    assert positions[0, :7].tolist() == [0, 1, 2, 3, 4, 2, 3]  # the eighth is padding
    assert starts.tolist() == [[2, 5]]


@pytest.fixture(scope="module")
def grading(benchmark):
    return benchmark("grading")


def test_every_public_function_is_attacked(grading) -> None:
    attacked = {name.partition(",")[0] for name in grading.FUNCTIONS}
    assert {f"answers.{name}" for name in answers.__all__ if callable(getattr(answers, name))} <= attacked
    assert {f"rewards.{name}" for name in (*rewards.REWARDS, "explain")} <= attacked


# --- the experiments ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experiments(benchmark):
    return benchmark("algorithms")


def test_every_arm_of_every_experiment_is_a_recipe_of_its_own(experiments):
    for name, experiment in experiments.EXPERIMENTS.items():
        recipes = [
            load_recipe(experiments.RECIPE, [*experiments.COMMON, *experiment.changes, *changes])
            for changes in experiment.arms.values()
        ]
        assert len({recipe.plan.completions_per_step for recipe in recipes}) == 1, name
        for claim in experiment.claims:
            assert {claim.one, claim.other} <= experiment.arms.keys(), claim.text


def test_a_claim_is_judged_by_pairs_of_seeds(experiments):
    def runs(one, other):
        return [{"seed": s, "arm": arm, "accuracy": v} for arm, vs in (("a", one), ("b", other))
                for s, v in reversed(list(enumerate(vs)))]  # fmt: skip

    def judged(kind, bar, one, other):
        return experiments.judge(experiments.Claim("it", "a", "b", "accuracy", kind, bar), runs(one, other))

    # Seeds differ by far more than the arms do: only pairs can tell.
    clear = judged("above", 0.05, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9])
    assert clear["held"] and clear["mean"] == pytest.approx(0.19 / 3) and clear["low"] > 0
    assert not judged("above", 0.07, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9])["held"]
    assert not judged("above", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8])["held"]  # an interval with 0 in it
    null = judged("zero", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8])
    assert null["held"] and null["smallest"] > 0.1 and "a difference of" in null["sentence"]
    assert judged("within", 0.02, [0.5, 0.52], [0.51, 0.5])["held"]
    assert (
        judged("half", 0.5, [0.1, 0.2], [0.2, 0.5])["held"] and not judged("half", 0.4, [0.1, 0.2], [0.2, 0.4])["held"]
    )


def test_the_records_are_of_the_predictions_as_they_stand(experiments, root):
    records = sorted((root / "assets" / "experiments").glob("*.json"))
    assert records
    for path in records:
        kept, experiment = json.loads(path.read_text(encoding="utf-8")), experiments.EXPERIMENTS[path.stem]
        assert kept["arms"] == experiment.arms and kept["changes"] == experiment.changes
        expected = [(c.text, c.one, c.other, c.measure, c.kind, c.bar) for c in experiment.claims]
        names = ("text", "one", "other", "measure", "kind", "bar")
        assert [tuple(claim[name] for name in names) for claim in kept["claims"]] == expected
        assert sorted((run["arm"], run["seed"]) for run in kept["runs"]) == sorted(
            (arm, seed) for arm in kept["arms"] for seed in range(5)
        )
        for run in kept["runs"]:
            recipe = load_recipe(experiments.RECIPE, [*kept["changes"], *kept["arms"][run["arm"]]])
            assert len(run["validation"]) == (recipe.training.steps if run["arm"] != "base" else 0)  # it is not trained
        for claim, again in zip(kept["claims"], experiments.judged(experiment, kept["runs"]), strict=True):
            assert claim["held"] == again["held"] and claim["mean"] == pytest.approx(again["mean"])


def test_the_interval_of_a_mean_and_the_smallest_mean_that_it_shows(benchmark) -> None:
    program = benchmark("algorithms")
    # t(4, 0.975) is 2.776; these have mean 3 and standard error sqrt(2.5 / 5).
    assert program.mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 2.776445 * 0.5**0.5, 3 + 2.776445 * 0.5**0.5))
    spread = [-1.0, 1.0, -1.0, 1.0, -1.0]
    smallest = program.smallest_mean(spread) / np.std(spread, ddof=1)  # where the standard deviation is 1
    samples = np.random.default_rng(5).normal(size=(20_000, 5)) + smallest
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / 5**0.5)
    assert np.mean(t > 2.776445) == pytest.approx(0.8, abs=0.01)
