"""A whole run of 2 processes with 2 devices each: it equals the run of 1 process with 4, and it survives losses.

It takes minutes; test_multihost.py has the quick tests.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import wait_for

from grpo_lib.common.files import read_jsonl
from grpo_train.runs.preemption import EXIT_CODE as STOPPED

pytestmark = pytest.mark.long(minutes=8)

STEPS = 8
# Everything is in it: several rollout micro-batches, accumulation, two updates a batch, the correction of the sampler's
# log-probabilities, a reference model, validation, checkpoints, and two devices to hold a sampler's model together.
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
)


class Run:
    """The processes of a run, seen from the test."""

    def __init__(self, directory: Path, base: Path, processes: int, devices: int, *more: str):
        port = free_port()
        self.outputs = [directory.with_name(f"{directory.name}.{number}.txt") for number in range(processes)]
        self.members = []
        for number, output in enumerate(self.outputs):
            command = [sys.executable, "-m", "grpo_tpu.cli", "train", "recipes/tiny-cpu.yaml", *RECIPE, *more]
            command += ["--runs", str(directory.parent), "--run", directory.name, "--base", str(base)]
            if processes > 1:
                command += ["--coordinator", f"127.0.0.1:{port}", f"--process={number}", f"--processes={processes}"]
            with open(output, "w", encoding="utf-8") as file:
                env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
                self.members.append(subprocess.Popen(command, stdout=file, stderr=file, env=env))

    def wait(self, seconds: float = 900) -> list[int]:
        try:
            return [member.wait(seconds) for member in self.members]
        finally:
            for member in self.members:
                member.kill()

    def said(self, number: int) -> str:
        return self.outputs[number].read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def rows(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def wait_until(happened: Callable[[], bool], run: Run) -> None:
    """Or until a process has ended, which is a failure."""
    wait_for(lambda: happened() or any(member.poll() is not None for member in run.members), 600, pause=0.2)
    assert happened(), [run.said(n) for n in (0, 1)]


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
    run = Run(alone, converted_base, processes=1, devices=4)
    assert run.wait() == [0], run.said(0)

    # A SIGTERM that only one of them receives, as when one machine is taken away.
    run = Run(together, converted_base, processes=2, devices=2)
    wait_until(lambda: len(rows(together)) >= 3, run)
    run.members[1].send_signal(signal.SIGTERM)
    assert run.wait() == [STOPPED, STOPPED], [run.said(number) for number in (0, 1)]
    assert all("stopped by SIGTERM" in run.said(number) for number in (0, 1))

    # They continue before a damaged checkpoint.  One is killed: the other ends soon, and nothing is lost.
    damaged = damage_the_newest_checkpoint(together)
    run = Run(together, converted_base, processes=2, devices=2)
    wait_until(lambda: "continuing after step" in run.said(0), run)
    assert f"the checkpoint of update {damaged} cannot be restored" in run.said(0)
    assert "step" not in run.said(1)  # process 0 does all logging; what stands there is Gloo's, threads mixed in a line
    wait_until(lambda: len(rows(together)) >= 6, run)
    run.members[1].kill()
    assert run.members[0].wait(60) != 0, run.said(0)
    run.wait()

    # What two began, one may finish.
    run = Run(together, converted_base, processes=1, devices=4)
    assert run.wait() == [0], run.said(0)
    assert "continuing after step" in run.said(0)

    same_rows(alone, together, STEPS)
    for which in ("before", "after"):
        assert read_jsonl(alone / "evals" / f"{which}.jsonl") == read_jsonl(together / "evals" / f"{which}.jsonl")
    assert json.loads((together / "environment.json").read_text())["processes"] == 2
    for name in ("summary.json", "report.html", "sync.json", "export/config.json"):
        assert (together / name).is_file()
