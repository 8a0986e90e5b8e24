"""Seconds per GRPO step: the course's trainer against plain JAX, plain JAX with the same levers, and TRL.

    python dev/benchmarks/step_time.py                      # recipes/tiny-cpu.yaml, 3 rounds of 20 steps
    python dev/benchmarks/step_time.py --no-trl --json
    python dev/benchmarks/step_time.py recipes/smollm2-135m-cpu.yaml --steps 5
    python dev/benchmarks/step_time.py --no-trl --against ../an-older-checkout

All start from the same weights and take the same prompts in the same order, the same group size, token limits and
optimizer settings.  Plain JAX (hand_jitted.py) pads every prompt to the longest of the run and every completion to the
limit.  The floor (floor.py) is the same loop with what the course's trainer does to be fast, written by hand, and an
update that takes from the sampler what both compute: it bounds what can be had; it is for the tiny model, where a step
is overhead.  Of a larger model a step is arithmetic: there the
peak (products.py), the matrix products of a step alone, says which fraction of it each one reaches.  TRL's GRPOTrainer
(trl_grpo.py) has the settings that were fastest for it.

--against puts the course's trainer of another checkout of this repository beside them, with the packages of this
environment: that checkout writes the job itself, by its own recipe of that name and the same changes, and its job must
be the same work.

A model that needs a cold start earns no reward without it, and groups without spread cost the course no gradient.  So
there, for all, the reward is a coin (job.py), and each group has both sides.

The rounds are interleaved, each measurement is a process of its own, and a step's time is the median over a round's
steps without the first ones, which compile.  The course's trainer writes no checkpoints here, as the others write none.
Measure on a machine that does nothing else: contention slows them differently.  A ratio holds for one kind of
processor, so the table names its vector and matrix units, and the bar of course/trl depends on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import ROOT, Job, machine, output_of, run_worker

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # first steps of a process, which hold the compilations
WORKERS = {
    "course": "course_grpo.py", "hand_jitted": "hand_jitted.py", "floor": "floor.py", "products": "products.py",
    "trl": "trl_grpo.py",
}  # fmt: skip
BENCHMARKS = ("dev/benchmarks", "benchmarks")  # where a checkout has this program: now, and before it was moved
LABELS = {
    "course": "this course (MaxText + Tunix)",
    "hand_jitted": "plain_grpo: plain JAX",
    "floor": "the floor: with the levers",
    "products": "the peak: products alone",
    "trl": "TRL, torch CPU",
    "before": "the course of --against",
}
Results = list[dict[str, dict[str, Any]]]  # per round: worker -> its result


def make_job(recipe_path: str, overrides: list[str], steps: int) -> Job:
    """The batches that the course's trainer will see in its first `steps` steps, and where its weights are.

    Raises CourseError for a bad recipe.
    """
    from itertools import islice

    from grpo_lib.common import environment
    from grpo_lib.problems import load_problems, training_batches
    from grpo_train.engines import conversion, maxtext_model
    from grpo_train.engines.tokens import Renderer, fit_prompts, load_tokenizer
    from grpo_train.recipes import load_recipe

    settings = [f"training.steps={steps}", f"training.checkpoint_every={steps + 1}", "training.schedule=constant"]
    settings.append("training.schedule_steps=null")
    recipe = load_recipe(recipe_path, [*overrides, *settings])
    if recipe.training.cold_start:
        settings += ["training.cold_start=0", "rewards=[coin]"]
        recipe = load_recipe(recipe_path, [*overrides, *settings])
    tokenizer = load_tokenizer(recipe.model)
    render = Renderer(recipe.prompts, tokenizer)
    problems = load_problems(recipe.problems, "train")
    batches = training_batches(
        problems,
        render,
        batch_size=recipe.plan.prompts_per_step,
        seed=recipe.seed,
    )
    first = list(islice(batches, steps))
    directory = maxtext_model.model_directory(recipe.model).resolve()
    newest = max(int(path.stat().st_mtime) for path in directory.iterdir())
    cache = environment.repo_root() / ".cache" / "benchmarks" / f"{directory.name}-{newest}-maxtext"
    return Job(
        model=str(directory),
        checkpoint=str(conversion.convert_to_maxtext(recipe.model, cache)),
        recipe=recipe.model_dump(mode="json"),
        max_prompt_length=fit_prompts(recipe.rollout, render, problems)[1],
        prompts=[[str(prompt) for prompt in batch["prompts"]] for batch in first],
        answers=[[str(answer) for answer in batch["answer"]] for batch in first],
    )


@dataclass(frozen=True)
class Worker:
    """One process that is measured: `python script job`, in the checkout that it belongs to."""

    python: str | Path
    script: Path
    job: Path
    checkout: Path = ROOT


def measure(worker: Worker) -> dict[str, Any]:
    """Run one worker in a process of its own."""
    return run_worker([worker.python, worker.script, worker.job], worker.checkout)


def checkout(text: str) -> Path:
    """The directory of --against.  Raises ArgumentTypeError where it has not the programs that are run in it."""
    directory = Path(text).resolve()
    if not text or directory == ROOT:
        raise argparse.ArgumentTypeError("name another checkout than the one that you are in")
    if not benchmarks_of(directory):
        raise argparse.ArgumentTypeError(f"{directory} is no checkout of this repository")
    return directory


def benchmarks_of(directory: Path) -> Path | None:
    """The folder of a checkout that has its benchmarks."""
    for folder in BENCHMARKS:
        if all((directory / folder / name).is_file() for name in ("step_time.py", WORKERS["course"])):
            return directory / folder
    return None


def worker_of_checkout(directory: Path, arguments: argparse.Namespace, own: Job, job: Path) -> Worker:
    """The course's worker of another checkout, and the job that it writes.  Exits where its job is another one."""
    folder = benchmarks_of(directory)
    assert folder  # by `checkout`
    writer = [sys.executable, folder / "step_time.py", arguments.recipe, *arguments.overrides]
    output_of([*writer, "--steps", str(arguments.steps), "--write-job", job], directory)
    if what := difference(own, Job.load(job)):
        sys.exit(f"error: --against: the recipe has other {what} there; give what differs as KEY=VALUE")
    return Worker(sys.executable, folder / WORKERS["course"], job, directory)


def difference(one: Job, other: Job) -> str:
    """What makes two jobs different work; empty where they are the same."""
    for name in ("prompts", "answers"):
        if getattr(one, name) != getattr(other, name):
            return name
    for section, key in (("grpo", "group_size"), ("rollout", "max_completion_length"), ("model", "dtype")):
        if one.recipe[section].get(key) != other.recipe[section].get(key):
            return f"{section}.{key}"
    return ""


def commit_of(directory: Path) -> str:
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def step_seconds(result: dict[str, Any], column: str = "seconds") -> float:
    """Median over the steps of one process, without those that compile."""
    return statistics.median(result[column][WARM_UP:])


def mean_after_warm_up(values: Sequence[float]) -> float:
    return statistics.mean(values[WARM_UP:])


def mean_of_last(values: Sequence[float]) -> float:
    return statistics.mean(values[-5:])


def bars(units: Sequence[str]) -> dict[str, float]:
    """The largest ratios that we want.  torch multiplies on AMX, and XLA gains less from it.

    That of the floor was set after one machine's 1.41 (docs/results.md): it says when the course gets slower.
    """
    return {"course/trl": 0.8 if "AMX" in units else 0.6, "course/floor": 1.5}


def summarize(rounds: Results, units: Sequence[str] = ()) -> dict[str, Any]:
    """Medians over the rounds, and the ratios course / other, each round for itself, with their bars."""
    workers = list(rounds[0])
    per_round: dict[str, list[float]] = {}
    for worker in workers:
        per_round[worker] = [step_seconds(r[worker]) for r in rounds]
    ratios = {}
    for other in workers[1:]:
        values = [a / b for a, b in zip(per_round["course"], per_round[other], strict=True)]
        ratio: dict[str, Any] = {
            "median": round(statistics.median(values), 3),
            "min": round(min(values), 3),
            "max": round(max(values), 3),
        }
        bar = bars(units).get(f"course/{other}")
        if bar:
            ratio |= {"bar": bar, "met": statistics.median(values) <= bar}
        ratios[f"course/{other}"] = ratio

    seconds_per_step = {}
    for worker, values in per_round.items():
        seconds_per_step[worker] = [round(value, 4) for value in values]
    return {
        "fraction_of_peak": fractions_of_peak(rounds) if "products" in workers else {},
        "seconds_per_step": seconds_per_step,
        "ratios": ratios,
        "workers": {worker: medians([r[worker] for r in rounds]) for worker in workers},
    }


def fractions_of_peak(rounds: Results) -> dict[str, dict[str, float]]:
    """{worker: {"rollout" or "update": the seconds of the matrix products alone over its own}}."""
    peak: dict[str, dict[str, float]] = {}
    for part in ("rollout", "update"):
        column = f"seconds_{part}"
        for other in (worker for worker in rounds[0] if worker != "products"):
            reached = [step_seconds(r["products"], column) / step_seconds(r[other], column) for r in rounds]
            peak.setdefault(other, {})[part] = round(statistics.median(reached), 3)
    return peak


def medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one worker's results, one from each round."""

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return round(statistics.median(value(result) for result in results), 3)

    return {
        "seconds": median(step_seconds),
        "rollout": median(lambda r: step_seconds(r, "seconds_rollout")),
        "update": median(lambda r: step_seconds(r, "seconds_update")),
        "first_step": median(lambda r: r["seconds"][0]),
        "process": median(lambda r: r["process_seconds"]),
        "memory_gib": median(lambda r: r["peak_memory_gib"]),
        "completion_length": median(lambda r: mean_after_warm_up(r["completion_length"])),
        "reward_first": median(lambda r: r["reward"][0]),
        "reward_last": median(lambda r: mean_of_last(r["reward"])),
        "versions": results[0]["versions"],
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as text; seconds unless it says otherwise."""
    head = f"{'':30} {'s/step':>7} {'min–max':>13} {'rollout':>8} {'update':>7} {'1st step':>8} {'process':>8}"
    lines = [head + f" {'GiB':>5} {'tokens':>7} {'reward':>12}"]
    for worker, row in summary["workers"].items():
        values = summary["seconds_per_step"][worker]
        cells = [
            f"{LABELS[worker]:30}",
            f"{row['seconds']:7.3f}",
            f"{min(values):6.3f}–{max(values):.3f}",
            f"{row['rollout']:8.3f}",
            f"{row['update']:7.3f}",
            f"{row['first_step']:8.2f}",
            f"{row['process']:8.1f}",
            f"{row['memory_gib']:5.2f}",
            f"{row['completion_length']:7.1f}",
            f"{row['reward_first']:5.2f} → {row['reward_last']:.2f}",
        ]
        lines.append(" ".join(cells))
    lines.append("")
    for name, ratio in summary["ratios"].items():
        line = f"{name:30} {ratio['median']:7.3f} {ratio['min']:6.3f}–{ratio['max']:.3f}"
        if "bar" in ratio:
            line += f"   bar {ratio['bar']:g}: {'met' if ratio['met'] else 'not met'}"
        lines.append(line)
    for worker, parts in summary["fraction_of_peak"].items():
        lines.append(f"{LABELS[worker]:30} update {parts['update']:.0%}, rollout {parts['rollout']:.0%} of the peak")
    return "\n".join(lines)


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes: says how quiet the machine was."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", nargs="?", default="recipes/tiny-cpu.yaml", help="recipe file (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (%(default)s)")
    steps_help = f"per process; the first {WARM_UP} do not count (%(default)s)"
    parser.add_argument("--steps", type=int, default=20, help=steps_help)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out; nothing is installed then")
    others = [worker for worker in WORKERS if worker != "course"]
    parser.add_argument("--without", nargs="*", choices=others, default=[], help="leave these out, for the minutes")
    against_help = "another checkout of this repository, whose trainer is measured, too"
    parser.add_argument("--against", type=checkout, metavar="DIRECTORY", help=against_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--write-job", metavar="FILE", help="write the job that the workers are given, and stop")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps <= WARM_UP:
        parser.error(f"--rounds must be 1 or more and --steps more than {WARM_UP}")
    return arguments


def workers_for(job: Job, without: Sequence[str]) -> list[str]:
    config = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
    left_out = {*without, "products" if config["model_type"] == "qwen3" else "floor"}
    return [worker for worker in WORKERS if worker not in left_out]


def pythons_of(workers: list[str]) -> dict[str, str | Path]:
    """The interpreter of each worker.  Raises CourseError if TRL's environment cannot be made."""
    from grpo_lib.common.errors import CourseError

    pythons: dict[str, str | Path] = dict.fromkeys(workers, sys.executable)
    if "trl" in workers:
        from peer_environments import TRL, EnvironmentFailed, ensure

        try:
            pythons["trl"] = ensure(TRL)
        except EnvironmentFailed as error:
            raise CourseError(str(error)) from None
    return pythons


def measure_rounds(workers: dict[str, Worker], count: int) -> Results:
    """Each worker once in each round, in turn."""
    rounds: Results = []
    for number in range(1, count + 1):
        rounds.append({})
        for name, worker in workers.items():
            rounds[-1][name] = measure(worker)
            seconds = step_seconds(rounds[-1][name])
            print(f"round {number}: {LABELS[name]:30} {seconds:.3f} s per step", file=sys.stderr, flush=True)
    return rounds


def measure_job(job: Job, pythons: dict[str, str | Path], arguments: argparse.Namespace) -> Results:
    """The rounds of this checkout's workers, and of the one of --against."""
    with tempfile.TemporaryDirectory(prefix="step-time-") as directory:
        job_file = Path(directory) / "job.json"
        job.save(job_file)
        workers = {name: Worker(python, HERE / WORKERS[name], job_file) for name, python in pythons.items()}
        if arguments.against:
            other_job = Path(directory) / "other.json"
            workers["before"] = worker_of_checkout(arguments.against, arguments, job, other_job)
        return measure_rounds(workers, arguments.rounds)


def main() -> None:
    arguments = parse_arguments()
    from grpo_lib.common import environment
    from grpo_lib.common.errors import CourseError

    try:
        environment.prepare()
        job = make_job(arguments.recipe, arguments.overrides, arguments.steps)
        if arguments.write_job:
            job.save(arguments.write_job)
            print(f"wrote {arguments.write_job}")
            return
        pythons = pythons_of(workers_for(job, [*arguments.without, *(["trl"] if arguments.no_trl else [])]))
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    before = load_average()
    rounds = measure_job(job, pythons, arguments)

    recipe = job.recipe
    where = machine()
    setting = {
        "recipe": recipe["name"],
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "prompts_per_step": len(job.prompts[0]),
        "group_size": recipe["grpo"]["group_size"],
        "max_prompt_length": job.max_prompt_length,
        "max_completion_length": recipe["rollout"]["max_completion_length"],
        "machine": where,
        "load_average": {"before": before, "after": load_average()},
    }
    if arguments.against:
        setting["against"] = commit_of(arguments.against)
    summary = summarize(rounds, where["units"]) | setting
    batch = f"{summary['prompts_per_step']} prompts × {summary['group_size']} completions"
    lengths = (summary["max_prompt_length"], summary["max_completion_length"])
    print(f"{batch}; prompts of at most {lengths[0]} tokens, completions of at most {lengths[1]}")
    units = ", ".join(where["units"]) or "units unknown"
    print(f"{where['processor']} ({units}), {where['cores']} cores, {where['memory_gib']} GiB; load average {before}\n")
    print(table(summary) + "\n")
    for worker, row in summary["workers"].items():
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        print(f"{worker}: {versions}")
    if arguments.json:
        print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
    main()
