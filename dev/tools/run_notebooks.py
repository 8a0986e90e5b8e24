"""Execute the course's notebooks in order with papermill, as a reader would, and print the result.

    python dev/tools/run_notebooks.py --recipe recipes/tiny-cpu.yaml --run course      (`make course`)
    python dev/tools/run_notebooks.py --in-place                                       (`make notebooks`, for authors)

Executed copies go to runs/RUN/notebooks/. Where the recipe has another model than the tiny one, text that is true of
the tiny one only (cells tagged `tiny-model`) is left out. With --in-place the outputs are written into notebooks/
itself, with the hash of the code that produced them, and only if they contain nothing specific to this machine.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import branches
import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbformat import NotebookNode

from grpo_lib.common import environment, files
from grpo_lib.common.errors import CourseError
from grpo_train.recipes import load_recipe
from grpo_train.runs import machine

# Each notebook, and what its kernel imports while those before it still work: JAX, MaxText and Tunix take 10 s.
PRELOADED = {
    "00_setup": "grpo_train.engines.maxtext_model",
    "01_checkpoint_conversion": "grpo_train.pipeline",
    "02_reward_design": "grpo_train.training",
    "03_policy_update": "grpo_train.losses.packing",
    "04_grpo_training": "grpo_train.pipeline",
    "05_evaluation": "grpo_train.pipeline",
    "further/06_on_a_tpu": "grpo_train.tpu.smoke_test",
    "further/07_policy_loss_kernel": "grpo_train.losses.pallas_kernel",
    "further/08_competition_math": "grpo_train.pipeline",
    "further/09a_which_algorithm": "grpo_train.losses.packing",
    "further/09b_how_to_compare": "grpo_train.losses.packing",
}
NOTEBOOKS = tuple(PRELOADED)
# By a kernel, or by cells.
IMPORTED_LATER = (
    "ipykernel.kernelapp", "matplotlib_inline.backend_inline", "matplotlib.pyplot", "grpo_train.report",
    "maxtext.checkpoint_conversion.to_huggingface", "maxtext.checkpoint_conversion.to_maxtext",
    "tensorboard.backend.event_processing.event_accumulator", "tensorboard.summary", "scipy.stats", "ipywidgets",
    "ipykernel.debugger",
)  # fmt: skip
WARM_KERNELS = 2  # kernels that import or wait while another works, each with up to 0.5 GB of memory
# What the cell tagged `parameters` of every notebook sets, unless GRPO_RECIPE and so on are in the environment.
PARAMETERS = {"RECIPE": "recipes/tiny-cpu.yaml", "RUN": "course", "OVERRIDES": ""}
TINY_MODEL, ABOUT_IT = "assets/tiny-base", "tiny-model"  # its path; the tag of cells that are true of its runs only
WIDGET = "application/vnd.jupyter.widget-view+json"


class NotebookFailed(Exception):
    """A cell raised an exception, or its kernel died. The message is one line."""


def run_course(
    recipe: str,
    run: str,
    notebooks_dir: Path,
    runs_dir: Path,
    in_place: bool = False,
    tiny: bool = True,
    overrides: str = "",
) -> Path:
    """Execute the notebooks in order and return the run directory.

    An existing run directory is moved aside first, never overwritten.

    Args:
      overrides: of the recipe, as `section.key=value`, with spaces between them.
      tiny: the recipe's model is TINY_MODEL.

    Raises:
      CourseError: with in_place, other parameters than the notebooks' own, or outputs that cannot be published.
      NotebookFailed: a notebook stopped with an error; the copy up to there is in runs/RUN/notebooks/.
    """
    # Where nothing differs, papermill adds no cell, and cells keep the numbers that a reader sees.
    given = {"RECIPE": recipe, "RUN": run, "OVERRIDES": overrides}
    changed = {key: value for key, value in given.items() if value != PARAMETERS[key]}
    if in_place and changed:
        raise CourseError(
            "--in-place takes the notebooks' own parameters: no --recipe, --run or overrides, GRPO_RECIPE, GRPO_RUN or "
            "GRPO_OVERRIDES"
        )
    run_dir = runs_dir / run
    move_aside(run_dir)
    print(f"course: {len(NOTEBOOKS)} notebooks with {recipe}, on {machine.usable_cores()} cores", flush=True)
    started = time.monotonic()
    executed = execute_all(NOTEBOOKS, notebooks_dir, run_dir, changed, tiny)
    print(f"all {len(NOTEBOOKS)} in {time.monotonic() - started:.0f} s", flush=True)
    if in_place:
        publish(executed, notebooks_dir)
    return run_dir


def import_libraries() -> None:
    """Import what the notebooks import, so that Python keeps it compiled; `make setup` does this once."""
    environment.prepare()
    for name in (*PRELOADED.values(), *IMPORTED_LATER):
        importlib.import_module(name)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source_sha256(notebook: NotebookNode) -> str:
    """Return the SHA-256 of the sources of all code cells: outputs belong to exactly this code."""
    return hashlib.sha256(json.dumps([cell.source for cell in code_cells(notebook)]).encode()).hexdigest()


def move_aside(run_dir: Path) -> None:
    """Rename an existing run directory to NAME-YYYYMMDD-HHMMSS and print its new name."""
    if run_dir.exists():
        aside = run_dir.rename(run_dir.with_name(f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        print(f"course: {_shown(run_dir)} was there already; it is now {_shown(aside)}", flush=True)


def execute_all(
    names: Sequence[str],
    notebooks_dir: Path,
    run_dir: Path,
    parameters: dict[str, str],
    tiny: bool,
    first: str = "",
) -> dict[str, NotebookNode]:
    """Execute each notebook in a kernel of its own; the next ones start while those before them work.

    Args:
      parameters: those of PARAMETERS that have other values.
      first: Python that each kernel runs before it imports anything.

    Returns the executed notebooks by name; their metadata `grpo_ways` has the ways that their cells went.
    """
    copies = run_dir / "notebooks"
    executed = {}
    with contextlib.ExitStack() as stack:
        # Messages of C++ libraries; the rest is in the notebooks.
        log = stack.enter_context(open(environment.repo_root() / ".cache" / "course-kernels.log", "wb"))
        variables = os.environ | {f"GRPO_{key}": value for key, value in (PARAMETERS | parameters).items()}

        def start_kernel(name: str) -> AsyncKernelManager:
            kernel = AsyncKernelManager(kernel_name=environment.KERNEL_NAME)
            # Frozen, because each full garbage collection would otherwise look through the libraries, half a second.
            preload = f"import gc; __import__({PRELOADED[name]!r}); gc.freeze(); del gc"
            recorder = (
                f"import runpy; runpy.run_path({branches.__file__!r})['record']({str(_ways_file(name))!r}); del runpy"
            )
            lines = [first, preload, recorder]
            options = [f"--IPKernelApp.exec_lines={line}" for line in lines if line]
            options.append("--HistoryManager.hist_file=:memory:")
            output = {"stdout": log, "stderr": log}
            folder = str((notebooks_dir / name).parent)  # as JupyterLab starts it
            run_sync(kernel.start_kernel)(cwd=folder, env=variables, extra_arguments=options, **output)
            stack.callback(_stop, kernel)
            return kernel

        kernels = [start_kernel(name) for name in names[:WARM_KERNELS]]
        for name, later in zip_longest(names, names[WARM_KERNELS:]):
            if later:
                kernels.append(start_kernel(later))
            kernel = kernels.pop(0)
            notebook = nbformat.read(notebooks_dir / f"{name}.ipynb", as_version=4)
            if not tiny:
                notebook.cells = [cell for cell in notebook.cells if ABOUT_IT not in cell.metadata.get("tags", ())]
            copy = copies / f"{name}.ipynb"
            copy.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, copy)
            executed[name] = _execute(copy, parameters, kernel)
            _stop(kernel)
            executed[name].metadata.grpo_ways = ways(name, executed[name])
            nbformat.write(executed[name], copy)
    return executed


def ways(name: str, notebook: NotebookNode) -> dict[str, list]:
    """Cell id -> the ways that its conditions went when it was executed last: [line, outcome] pairs (branches.py)."""
    found = branches.read(_ways_file(name))
    by_cell = {cell.id: found.get(branches.digest(cell.source)) for cell in code_cells(notebook)}
    return {cell: pairs for cell, pairs in by_cell.items() if pairs}


def _ways_file(name: str) -> Path:
    return environment.repo_root() / ".cache" / "branches" / f"{name.replace('/', '-')}.jsonl"


def _stop(kernel: AsyncKernelManager) -> None:
    if run_sync(kernel.is_alive)():
        run_sync(kernel.shutdown_kernel)(now=True)


def _execute(path: Path, parameters: dict[str, str], kernel: AsyncKernelManager) -> NotebookNode:
    """Execute a copy of a notebook; papermill writes the outputs into it, also when a cell fails."""
    print(f"  {path.stem:<26}", end="", flush=True)
    started = time.monotonic()
    try:
        notebook = papermill.execute_notebook(path, path, parameters, km=kernel, start_timeout=300, progress_bar=False)
    except papermill.PapermillExecutionError as error:
        reason = f"cell {error.exec_count}: {error.ename}: {error.evalue}".splitlines()[0]
        raise NotebookFailed(f"{path.name}, {reason} (executed up to there: {_shown(path)})") from error
    except RuntimeError as error:  # nbclient's DeadKernelError is one
        reason = str(error).splitlines()[0]
        raise NotebookFailed(f"{path.name}: its kernel stopped ({reason}); was there enough memory?") from error
    print(f"{time.monotonic() - started:6.1f} s", flush=True)
    return notebook


def publish(notebooks: dict[str, NotebookNode], notebooks_dir: Path) -> None:
    """Write the executed notebooks over their sources: all of them, or none if one has unsuitable outputs."""
    for name, notebook in notebooks.items():
        for cell in code_cells(notebook):  # progress bars do not work without a kernel
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        if problems := publication_problems(notebook):
            raise CourseError(f"notebooks/{name}.ipynb is not published: {problems[0]}")
    for name, notebook in notebooks.items():
        took = {cell.id: round(cell.metadata.papermill.duration, 1) for cell in code_cells(notebook)}
        for cell in notebook.cells:  # without papermill's metadata
            cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        # The seconds are for dev/tools/class_check.py, and those of slow cells for dev/tools/reading_minutes.py.
        course = {
            "source_sha256": source_sha256(notebook),
            "seconds": round(notebook.metadata.papermill.duration, 1),
            "cells": {cell: seconds for cell, seconds in took.items() if seconds >= 1},
            "ways": notebook.metadata.get("grpo_ways", {}),  # for dev/tools/rehearse.py
        }
        notebook.metadata = {
            "kernelspec": {"display_name": "GRPO course", "language": "python", "name": environment.KERNEL_NAME},
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
            "grpo": course,
        }
        files.write_text_atomic(notebooks_dir / f"{name}.ipynb", nbformat.writes(notebook) + "\n")
    print(f"notebooks: outputs written to {_shown(notebooks_dir)}", flush=True)


def publication_problems(notebook: NotebookNode) -> list[str]:
    """Return the reasons not to publish the outputs: errors, warnings, machine paths, secrets, widgets."""
    folders = (environment.repo_root(), Path.home(), sys.prefix, os.path.realpath(sys.executable))
    paths = [re.escape(str(folder)) for folder in folders if len(str(folder)) > 2]
    machine = re.compile("|".join([*paths, r"/(home|Users|tmp|var)/\w"]))
    secret = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.IGNORECASE)
    secrets = [value for name, value in os.environ.items() if secret.search(name) and len(value) >= 8]
    problems = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            where = f"cell {cell.execution_count}"
            text = _text(output)
            if output.output_type == "error":
                problems.append(f"{where} ends in an error")
            if output.get("name") == "stderr":
                problems.append(f"{where} writes to stderr: {text.strip().splitlines()[0][:100]}")
            if found := machine.search(text):
                problems.append(f"{where} shows a path of this machine: {found.group()}")
            if any(value in text for value in secrets):
                problems.append(f"{where} shows a secret of this machine's environment")
            if WIDGET in output.get("data", {}):
                problems.append(f"{where} shows a widget, which needs a kernel")
    return problems


def _text(output: NotebookNode) -> str:
    """All text of an output, without images (base64)."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *(data[kind] for kind in data if not kind.startswith("image/p"))]
    return "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)


def print_result(run_dir: Path) -> None:
    """Print the rates before and after, interval, p and the report's path, from the run's summary.json."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    for when in ("before", "after"):
        side = summary[when]
        rates = [
            f"last number {side['lenient_accuracy']:.1%}",
            f"within 10 % {side['partial_accuracy']:.1%}",
            f"format {side['format_accuracy']:.1%}",
        ]
        print(f"{when:<9} {side['accuracy']:6.1%} of {side['n']:,} problems ({', '.join(rates)})")
    points = [100 * value for value in (summary["difference"], *summary["difference_interval"])]
    print("interval  {:+.1f} points, 95 % interval {:+.1f} to {:+.1f}".format(*points))
    print(f"p         {summary['mcnemar_p']:.1e} (McNemar, exact)")
    print(f"report    {_shown(run_dir / 'report.html')}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dev/tools/run_notebooks.py", description=__doc__.splitlines()[0])
    recipe, run, overrides = (os.environ.get(f"GRPO_{key}") or value for key, value in PARAMETERS.items())
    parser.add_argument("--recipe", default=recipe, help="a recipe file, or FILE@PROFILE (or GRPO_RECIPE)")
    parser.add_argument("--run", default=run, help="name of the run directory under runs/ (or GRPO_RUN)")
    parser.add_argument("--overrides", default=overrides, help="SECTION.KEY=VALUE … (or GRPO_OVERRIDES)")
    parser.add_argument("--in-place", action="store_true", help="write the outputs into notebooks/ (authors)")
    options = parser.parse_args(arguments)
    root = environment.repo_root()
    try:
        environment.prepare()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", options.run):
            raise CourseError(f"--run {options.run[:100]!r}: give a plain name of up to 100 letters, such as course")
        # A mistake is found now, and not in the third notebook.
        tiny = load_recipe(options.recipe, options.overrides).model.path == TINY_MODEL
        run_dir = run_course(
            _shown(Path(options.recipe).resolve()),
            options.run,
            root / "notebooks",
            root / "runs",
            options.in_place,
            tiny,
            options.overrides,
        )
        print_result(run_dir)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NotebookFailed as error:
        print("failed", flush=True)  # behind the notebook's name
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the results so far are in runs/", file=sys.stderr)
        return 130
    return 0


def _shown(path: Path) -> str:
    """`path` as seen from the repo, which is shorter and names no home folder."""
    root = environment.repo_root()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


if __name__ == "__main__":
    sys.exit(main())
