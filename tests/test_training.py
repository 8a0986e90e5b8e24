"""Training: whole rows, restored runs, refusals."""

from types import SimpleNamespace

import numpy as np
import pytest

from grpo_lib.errors import CourseError
from grpo_lib.files import read_jsonl
from grpo_lib.recipes import load_recipe

pytestmark = pytest.mark.slow

SMALL = [
    "training.steps=4",
    "training.prompts_per_step=4",
    "training.checkpoint_every=2",
    "training.validate_every=0",
    "grpo.group_size=4",
    "problems.train=200",
]
# The devices of one host.
FOUR = [SimpleNamespace(process_index=0, id=number) for number in range(4)]
# Clocks differ between two runs of the same steps; nothing else may.
CLOCKS = {"seconds", "seconds_rollout", "seconds_sync", "seconds_update"}


@pytest.fixture(scope="module")
def recipe(root):
    return load_recipe(root / "recipes" / "tiny-cpu.yaml", SMALL)


@pytest.fixture(scope="module")
def build(recipe, converted_base):
    from grpo_lib import training
    from grpo_lib.problems import load_problems

    def build_in(directory, recipe=recipe):
        return training.build_session(recipe, directory, load_problems(recipe.problems, "train"), converted_base)

    return build_in


@pytest.fixture(scope="module")
def whole_run(build, tmp_path_factory):
    """Four steps without an interruption."""
    from grpo_lib import training

    session = build(tmp_path_factory.mktemp("whole"))
    check = training.check_first_sync(session, prompts=8)
    seen = []
    rows = training.train(session, on_step=seen.append)
    return session, check, rows, seen


def without_clocks(rows):
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def test_every_step_gives_one_whole_row(whole_run, recipe):
    session, check, rows, seen = whole_run
    assert check.mean_gap < 5e-3
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows == seen == read_jsonl(session.directory / "metrics.jsonl")
    for row in rows:
        assert {"loss", "grad_norm", "entropy", "clip_fraction", "reward", "accuracy", *CLOCKS} <= row.keys()
        assert {f"reward/{name}" for name in recipe.rewards} <= row.keys()
        assert row["reward"] == pytest.approx(sum(row[f"reward/{name}"] for name in recipe.rewards), abs=1e-5)
        assert row["seconds"] >= row["seconds_update"] > 0
        assert 0 < row["completion_length"] <= recipe.rollout.max_completion_length


def test_on_policy_the_clip_never_acts(whole_run):
    assert [row["clip_fraction"] for row in whole_run[2]] == [0, 0, 0, 0]


def test_the_first_step_moves_and_the_warm_up_ends_at_the_recipes_rate(whole_run, recipe):
    rates = [row["learning_rate"] for row in whole_run[2]]
    assert rates[0] > 0
    assert rates == sorted(rates)
    from grpo_lib.training import learning_rate_schedule

    assert float(learning_rate_schedule(recipe)(100)) == pytest.approx(recipe.training.learning_rate)


def test_tensorboard_holds_the_same_numbers(whole_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session, _, rows, _ = whole_run
    events = EventAccumulator(str(session.directory / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("step/train/reward")]
    assert logged == pytest.approx([row["reward"] for row in rows], abs=1e-5)


def test_a_finished_run_is_left_alone(whole_run, build):
    from grpo_lib import training

    session, _, rows, _ = whole_run
    again = build(session.directory)
    assert again.step == 4
    assert training.train(again) == rows


def test_a_restored_run_continues_as_if_it_had_not_stopped(whole_run, build, tmp_path):
    """Stopped in step 3, it goes on after the checkpoint of step 2, with the same problems and the same noise."""
    from grpo_lib import training

    def stop(row):
        if row["step"] == 2:  # a row comes when the next step has been taken
            raise KeyboardInterrupt

    first = build(tmp_path)
    with pytest.raises(BaseException):  # noqa: B017  (Tunix may wrap what a callback raises)
        training.train(first, on_step=stop)
    second = build(tmp_path)
    assert second.step == 2
    rows = training.train(second)
    assert without_clocks(rows) == without_clocks(whole_run[2])
    assert read_jsonl(tmp_path / "metrics.jsonl") == rows


def test_a_closed_session_says_what_to_do(build, tmp_path):
    from grpo_lib import training

    session = build(tmp_path)
    session.closed = True
    with pytest.raises(CourseError, match="build a new one"):
        training.train(session)


def test_a_damaged_training_checkpoint_is_named(whole_run, build, tmp_path):
    import shutil

    shutil.copytree(whole_run[0].directory / "checkpoints", tmp_path / "checkpoints")
    for path in (tmp_path / "checkpoints" / "actor" / "4").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CourseError, match=r"actor/4 cannot be restored .* remove that folder"):
        build(tmp_path)


def test_a_prompt_that_is_too_long_is_not_cut(build, recipe, tmp_path):
    short = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_prompt_length": 10})})
    with pytest.raises(CourseError, match=r"rollout\.max_prompt_length=10 is shorter than the longest prompt"):
        build(tmp_path, short)


def change(recipe, **sections):
    """The recipe with some keys of some sections changed."""
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def test_problems_with_long_prompts_are_left_out_on_request(recipe, tokenizer):
    from grpo_lib import training
    from grpo_lib.problems import load_problems

    problems = load_problems(recipe.problems, "train")
    lengths = training.prompt_lengths(recipe, tokenizer, problems)
    middle = sorted(lengths)[100]
    skip = change(recipe, rollout={"max_prompt_length": middle, "overlong_prompts": "skip"})
    width, fitting = training.fit_prompts(skip, tokenizer, problems)
    assert width == middle
    assert fitting == [problem for problem, length in zip(problems, lengths, strict=True) if length <= middle]
    assert 100 < len(fitting) < len(problems)
    none = change(recipe, rollout={"max_prompt_length": 3, "overlong_prompts": "skip"})
    with pytest.raises(CourseError, match="shorter than every prompt"):
        training.fit_prompts(none, tokenizer, problems)


def test_the_cosine_ends_at_zero_after_the_last_step(recipe):
    from grpo_lib.training import learning_rate_schedule

    cosine = change(recipe, training={"schedule": "cosine", "steps": 100, "warmup_steps": 10})
    rate, peak = learning_rate_schedule(cosine), recipe.training.learning_rate
    assert float(rate(0)) == pytest.approx(peak / 10)
    assert float(rate(10)) == pytest.approx(peak)
    assert float(rate(55)) == pytest.approx(peak / 2, rel=1e-3)
    assert 0 < float(rate(99)) < peak / 1000
    assert float(rate(100)) == pytest.approx(0, abs=1e-12)


def test_what_cannot_run_is_refused_before_anything_is_loaded(recipe, monkeypatch, tmp_path):
    import importlib.util

    from grpo_lib import pipeline

    missing = {"vllm", "wandb"}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else found(name))
    for sections, message in (
        ({"loss": {"implementation": "pallas"}}, r"loss\.implementation=pallas is not built yet; use jax"),
        ({"rollout": {"engine": "vllm"}}, r"rollout\.engine=vllm needs vllm-tpu, .*make setup-tpu"),
        ({"tracking": {"wandb": "offline"}}, r"tracking\.wandb=offline needs wandb, .*pip install wandb"),
    ):
        with pytest.raises(CourseError, match=message):
            pipeline.build_session(change(recipe, **sections), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_online_tracking_needs_a_login(monkeypatch):
    import importlib.util

    from grpo_lib import tracking
    from grpo_lib.recipes import TrackingRecipe

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tracking, "_logged_in", lambda: False)
    with pytest.raises(CourseError, match="finds no login that W&B accepts; set WANDB_API_KEY"):
        tracking.require(TrackingRecipe(wandb="online"))
    tracking.require(TrackingRecipe(wandb="offline"))
    tracking.require(TrackingRecipe())


@pytest.mark.parametrize(
    "hardware, trains, samples",
    [
        ({}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"trainer_devices": 2}, [0, 1], [0, 1]),
        ({"trainer_devices": 1, "sampler_devices": 3}, [0], [1, 2, 3]),
        ({"accelerator": "v6e-4"}, [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_devices_are_given_out_in_order(recipe, hardware, trains, samples):
    from grpo_lib.training import place

    trainer, sampler = place(change(recipe, hardware=hardware), FOUR)
    assert ([FOUR.index(one) for one in trainer], [FOUR.index(one) for one in sampler]) == (trains, samples)


@pytest.mark.parametrize(
    "hardware, message",
    [
        ({"accelerator": "v6e-8"}, r"needs 8 devices \(8 that train\) and JAX finds 4 here; run it on v6e-8"),
        ({"trainer_devices": 3, "sampler_devices": 2}, r"needs 5 devices \(3 that train, 2 that sample\)"),
        ({"trainer_tensor": 3}, r"trainer_tensor=3 must divide its 4 devices"),
    ],
)
def test_devices_that_do_not_fit_are_refused(recipe, hardware, message):
    from grpo_lib.training import place

    with pytest.raises(CourseError, match=message):
        place(change(recipe, hardware=hardware), FOUR)


def test_a_slice_of_several_hosts_is_refused(recipe):
    from grpo_lib.training import place

    devices = [SimpleNamespace(process_index=index // 4) for index in range(8)]
    with pytest.raises(CourseError, match="several hosts, and such a run is not built yet"):
        place(recipe, devices)
    assert place(recipe, devices[:4]) == (devices[:4], devices[:4])


def test_a_micro_batch_that_does_not_spread_over_the_devices_found_is_refused(recipe):
    from grpo_lib.training import place

    odd = change(recipe, training={"micro_batch": 1}, grpo={"group_size": 3})
    with pytest.raises(CourseError, match=r"micro-batch of 3 completions .* does not spread evenly over 4 devices"):
        place(odd, FOUR)


def test_several_updates_a_batch_and_a_resume_among_them(build, recipe, tmp_path):
    """A step is a batch of completions: its row, its checkpoint and its problems, whatever the number of updates."""
    from grpo_lib import training

    twice = change(recipe, grpo={"iterations": 2}, rollout={"temperature": 0.8})
    whole = training.train(build(tmp_path / "whole", twice))
    assert [row["step"] for row in whole] == [1, 2, 3, 4]
    assert max(row["clip_fraction"] for row in whole) > 0  # the second update is off-policy

    def stop(row):
        if row["step"] == 2:
            raise KeyboardInterrupt

    first = build(tmp_path / "stopped", twice)
    with pytest.raises(BaseException):  # noqa: B017
        training.train(first, on_step=stop)
    second = build(tmp_path / "stopped", twice)
    assert second.step == 2
    assert without_clocks(training.train(second)) == without_clocks(whole)


def test_rows_reach_weights_and_biases_in_order():
    from grpo_lib import tracking

    class Backend:
        def __init__(self):
            self.logged = []

        def log_scalar(self, name, value, step):
            self.logged.append((name, value, step))

    backend = Backend()
    tracking.log(backend, {"step": 3, "reward": 0.5, "validation_accuracy": None})
    assert backend.logged == [("reward", 0.5, 3)]


def test_batch_metrics_by_hand():
    from grpo_lib.training import _batch_metrics

    class Sampler:
        lengths, truncated = [4, 6, 8, 2], [False, True, False, False]

        def take_seconds(self, what):
            return {"generating": 1.5, "syncing": 0.5}[what]

    good, bad = "<reasoning>1+1=2</reasoning><answer>2</answer>", "<answer>3</answer>"
    metrics = _batch_metrics(
        Sampler(), 2, prompts=["p"] * 4, completions=[good, bad, "so 2", good], answer=["2"] * 4,
        rewards=np.array([1.0, 0.0, 0.5, 0.5]), advantages=None,
    )  # fmt: skip
    values = {name.removeprefix("step/"): value for name, (value, _) in metrics.items()}
    assert values == {
        "reward": 0.5,
        "reward_std": 0.25,
        "zero_variance_groups": 0.5,
        "accuracy": 0.5,
        "lenient_accuracy": 0.75,
        "format": 0.5,
        "completion_length": 5.0,
        "truncated": 0.25,
        "seconds_rollout": 1.5,
        "seconds_sync": 0.5,
    }
