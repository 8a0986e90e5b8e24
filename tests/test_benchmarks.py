"""The benchmarks: what they count, and that they start."""

import functools
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_lib import answers, plain_grpo, rewards
from grpo_lib.problems import load_problems
from grpo_lib.prompts import render, template_completion
from grpo_train.recipes import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """A program as a module, by its name; the folder's modules import each other by name, as they do when run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def grading(benchmark):
    return benchmark("grading")


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


@pytest.mark.parametrize(
    ("architecture", "cpuinfo", "units"),
    [
        ("x86_64", "flags\t\t: fpu avx2 avx512f amx_tile\n", ["AVX2", "AVX-512", "AMX"]),
        ("x86_64", "flags\t\t: fpu\n", ["SSE2"]),
        ("aarch64", "Features\t: fp asimd sve\n", ["NEON", "SVE"]),
        ("arm64", None, ["NEON"]),
        ("riscv64", None, []),
    ],
)
def test_units_of_a_processor(benchmark, tmp_path, monkeypatch, architecture, cpuinfo, units) -> None:
    job = benchmark("job")
    monkeypatch.setattr(job.platform, "machine", lambda: architecture)
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    assert job.units(tmp_path / "cpuinfo") == units


def test_a_linked_environment_is_refused_and_its_target_kept(benchmark, tmp_path, monkeypatch) -> None:
    trl_environment = benchmark("trl_environment")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    link = tmp_path / ".venv-trl"
    link.symlink_to("elsewhere")
    monkeypatch.setattr(trl_environment, "ENVIRONMENT", link)
    monkeypatch.setattr(trl_environment, "_runs", lambda command: pytest.fail(f"ran {command}"))
    with pytest.raises(trl_environment.EnvironmentFailed, match=f"^{link} is a symbolic link.*rm {link}") as failed:
        trl_environment.ensure()
    assert "\n" not in str(failed.value)
    assert (tmp_path / "elsewhere" / "precious").exists()


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


def test_parity_counts_both_graders_and_texts(benchmark) -> None:
    records = [{"completion": f"<reasoning>r</reasoning><answer>{n}</answer>", "gold": "3"} for n in (3, 3, 4, 5)]
    completions = [records[0]["completion"], "nothing", records[2]["completion"], records[0]["completion"]]
    found = benchmark("export_parity").compare(records, completions)
    assert found == {
        "n": 4, "identical_completions": 0.5, "actor_accuracy": 0.5, "export_accuracy": 0.5, "difference": 0.0,
    }  # fmt: skip


def test_every_public_function_is_attacked(grading) -> None:
    attacked = {name.partition(",")[0] for name in grading.FUNCTIONS}
    assert {f"answers.{name}" for name in answers.__all__ if callable(getattr(answers, name))} <= attacked
    assert {f"rewards.{name}" for name in (*rewards.REWARDS, "explain")} <= attacked


def test_throughput_counts_verdicts_and_takes_ratios_within_rounds(grading, monkeypatch) -> None:
    clock = iter([0.0, 1.0, 0.0, 4.0, 0.0, 2.0, 0.0, 6.0])  # start and end: first ours, then the other; two rounds
    monkeypatch.setattr(grading.time, "process_time", lambda: next(clock))
    graders = {"is_correct": answers.is_correct, "last_number": grading.last_number}
    monkeypatch.setattr(grading, "graders", lambda pairs: graders)
    pairs = [(template_completion("so", "18"), "18"), ("so 18", "18"), ("so 17", "18"), ("", "18")]
    found = grading.throughput(pairs, rounds=2)
    assert found["accepted"] == {"is_correct": 1, "last_number": 2}
    assert found["per_cpu_second"] == {"is_correct": [4, 2], "last_number": [1, 1]}
    assert found["ratios"] == {"is_correct/last_number": {"median": 3.5, "min": 3.0, "max": 4.0}}


def test_accuracy_separates_the_two_kinds_of_mistake(grading) -> None:
    labelled = {"18": True, "1.8e1": True, "17 or 18": False, "17": False}
    found = grading.accuracy([{"text": text, "gold": "18", "label": label} for text, label in labelled.items()])
    assert found["is_correct"] == {"n": 4, "accuracy": 1.0, "wrong_accepted": 0, "right_refused": 0}
    assert found["last_number"] == {"n": 4, "accuracy": 0.5, "wrong_accepted": 1, "right_refused": 1}


def test_math_verify_is_given_the_answer(grading) -> None:
    verdict = grading.graders([("", "18")])["math_verify"]
    assert verdict(template_completion("so 17", "$18$"), "18")
    assert not verdict(template_completion("so 18", "17"), "18")
    assert not verdict("no tags: 18", "18")


def test_the_program(tmp_path) -> None:
    options = ["--rounds", "1", "--limit", "20", "--size", "50", "--json"]
    command = [sys.executable, str(BENCHMARKS / "grading.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["throughput"]["reference run"]["completions"] == 20
    functions = found["worst_case"]["functions"]
    assert functions[found["worst_case"]["worst"]]["seconds"] == max(row["seconds"] for row in functions.values())


def test_conversion_memory_states_the_32b_by_a_line(benchmark, tmp_path) -> None:
    memory = benchmark("conversion_memory")
    sizes = [{"model_bytes": n * 10**9, "to_maxtext": {"peak_bytes": (0.5 + 0.6 * n) * 10**9}} for n in (1, 2, 4)]
    found = memory.growth(sizes, "to_maxtext")
    assert found == {"bytes_per_byte": 0.6, "intercept_gb": 0.5, "stated_32b_gb": 39.8}
    written = memory.write_model(tmp_path / "model", 1)
    assert written == sum(2 * math.prod(shape) for shard in memory.tensors(1) for shape in shard.values())
    # 64 layers of an eighth of the width: a 64th of the 32B, but for the biases and norms
    whole = sum(2 * math.prod(shape) for shard in memory.tensors(64) for shape in shard.values())
    assert whole * 64 == pytest.approx(memory.BYTES_32B, rel=0.01)


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


def test_equal_completions_are_read_off_the_curves(experiments):
    def run(arm, passes, validation):
        return {"seed": 0, "arm": arm, "completions_per_step": 10, "validation": validation,
                "curves": {"sampling_passes": passes}}  # fmt: skip

    steps = range(1, 25)
    on = run("on", [2] * 24, [step / 24 if step % 3 == 0 else None for step in steps])
    off = run("off", [1] * 24, [step / 48 if step % 3 == 0 else None for step in steps])
    experiments.dynamic_measures([on, off])
    assert (on["at_updates"], off["at_updates"]) == (0.5, 0.25)
    assert on["at_completions"] == off["at_completions"] == pytest.approx(0.5)  # 240 each: 12 steps, or 24


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
