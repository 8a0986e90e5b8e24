"""A whole run of 2 processes with 2 devices each: it equals the run of 1 process with 4, and it survives losses.

It takes minutes; test_multihost.py has the quick tests.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TRAIN, Program, devices, free_port, wait_for

from grpo_lib.common.files import read_jsonl
from grpo_train.engines import conversion
from grpo_train.recipes import ModelRecipe
from grpo_train.runs.preemption import EXIT_CODE as STOPPED
from grpo_train.tpu import random_model

pytestmark = pytest.mark.long(minutes=8)

STEPS = 8
# Everything is in it: several rollout micro-batches, accumulation, two updates a batch, the correction of the sampler's
# log-probabilities, a reference model, an adapted beta, validation, checkpoints, and two devices to hold a sampler's
# model together.
RECIPE = [
    "hardware.sampler_tensor=2",
    f"training.steps={STEPS}",
    "training.prompts_per_step=4",
    "training.micro_batch_size=8",
    "training.checkpoint_every=2",
    "training.validate_every=3",
    "rollout.micro_batch_size=2",
    "rollout.max_completion_length=16",
    "grpo.group_size=4",
    "grpo.beta=0.04",
    "grpo.target_kl=0.01",
    "grpo.iterations=2",
    "grpo.correction=tis",
    "problems.train=200",
    "problems.validation=8",
    "problems.test=20",
    "evaluation.batch_size=16",
]
TOLERANCE = 1e-5
EQUAL = (
    "step",
    "reward",
    "accuracy",
    "format",
    "completions/mean_length",
    "completions/clipped_ratio",
    "validation_accuracy",
    "beta",
)


def start(directory: Path, base: Path, processes: int, *changes: str) -> list[Program]:
    """A run on four devices."""
    train = [TRAIN, "train", "recipes/tiny-cpu.yaml", *RECIPE, *changes]
    train += ["--runs", directory.parent, "--run", directory.name, "--base", base]
    together = ["--coordinator", f"127.0.0.1:{free_port()}", f"--processes={processes}", "--process"]
    members = []
    for number in range(processes):
        arguments = [*train, *together, number] if processes > 1 else train
        output = directory.with_name(f"{directory.name}.{number}.txt")
        members.append(Program(*arguments, output=output, XLA_FLAGS=devices(4 // processes)))
    return members


def rows(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def wait_until(happened: Callable[[], bool], run: list[Program]) -> None:
    """Or until a process has ended, which is a failure."""
    wait_for(lambda: happened() or not all(member.is_alive() for member in run), 600, pause=0.2)
    assert happened(), [member.said() for member in run]


def damage_the_newest_checkpoint(directory: Path) -> int:
    """The update that it is of."""
    folder = directory / "checkpoints" / "actor"
    newest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return int(newest.name)


def same_rows(alone: Path, together: Path, steps: int) -> None:
    """Rewards and lengths are equal, everything else but clocks is within TOLERANCE."""
    assert [row["step"] for row in rows(together)] == list(range(1, steps + 1))
    for one, two in zip(rows(alone), rows(together), strict=True):
        for name in set(one) | set(two):
            if name in EQUAL:
                assert one[name] == two[name], (one["step"], name)
            elif not name.startswith(("seconds", "tokens_per_second", "compilations")):
                assert one[name] == pytest.approx(two[name], abs=TOLERANCE), (one["step"], name)


def test_two_processes_make_the_run_of_one_although_one_is_stopped_and_another_killed(tmp_path, converted_base):
    alone, together = tmp_path / "alone", tmp_path / "together"
    start(alone, converted_base, processes=1)[0].lines()

    # A SIGTERM that only one of them receives, as when one machine is taken away.
    run = start(together, converted_base, processes=2)
    wait_until(lambda: len(rows(together)) >= 3, run)
    os.kill(run[1].pid, signal.SIGTERM)
    assert all(any("stopped by SIGTERM" in line for line in member.lines(STOPPED)) for member in run)

    # They continue before a damaged checkpoint.  One is killed: the other ends soon, and nothing is lost.
    damaged = damage_the_newest_checkpoint(together)
    run = start(together, converted_base, processes=2)
    wait_until(lambda: "continuing after step" in run[0].said(), run)
    assert f"the checkpoint of update {damaged} cannot be restored" in run[0].said()
    # Process 0 does all logging; what stands there is Gloo's, threads mixed in a line.
    assert "step" not in run[1].said()
    wait_until(lambda: len(rows(together)) >= 6, run)
    run[1].kill()
    run[0].join(60)
    assert run[0].exitcode, run[0].said()

    # What two began, one may finish.
    (run,) = start(together, converted_base, processes=1)
    assert "continuing after step" in "\n".join(run.lines())

    same_rows(alone, together, STEPS)
    assert len({row["beta"] for row in rows(together)}) > 1
    for which in ("before", "after"):
        assert read_jsonl(alone / "evals" / f"{which}.jsonl") == read_jsonl(together / "evals" / f"{which}.jsonl")
    assert json.loads((together / "environment.json").read_text())["processes"] == 2
    for name in ("summary.json", "report.html", "sync.json", "export/config.json"):
        assert (together / name).is_file()


@pytest.mark.nightly
def test_two_processes_watch_the_kl_of_one(tmp_path, converted_base):
    """Each process has its part of the base in its own memory."""
    watched = ["grpo.beta=0", "grpo.target_kl=null", "grpo.watch_kl=3", "training.steps=3", "training.validate_every=0"]
    directories = {processes: tmp_path / f"of {processes}" for processes in (1, 2)}
    for processes, directory in directories.items():
        for member in start(directory, converted_base, processes, *watched):
            member.lines()
    same_rows(directories[1], directories[2], 3)
    first, last = (row["kl"] for row in rows(directories[2]) if "kl" in row)
    assert abs(first) < 1e-6 < last


@pytest.mark.nightly
def test_two_processes_sample_at_the_temperature_of_each_step_and_within_top_k(tmp_path, converted_base):
    """With sizes per device: of a gradient 2 completions for each of the four, of a rollout 1 prompt for each of the
    sampler's two replicas."""
    changes = [
        "hardware.trainer_devices=4",
        *("rollout.temperature={from: 1.0, to: 0.6}", "rollout.top_k=20", "grpo.correction=none", "training.steps=3"),
        *("training.micro_batch_size=null", "training.micro_batch_size_per_device=2", "training.validate_every=0"),
        *("rollout.micro_batch_size=null", "rollout.micro_batch_size_per_device=1", "problems.test=8"),
    ]
    alone, together = tmp_path / "alone", tmp_path / "together"
    start(alone, converted_base, 1, *changes)[0].lines()
    both = start(together, converted_base, 2, *changes)
    lines, _ = (member.lines() for member in both)
    assert any("warning: rollout.top_k=20 and top_p=1 leave out " in line for line in lines)
    same_rows(alone, together, steps=3)
    assert [row["temperature"] for row in rows(together)] == pytest.approx([1.0, 0.8, 0.6])
    assert read_jsonl(alone / "evals" / "after.jsonl") == read_jsonl(together / "evals" / "after.jsonl")


@pytest.mark.nightly
def test_two_processes_train_a_llama_with_scaled_rotary_embeddings_although_both_are_killed(tmp_path):
    """The architecture of recipes/llama3.1-8b-gsm8k.yaml@v5p-64; a coin rewards it, so that its weights move."""
    model = ModelRecipe(path=str(tmp_path / "model"), maxtext_name="llama3.1-8b")
    random_model.write_random_model(model, model.path)
    base = conversion.convert_to_maxtext(model, tmp_path / "base")
    changes = [
        *(f"model.path={model.path}", "model.maxtext_name=llama3.1-8b", "rewards=[random_reward]"),
        *("training.steps=3", "training.checkpoint_every=1", "training.learning_rate=1e-3"),
        *("training.validate_every=0", "problems.validation=2", "problems.test=2", "evaluation.batch_size=2"),
        "grpo.target_kl=null",
    ]
    alone, together = tmp_path / "alone", tmp_path / "together"
    start(alone, base, 1, *changes)[0].lines()
    run = start(together, base, 2, *changes)
    wait_until(lambda: len(rows(together)) >= 2, run)
    for member in run:
        member.kill()
        member.join(60)
    first, _ = [member.lines() for member in start(together, base, 2, *changes)]
    assert any("continuing after step" in line for line in first)
    same_rows(alone, together, steps=3)
    losses = [row["loss"] for row in rows(together)]
    assert len(set(losses)) == 3
    assert json.loads((together / "sync.json").read_text())["mean_gap"] < 1e-4
