"""Execute the course's notebooks in order, as a reader would, and print what came out.

    python -m grpo_lib.course --recipe recipes/tiny-cpu.yaml --run course      (`make course`)
    python -m grpo_lib.course --in-place                                       (`make notebooks`, for authors)

Executed copies go to runs/RUN/notebooks/. With --in-place the outputs are written into notebooks/ itself, with
the hash of the code that produced them, and only if they hold nothing that belongs to this machine alone.
"""

import argparse
import ast
import asyncio
import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from grpo_lib import environment, files
from grpo_lib.errors import CourseError
from grpo_lib.recipes import load_recipe

NOTEBOOKS = (
    "00_setup", "01_checkpoint_conversion", "02_reward_design", "03_grpo_training", "04_evaluation", "05_on_a_tpu",
    "06_policy_loss_kernel",
)  # fmt: skip
# Imported by a kernel while the notebook before it still runs: JAX, MaxText and Tunix take 10 s or more.
PRELOAD = "grpo_lib.training"
WIDGET = "application/vnd.jupyter.widget-view+json"


class NotebookFailed(Exception):
    """A cell raised an exception, or its kernel died. The message is one line."""


def run_course(
    recipe: str, run: str, notebooks_dir: Path, runs_dir: Path, in_place: bool = False, kernel_start: str = ""
) -> Path:
    """Execute the notebooks in order and return the run directory.

    An existing run directory is moved aside first, never overwritten.

    Args:
      kernel_start: a line of Python that every kernel runs before anything else.

    Raises:
      CourseError: a notebook is missing or lacks its parameters; with in_place, outputs cannot be published.
      NotebookFailed: a notebook stopped with an error; the copy up to there is in runs/RUN/notebooks/.
    """
    parameters = {"RECIPE": recipe, "RUN": run}
    notebooks = {name: read_notebook(notebooks_dir / f"{name}.ipynb") for name in NOTEBOOKS}
    for name, notebook in notebooks.items():
        if in_place and parameters_of(notebook) != parameters:
            raise CourseError(
                f"notebooks/{name}.ipynb: outputs are kept only for the cell's own parameters, "
                f"{parameters_of(notebook)}; drop --recipe and --run, or change the cell"
            )
        set_parameters(notebook, parameters)
    run_dir = runs_dir / run
    move_aside(run_dir)
    cores = environment.usable_cores()
    print(f"course: {len(NOTEBOOKS)} notebooks with {recipe}, on {cores} cores", flush=True)
    started = time.monotonic()
    with peak_memory() as peak:
        asyncio.run(_execute_all(notebooks, notebooks_dir, run_dir, kernel_start))
    seconds = time.monotonic() - started
    print(f"all {len(NOTEBOOKS)} in {seconds:.0f} s; peak memory {peak[0] / 2**30:.1f} GiB", flush=True)
    if in_place:
        publish(notebooks, notebooks_dir)
    return run_dir


def read_notebook(path: Path) -> NotebookNode:
    """Return the notebook at `path` without its outputs; CourseError if it is missing or damaged."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError as error:
        raise CourseError(f"{path}: no such notebook; take it from the repo") from error
    except Exception as error:  # nbformat raises several kinds for a damaged file
        raise CourseError(f"{path}: not a notebook ({type(error).__name__}); take it from the repo") from error
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source_sha256(notebook: NotebookNode) -> str:
    """Return the SHA-256 of the sources of all code cells: outputs belong to exactly this code."""
    sources = [cell.source for cell in code_cells(notebook) if "injected-parameters" not in _tags(cell)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def parameters_of(notebook: NotebookNode) -> dict[str, Any]:
    """Return the literal assignments of the cell tagged `parameters`; CourseError if there is no such cell."""
    for cell in code_cells(notebook):
        if "parameters" in _tags(cell):
            assignments = [node for node in ast.parse(cell.source).body if isinstance(node, ast.Assign)]
            return {node.targets[0].id: ast.literal_eval(node.value) for node in assignments}
    raise CourseError("a notebook has no cell tagged `parameters`; add one that sets RECIPE and RUN")


def set_parameters(notebook: NotebookNode, parameters: dict[str, Any]) -> None:
    """Put a cell with `parameters` after the tagged one, as papermill does, where they differ from its own."""
    own = parameters_of(notebook)
    changed = {name: value for name, value in parameters.items() if own.get(name) != value}
    if changed:
        source = "\n".join(f"{name} = {value!r}" for name, value in changed.items())
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
        position = next(i for i, cell in enumerate(notebook.cells) if "parameters" in _tags(cell))
        notebook.cells.insert(position + 1, cell)


def move_aside(run_dir: Path) -> None:
    """Rename an existing run directory to NAME-YYYYMMDD-HHMMSS and say so."""
    if not run_dir.exists():
        return
    stem = f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    aside = next(path for n in range(1000) if not (path := run_dir.with_name(stem + f"-{n}" * bool(n))).exists())
    run_dir.rename(aside)
    print(f"course: {_shown(run_dir)} was there already; it is now {_shown(aside)}", flush=True)


async def _execute_all(
    notebooks: dict[str, NotebookNode], notebooks_dir: Path, run_dir: Path, kernel_start: str
) -> None:
    """Execute each notebook in a kernel of its own; the next kernel starts while the one before it works."""
    names = list(notebooks)
    _kernel_log().unlink(missing_ok=True)
    async with contextlib.AsyncExitStack() as kernels:
        waiting = await kernels.enter_async_context(_kernel(notebooks_dir, kernel_start, preload=False))
        for name, following in zip(names, [*names[1:], None], strict=True):
            kernel = waiting
            if following:
                waiting = await kernels.enter_async_context(_kernel(notebooks_dir, kernel_start, preload=True))
            await _execute(name, notebooks[name], kernel, run_dir / "notebooks" / f"{name}.ipynb")
            await kernel.shutdown_kernel(now=True)


@contextlib.asynccontextmanager
async def _kernel(folder: Path, start: str, preload: bool) -> AsyncIterator[AsyncKernelManager]:
    """A started kernel with the working folder `folder`; it runs `start`, then with `preload` imports PRELOAD, before
    it answers."""
    manager = AsyncKernelManager(kernel_name=environment.KERNEL_NAME)
    lines = [start] * bool(start) + [f"__import__({PRELOAD!r})"] * preload
    arguments = ["--HistoryManager.hist_file=:memory:", *(f"--IPKernelApp.exec_lines={line}" for line in lines)]
    with open(_kernel_log(), "ab") as log:  # what C++ libraries say; the notebooks hold the rest
        await manager.start_kernel(cwd=str(folder), stdout=log, stderr=log, extra_arguments=arguments)
    try:
        yield manager
    finally:
        if await manager.is_alive():
            await manager.shutdown_kernel(now=True)


async def _execute(name: str, notebook: NotebookNode, kernel: AsyncKernelManager, path: Path) -> None:
    """Execute `notebook` in place and write the executed copy to `path`, also when a cell fails."""
    print(f"  {name:<26}", end="", flush=True)
    started = time.monotonic()
    client = NotebookClient(notebook, km=kernel, timeout=None, startup_timeout=300, record_timing=False)
    try:
        await client.async_execute()
    except CellExecutionError as error:
        print("failed", flush=True)
        number = failed_cell(notebook)
        reason = f"cell {number}: {error.ename}: {error.evalue}".splitlines()[0]
        raise NotebookFailed(f"{name}.ipynb, {reason} (executed up to there: {_shown(path)})") from error
    except (DeadKernelError, RuntimeError) as error:
        print("failed", flush=True)
        raise NotebookFailed(
            f"{name}.ipynb: its kernel stopped ({str(error).splitlines()[0]}); was there enough memory?"
        ) from error
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        files.write_text_atomic(path, nbformat.writes(notebook) + "\n")
    print(f"{time.monotonic() - started:6.1f} s", flush=True)


def failed_cell(notebook: NotebookNode) -> int:
    """Return the execution number of the first cell with an error output, 0 if there is none."""
    for cell in code_cells(notebook):
        if any(output.output_type == "error" for output in cell.outputs):
            return cell.execution_count or 0
    return 0


@contextlib.contextmanager
def peak_memory(interval: float = 0.5) -> Iterator[list[int]]:
    """Watch the resident memory of this process and all its descendants; item 0 is the peak so far, in bytes.

    Pages that processes share are counted once for each, so it is an upper bound.
    """
    peak, stop, this = [0], threading.Event(), psutil.Process()

    def watch() -> None:
        while not stop.wait(interval):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def publish(notebooks: dict[str, NotebookNode], notebooks_dir: Path) -> None:
    """Write the executed notebooks over their sources: all, or none if one holds what no reader should see."""
    for name, notebook in notebooks.items():
        for cell in code_cells(notebook):  # progress bars: seen while they move, and dead on a page
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        problems = publication_problems(notebook)
        if problems:
            raise CourseError(f"notebooks/{name}.ipynb is not published: {problems[0]}")
    for name, notebook in notebooks.items():
        for cell in notebook.cells:
            cell.metadata = {"tags": _tags(cell)} if _tags(cell) else {}
        notebook.metadata = {
            "kernelspec": {
                "display_name": "GRPO course",
                "language": "python",
                "name": environment.KERNEL_NAME,
            },
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
            "grpo": {"source_sha256": source_sha256(notebook)},
        }
        files.write_text_atomic(notebooks_dir / f"{name}.ipynb", nbformat.writes(notebook) + "\n")
    print(f"notebooks: outputs written to {_shown(notebooks_dir)}", flush=True)


def publication_problems(notebook: NotebookNode) -> list[str]:
    """Return what keeps the outputs from being published: warnings, machine paths, secrets, widgets."""
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
                problems.append(f"{where} shows a widget, which a page without a kernel cannot")
    return problems


def print_result(run_dir: Path) -> None:
    """Print before, after, interval, p and the report's path, from the run's summary.json."""
    summary_path, report = run_dir / "summary.json", run_dir / "report.html"
    if not summary_path.is_file():
        raise CourseError(f"{_shown(summary_path)} is missing: the last notebook did not write it")
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    for when in ("before", "after"):
        side = summary[when]
        print(
            f"{when:<9} {side['accuracy']:6.1%} of {side['n']:,} problems"
            f" (last number, tags or not: {side['lenient_accuracy']:.1%})"
        )
    low, high = summary["difference_interval"]
    points = 100 * summary["difference"], 100 * low, 100 * high
    print("interval  {:+.1f} points, 95 % interval {:+.1f} to {:+.1f}".format(*points))
    print(f"p         {summary['mcnemar_p']:.1e} (McNemar, exact)")
    print(f"report    {_shown(report)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_lib.course", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes/tiny-cpu.yaml", help="a recipe file, or FILE@PROFILE")
    parser.add_argument("--run", default="course", help="name of the run directory under runs/")
    parser.add_argument("--in-place", action="store_true", help="write the outputs into notebooks/ (authors)")
    parser.add_argument(
        "--kernel-start", default="", metavar="CODE", help="a line of Python that every kernel runs first (rehearsals)"
    )
    options = parser.parse_args(arguments)
    environment.prepare()
    root = environment.repo_root()
    try:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.run):
            raise CourseError(f"--run {options.run!r}: give a plain name, such as course")
        load_recipe(options.recipe)  # a mistake in it is better found now than in the third notebook
        recipe = Path(options.recipe).resolve()
        recipe = recipe.relative_to(root) if recipe.is_relative_to(root) else recipe
        run_dir = run_course(
            recipe.as_posix(), options.run, root / "notebooks", root / "runs", options.in_place, options.kernel_start
        )
        print_result(run_dir)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NotebookFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; what was done so far is in runs/", file=sys.stderr)
        return 130
    return 0


def _kernel_log() -> Path:
    return environment.repo_root() / ".cache" / "course-kernels.log"


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _text(output: NotebookNode) -> str:
    """Return all text of an output; images, which are base64, are left out."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *(data[kind] for kind in data if not kind.startswith("image/p"))]
    return "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)


def _shown(path: Path) -> str:
    """Return `path` as seen from the repo, which is shorter and names no home folder."""
    root = environment.repo_root()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


if __name__ == "__main__":
    sys.exit(main())
