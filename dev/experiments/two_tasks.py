"""One task or two with the same number of completions: the runs behind notebook 08.

    python dev/experiments/two_tasks.py                # lessons/tiny-tasks.yaml, three arms, seeds 0 to 2: 15 minutes
    python dev/experiments/two_tasks.py --json         # and write assets/reference/two_tasks.json

Each arm trains from the same base: on both tasks (the recipe as it is), or on one of them (its profiles).  Then every
exported model answers the test problems of both tasks, greedily; the base and the model of the first seed that trained
on both also 32 times each, sampled.  Arms of a seed follow each other, so a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import ROOT, machine

from grpo_lib.common.files import write_json_atomic
from grpo_lib.evaluation import EvalRun
from grpo_train.recipes import load_recipe
from grpo_train.runs.metric_glossary import read_metrics

RECIPE = ROOT / "recipes/lessons/tiny-tasks.yaml"
ARMS = {"both": "", "small-numbers": "@small", "large-numbers": "@large"}
CURVES = ("accuracy", "frac_reward_zero_std")
SAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run; default: the recipe's")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each problem")
    parser.add_argument("--json", action="store_true", help="write assets/reference/two_tasks.json")
    arguments = parser.parse_args()
    changes = [f"training.steps={arguments.steps}"] if arguments.steps else []

    recipe = load_recipe(RECIPE, changes)
    runs: list[dict[str, Any]] = []
    sampled: dict[str, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="two-tasks-") as folder:
        base = evaluated(str(ROOT / recipe.model.path), Path(folder) / "base.jsonl", arguments.samples)
        sampled["base"] = rights(base)
        for seed in range(arguments.seeds):
            for arm, profile in ARMS.items():
                name = f"{arm}-{seed}"
                grpo("train", f"{RECIPE}{profile}", f"seed={seed}", *changes, "--runs", folder, "--run", name)
                run = Path(folder) / name
                samples = arguments.samples if arm == "both" and seed == 0 else 0
                answered = evaluated(str(run / "export"), Path(folder) / f"{name}.jsonl", samples)
                if samples:
                    sampled["trained"] = rights(answered)
                runs.append({"arm": arm, "seed": seed, "curves": curves(run, arm), "verdicts": verdicts(answered)})
                print(f"seed {seed}, {arm}: {shares(runs[-1]['verdicts'])}", flush=True)
    settings = f"--seeds {arguments.seeds} --samples {arguments.samples}"
    result = {
        "command": f"python dev/experiments/two_tasks.py {settings} --json",
        "recipe": recipe.name,
        "steps": recipe.training.steps,
        "completions_per_step": recipe.plan.completions_per_step,
        "runs": runs,
        "samples": arguments.samples,
        "right_samples": sampled,
        "machine": machine(),
    }
    if arguments.json:
        write_json_atomic(ROOT / "assets/reference/two_tasks.json", result)


def grpo(*arguments: str) -> None:
    """A command of the course; what it prints is shown only if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_train.cli", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        sys.exit(f"error: grpo {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def evaluated(model: str, file: Path, samples: int) -> dict[str, EvalRun]:
    """The answers of a model to the test problems of both tasks, by task."""
    more = ["--samples", str(samples)] if samples else []
    grpo("evaluate", str(RECIPE), f"model.path={model}", "--output", str(file), *more)
    return EvalRun.load(file).by_task()


def verdicts(answered: dict[str, EvalRun]) -> dict[str, str]:
    """For each task a "1" or "0" for each problem: whether the greedy answer is right."""
    return {task: "".join(str(int(record["strict"])) for record in run.counted) for task, run in answered.items()}


def rights(answered: dict[str, EvalRun]) -> dict[str, list[int]]:
    """For each task, how many of the samples of each problem are right."""
    right_samples = {}
    for task, run in answered.items():
        counts = {record["id"]: 0 for record in run.records}
        for record in run.records:
            counts[record["id"]] += record["strict"] and not record["greedy"]
        right_samples[task] = list(counts.values())
    return right_samples


def curves(run: Path, arm: str) -> dict[str, dict[str, list[float | None]]]:
    """{task: {metric: [steps]}}, of the tasks that the arm trained on.  None: no problem of the task in that step."""
    rows = read_metrics(run / "metrics.jsonl")
    if arm != "both":
        return {arm: {name: [row.get(name) for row in rows] for name in CURVES}}
    tasks = list(ARMS)[1:]
    return {task: {name: [row.get(f"tasks/{task}/{name}") for row in rows] for name in CURVES} for task in tasks}


def shares(verdicts: dict[str, str]) -> str:
    return ", ".join(f"{task} {text.count('1') / len(text):.1%}" for task, text in verdicts.items())


if __name__ == "__main__":
    main()
