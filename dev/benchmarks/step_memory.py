"""What a run takes of a CPU's memory, measured beside what it says before it starts (engines/cpu_memory.py).

    python dev/benchmarks/step_memory.py recipes/tiny-cpu.yaml
    python dev/benchmarks/step_memory.py recipes/qwen2.5-0.5b-gsm8k.yaml@cpu lora.rank=null --json

The run is `grpo train` with three steps and as many checkpoints, from the conversion of the model to its export, in a
temporary folder.  Every tenth of a second the resident memory of its process and of all that it started is added up;
the largest sum counts.
Shared pages count in each process, so the sum is on the large side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from job import ROOT, machine, only_result_on_stdout

GIB = 2**30
INTERVAL = 0.1  # seconds between two looks
STEPS = ("training.steps=3", "training.checkpoint_every=1")  # an update while a checkpoint is saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a file in recipes/, also FILE.yaml@PROFILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes, such as lora.rank=null")
    parser.add_argument("--runs", help="folder for the run, with room for checkpoints; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    overrides = [*STEPS, *arguments.overrides]
    with only_result_on_stdout() as stdout:
        estimated = estimate(arguments.recipe, overrides)
        with tempfile.TemporaryDirectory(prefix="step-memory-", dir=arguments.runs) as runs:
            measured = measure([arguments.recipe, *overrides, "--runs", runs], Path(runs) / "train.log")
        result = {"recipe": arguments.recipe, "overrides": overrides, **estimated, **measured}
        result |= {
            "estimate_over_measured": round(result["estimate_gib"] / result["peak_gib"], 3),
            "machine": machine(),
        }
        print(table(result), file=stdout)
        if arguments.json:
            print(json.dumps(result), file=stdout)


def estimate(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """What the run says, or an error where it would refuse."""
    from grpo_train import checks
    from grpo_train.recipes import load_recipe

    needed = checks.check(load_recipe(recipe, overrides)).memory
    if needed is None:
        sys.exit("error: only the memory of one CPU is estimated")
    parts = {name: round(size / GIB, 2) for name, size in needed.parts.items()}
    return {"estimate_gib": round(needed.gib, 2), "estimate_phase": needed.phase, "estimate_parts": parts}


def measure(arguments: list[str], log: Path) -> dict[str, Any]:
    """Peak memory of `grpo train` and all that it starts, and what its log had said by then."""
    command = [sys.executable, "-m", "grpo_train.cli", "train", *arguments]
    started, peak, said = time.perf_counter(), 0, ""
    with open(log, "w", encoding="utf-8") as file:
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        while run.poll() is None:
            if (resident := _resident(psutil.Process(run.pid))) > peak:
                peak, said = resident, _last_line(log)
            time.sleep(INTERVAL)
    if run.returncode:
        sys.exit(f"error: the run failed with {run.returncode}: {_last_line(log)}")
    return {"peak_gib": round(peak / GIB, 2), "peak_after": said, "seconds": round(time.perf_counter() - started, 1)}


def _resident(process: psutil.Process) -> int:
    """Bytes of a process and of its descendants; 0 for one that has ended meanwhile."""
    try:
        running = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for each in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:120] if lines else ""


def table(result: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {size}" for name, size in result["estimate_parts"].items() if size >= 0.05)
    measured = f"measured   {result['peak_gib']:6.2f} GiB in {result['seconds']:.0f} s, after: {result['peak_after']}"
    estimated = f"estimated  {result['estimate_gib']:6.2f} GiB, {result['estimate_phase']}: {parts}"
    return f"{measured}\n{estimated}\nestimate / measured  {result['estimate_over_measured']:.2f}"


if __name__ == "__main__":
    main()
