"""A whole run of 2 processes with 4 devices each: it is the run of 1 process with 8, and it survives losses.

It takes minutes, and runs where GRPO_PROCESSES=1 says so; tests/test_processes.py has the quick ones.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lib.files import read_jsonl
from grpo_lib.interruption import EXIT_CODE as STOPPED
from grpo_lib.roll_call import EXIT_CODE as ONE_IS_MISSING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("GRPO_PROCESSES"), reason="runs of several processes: set GRPO_PROCESSES=1"),
]

STEPS = 8
# Everything is in it: several passes, accumulation, two updates a batch, a reference model, validation, checkpoints.
RECIPE = [
    f"training.steps={STEPS}",
    "training.prompts_per_step=4",
    "training.micro_batch_size=8",
    "training.checkpoint_every=2",
    "training.validate_every=3",
    "rollout.prompts_per_pass=2",
    "rollout.max_completion_length=16",
    "grpo.group_size=4",
    "grpo.beta=0.04",
    "grpo.iterations=2",
    "problems.train=200",
    "problems.validation=8",
    "problems.test=20",
    "evaluation.batch_size=16",
]
TOLERANCE = 1e-5
EQUAL = ("step", "reward", "accuracy", "format", "completion_length", "truncated", "validation_accuracy")


class Run:
    """The processes of a run, seen from the test."""

    def __init__(self, directory: Path, base: Path, processes: int, devices: int):
        port = free_port()
        self.outputs = [directory.with_name(f"{directory.name}.{number}.txt") for number in range(processes)]
        self.members = []
        for number, output in enumerate(self.outputs):
            command = [sys.executable, "-m", "grpo_lib.cli", "train", "recipes/tiny-cpu.yaml", *RECIPE]
            command += ["--runs", str(directory.parent), "--run", directory.name, "--base", str(base)]
            if processes > 1:
                command += ["--coordinator", f"127.0.0.1:{port}", f"--process={number}", f"--processes={processes}"]
            flags = f"--xla_force_host_platform_device_count={devices}"
            with open(output, "w", encoding="utf-8") as file:
                env = os.environ | {"XLA_FLAGS": flags}
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
    """A port that is free, and the one after it, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def rows(directory: Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def wait_for(run: Run, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert all(member.poll() is None for member in run.members), [run.said(n) for n in (0, 1)]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_rows(run: Run, directory: Path, number: int) -> None:
    wait_for(run, lambda: len(rows(directory)) >= number)


def damage_the_newest_checkpoint(directory: Path) -> int:
    """The update that it is of."""
    folder = directory / "checkpoints" / "actor"
    newest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return int(newest.name)


def test_two_processes_make_the_run_of_one_although_one_is_stopped_and_another_killed(tmp_path, converted_base):
    alone, together = tmp_path / "alone", tmp_path / "together"
    run = Run(alone, converted_base, processes=1, devices=8)
    assert run.wait() == [0], run.said(0)

    # A SIGTERM that only one of them receives, as when one machine is taken away.
    run = Run(together, converted_base, processes=2, devices=4)
    wait_for_rows(run, together, 3)
    run.members[1].send_signal(signal.SIGTERM)
    assert run.wait() == [STOPPED, STOPPED], [run.said(number) for number in (0, 1)]
    assert all("stopped by SIGTERM" in run.said(number) for number in (0, 1))

    # They continue before a damaged checkpoint.  One is killed: the other ends soon, says which, and loses nothing.
    damaged = damage_the_newest_checkpoint(together)
    run = Run(together, converted_base, processes=2, devices=4)
    wait_for(run, lambda: "continuing after step" in run.said(0))
    assert f"the checkpoint of update {damaged} cannot be restored" in run.said(0)
    assert run.said(1) == ""  # process 0 does the talking
    wait_for_rows(run, together, 6)
    run.members[1].kill()
    killed = time.monotonic()
    assert run.members[0].wait(120) == ONE_IS_MISSING, run.said(0)
    assert time.monotonic() - killed < 60
    last = run.said(0).splitlines()[-1]
    assert last.startswith("error: process 1 of 2") and "is gone" in last and "start all processes again" in last
    run.wait()

    # What two began, one may finish.
    run = Run(together, converted_base, processes=1, devices=8)
    assert run.wait() == [0], run.said(0)
    assert "continuing after step" in run.said(0)

    assert [row["step"] for row in rows(together)] == list(range(1, STEPS + 1))
    for one, two in zip(rows(alone), rows(together), strict=True):
        for name in set(one) | set(two):
            if name in EQUAL:
                assert one[name] == two[name], (one["step"], name)
            elif not name.startswith(("seconds", "tokens_per_second")):
                assert one[name] == pytest.approx(two[name], abs=TOLERANCE), (one["step"], name)
    for which in ("before", "after"):
        assert read_jsonl(alone / "evals" / f"{which}.jsonl") == read_jsonl(together / "evals" / f"{which}.jsonl")
    assert json.loads((together / "environment.json").read_text())["processes"] == 2
    for name in ("summary.json", "report.html", "sync.json", "export/config.json"):
        assert (together / name).is_file()
