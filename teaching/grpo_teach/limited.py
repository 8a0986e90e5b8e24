"""Run functions of a student in grpo_teach.worker: limits of time, memory and output; values or reasons come back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_teach import worker
from grpo_teach.hand_ins import plain

SECONDS = 10  # of computing; a busy machine costs nobody points
WAIT = 3  # times as long by the clock, for what sleeps
MEMORY = 2**30  # bytes of address space, Python and NumPy included
OUTPUT = 2**24  # bytes of results


@dataclass(frozen=True)
class Failed:
    """What comes back in place of a value."""

    reason: str

    @property
    def kind(self) -> str:
        """The error's type."""
        return self.reason.partition(" (line ")[0].partition(":")[0]


@dataclass(frozen=True)
class Call:
    """One call of a function: its name, its arguments, and the source of `harness(function, *arguments)` or ""."""

    function: str
    harness: str
    arguments: tuple


def run(code: str, calls: Sequence[Call], seconds: int = SECONDS) -> list[Any]:
    """One value or `Failed` per call, of functions that `code` defines.  All calls share one process and its limits."""
    limits = {
        "RLIMIT_CPU": (seconds, seconds + 1),
        "RLIMIT_AS": (MEMORY, MEMORY),
        "RLIMIT_FSIZE": (OUTPUT, OUTPUT),
    }
    encoded = [[call.function, call.harness, worker.encode(call.arguments)] for call in calls]
    packages = str(Path(np.__file__).parents[1])
    task = {"code": code, "calls": encoded, "packages": packages, "limits": limits}
    lines, reason = _results(json.dumps(task), seconds)
    values = [_value(line) for line in lines[: len(calls)]]
    return values + [Failed(reason)] * (len(calls) - len(values))


def _results(task: str, seconds: int) -> tuple[list[str], str]:
    """The complete lines that the process wrote, and why it wrote no more."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        # -S and -I: neither this repository nor the variables of this process are there.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.communicate(task.encode(), timeout=WAIT * seconds)
            stopped = process.returncode == -signal.SIGXCPU
            reason = f"stopped after {seconds} seconds" if stopped else "the function ended its process"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {WAIT * seconds} seconds without a result"
        with contextlib.suppress(ProcessLookupError):  # whatever is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return output.read(OUTPUT).decode(errors="replace").split("\n")[:-1], reason


def _value(line: str) -> Any:
    """A result; a student's code can write here too, so the line may hold anything."""
    try:
        result = json.loads(line)
        if "error" in result:
            return Failed(plain(str(result["error"])))
        return worker.decode(result["value"])
    except Exception:
        return Failed("its result cannot be read")
