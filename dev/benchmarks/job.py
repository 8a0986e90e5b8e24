"""Input, output and main program of a benchmark's workers.  Pure Python: each worker has its own packages.

A job is one JSON file: weights, prompts with their gold answers in the order of the steps, and the values of the
recipe.  A worker reads it, trains, and prints one JSON object on its last line of standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # grpo_lib, for an environment in which it is not installed
LINES_OF_ERRORS = 20  # that are shown of a worker that fails
STARTED = time.perf_counter()  # about when the worker process began
# Vector and matrix units by their names in Linux's /proc/cpuinfo, on x86 and on ARM.
UNITS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX",
    "asimd": "NEON", "sve": "SVE", "sve2": "SVE2", "sme": "SME",
}  # fmt: skip
BASELINE = {"x86_64": "SSE2", "AMD64": "SSE2", "aarch64": "NEON", "arm64": "NEON"}  # what every such processor has


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


def coin(completion: str, gold: str = "") -> tuple[float, str]:
    """A reward of 1 or 0 by the letters of the text: hardly a group is without both, so each is trained on."""
    return float(zlib.crc32(completion.encode()) % 2), "by chance"


def worker_main(train: Callable[[Job], dict[str, Any]], doc: str) -> None:
    """The main program of a worker: read the job, train, print the result."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("job", help="file made by step_time.py --write-job")
    arguments = parser.parse_args()
    with only_result_on_stdout() as stdout:
        from grpo_lib import rewards

        rewards.REWARDS["coin"] = rewards.reward_function(coin)
        print(json.dumps(train(Job.load(arguments.job))), file=stdout)


def run_worker(command: Sequence[str | Path], checkout: Path = ROOT) -> dict[str, Any]:
    """Run a worker in its own process and return its result."""
    return json.loads(output_of(command, checkout).splitlines()[-1])


def output_of(command: Sequence[str | Path], checkout: Path = ROOT) -> str:
    """What `python script …` prints, with the packages of `checkout`.  Exits with the end of its errors if it fails."""
    words = [str(word) for word in command]
    packages = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(packages)},
    )
    if done.returncode or not done.stdout.strip():
        last = "\n".join(done.stderr.splitlines()[-LINES_OF_ERRORS:])
        sys.exit(f"error: {Path(words[1]).name} failed, exit status {done.returncode}; the end of its errors:\n{last}")
    return done.stdout


def machine() -> dict[str, Any]:
    """Where a number was measured: platform, processor and its units, cores, memory, commit."""
    from grpo_train.runs import machine as described_machine

    described = described_machine.describe(devices=False)
    kept = {key: described[key] for key in ("platform", "processor", "cores", "memory_gib", "commit")}
    return kept | {"units": units()}


def units(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The processor's vector and matrix units; without Linux's list of them, what its architecture always has."""
    flags: set[str] = set()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags.update(values.split())
    always = [BASELINE[platform.machine()]] if platform.machine() in BASELINE else []
    return [unit for flag, unit in UNITS.items() if flag in flags] or always


@contextlib.contextmanager
def only_result_on_stdout() -> Iterator[Any]:
    """Redirect what libraries print to standard error; yields the real standard output."""
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
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        versions[package] = importlib.metadata.version(package)
    return {
        "name": name,
        "seconds": [round(value, 5) for value in seconds],
        "seconds_rollout": [round(value, 5) for value in seconds_rollout],
        "seconds_update": [round(value, 5) for value in seconds_update],
        "reward": [round(value, 4) for value in reward],
        "completion_length": [round(value, 2) for value in completion_length],
        "process_seconds": round(time.perf_counter() - STARTED, 2),
        "peak_memory_gib": round(peak, 2),
        "versions": versions,
    }
