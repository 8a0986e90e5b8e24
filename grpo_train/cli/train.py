"""`grpo train`: a run from conversion to report."""

import contextlib
import datetime
import statistics
import sys
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.cli.options import (
    AsJson,
    Base,
    Coordinator,
    NoIsolation,
    Overrides,
    Overwrite,
    Processes,
    ProcessNumber,
    RecipePath,
    RunName,
    RunsFolder,
    commands,
    finish,
    isolate,
    log_for,
    process_count,
)  # fmt: skip
from grpo_train.recipes import Recipe, dump_recipe, load_recipe
from grpo_train.runs.metric_glossary import TASK_METRIC
from grpo_train.runs.preemption import PreemptionHandler

PHASES = ("before", "after")
FIRST_STEPS = 10  # after so many a measured update is put beside the estimate
DONE = ("export/config.json", "report.html")  # the last files of a run, after summary.json

app = commands()


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    run: RunName = None,
    runs: RunsFolder = Path("runs"),
    overwrite: Overwrite = False,
    base: Base = None,
    coordinator: Coordinator = None,
    process: ProcessNumber = None,
    processes: Processes = None,
    no_isolation: NoIsolation = False,
    as_json: AsJson = False,
) -> None:
    """End-to-end run: convert, evaluate, train, evaluate again, export and report.

    The same command continues a run that was interrupted.  On SIGTERM the current step is saved, and the exit code is
    75.

    A multi-process run, such as one process per host of a TPU slice: the same command on each, on a folder that all
    share.  Where JAX does not find the others by itself, as it does on a TPU slice, on GKE and under SLURM, each gets
    --coordinator and its own --process.  When a process is lost, the others exit within a minute.
    """
    resolved = load_recipe(recipe, overrides or ())
    count = process_count(resolved, coordinator, process, processes)
    if run is not None and (Path(run).name != run or run in ("", "..")):
        raise CourseError(
            f"--run {run!r} is not a name: the run becomes a folder in {runs}; leave out slashes and dots"
        )
    directory = runs / (run or resolved.name)
    if count == 1 and not overwrite and (summary := finished_summary(directory, resolved)):
        rates = " -> ".join(f"{summary[phase]['accuracy']:.1%}" for phase in PHASES)
        return finish(
            summary,
            as_json,
            f"{directory} is finished: {rates}; grpo report {directory} shows it, --overwrite trains it again",
        )
    isolate(resolved, no_isolation, log_for(as_json))
    environment.require_free_chips()
    connected: contextlib.AbstractContextManager[int] = contextlib.nullcontext(0)
    if count > 1:
        from grpo_train.runs import multihost

        connected = multihost.distributed_context(coordinator, count, process, digest=_digest(resolved))
    # In this order: JAX's distributed runtime installs a SIGTERM handler of its own, which would ignore it.
    with connected as number, PreemptionHandler(resolved.training.stop_after) as preemption:
        if count > 1:
            import jax

            own = f"{jax.local_device_count()} of {jax.device_count()} devices are its own, {jax.default_backend()}"
            print(f"process {number} of {count}: {own}", file=sys.stderr, flush=True)
        if number:  # it computes with process 0, which does all file I/O and logging
            from grpo_train import checks, pipeline

            pipeline.run(checks.check(resolved), directory, progress=False, preemption=preemption)
        else:
            _train(resolved, directory, overwrite, base, as_json, preemption)


def _train(
    recipe: Recipe, directory: Path, overwrite: bool, base: str | None, as_json: bool, preemption: PreemptionHandler
) -> None:
    from grpo_train import checks
    from grpo_train.runs.run_directory import check_base, check_run, link_base, one_at_a_time, open_run, require_folder

    # Whatever can be wrong is found before the directory is made, and what is found at once comes first.
    continued = check_run(directory, recipe, overwrite=overwrite)
    require_folder(directory.parent, "--runs")
    if recipe.training.checkpoints:
        require_folder(recipe.training.checkpoints, "training.checkpoints")
    if base:
        check_base(base)
    date = None if continued else datetime.date.today()  # not that of a run that is replaced
    ready = checks.check(recipe, run=directory, makes_base=not base, date=date)

    from grpo_lib.common.files import read_json_if_exists, write_json_atomic
    from grpo_train import pipeline, report
    from grpo_train.report.formatting import duration
    from grpo_train.runs.metrics_logger import ESTIMATE

    log = log_for(as_json)
    seconds: dict[int, float] = {}
    updates: list[float] = []
    estimated = _estimate(recipe)

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] in seconds:  # it comes again when its validation joins it
            log(f"step {row['step']}/{recipe.training.steps}  validation {row['validation_accuracy']:.1%}")
            return
        seconds[row["step"]] = row["seconds"]
        updates.append(row.get("seconds_update", 0.0))
        # The first steps compile, and a step after a validation has its time, so the usual one counts.
        steps = statistics.median(seconds.values()) * (recipe.training.steps - row["step"])
        evaluated = read_json_if_exists(directory / "evals" / "before.json").get("seconds") or 0.0
        log(
            f"step {row['step']}/{recipe.training.steps}  {step_line(row, recipe)}  "
            f"({duration(steps + evaluated)} left, with the evaluation after it)"
        )
        if estimated and len(updates) == FIRST_STEPS:
            log(estimated.compared(statistics.median(updates)))

    with one_at_a_time(directory):
        if continued:
            log(f"continuing {directory}")
        directory = open_run(directory, recipe, overwrite=overwrite, log=log, date=ready.render.date)
        if base:
            link_base(directory, base)
        if estimated:
            write_json_atomic(directory / ESTIMATE, {"update_seconds": estimated.update.high})
        summary = pipeline.run(ready, directory, on_step, log, progress=sys.stderr.isatty(), preemption=preemption)
        finish(summary, as_json, f"{report.headline(summary)}\nreport: {report.write_report(directory)}")


def _estimate(recipe: Recipe) -> Any:
    """The stored estimate of a recipe, on the TPU that it is for; else None."""
    import jax

    from grpo_train.tpu import preflight

    if not recipe.hardware.accelerator or jax.default_backend() != "tpu":
        return None
    result = preflight.stored_result(recipe)
    return result.estimate if result else None


def _digest(recipe: Recipe) -> str:
    """What all processes of a run must have in common: the recipe, and the user's own files that it names."""
    from grpo_train.runs.run_directory import digests_of_files

    return f"{dump_recipe(recipe)}{digests_of_files(recipe)}"


def finished_summary(directory: Path, recipe: Recipe) -> dict[str, Any]:
    """summary.json of a run of this recipe that has done everything, its export, too; of another nothing.

    A damaged one counts as none: the run goes on, finds all steps done, and writes it again.
    """
    from grpo_lib.common.files import read_json_if_exists
    from grpo_train.runs.run_directory import changed_keys, check_run

    if not check_run(directory, recipe) or not all((directory / file).exists() for file in DONE):
        return {}
    if "training.steps" in changed_keys(directory, recipe):
        return {}  # it has done everything for another last step
    try:
        summary = read_json_if_exists(directory / "summary.json")
        rates = [summary[phase]["accuracy"] for phase in PHASES]
    except (CourseError, LookupError, TypeError):
        return {}
    return summary if all(isinstance(rate, float) for rate in rates) else {}


def step_line(row: dict[str, Any], recipe: Recipe) -> str:
    """What the terminal shows of a step, in the order in which it happens."""
    tasks = {task.name: (TASK_METRIC.format(task.name, "accuracy"), ".1%") for task in recipe.tasks}
    keys = {
        "reward": ("reward", ".3f"),
        "accuracy": ("accuracy", ".1%"),
        **tasks,
        "format": ("format", ".1%"),
        "length": ("completions/mean_length", ".1f"),
        "loss": ("loss", ".2g"),
        "kl": ("kl", ".2g"),
        "beta": ("beta", ".2g"),
        "rollout": ("seconds_rollout", ".2f"),
        "update": ("seconds_update", ".2f"),
        "sync": ("seconds_sync", ".2f"),
        "seconds": ("seconds", ".2f"),
        "validation": ("validation_accuracy", ".1%"),
    }
    parts = []
    for name, (key, form) in keys.items():
        if key in row:
            number = "nan" if row[key] is None else format(row[key], form)  # None: not a finite number
            parts.append(f"{name} {number}")
    return "  ".join(parts)
