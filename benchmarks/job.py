"""What every worker of a benchmark is given, and what it gives back.  Pure Python: each worker has its own packages.

A job is one JSON file: weights, prompts with their gold answers in the order of the steps, and the numbers of the
recipe.  A worker reads it, trains, and prints one JSON object on its last line of standard output.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # grpo_lib, for an environment in which it is not installed
STARTED = time.perf_counter()  # about when the worker process began


@dataclass(frozen=True)
class Job:
    """The same work for every worker.  Lengths are in tokens."""

    model: str  # Hugging Face directory
    checkpoint: str  # the same weights as MaxText checkpoint, for the course's trainer only
    recipe: dict[str, Any]  # the resolved recipe
    max_prompt_length: int  # what the course's trainer pads prompts to
    prompts: list[list[str]]  # [steps][prompts per step], rendered
    answers: list[list[str]]  # [steps][prompts per step], the gold number as text

    @property
    def steps(self) -> int:
        return len(self.prompts)

    def save(self, path: str | os.PathLike) -> None:
        Path(path).write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Job:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@contextlib.contextmanager
def only_result_on_stdout() -> Iterator[Any]:
    """Send what libraries print to standard error, and give the real standard output."""
    real = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    with os.fdopen(real, "w", encoding="utf-8") as stdout:
        yield stdout


def result(
    name: str,
    seconds: Sequence[float],
    seconds_rollout: Sequence[float],
    seconds_update: Sequence[float],
    reward: Sequence[float],
    completion_length: Sequence[float],
    packages: Sequence[str],
) -> dict[str, Any]:
    """One worker's result.  The lists have one entry per step; the first steps hold the compilations."""
    # ru_maxrss counts KiB on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    return {
        "name": name,
        "seconds": [round(value, 5) for value in seconds],
        "seconds_rollout": [round(value, 5) for value in seconds_rollout],
        "seconds_update": [round(value, 5) for value in seconds_update],
        "reward": [round(value, 4) for value in reward],
        "completion_length": [round(value, 2) for value in completion_length],
        "process_seconds": round(time.perf_counter() - STARTED, 2),
        "peak_memory_gib": round(peak, 2),
        "versions": {
            "python": sys.version.split()[0],
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }
