"""What logging and checkpointing cost: 100 steps with all of it against the same steps with none.

    python benchmarks/run_overhead.py                     # recipes/tiny-cpu.yaml, 3 rounds of 100 steps
    python benchmarks/run_overhead.py --steps 20 --rounds 1 --json

With: metrics.jsonl, TensorBoard, the comparison of sampler and trainer in every step, a checkpoint as often as the
recipe says, and the last one waited for.  Without: the rollout, the rewards, the update and the sync alone.  Both take
the same steps from the same weights, in processes of their own, in turns; the first steps, which compile, are left out.

Two ratios: of seconds on the clock, and of CPU seconds of the whole process, its background threads included, which
neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from job import ROOT, only_result_on_stdout

WARM_UP = 3  # first steps, which hold the compilations
SUMMARY = {"median": statistics.median, "min": min, "max": max}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny-cpu.yaml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--worker", choices=["with", "without"], help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP + 1 or arguments.rounds < 1:
        sys.exit(f"error: --steps must be above {WARM_UP + 1}, and --rounds at least 1")
    if arguments.worker:
        with only_result_on_stdout() as stdout:
            seconds = measure(arguments.recipe, arguments.steps, arguments.base, arguments.worker == "with")
            print(json.dumps(seconds), file=stdout)
        return

    from grpo_lib import environment, models
    from grpo_lib.recipes import load_recipe

    recipe = load_recipe(ROOT / arguments.recipe)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="run-overhead-") as folder:
        models.convert_to_maxtext(recipe.model, Path(folder) / "base")
        for number in range(arguments.rounds):
            order = ("with", "without") if number % 2 else ("without", "with")
            seconds = {which: in_a_process(arguments, Path(folder) / "base" / "0" / "items", which) for which in order}
            rounds.append(seconds)
            print(
                f"round {number + 1}: {seconds['with'][0]:.3f} s a step with, {seconds['without'][0]:.3f} s without; "
                f"of CPUs {seconds['with'][1]:.3f} and {seconds['without'][1]:.3f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    kinds = ("seconds", "cpu_seconds")
    ratios = {kind: [one["with"][n] / one["without"][n] for one in rounds] for n, kind in enumerate(kinds)}
    machine = environment.describe(devices=False)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "steps": arguments.steps,
        "checkpoint_every": recipe.training.checkpoint_every,
        **{
            f"{kind}_per_step": {which: [round(one[which][n], 4) for one in rounds] for which in ("with", "without")}
            for n, kind in enumerate(kinds)
        },
        "ratio": {kind: {name: round(f(ratios[kind]), 3) for name, f in SUMMARY.items()} for kind in kinds},
        "machine": {key: machine[key] for key in ("platform", "processor", "cores", "memory_gib", "commit")},
    }
    for kind, ratio in result["ratio"].items():
        median, low, high = (ratio[name] for name in SUMMARY)
        print(f"with / without, {kind}: {median:.3f} in the median of {len(rounds)} rounds ({low:.3f} to {high:.3f})")
    if arguments.json:
        print(json.dumps(result))


def in_a_process(arguments: argparse.Namespace, base: Path, which: str) -> list[float]:
    """Seconds and CPU seconds per step, measured by a process of its own."""
    command = [
        sys.executable, __file__, "--worker", which, "--base", str(base),
        "--recipe", arguments.recipe, "--steps", str(arguments.steps),
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        sys.exit(f"error: the run {which} failed: {' '.join(last)}\n  to see all of it: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(recipe_path: str, steps: int, base: str, recorded: bool) -> list[float]:
    """Seconds and CPU seconds per step, from the end of the warm-up until the last checkpoint is on disk."""
    import orbax.checkpoint as ocp

    from grpo_lib import recording, training
    from grpo_lib.problems import load_problems
    from grpo_lib.recipes import load_recipe

    settings = [f"training.steps={steps}", "training.validate_every=0"]
    recipe = load_recipe(ROOT / recipe_path, settings)
    marks: list[tuple[float, float]] = []

    class Marking(recording.Clock):
        def on_train_end(self, train_ctx) -> None:
            super().on_train_end(train_ctx)
            marks.append((time.perf_counter(), time.process_time()))

    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(training, "Clock", Marking))
        if not recorded:
            changes.enter_context(mock.patch.object(training, "batch_metrics", lambda *_, **__: {}))
            changes.enter_context(mock.patch.object(training.Recorder, "backends", lambda _: [mock.MagicMock]))
            never = ocp.CheckpointManagerOptions(should_save_fn=lambda *_: False)
            changes.enter_context(mock.patch.object(training.checkpoints, "manager_options", lambda *_: never))
        folder = changes.enter_context(tempfile.TemporaryDirectory(prefix="run-overhead-"))
        session = training.build_session(recipe, folder, load_problems(recipe.problems, "train"), base)
        training.train(session)
        marks.append((time.perf_counter(), time.process_time()))
    # Without: until the last update, for Tunix saves a checkpoint when it closes, whatever its options say.
    ended = marks[-1] if recorded else marks[-2]
    return [(end - begin) / (steps - WARM_UP) for end, begin in zip(ended, marks[WARM_UP - 1], strict=True)]


if __name__ == "__main__":
    main()
