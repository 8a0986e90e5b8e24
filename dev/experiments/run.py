"""Which parts of the algorithm make a difference: experiments on small models whose predictions were written first.

    python dev/experiments/run.py                     # what there is, with the predictions
    python dev/experiments/run.py kl                  # five seeds of each arm; its record says how long
    python dev/experiments/run.py kl --json           # and write assets/experiments/kl.json
    python dev/experiments/run.py real-blind --json   # SmolLM2-135M (make real-model): half a day

Each arm trains from the same base with the same seeds: seed s of every arm takes its problems from the same sequence.
The arms of a seed follow each other, so a machine that slows down slows all of them.  A claim is about differences of
two arms, one for each seed, with the 95 % interval of their mean (Student's t).  Each finished run is appended to
partial/NAME.jsonl in this folder.  An interrupted experiment goes on from there, on another machine, too: commit the
file where an experiment takes hours, and remove it when the record is written.

The experiments are in the YAML files of this folder (experiment.py), what an arm changes beyond its recipe in arms.py,
what is measured in measures.py, supervised arms in imitation.py, and how a claim is judged in judge.py.
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

import imitation
import numpy as np
from arms import BEFORE
from experiment import EXPERIMENTS, Experiment
from judge import bar_of, judge
from measures import ACROSS, AFTER, TESTS, Run, curves_of, rounded, tested, validated
from shared import ROOT, machine
from starts import start_of
from tqdm import tqdm

from grpo_lib.common.files import append_jsonl, read_jsonl, write_json_atomic
from grpo_train import checks, training
from grpo_train.recipes import Recipe, load_recipe

RECORDS = ROOT / "assets/experiments"
PARTIAL = ROOT / "dev/experiments/partial"
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
        "tested": experiment.tested,
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
    parser.add_argument("--folder", type=Path, default=PARTIAL, help="of the finished runs")
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
    """The runs of an experiment: those that NAME.jsonl in `folder` has, and the others now.

    A finished run is appended at once, so that an interruption costs one run at most.
    """
    experiment = EXPERIMENTS[name]
    file = folder / f"{name}.jsonl"
    rows = read_jsonl(file) if file.exists() else []
    finished = {row["settings"]: row["run"] for row in rows}
    runs = []
    for seed, arm in tqdm(planned(experiment, seeds), desc=name, unit="run"):
        recipe = recipe_of(experiment, arm, seed, steps)
        settings = settings_of(experiment, arm, recipe)
        if settings not in finished:
            run = run_arm(experiment, arm, recipe)
            append_jsonl(file, {"settings": settings, "machine": machine(), "run": run})
            finished[settings] = run
            tqdm.write(f"seed {seed}, {arm}: {run['accuracy']:.1%}, {run['seconds']:.0f} s", file=sys.stderr)
        runs.append(finished[settings])
    return runs


def planned(experiment: Experiment, seeds: int) -> list[tuple[int, str]]:
    """The seed and the arm of each run, in their order."""
    return [(seed, arm) for seed in range(seeds) for arm in experiment.arms if seed < experiment.seeds.get(arm, seeds)]


def recipe_of(experiment: Experiment, arm: str, seed: int, steps: int | None = None) -> Recipe:
    changes = [*COMMON, *experiment.changes, *experiment.arms[arm], f"seed={seed}"]
    if steps:
        changes.append(f"training.steps={steps}")
    return load_recipe(experiment.recipe_path, changes)


def settings_of(experiment: Experiment, arm: str, recipe: Recipe) -> str:
    """What decides a run, in short, the same on every machine: finished runs of other settings stay apart."""
    values = recipe.model_dump(mode="json", exclude={"model"}, exclude_defaults=True)
    rest = [arm, experiment.before, experiment.after, experiment.tested, experiment.samples.get(arm, 0)]
    return f"{arm} {recipe.seed} {zlib.crc32(json.dumps([values, rest], sort_keys=True).encode()):08x}"


def run_arm(experiment: Experiment, arm: str, recipe: Recipe) -> Run:
    """Train one arm with one seed, and measure."""
    started = time.perf_counter()
    measures: Run = {}
    start, problems = start_of(experiment, arm, recipe)
    if arm in imitation.ARMS:
        start, measures = imitation.imitated(arm, recipe, problems, start)
    with tempfile.TemporaryDirectory(prefix="experiments-") as folder:
        session = training.build_session(checks.check(recipe, problems), folder, start, log=lambda text: None)
        if experiment.before:
            BEFORE[experiment.before](session, arm)
        validate = functools.partial(validated, session)
        rows = training.train(session, validate=validate, validate_every=experiment.validate_every)
        if experiment.after:
            measures |= AFTER[experiment.after](session)
        measures |= tested(session, TESTS[experiment.tested](recipe), experiment.samples.get(arm, 0))
    if rows:
        measures["dose"] = sum(row["learning_rate"] for row in rows)
    curves = curves_of(rows)
    last = [value for value in curves.get("entropy", [])[-5:] if value is not None]
    run = {
        "seed": recipe.seed,
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
