"""Training: whole rows, restored runs, refusals."""

import dataclasses
import importlib
import importlib.util
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from helpers import CLOCKS, without_clocks
from jax.profiler import ProfileData
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl, read_jsonl, write_json_atomic
from grpo_lib.problems import load_problems
from grpo_lib.records import EvalRun
from grpo_train import checks, export, pipeline, training
from grpo_train.engines import cluster as clusters
from grpo_train.engines import conversion, model_files, weight_sync
from grpo_train.engines.cluster import assign_devices
from grpo_train.engines.optimizer import learning_rate_schedule, learning_rates
from grpo_train.engines.tokens import Renderer, fit_prompts, prompt_lengths
from grpo_train.recipes import batch_plan, load_recipe
from grpo_train.runs import checkpoints, run_directory, tracking
from grpo_train.runs.metric_glossary import METRICS, glossary, metric
from grpo_train.runs.metrics_logger import REQUIRED_METRICS, TUNIX_METRICS, Recorder, TimedReward, batch_metrics

pytestmark = pytest.mark.slow

SMALL = [
    "training.steps=4",
    "training.prompts_per_step=4",
    "training.checkpoint_every=2",
    "training.validate_every=0",
    "grpo.group_size=4",
    "problems.train=200",
    "problems.test=12",
    "evaluation.samples=2",
    "evaluation.batch_size=12",
]
# The devices of one host.
FOUR = [SimpleNamespace(process_index=0, id=number) for number in range(4)]


@pytest.fixture(scope="module")
def recipe(root):
    return load_recipe(root / "recipes" / "tiny-cpu.yaml", SMALL)


@pytest.fixture(scope="module")
def build(recipe, converted_base):
    def build_in(directory, recipe=recipe, **more):
        problems = load_problems(recipe.problems, "train")
        return training.build_session(checks.check(recipe, problems), directory, converted_base, **more)

    return build_in


@pytest.fixture(scope="module")
def whole_run(build, tmp_path_factory):
    """Four steps without an interruption, between two evaluations."""
    session = build(tmp_path_factory.mktemp("whole"))
    check = training.check_first_sync(session, prompts=8)
    pipeline.evaluate(session, "before", progress=False)
    seen = []
    rows = training.train(session, on_step=seen.append)
    pipeline.evaluate(session, "after", progress=False)
    return session, check, rows, seen


def test_every_step_gives_one_whole_row(whole_run, recipe):
    session, check, rows, seen = whole_run
    assert check.mean_gap < 5e-3
    assert check.weights == 13
    assert check.tokens > 0
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] > 0
    assert rates == sorted(rates)  # the warm-up
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows == seen == read_jsonl(session.directory / "metrics.jsonl")
    for row in rows:
        assert {"loss", "grad_norm", "entropy", "clip_ratio", "reward", "accuracy", *CLOCKS} <= row.keys()
        assert {f"rewards/{name}/mean" for name in recipe.rewards} <= row.keys()
        assert row["clip_ratio"] == 0  # on-policy
        assert "kl" not in row  # without a reference
        assert row["reward"] == pytest.approx(sum(row[f"rewards/{name}/mean"] for name in recipe.rewards), abs=1e-5)
        assert row["seconds"] >= row["seconds_update"] > 0
        assert 0 < row["completions/mean_length"] <= recipe.rollout.max_completion_length


@pytest.mark.long
def test_rows_of_a_run_with_every_measurement(build, root, tmp_path):
    changes = ["grpo.correction=tis", "grpo.dynamic_sampling=3", "grpo.aggregation=step"]
    changes += ["rollout.temperature=0.8", "training.learning_rate=1e-3", "grpo.watch_kl=3"]
    rows = training.train(build(tmp_path, load_recipe(root / "recipes" / "tiny-cpu.yaml", [*SMALL, *changes])))
    assert [row["step"] for row in rows if "kl" in row] == [1, 3]
    assert abs(rows[0]["kl"]) < 1e-6
    assert rows[2]["kl"] > 1e-6
    for row in rows:
        # The sampler's probabilities are the trainer's, also at another temperature.
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=2e-3)
        assert 1 <= row["dynamic_sampling/passes"] <= 3
        assert row["dynamic_sampling/uniform_groups"] >= 0
        for name in row:
            assert metric(name), name


def test_tensorboard_holds_the_steps_and_both_evaluations(whole_run):
    session, _, rows, _ = whole_run
    summary = pipeline.write_summary(session.recipe, session.directory)
    pipeline.evaluate(session, "before", progress=False)  # read again, and not logged again
    logged = events(session.directory)
    assert {tag for tag in logged if tag.startswith("train/")} == {
        f"train/{name}" for name in rows[0] if name != "step"
    }
    for name in ("reward", "loss", "seconds"):
        assert logged[f"train/{name}"] == [(row["step"], pytest.approx(row[name], abs=1e-5)) for row in rows]
    both = [(0, summary["before"]), (4, summary["after"])]
    for name in ("accuracy", "reward", "seconds", "sampled_accuracy", "maj_at_k"):
        assert logged[f"eval/{name}"] == [(step, pytest.approx(part[name])) for step, part in both]
    assert logged["eval/pass_at_2"] == [(step, pytest.approx(part["pass_at_k"]["2"])) for step, part in both]


def events(directory):
    """tag -> [(step, value)], as TensorBoard shows them."""
    read = EventAccumulator(str(directory / "tensorboard"))
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_forgets_the_steps_that_are_taken_again(recipe, tmp_path):
    tracking.log_evaluation(recipe.tracking, tmp_path, {"before": tracking.evaluation_row(0, {"accuracy": 0.25})}, {})
    boards = []  # the first is never closed: what was logged is on disk
    for finished, reward in ((0, 1.0), (2, 2.0)):
        boards += tracking.start(recipe.tracking, tmp_path, finished, config={})
        for step in range(finished + 1, 5):
            boards[-1].log({"step": step, "reward": reward, "kl": None})
        boards[-1].log({"step": 4, "validation_accuracy": reward})
    assert events(tmp_path) == {
        "train/reward": [(1, 1), (2, 1), (3, 2), (4, 2)],
        "train/validation_accuracy": [(4, 2)],
        "eval/accuracy": [(0, 0.25)],
    }
    for board in boards:
        board.close()


def test_tensorboard_shows_the_last_of_many_starts_within_a_second(recipe, tmp_path):
    for reward in range(12):
        [board] = tracking.start(recipe.tracking, tmp_path, finished=0, config={})
        board.log({"step": 1, "reward": reward})
        board.close()
    assert events(tmp_path) == {"train/reward": [(1, 11)]}


def test_a_finished_run_is_left_alone(whole_run, build):
    session, _, rows, _ = whole_run
    again = build(session.directory)
    assert again.step == 4
    assert training.train(again) == rows


@pytest.mark.long(minutes=1)
def test_a_run_that_is_continued_says_its_plan_and_all_rates_and_converts_nothing(
    whole_run, recipe, converted_base, tmp_path
):
    shutil.copytree(whole_run[0].directory, tmp_path, dirs_exist_ok=True)
    run_directory.link_base(tmp_path, converted_base)
    said = []
    pipeline.run(checks.check(recipe), tmp_path, log=said.append, progress=False)
    text = "\n".join(said)
    assert batch_plan.table(recipe.plan, recipe.batch_given) in text
    assert "converting" not in text
    assert "warning: training.warmup_steps=5 is not less than the steps" in text
    for phase in ("before", "after"):
        found = EvalRun.load(tmp_path / "evals" / f"{phase}.jsonl").summary()
        [line] = [line for line in said if line.startswith(f"{phase}: {found['accuracy']:.1%} of 12 ")]
        assert f"within 10 % {found['partial_accuracy']:.1%}, format {found['format_accuracy']:.1%}" in line


def test_a_checkpoint_takes_what_was_counted(whole_run, recipe):
    session = whole_run[0]
    weights = session.actor.parameter_count()
    use = model_files.disk_use(change(recipe, training={"max_to_keep": 1, "checkpoint_every": 1, "steps": 1}))
    newest = Path(session.checkpoints) / "4"
    written = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    assert written == pytest.approx(weights * use["checkpoints"], rel=0.1)


def test_the_checkpoint_of_the_last_step_is_exported_without_a_copy(whole_run, monkeypatch, tmp_path):
    session = whole_run[0]
    written = conversion.export_to_hugging_face(session.actor, session.recipe.model, tmp_path / "export")
    monkeypatch.setattr(conversion, "save_tree", None)  # so nothing is saved once more
    assert conversion.differing_weights(export.export_policy(session), written) == []


def test_a_checkpoint_is_exported_as_the_run_would(whole_run, recipe, tmp_path):
    session = whole_run[0]
    exported = export.export_policy(session)
    folder, step = export.export_step(recipe, session.directory, output=tmp_path / "newest")
    assert step == 4
    assert files(folder) == files(exported)
    with pytest.raises(CourseError, match="--overwrite"):
        export.export_step(recipe, session.directory, output=folder)

    copy = Path(shutil.copytree(session.directory, tmp_path / "copy"))
    newest = copy / "checkpoints" / "actor" / "4" / "model_params"
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:300])
    said = []
    folder, step = export.export_step(recipe, copy, output=folder, overwrite=True, log=said.append)
    assert step == 2
    assert "step 4 cannot be read" in said[0]
    assert newest.exists()  # nothing is moved
    assert files(folder)["model.safetensors"] != files(exported)["model.safetensors"]


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_recipes_own_limit_decides_whether_a_run_starts(whole_run, recipe):
    strict = change(recipe, rollout={"max_mean_gap": 1e-9})
    with pytest.raises(CourseError, match="limit 1e-09"):
        training.check_first_sync(dataclasses.replace(whole_run[0], recipe=strict), prompts=8)


@pytest.mark.long
def test_damaged_training_checkpoints_are_said_and_the_one_before_is_taken(whole_run, build, tmp_path):
    """Files of both are cut short."""
    shutil.copytree(whole_run[0].directory, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints"
    for path in (folder / "actor").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:300])
    said = []
    assert build(tmp_path, log=said.append).step == 0
    assert "update 4" in said[0]
    assert "update 2" in said[0]
    assert len(said) == 2
    assert sorted(path.name for path in (folder / "damaged").iterdir()) == ["actor-2", "actor-4"]


@pytest.mark.parametrize("ending", ['{"step": 3, "los', "{}\n", "{}"])
def test_a_torn_last_row_is_taken_again_from_the_checkpoint_before_it(whole_run, build, tmp_path, ending):
    """As a kill leaves it: the row of step 3 is not whole, and the checkpoint of step 4 is there."""
    shutil.copytree(whole_run[0].directory, tmp_path, dirs_exist_ok=True)
    metrics = tmp_path / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:2]) + ending)
    session = build(tmp_path)
    assert session.step == 2
    again = training.train(session)
    assert without_clocks(again) == without_clocks(whole_run[2]) == without_clocks(read_jsonl(metrics))


def with_old_optimizer(monkeypatch):
    """Build sessions as before the sum of gradients was left out: optax.MultiSteps also around a single one."""
    monkeypatch.setattr(clusters.checkpoints, "has_gradient_sum", lambda folder: True)
    monkeypatch.setattr(clusters, "drop_sum", lambda optimizer: None)


def moments(session):
    """Adam's first moment, by the names of weights."""
    return weight_sync.by_name(optax.tree.get(session.cluster.actor_trainer.optimizer.opt_state, "mu"))


@pytest.mark.long(minutes=1)
@pytest.mark.parametrize(("first", "then"), [("one, summed", 1), (1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_micro_batches(
    whole_run, build, recipe, tmp_path, monkeypatch, first, then
):
    """With a sum of gradients in the checkpoint and none in the optimizer, and the other way round."""

    def start(count, steps):
        parts = {} if count == 1 else {"layout": "padded", "micro_batch_size": 16 // count}
        return build(tmp_path, change(recipe, training={"steps": steps, **parts}))

    with monkeypatch.context() as patched:
        if first == "one, summed":
            with_old_optimizer(patched)
        training.train(start(1 if first == "one, summed" else first, 2))
    assert checkpoints.has_gradient_sum(epath.Path(tmp_path / "checkpoints" / "actor")) == (first != 1)

    session = start(then, 4)
    assert session.step == 2
    rows = training.train(session)
    assert checkpoints.has_gradient_sum(session.checkpoints) == (then != 1)
    assert [row["reward"] for row in rows] == [row["reward"] for row in whole_run[2]]
    wanted = moments(whole_run[0])
    for name, found in moments(session).items():
        # MaxText rounds the gradient of a tied embedding to bfloat16, of each micro-batch.
        assert np.linalg.norm(found - wanted[name]) < 1e-2 * np.linalg.norm(wanted[name]), name


def test_a_damaged_row_before_the_last_names_its_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{}\n{"step": 3}\n')
    with pytest.raises(CourseError, match="row 2 has no step"):
        Recorder(tmp_path, iterations=1, completions=8, learning_rate=float)


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"wall_seconds": "many"}', "null"])
def test_damaged_seconds_cost_the_sum_and_not_the_run(tmp_path, content):
    (tmp_path / "seconds.json").write_text(content)
    said = []
    assert pipeline._seconds_before(tmp_path, said.append) == 0
    assert len(said) == 1
    assert "seconds.json cannot be read" in said[0]


def change(recipe, **sections):
    """The recipe with some keys of some sections changed."""
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def test_a_long_prompt_is_an_error_or_left_out_on_request(recipe, tokenizer):
    problems = load_problems(recipe.problems, "train")
    render = Renderer(recipe.prompts, tokenizer)
    lengths = prompt_lengths(render, problems)
    middle = sorted(lengths)[100]
    skip = change(recipe, rollout={"max_prompt_length": middle, "overlong_prompts": "filter"})
    shortest, width, fitting = fit_prompts(skip.rollout, render, problems)
    assert (shortest, width) == (min(lengths), middle)
    assert fitting == [problem for problem, length in zip(problems, lengths, strict=True) if length <= middle]
    assert 100 < len(fitting) < len(problems)
    for overlong, message in (
        ("filter", "shorter than every prompt"),
        ("error", r"rollout\.max_prompt_length=3 is shorter than the longest prompt"),
    ):
        short = change(recipe, rollout={"max_prompt_length": 3, "overlong_prompts": overlong})
        with pytest.raises(CourseError, match=message):
            fit_prompts(short.rollout, render, problems)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3, 20])
def test_the_rows_rates_are_the_optimizers(recipe, schedule, warmup):
    planned = change(recipe, training={"schedule": schedule, "steps": 7, "warmup_steps": warmup})
    rate = learning_rate_schedule(planned.training)
    assert learning_rates(planned.training) == pytest.approx([float(rate(step)) for step in range(7)], rel=1e-6)


def test_the_cosine_ends_at_zero_after_the_last_step(recipe):
    cosine = change(recipe, training={"schedule": "cosine", "steps": 100, "warmup_steps": 10})
    rate = learning_rate_schedule(cosine.training)
    peak = recipe.training.learning_rate
    rates = [float(rate(step)) / peak for step in (0, 10, 55, 99, 100)]
    assert rates == pytest.approx([0.1, 1, 0.5, 0, 0], abs=1e-3)
    assert rates[3] > 0


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine=vllm"),
        ({"tracking": {"wandb": "offline"}}, "tracking.wandb=offline"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(recipe, monkeypatch, tmp_path, sections, key):
    find_spec = importlib.util.find_spec

    def find_all_but_two(name, *rest):
        return None if name in ("vllm", "wandb") else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_two)
    with pytest.raises(CourseError, match=key):
        pipeline.start_session(checks.check(change(recipe, **sections)), tmp_path)
    assert list(tmp_path.iterdir()) == []


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
    changed = change(recipe, hardware=hardware)
    trainer, sampler = assign_devices(changed.hardware, "tunix", changed.sampler_tensor(4), FOUR)
    assert ([FOUR.index(one) for one in trainer], [FOUR.index(one) for one in sampler]) == (trains, samples)


NOISY = """
def noisy(prompts, completions, **_):
    return [sum(map(ord, completion)) % 97 for completion in completions]
"""


def test_the_sampler_has_no_weights_in_an_update_and_says_so_after_an_interruption(build, tmp_path):
    session = build(tmp_path)
    trainer = session.cluster.actor_trainer
    prepare, seen = trainer._prepare_inputs, []

    def interrupted_in_the_second_step(inputs):
        prepared = prepare(inputs)
        seen.append(session.sampler.has_weights)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return prepared

    trainer._prepare_inputs = interrupted_in_the_second_step
    assert session.sampler.has_weights
    with pytest.raises(KeyboardInterrupt):
        training.train(session)
    assert seen == [False, False]
    with pytest.raises(CourseError, match="interrupted in mid-step; build a new session"):
        session.generate(["1+1?"])


@pytest.mark.long(minutes=1)
def test_a_sampler_that_lags_keeps_its_weights_through_updates(build, tmp_path, monkeypatch):
    """What the experiments `stale` and `expert` ask for."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "dev" / "experiments"))
    arms = importlib.import_module("arms")

    def copied(session):
        return {name: jnp.array(value) for name, value in weight_sync.by_name(session.actor.weights()).items()}

    session = build(tmp_path)
    before = copied(session)
    arms.sync_every(session, "stale")
    assert len(training.train(session)) == 4
    weight_sync.check_weights(session.sampler, before)
    with pytest.raises(CourseError):
        weight_sync.check_weights(session.sampler, copied(session))


@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("rounding", [pytest.param("nearest", marks=pytest.mark.nightly), "stochastic"])
def test_several_updates_a_batch_and_a_resume_among_them(build, recipe, tmp_path, rounding):
    """Stopped in step 3, it goes on after the checkpoint of step 2, with the same problems and the same noise.

    With checkpoints in a folder for those of all runs, and a reward that differs between completions.  And with
    bfloat16 weights, whose rounding is noise, too, and a sum of gradients over micro-batches.
    """

    file = tmp_path / "noisy.py"
    file.write_text(NOISY)
    twice = change(
        recipe,
        grpo={"iterations": 2},
        rollout={"temperature": 0.8},
        training={"checkpoints": str(tmp_path / "all"), "rounding": rounding},
    ).model_copy(update={"rewards": [f"{file}:noisy"]})
    if rounding == "stochastic":
        twice = change(twice, model={"weight_dtype": "bfloat16"}, training={"micro_batch_size": 8, "layout": "padded"})
    whole = training.train(build(tmp_path / "whole", twice))
    assert [row["step"] for row in whole] == [1, 2, 3, 4]
    assert max(row["clip_ratio"] for row in whole) > 0  # the second update is off-policy
    assert len({row["rewards/noisy/mean"] for row in whole}) == 4
    assert all(0.8 < row.get("update_applied", 1) < 1.2 for row in whole)
    assert ("update_applied" in whole[0]) == (rounding == "stochastic")

    def stop(row):
        if row["step"] == 2:
            raise KeyboardInterrupt

    first = build(tmp_path / "stopped", twice)
    with pytest.raises(BaseException):  # noqa: B017
        training.train(first, on_step=stop)
    with pytest.raises(CourseError):  # it is closed: a new session continues the run
        training.train(first)
    first.cluster.actor_trainer.checkpoint_manager.close()  # waits until the checkpoint is written
    assert checkpoints.updates(checkpoints.checkpoint_root(twice.training, tmp_path / "stopped") / "actor") == [4]
    assert not (tmp_path / "stopped" / "checkpoints").exists()
    second = build(tmp_path / "stopped", twice)
    assert second.step == 2
    rows = training.train(second)
    assert without_clocks(rows) == without_clocks(whole)
    assert read_jsonl(tmp_path / "stopped" / "metrics.jsonl") == rows


@pytest.mark.long(minutes=1)
def test_a_profile_holds_the_steps_asked_for_and_changes_no_number(whole_run, build, recipe, tmp_path):
    """Of steps 2 and 3, and of a run that ends within the window."""
    rows = training.train(build(tmp_path / "inside", change(recipe, training={"profile_steps": [2, 3]})))
    assert without_clocks(rows) == without_clocks(whole_run[2])
    (trace,) = traces(tmp_path / "inside")
    assert steps_in(trace) == {2, 3}

    past = build(tmp_path / "inside", change(recipe, training={"profile_steps": [2, 9]}))
    training.train(past)  # all four steps are done: nothing is left to record
    assert traces(tmp_path / "inside") == [trace]


@pytest.mark.nightly(minutes=1)
def test_a_profile_is_written_when_the_run_stops_within_its_steps(build, recipe, tmp_path):
    """And a session that begins within the window records the rest of it."""
    profiled = change(recipe, training={"profile_steps": [2, 9]})
    asked = iter([False, True])  # before the second step, and before the third
    training.train(build(tmp_path, profiled), stop=lambda: next(asked))
    (first,) = traces(tmp_path)
    assert steps_in(first) == {2}
    time.sleep(1.1)  # the profiler names a trace by the second
    training.train(build(tmp_path, profiled))
    (_, second) = traces(tmp_path)
    assert steps_in(second) == {3, 4}


def steps_in(trace):
    """The steps whose updates a trace holds; of one update each."""
    events = (
        event for plane in ProfileData.from_file(str(trace)).planes for line in plane.lines for event in line.events
    )
    begun = [dict(event.stats)["step_num"] + 1 for event in events if event.name == "train"]
    # After each step Tunix's loop asks once more, and finds no batch: that is counted as the next one.
    return set(begun) - {max(begun)}


def traces(directory):
    """The files that TensorBoard's tab PROFILE lists."""
    return sorted((directory / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))


def test_checkpoints_may_be_in_a_bucket(recipe, tmp_path):
    in_a_bucket = change(recipe, training={"checkpoints": "gs://bucket/grpo"})
    assert str(checkpoints.checkpoint_root(in_a_bucket.training, tmp_path / "run")) == "gs://bucket/grpo/run"


def test_a_run_that_goes_on_goes_on_in_the_same_wandb_run(recipe, tmp_path, monkeypatch):
    begun = []
    logged = []

    def init(**arguments):
        begun.append(arguments)
        return SimpleNamespace(log=lambda values, step: logged.append((values, step)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    offline = change(recipe, tracking={"wandb": "offline"})
    for directory in (tmp_path / "run", tmp_path / "run", tmp_path / "other"):
        _, wandb = tracking.start(offline.tracking, directory, 0, config=offline.model_dump(mode="json"))
    first, second, other = (arguments["id"] for arguments in begun)
    assert first == second != other
    assert {arguments["resume"] for arguments in begun} == {"allow"}
    wandb.log({"step": 3, "reward": 0.5, "validation_accuracy": None})
    assert logged == [({"reward": 0.5}, 3)]


def test_the_evaluations_are_in_the_summary_of_the_wandb_run(recipe, tmp_path, monkeypatch):
    """wandb is not in this environment."""
    summary = {}
    run = SimpleNamespace(summary=summary, finish=lambda: None)  # log would be an error
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    offline = change(recipe, tracking={"wandb": "offline"})
    rewards = {"rewards": {"tags": 0.5}}
    before = tracking.evaluation_row(0, {"accuracy": 0.25, "n": 12, "reward": 0.5, "seconds": None})
    samples = {"samples": 2, "maj_at_k": 0.75, "pass_at_k": {"1": 0.5, "2": 1.0}}
    after = tracking.evaluation_row(4, {"accuracy": 0.5, "n": 12, "reward": 0.5, **samples, **rewards})
    tracking.log_evaluation(offline.tracking, tmp_path, {"before": before}, {"name": "tiny-cpu"})
    assert summary == {"before/accuracy": 0.25, "before/reward": 0.5}  # a published name is for the result alone
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 4, "loss": 0.125, "kl": None, "seconds": 2.0})
    tracking.log_evaluation(offline.tracking, tmp_path, {"before": before, "after": after}, {"name": "tiny-cpu"})
    assert summary == {
        "before/accuracy": 0.25, "before/reward": 0.5, "after/accuracy": 0.5, "after/reward": 0.5,
        "after/maj_at_k": 0.75, "after/pass_at_2": 1.0, "loss": 0.125, "seconds": 2.0, "after/rewards/tags/mean": 0.5,
        # As published runs call them.
        "eval_full/accuracy": 0.5, "eval/reward/total/mean": 0.5, "eval/reward/func/tags/mean": 0.5,
        "time/train/step_avg_last10_s": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "processes", "trainer", "sampler", "line"),
    [
        (1, 1, {"fsdp": 1}, {"fsdp": 1}, "1 x cpu: trains and samples"),
        (2, 1, {"fsdp": 1}, {"fsdp": 1}, "2 x cpu: trainer 1, sampler 1"),
        (4, 1, {"fsdp": 2, "tensor": 2}, {"tp": 4}, "4 x cpu: trainer 4 (fsdp 2 x tensor 2), sampler 4 (tp 4)"),
        (
            *(8, 2, {"fsdp": 8}, {"fsdp": 4}),
            "8 x cpu in 2 processes: trainer 8 (fsdp 8), sampler 8, each process 4 (fsdp 4)",
        ),
    ],
)
def test_the_line_about_devices_has_all_and_the_share_of_a_process(found, processes, trainer, sampler, line):
    assert training.devices_line(found, "cpu", processes, trainer, sampler) == line


def test_batch_metrics_by_hand_and_every_key_is_in_the_glossary():
    def tags(prompts, completions, answer):
        return [1.0, 0.0, 0.0, 1.0]

    seconds = {"generating": 1.5, "syncing": 0.5}
    sampler = SimpleNamespace(lengths=[4, 6, 8, 2], truncated=[False, True, False, False], seconds=seconds)
    good = "<reasoning>1+1=2</reasoning><answer>2</answer>"
    completions = [good, "<answer>3</answer>", "so 2", good]
    part = TimedReward(tags)
    assert part(["p"] * 4, completions, answer=["2"] * 4) == part.values
    assert part.__name__ == "tags"
    metrics = batch_metrics(
        sampler, 2, [part], lambda: 0.125, prompts=["p"] * 4, completions=completions,
        answer=["2"] * 4, kind=["tagged"] * 4, rewards=np.array([1.0, 0.0, 0.5, 0.5]), advantages=None,
    )  # fmt: skip
    values = {name.removeprefix("step/"): value for name, (value, _) in metrics.items()}
    assert values.pop("seconds_reward") > 0
    assert values == {
        "reward": 0.5,
        "rewards/tags/mean": 0.5,
        "rewards/tags/std": 0.5,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.5,
        "accuracy": 0.5,
        "lenient_accuracy": 0.75,
        "format": 0.5,
        "format_without_number": 0.0,
        "completions/mean_length": 5.0,
        "completions/clipped_ratio": 0.25,
        "sampler_trainer_gap": 0.125,
        "seconds_rollout": 1.5,
        "seconds_sync": 0.5,
    }
    written = values.keys() | {"seconds_reward", *TUNIX_METRICS.values()}
    # From the timer, the reference model's, the recorder and pipeline.validation.
    written |= {"seconds", "seconds_update", "tokens_per_second", "step", "learning_rate", "compilations"}
    written |= {"peak_memory_gib", "update_over_estimate"}  # of a chip
    written |= {"validation_accuracy", "validation_lenient"}
    # From learner and optimizer, where a recipe asks for them.
    written |= {"dynamic_sampling/passes", "dynamic_sampling/uniform_groups", "update_applied", "beta", "temperature"}
    assert set(glossary([dict.fromkeys(written, 0.0)])) == written
    assert {name for name in METRICS if "NAME" not in name} <= written, "an entry for a metric that nothing writes"
    joins = {name.removeprefix("step/"): join for name, (_, join) in metrics.items()}
    assert joins["seconds_rollout"]([1.5, 1.5]) == 3
    assert joins["reward"]([0.0, 1.0]) == 0.5  # of two


def test_metrics_of_a_task_are_over_its_own_completions_of_all_micro_batches():
    sampler = SimpleNamespace(lengths=[1] * 4, truncated=[False] * 4, seconds={})

    def metrics(tasks, rewards):
        return batch_metrics(
            sampler, 2, [], lambda: 0.0, prompts=["p"] * 4, completions=["<answer>2</answer>"] * 4,
            answer=["2"] * 4, kind=["tagged"] * 4, task=np.array(tasks), rewards=np.array(rewards), advantages=None,
        )  # fmt: skip

    first = metrics(["a", "a", "b", "b"], [1.0, 0.0, 1.0, 1.0])
    second = metrics(["b"] * 4, [0.0, 0.0, 1.0, 0.0])

    def joined(name):
        _, join = first[name]
        return join(np.array([micro_batch[name][0] for micro_batch in (first, second) if name in micro_batch]))

    assert joined("step/tasks/a/reward") == 0.5
    assert joined("step/tasks/b/reward") == 0.5
    assert joined("step/tasks/a/frac_reward_zero_std") == 0
    assert joined("step/tasks/b/frac_reward_zero_std") == 2 / 3
    assert joined("step/tasks/b/accuracy") == 1
    assert not any(name.startswith("step/tasks/a") for name in second)


def test_a_row_is_written_when_it_is_whole_and_a_validation_may_join_it_later(tmp_path):
    seen = []
    recorder = Recorder(tmp_path, iterations=1, completions=8, learning_rate=lambda step: 0.5 + step)
    recorder.begin(0, lambda row: seen.append(dict(row)))
    for name in ("reward", "seconds", "completions/mean_length"):
        recorder.log_scalar(f"step/train/{name}", 2.0, step=0)
    recorder.log_scalar("actor/train/loss", float("nan"), step=1)
    assert seen == []
    assert not recorder.path.exists()
    recorder.log_scalar("actor/train/entropy", 0.25, step=1)
    row = {
        "step": 1, "learning_rate": 0.5, "loss": None, "entropy": 0.25, "tokens_per_second": 8.0,
        "reward": 2.0, "seconds": 2.0, "completions/mean_length": 2.0,
    }  # fmt: skip
    assert seen == read_jsonl(recorder.path) == [row]
    assert row.keys() >= REQUIRED_METRICS
    recorder.add(1, {"validation_accuracy": 0.75})
    assert read_jsonl(recorder.path) == [row | {"validation_accuracy": 0.75}] == seen[1:]
    assert recorder.rows == seen[1:]
    again = Recorder(tmp_path, iterations=1, completions=8, learning_rate=float)
    assert again.last_step == 1
    assert again.begin(0, None) == [] == read_jsonl(recorder.path)


def test_a_row_has_the_update_over_its_estimate_where_one_is_kept(tmp_path):
    write_json_atomic(tmp_path / "estimate.json", {"update_seconds": 4.0})
    recorder = Recorder(tmp_path, iterations=1, completions=8, learning_rate=float)
    recorder.begin(0, None)
    recorder.pending[1] = dict.fromkeys(REQUIRED_METRICS, 1.0) | {"completions/mean_length": 3.0}
    recorder.log_scalar("step/train/seconds_update", 3.0, step=0)
    assert read_jsonl(recorder.path)[0]["update_over_estimate"] == 0.75


def test_a_recorder_writes_only_in_the_first_process_and_only_its_own_training(tmp_path):
    """JAX hands every scalar to every listener of the process, those of a session that is over included."""
    other, waiting, over = (
        Recorder(tmp_path, iterations=1, completions=8, learning_rate=float, writes=False) for _ in range(3)
    )
    for recorder in (other, over):
        recorder.begin(0, None)
    over.finish()
    other.pending[1] = dict.fromkeys(REQUIRED_METRICS, 1.0) | {"completions/mean_length": 3.0}
    for recorder in (other, waiting, over):
        recorder.log_scalar("step/train/reward", 2.0, step=0)
    other.add(1, {"validation_accuracy": 0.75})
    assert [row["step"] for row in other.rows] == [1]
    assert waiting.pending == over.pending == {}
    assert list(tmp_path.iterdir()) == []
