"""What logging and checkpointing cost: 100 steps with all of it against 100 with none, in one run that takes turns.

    python dev/benchmarks/run_overhead.py                     # recipes/tiny-cpu.yaml, 3 runs of 100 and 100 steps
    python dev/benchmarks/run_overhead.py --steps 20 --rounds 1 --json

With: metrics.jsonl, TensorBoard, the comparison of sampler and trainer in every step, and a checkpoint as often as the
recipe says.  Without: the rollout, the rewards, the update and the sync alone.

As many steps as lie between two checkpoints are taken with it, then as many without, and so on: what slows the machine
for a while slows both.  A turn with it holds one checkpoint, in its middle, which is on disk before the turn ends.  The
first steps, which compile, are left out; what the first checkpoint pays for all is not.

Two ratios: of seconds on the clock, and of CPU seconds of the whole process, its background threads included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from job import ROOT, machine, only_result_on_stdout, run_worker

KINDS = ("seconds", "cpu_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny-cpu.yaml")
    parser.add_argument("--steps", type=int, default=100, help="with, and as many without")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    from grpo_train.engines import conversion
    from grpo_train.recipes import load_recipe

    recipe = load_recipe(ROOT / arguments.recipe)
    block = recipe.training.checkpoint_every
    if arguments.steps < block or arguments.steps % block or arguments.rounds < 1:
        sys.exit(f"error: --steps must be {block}, or a multiple of it, and --rounds at least 1")
    if arguments.worker:
        with only_result_on_stdout() as stdout:
            print(json.dumps(measure(arguments.recipe, arguments.steps, block, arguments.base)), file=stdout)
        return

    rounds = []
    with tempfile.TemporaryDirectory(prefix="run-overhead-") as folder:
        conversion.convert_to_maxtext(recipe.model, Path(folder) / "base")
        for number in range(arguments.rounds):
            command = [
                sys.executable, __file__, "--worker", "--base", str(Path(folder) / "base" / "0" / "items"),
                "--recipe", arguments.recipe, "--steps", str(arguments.steps),
            ]  # fmt: skip
            rounds.append(run_worker(command))
            ratios = [f"{ratio(rounds[-1:], kind)[0]:.3f} of {kind.replace('_', ' ')}" for kind in KINDS]
            print(f"round {number + 1}: with / without {' and '.join(ratios)}", file=sys.stderr, flush=True)
    ratio_of = {}
    for kind in KINDS:
        together, low, high = ratio(rounds, kind)
        ratio_of[kind] = {"all": round(together, 3), "low": round(low, 3), "high": round(high, 3)}
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "steps": arguments.steps,
        "checkpoint_every": block,
        "rounds": rounds,
        "ratio": ratio_of,
        "machine": machine(),
    }
    for kind, row in ratio_of.items():
        interval = f"95 % interval {row['low']:.3f} to {row['high']:.3f}"
        measured = f"{len(rounds)} rounds of {arguments.steps} and {arguments.steps} steps"
        print(f"with / without, {kind.replace('_', ' ')}: {row['all']:.3f}, {interval} ({measured})")
    if arguments.json:
        print(json.dumps(result))


def ratio(rounds: list[dict[str, dict[str, list[float]]]], kind: str) -> tuple[float, float, float]:
    """What all turns with took together, by what those without did, and a 95 % bootstrap interval over the pairs."""
    from grpo_lib import statistics

    on, off = [], []
    for measured in rounds:
        on += measured["with"][kind]
        off += measured["without"][kind]
    most = max(on + off)
    mean = sum(off) / len(off)
    more = statistics.paired_bootstrap([turn / most for turn in off], [turn / most for turn in on])
    difference, low, high = (1 + x * most / mean for x in (more.difference, more.low, more.high))
    return difference, low, high


def measure(recipe_path: str, steps: int, block: int, base: str) -> dict[str, dict[str, list[float]]]:
    """{"with" or "without": {"seconds" or "cpu_seconds": of each block}}, from one run of twice `steps` and some."""
    from grpo_train import checks, training
    from grpo_train.recipes import load_recipe
    from grpo_train.runs import metrics_logger

    turn = block + 1  # Tunix logs a step when the next one is under way: the first step of a turn counts for neither
    warm_up = 2 * turn - turn // 2  # so that checkpoints fall into the middle of the turns with
    recipe = load_recipe(
        ROOT / recipe_path,
        [
            f"training.steps={warm_up + 2 * turn * (steps // block) + 1}",  # the last one saves once more
            f"training.checkpoint_every={2 * turn}",
            "training.validate_every=0",
        ],
    )
    blocks: dict[str, dict[str, list[float]]] = {which: {kind: [] for kind in KINDS} for which in ("with", "without")}
    done, begun = 0, (0.0, 0.0)

    def now_with() -> bool:
        return (done - warm_up) // turn % 2 == 0

    def in_turn(function, otherwise):
        """`function` in the turns with, and nothing but `otherwise` in those without."""
        return lambda *given, **named: function(*given, **named) if now_with() else otherwise

    class Marking(metrics_logger.StepTimer):
        def on_train_end(self, train_ctx) -> None:
            nonlocal done, begun
            super().on_train_end(train_ctx)
            if train_ctx.train_steps == done:  # not the last micro-batch of the step
                return
            was_with = now_with()  # of the step before
            done = train_ctx.train_steps
            taken = (done - warm_up) % turn  # steps of this turn
            if taken == 0:
                train_ctx.checkpoint_manager._checkpoint_manager.wait_until_finished()
            now = (time.perf_counter(), time.process_time())
            if taken == 1:
                begun = now
            elif taken == 0 and done > warm_up:
                for kind, before, after in zip(KINDS, begun, now, strict=True):
                    blocks["with" if was_with else "without"][kind].append(after - before)

    with contextlib.ExitStack() as changes:
        for owner, name, new in (
            (training, "StepTimer", Marking),
            (training, "batch_metrics", in_turn(training.batch_metrics, {})),
            (training.Recorder, "log_scalar", in_turn(training.Recorder.log_scalar, None)),
        ):
            changes.enter_context(mock.patch.object(owner, name, new))
        folder = changes.enter_context(tempfile.TemporaryDirectory(prefix="run-overhead-"))
        session = training.build_session(checks.check(recipe), folder, base)
        training.train(session)
    return blocks


if __name__ == "__main__":
    main()
