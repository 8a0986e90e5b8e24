"""Runs that are killed, stopped or out of disk continue, and end with the results of an undisturbed one, bit by bit."""

import functools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from helpers import TRAIN, Program, wait_for, without_clocks

from grpo_lib.common.files import read_jsonl
from grpo_train.runs import checkpoints
from grpo_train.runs.preemption import EXIT_CODE
from grpo_train.runs.run_directory import read_changes

pytestmark = pytest.mark.long(minutes=12)
STEPS = 8
RECIPE = [
    f"training.steps={STEPS}",
    "training.prompts_per_step=4",
    "training.checkpoint_every=2",
    "training.validate_every=4",
    "grpo.group_size=4",
    # Two tasks: the order of each, and their mixture, continue too.
    "problems=[{train: 150, validation: 10, test: 40},"
    " {name: hard, difficulty: hard, weight: 3, train: 50, validation: 10, test: 20, prompts: {system: ''}}]",
    "evaluation.batch_size=20",
    "rollout.max_completion_length=16",
    "grpo.watch_kl=3",
]
# All that changes from step to step, or adds weights; each follows from the step.
SWITCHED = ["lora.rank=4", "training.learning_rate=3e-3", "grpo.dynamic_sampling=3"]
SWITCHED += ["grpo.beta=0.05", "grpo.target_kl=0.01"]


@pytest.fixture(scope="module")
def start(converted_base):
    """Starts a run in a folder; what it prints goes to a file next to the folder."""

    def start(directory: Path, *changes: str, program: str = TRAIN) -> Program:
        place = ["--runs", directory.parent, "--run", directory.name, "--base", converted_base]
        arguments = ["train", "recipes/tiny-cpu.yaml", *RECIPE, *changes, *place]
        return Program(program, *arguments, output=directory.with_name(f"{directory.name}.txt"))

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    start(directory).lines()
    return directory


def said(directory: Path) -> str:
    return directory.with_name(f"{directory.name}.txt").read_text(encoding="utf-8")


def rows(directory: Path) -> list[dict]:
    """metrics.jsonl without the clocks."""
    path = directory / "metrics.jsonl"
    return without_clocks(read_jsonl(path) if path.exists() else [])


def weights(directory: Path, step: int = STEPS) -> list[np.ndarray]:
    """Actor and optimizer of a checkpoint."""
    checkpoint = epath.Path(directory) / "checkpoints" / "actor" / str(step)
    return jax.tree.leaves([checkpoints.read(checkpoint / item) for item in checkpoints.ITEMS])


def assert_same(directory: Path, reference: Path, step: int = STEPS) -> None:
    """`step`: the number of the last checkpoint, which counts updates."""
    assert rows(directory) == rows(reference)
    for one, other in zip(weights(directory, step), weights(reference, step), strict=True):
        assert np.array_equal(one, other)
    for which in ("before", "after"):
        ours, theirs = (read_jsonl(folder / "evals" / f"{which}.jsonl") for folder in (directory, reference))
        assert ours == theirs


def run_until(run: Program, moment: Callable[[], bool], number: signal.Signals) -> int:
    """Send a run a signal at a moment, unless it comes to its end before; returns its exit code."""
    ended = threading.Event()

    def send() -> None:
        if moment() and not ended.is_set():
            os.kill(run.pid, number)

    threading.Thread(target=send, daemon=True).start()
    run.join()
    ended.set()
    return run.exitcode


# --- kill -9 ---


def soon(directory: Path, rng: random.Random) -> bool:
    """Anywhere: while the model is loaded, at the first sync, in the first steps."""
    time.sleep(rng.uniform(0, 8))
    return True


def in_a_step(directory: Path, rng: random.Random) -> bool:
    """Some time after a row was written, which is when a step begins."""
    path = directory / "metrics.jsonl"
    size = path.stat().st_size if path.exists() else 0
    if not wait_for(lambda: path.exists() and path.stat().st_size > size):
        return False
    time.sleep(rng.uniform(0, 0.4))
    return True


def in_a_save(directory: Path, rng: random.Random) -> bool:
    """While Orbax writes a checkpoint: there is a temporary folder then."""
    folder = directory / "checkpoints" / "actor"
    found = wait_for(lambda: any("tmp" in path.name for path in folder.glob("*")), pause=0.001)
    time.sleep(rng.uniform(0, 0.02))
    return found


def in_an_evaluation(directory: Path, rng: random.Random) -> bool:
    """While one of the two evaluations is being written."""
    folder = directory / "evals"
    begun = {path.name for path in folder.glob("*")}
    found = wait_for(lambda: {path.name for path in folder.glob("*")} - begun)
    time.sleep(rng.uniform(0, 0.3))
    return found


MOMENTS = (in_a_save, in_a_step, in_an_evaluation, soon)


@pytest.mark.parametrize(("kills", "seed"), [(len(MOMENTS), 2402), pytest.param(12, 2405, marks=pytest.mark.nightly)])
def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(start, undisturbed, tmp_path, kills, seed):
    """Kill -9, resume, kill again.  A run that gets to its end in spite of it is compared, and the next one begins."""
    rng = random.Random(seed)
    killed = []
    finished = 0
    directory = tmp_path / "run-0"
    while len(killed) < kills:
        moment = MOMENTS[len(killed) % len(MOMENTS)]
        code = run_until(start(directory), functools.partial(moment, directory, rng), signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), said(directory)
        if code:
            killed.append(moment)
            continue
        assert_same(directory, undisturbed)
        finished += 1
        directory = tmp_path / f"run-{finished}"
    start(directory).lines()
    assert_same(directory, undisturbed)
    assert set(killed) == set(MOMENTS)
    assert [row["step"] for row in rows(directory) if "kl" in row] == [1, 3, 6]


@pytest.mark.nightly
def test_killed_with_adapters_and_spare_prompts(start, tmp_path):
    whole = tmp_path / "whole"
    directory = tmp_path / "killed"
    rng = random.Random(2404)
    start(whole, *SWITCHED).lines()
    for moment in (in_a_step, in_a_save, in_a_step):
        code = run_until(start(directory, *SWITCHED), functools.partial(moment, directory, rng), signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), said(directory)
    start(directory, *SWITCHED).lines()
    assert_same(directory, whole)
    assert max(row["dynamic_sampling/passes"] for row in rows(whole)) > 1
    assert len({row["beta"] for row in rows(whole)}) > 1


@pytest.mark.nightly
def test_killed_with_a_temperature_that_changes(start, tmp_path):
    """Every log-probability is of the step's temperature: of reference, old policy, sampler and update."""
    changes = [
        *("rollout.temperature={from: 1.0, to: 0.6, steps: 5}", "rollout.micro_batch_size=2"),
        *("grpo.beta=0.05", "grpo.iterations=2", "grpo.correction=tis", "training.micro_batch_size=8"),
        # What else compiles in later steps: rows of another shape, and validations.
        *("training.layout=padded", "training.validate_every=0"),
    ]
    whole = tmp_path / "whole"
    directory = tmp_path / "killed"
    rng = random.Random(2405)
    start(whole, *changes).lines()
    for moment in (in_a_step, in_a_save):
        code = run_until(start(directory, *changes), functools.partial(moment, directory, rng), signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), said(directory)
    start(directory, *changes).lines()
    assert_same(directory, whole, 2 * STEPS)
    assert [row["temperature"] for row in rows(whole)] == pytest.approx([1.0, 0.9, 0.8, 0.7, *[0.6] * (STEPS - 4)])
    # The sampler's probabilities are the trainer's at each of them, and no step compiles for its own.
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=5e-3) for row in rows(whole))
    assert not any(row["compilations"] for row in read_jsonl(whole / "metrics.jsonl")[2:])


# --- stopped, without room, damaged ---


def test_stopped_without_room_and_damaged_it_ends_as_if_nothing_had_happened(start, undisturbed, tmp_path):
    """One run, three mishaps: each start costs seconds."""
    directory = tmp_path / "run"
    rng = random.Random(2403)
    folder = epath.Path(directory) / "checkpoints" / "actor"

    # The time of training.stop_after: saved where it was, and not only at the next multiple of checkpoint_every.  The
    # alarm comes early, by hand; the starts after it have no such time.  SIGTERM: test_several_processes.py.
    limited = start(directory, "training.stop_after=1h")
    begun = functools.partial(wait_for, lambda: len(rows(directory)) >= 4, seconds=300)  # the first step compiles
    code = run_until(limited, begun, signal.SIGALRM)
    saved = checkpoints.updates(folder)
    reason = f"stopped by training.stop_after after step {saved[-1]} of {STEPS}, which is saved; "
    assert code == EXIT_CODE, said(directory)
    assert reason in said(directory), said(directory)
    assert saved[-1] == len(rows(directory)) < STEPS

    # A limit on the size of files stands for the full disk: it lets the small ones through, and not a checkpoint.
    small_files = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
    line = start(directory, program=small_files + TRAIN).lines(2)[-1]
    assert line.startswith(f"error: {directory} cannot be written, its disk is full (File too large)"), line
    assert f"the last good checkpoint is of step {saved[-1]}" in line
    assert checkpoints.updates(folder) == saved

    # The newest checkpoint is cut short: the one before it is taken.
    for path in Path(folder / str(saved[-1]) / "model_params" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    start(directory).lines()
    assert f"checkpoint of update {saved[-1]} cannot be restored" in said(directory)
    assert f"continuing from update {saved[-2]}" in said(directory)
    assert_same(directory, undisturbed)

    assert f"training completed: {STEPS} of {STEPS} steps" in said(directory)
    assert said(undisturbed).count(f"step {STEPS}/{STEPS}  ") == 2  # the last row comes before its validation
    spent = json.loads((directory / "seconds.json").read_text())["wall_seconds"]
    assert spent > sum(row["seconds"] for row in read_jsonl(directory / "metrics.jsonl"))  # of all starts


# --- continued with other values ---


KILLED_IN_STEP_1 = """
import os, signal
from grpo_train.runs import metrics_logger
metrics_logger.TimedReward.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # sampled, not yet trained
"""
SHORT = ["training.steps=3", "training.validate_every=0"]  # the last one counts
ROUNDED = {"rtol": 1e-4, "atol": 1e-5}  # sums of float32 in another order


def assert_nearly_same(directory: Path, reference: Path) -> None:
    """The rows up to the rounding of sums; what was sampled is the same."""
    ours, theirs = rows(directory), rows(reference)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name in ("reward", "accuracy", "completions/mean_length"):
            assert one[name] == other[name]
        # The gap is measured on as many completions as a micro-batch has, and entropy is the mean of the means of
        # micro-batches.
        compared = one.keys() - {"sampler_trainer_gap", "entropy"}
        for name in compared:
            assert np.allclose(one[name], other[name], **ROUNDED), (name, one[name], other[name])


def test_killed_in_its_first_step_it_goes_on_with_half_the_micro_batch(start, tmp_path):
    """As the kernel kills a process that wants too much memory."""
    whole, directory = tmp_path / "whole", tmp_path / "killed"
    start(whole, *SHORT).lines()
    killed = start(directory, *SHORT, program=KILLED_IN_STEP_1 + TRAIN)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, said(directory)
    assert rows(directory) == [], said(directory)
    start(directory, *SHORT, "training.micro_batch_size=8").lines()  # of 16 completions
    assert "changed after step 0: training.micro_batch_size: null -> 8" in said(directory)
    assert_nearly_same(directory, whole)
    assert (directory / "evals" / "before.jsonl").read_bytes() == (whole / "evals" / "before.jsonl").read_bytes()


def test_a_run_that_grows_ends_as_a_longer_one_and_keeps_what_it_had(start, undisturbed, tmp_path):
    directory = tmp_path / "grown"
    start(directory, "training.steps=3").lines()  # it is evaluated and exported
    after = (directory / "evals" / "after.jsonl").read_bytes()
    exported = (directory / "export" / "model.safetensors").read_bytes()
    start(directory).lines()
    assert f"training.steps: 3 -> {STEPS}" in said(directory)
    assert_same(directory, undisturbed)
    assert (directory / "evals" / "after-3.jsonl").read_bytes() == after
    assert (directory / "export-3" / "model.safetensors").read_bytes() == exported
    assert json.loads((directory / "summary.json").read_text())["steps"] == STEPS
    assert json.loads((directory / "summary-3.json").read_text())["steps"] == 3
    own, longer = (folder / "export" / "model.safetensors" for folder in (directory, undisturbed))
    assert own.read_bytes() == longer.read_bytes()


@pytest.mark.nightly
def test_beta_is_raised_while_a_run_goes_on(start, tmp_path):
    """With adapters, whose export needs the base, too."""
    directory = tmp_path / "run"
    adapters = ["lora.rank=4", "training.learning_rate=3e-3", "training.validate_every=0"]
    start(directory, *adapters, "training.steps=2", "grpo.beta=0.02").lines()
    first = rows(directory)
    start(directory, *adapters, "training.steps=4", "grpo.beta=0.5").lines()
    assert rows(directory)[:2] == first
    assert rows(directory)[-1]["kl"] > 0
    changes = read_changes(directory)[0]
    assert changes["step"] == 2
    assert changes["changes"]["grpo.beta"] == {"before": 0.02, "after": 0.5}
    assert "grpo.beta: 0.02 -&gt; 0.5" in (directory / "report.html").read_text()

    runs = ["--runs", directory.parent]
    Program(TRAIN, "export", directory.name, "--step", "4", *runs, output=tmp_path / "export.txt").lines()
    for path in (directory / "export").iterdir():
        assert (directory / "export-4" / path.name).read_bytes() == path.read_bytes()
