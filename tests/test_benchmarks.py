"""The benchmarks: what they count, and that they start."""

import importlib
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from grpo_train.recipes import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[1] / "dev" / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """A program as a module, by its name; the folder's modules import each other by name, as they do when run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("program", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_program_imports_what_is_there(benchmark, program) -> None:
    benchmark(program)


# --- the experiments ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experiments(benchmark):
    return benchmark("algorithms")


@pytest.mark.parametrize(
    ("kind", "bar", "one", "other", "held"),
    [
        # Seeds differ by far more than the arms do: only pairs can tell.
        ("above", 0.05, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9], True),
        ("above", 0.07, [0.16, 0.57, 0.96], [0.1, 0.5, 0.9], False),
        ("above", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8], False),  # an interval with 0 in it
        ("zero", 0.0, [0.2, 0.4, 0.9], [0.1, 0.5, 0.8], True),
        ("within", 0.02, [0.5, 0.52], [0.51, 0.5], True),
        ("at most", 0.02, [0.1, 0.5], [0.3, 0.3], True),
        ("at most", 0.02, [0.33, 0.3], [0.3, 0.3], True),
        ("at most", 0.02, [0.36, 0.3], [0.3, 0.3], False),
        ("half", 0.5, [0.1, 0.2], [0.2, 0.5], True),
        ("half", 0.4, [0.1, 0.2], [0.2, 0.4], False),
    ],
)
def test_a_claim_is_judged_by_pairs_of_seeds(experiments, kind, bar, one, other, held):
    runs = []
    for arm, values in (("a", one), ("b", other)):
        runs += [{"seed": seed, "arm": arm, "accuracy": value} for seed, value in reversed(list(enumerate(values)))]
    assert experiments.judge(experiments.Claim("it", "a", "b", "accuracy", kind, bar), runs)["held"] == held


def test_the_records_are_of_the_predictions_as_they_stand(experiments, root):
    records = sorted((root / "assets" / "experiments").glob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        experiment = experiments.EXPERIMENTS[path.stem]
        assert record["arms"] == experiment.arms
        assert record["changes"] == experiment.changes
        seeds = range(3 if path.stem == "real" else 5)
        made = sorted((run["arm"], run["seed"]) for run in record["runs"])
        assert made == sorted(product(record["arms"], seeds))
        for run in record["runs"]:
            recipe = load_recipe(experiment.recipe, [*record["changes"], *record["arms"][run["arm"]]])
            steps = 0 if run["arm"] in experiments.UNTRAINED else recipe.training.steps
            assert len(run["validation"]) == steps
        judged = experiments.judged(experiment, record["runs"])
        for saved, claim, again in zip(record["claims"], experiment.claims, judged, strict=True):
            assert saved.items() >= vars(claim).items()
            assert saved["held"] == again["held"]
            assert saved["mean"] == pytest.approx(again["mean"])


def test_the_interval_of_a_mean_and_the_smallest_mean_that_it_shows(experiments) -> None:
    # t(4, 0.975) is 2.776; these have mean 3 and standard error sqrt(2.5 / 5).
    half = 2.776445 * 0.5**0.5
    assert experiments.mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - half, 3 + half))
    spread = [-1.0, 1.0, -1.0, 1.0, -1.0]
    smallest = experiments.smallest_mean(spread) / np.std(spread, ddof=1)  # where the standard deviation is 1
    samples = np.random.default_rng(5).normal(size=(20_000, 5)) + smallest
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / 5**0.5)
    assert np.mean(t > 2.776445) == pytest.approx(0.8, abs=0.01)
