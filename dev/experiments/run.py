"""Which parts of the algorithm make a difference: experiments on small models whose predictions were written first.

    python dev/experiments/run.py                     # what there is, with the predictions
    python dev/experiments/run.py kl                  # five seeds of each arm; its record says how long
    python dev/experiments/run.py kl --json           # and write assets/experiments/kl.json
    python dev/experiments/run.py real --seeds 3      # SmolLM2-135M (make real-model), 45 minutes for each seed

Each arm trains from the same base with the same seeds: seed s of every arm takes its problems from the same sequence.
The arms of a seed follow each other, so a machine that slows down slows all of them.  A claim is about differences of
two arms, one for each seed, with the 95 % interval of their mean (Student's t).  An interrupted experiment goes on
where it stopped, from the finished runs in --folder; with `--folder dev/experiments/partial` these can be committed.

The experiments are in the YAML files of this folder (experiment.py), what an arm changes beyond its recipe in arms.py,
what is measured in measures.py, and how a claim is judged in judge.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from arms import BEFORE
from experiment import EXPERIMENTS, Experiment
from judge import bar_of, judge
from measures import ACROSS, AFTER, Run, curves_of, rounded, summary_of, validated
from shared import ROOT, machine
from starts import start_of
from tqdm import tqdm

from grpo_lib.common.files import write_json_atomic
from grpo_train import checks, training
from grpo_train.recipes import load_recipe

RECORDS = ROOT / "assets/experiments"
COMMON = ["training.checkpoint_every=1000", "training.validate_every=0", "problems.test=500", "problems.validation=200"]


def main() -> None:
    arguments = parsed()
    if not arguments.name:
        print_predictions()
        return
    started = time.perf_counter()
    experiment = EXPERIMENTS[arguments.name]
    runs = all_runs(arguments.name, arguments.seeds, arguments.steps, arguments.folder)
    result = {
        "command": f"python dev/experiments/run.py {arguments.name} --seeds {arguments.seeds} --json",
        "question": experiment.question,
        "changes": experiment.changes,
        "arms": experiment.arms,
        "claims": judged(experiment, runs),
        "units": {"entropy": "nats per token"},
        "runs": runs,
        "seconds": sum(run["seconds"] for run in runs),
        "machine": machine(),
    }
    for claim in result["claims"]:
        print(claim["sentence"])
    just_now = time.perf_counter() - started
    print(f"{result['seconds'] / 60:.0f} minutes of runs, {just_now / 60:.0f} of them just now")
    if arguments.json:
        RECORDS.mkdir(exist_ok=True)
        write_json_atomic(RECORDS / f"{arguments.name}.json", result)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS, help="of the experiment; none: print all predictions")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run; default: the experiment's")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "experiments", help="where finished runs wait")
    parser.add_argument("--json", action="store_true", help="write assets/experiments/NAME.json")
    arguments = parser.parse_args()
    if arguments.seeds < 3:
        parser.error(f"--seeds: an interval needs at least 3, got {arguments.seeds}")
    if arguments.json and arguments.steps:
        parser.error("--json: a record is of whole runs; leave out --steps")
    return arguments


def print_predictions() -> None:
    for name, experiment in EXPERIMENTS.items():
        print(f"{name}: {experiment.question}")
        for claim in experiment.claims:
            print(f"    {claim.text} ({bar_of(claim)})")


def all_runs(name: str, seeds: int, steps: int | None, folder: Path) -> list[Run]:
    """The runs of an experiment: those that a file in `folder` has, and the others now.

    Each finished run is written at once, so that an interruption costs one run at most.
    """
    experiment = EXPERIMENTS[name]
    settings = json.dumps([COMMON, experiment.changes, experiment.arms])  # finished runs of other settings stay apart
    file = folder / f"{name}-{steps or 'whole'}-{zlib.crc32(settings.encode()):08x}.json"
    runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    done = {(run["seed"], run["arm"]) for run in runs}
    planned = [(seed, arm) for seed in range(seeds) for arm in experiment.arms]
    missing = [pair for pair in planned if pair not in done]
    for seed, arm in tqdm(missing, desc=name, unit="run"):
        run = run_arm(experiment, arm, seed, steps)
        runs.append(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(file, runs)
        tqdm.write(f"seed {seed}, {arm}: {run['accuracy']:.1%}, {run['seconds']:.0f} s", file=sys.stderr)
    return [run for run in runs if run["seed"] < seeds]  # the file may have more


def run_arm(experiment: Experiment, arm: str, seed: int, steps: int | None) -> Run:
    """Train one arm with one seed, and measure."""
    started = time.perf_counter()
    changes = [*COMMON, *experiment.changes, *experiment.arms[arm], f"seed={seed}"]
    if steps:
        changes.append(f"training.steps={steps}")
    recipe = load_recipe(experiment.recipe_path, changes)
    with tempfile.TemporaryDirectory(prefix="experiments-") as folder:
        start, problems = start_of(experiment, arm, recipe)
        session = training.build_session(checks.check(recipe, problems), folder, start, log=lambda text: None)
        if experiment.before:
            BEFORE[experiment.before](session, arm)
        validate = functools.partial(validated, session)
        rows = training.train(session, validate=validate, validate_every=experiment.validate_every)
        measures = AFTER[experiment.after](session) if experiment.after else {}
        summary = summary_of(session, "test")
        measures |= {"accuracy": summary["accuracy"], "form": summary["format_accuracy"]}
    curves = curves_of(rows)
    last = [value for value in curves.get("entropy", [])[-5:] if value is not None]
    run = {
        "seed": seed,
        "arm": arm,
        "seconds": round(time.perf_counter() - started, 1),
        "entropy": float(np.mean(last)) if last else None,
        "way": float(np.mean(curves["accuracy"])) if rows else None,  # of the samples of all steps
        "completions_per_step": recipe.plan.completions_per_step,
        "validation": [rounded(row.get("validation_accuracy")) for row in rows],
        "curves": curves,
        **measures,
    }
    del session
    gc.collect()
    return run


def judged(experiment: Experiment, runs: list[Run]) -> list[dict[str, Any]]:
    """Each claim with the value of each seed, mean, interval, verdict and a sentence."""
    if experiment.across:
        ACROSS[experiment.across](runs)
    return [judge(claim, runs) for claim in experiment.claims]


if __name__ == "__main__":
    main()
