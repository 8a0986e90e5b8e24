"""Rehearse the notebooks of a TPU VM before the VM is rented: the same notebooks with a recipe scaled down, on a CPU.

    .venv-tpu/bin/python dev/tools/rehearse.py recipes/llama3.1-8b-gsm8k.yaml      (`make rehearse RECIPE=…`)

The recipe is scaled as `grpo smoke-test` scales it: the tiny model, a few steps, its chips as virtual devices, vLLM
where the recipe has it.  GSM8K comes from problems.path or GSM8K_DIR; without it word problems take its place.  Run
directory and executed notebooks stay in runs/rehearsal-NAME/.  The same command goes on where it was stopped: a
notebook that has come to its end is not run again, and a training continues after its last checkpoint.  --again starts
anew.

At the end: the seconds of each notebook, and where a cell went another way than with the tiny recipe (branches.py).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import run_notebooks

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_train.recipes import Recipe, dump_recipe, load_recipe
from grpo_train.runs.run_directory import changed_keys, check_run
from grpo_train.tpu import random_model, smoke_test

# Those that docs/tpu-vm.md sends to the VM.
NOTEBOOKS = ("00_setup", "01_checkpoint_conversion", "02_reward_design", "04_grpo_training", "05_evaluation")
VLLM_ON_CPU = "from grpo_train.tpu import vllm_on_cpu; vllm_on_cpu.install(); del vllm_on_cpu"
WIDTH = 76  # characters of a line of code in the table


def rehearse(recipe: Recipe, names: Sequence[str] = NOTEBOOKS, again: bool = False) -> Path:
    """Run the notebooks with the scaled recipe and print the table; returns the run directory.

    Raises:
      CourseError: the recipe needs vLLM, which is not installed, or a run of this name has another recipe.
      run_notebooks.NotebookFailed: a notebook stopped with an error.
    """
    root = environment.repo_root()
    run = f"rehearsal-{recipe.name}"
    run_dir = root / "runs" / run
    scaled = scale(recipe, run_dir)
    file = root / ".cache" / "rehearsals" / f"{recipe.name}.yaml"
    write_text_atomic(file, dump_recipe(scaled))
    if again:
        run_notebooks.move_aside(run_dir)
    else:
        check_run(run_dir, scaled)
    # What was executed with other values of the recipe is not this rehearsal's.
    left = [name for name in names if changed_keys(run_dir, scaled) or not is_done(run_dir, name)]
    count = smoke_test.device_count(scaled)
    print(f"rehearsal of {recipe.name}: {scaled.rollout.engine}, {count} virtual devices, runs/{run}", flush=True)
    for name in names:
        if name not in left:
            print(f"  {name:<26} done before", flush=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    os.environ.update(smoke_test.VARIABLES | {"XLA_FLAGS": flags})
    run_notebooks.execute_all(
        left,
        root / "notebooks",
        run_dir,
        {"RECIPE": file.relative_to(root).as_posix(), "RUN": run},
        tiny=False,  # what the text says of the tiny recipe's run is not true of this one
        first=VLLM_ON_CPU if scaled.rollout.engine == "vllm" else "",
    )
    print(table(root / "notebooks", run_dir, names))
    return run_dir


def scale(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe at the size of a smoke test, with a tiny model that its mesh can share, beside the run directory."""
    if recipe.rollout.engine == "vllm" and not smoke_test.vllm_can_run():
        raise CourseError("rollout.engine=vllm needs vllm-tpu: make setup-tpu, then .venv-tpu/bin/python")
    if recipe.hardware.process_count() > 1:
        raise CourseError("notebooks are for one host; take grpo smoke-test for several")
    scaled = smoke_test.scaled_recipe(
        recipe,
        gsm8k=smoke_test.gsm8k_folder(recipe),
        placeholders=smoke_test.placeholders(recipe),
    )
    tiny = smoke_test.tiny_recipe(scaled, run_dir.with_name(f"{run_dir.name}-tiny"))
    if (heads := smoke_test.tiny_heads(scaled)) > 1:
        random_model.write_tiny_model(tiny.model.path, heads)
    return tiny


def is_done(run_dir: Path, name: str) -> bool:
    """Whether an executed copy of the notebook, as it is now, has come to its end without an error."""
    copy = run_dir / "notebooks" / f"{name}.ipynb"
    if not copy.exists():
        return False
    executed = nbformat.read(copy, as_version=4)
    source = nbformat.read(environment.repo_root() / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in run_notebooks.code_cells(executed)}
    same = all(cells.get(cell.id) == cell.source for cell in run_notebooks.code_cells(source) if cell.id in cells)
    # Written last.  What papermill writes is no sign: after a kernel was killed it has an end, too, and no exception.
    return same and "grpo_ways" in executed.metadata


def table(notebooks_dir: Path, run_dir: Path, names: Sequence[str]) -> str:
    """Notebook, seconds, and the lines of its cells that went another way than in the committed notebook's run."""
    lines = ["", "notebook                    seconds  other ways than with the tiny recipe"]
    for name in names:
        executed = nbformat.read(run_dir / "notebooks" / f"{name}.ipynb", as_version=4)
        seconds = executed.metadata.papermill.duration
        others = list(other_ways(notebooks_dir / f"{name}.ipynb", executed))
        lines.append(f"{name:<26} {seconds:8.0f}  {others[0] if others else 'none'}")
        lines += [f"{'':<37}{other}" for other in others[1:]]
    return "\n".join(lines)


def other_ways(committed: Path, executed: nbformat.NotebookNode) -> Iterator[str]:
    """Each condition that was true in one run and false in the other, by cell and line of code."""
    known = nbformat.read(committed, as_version=4).metadata.get("grpo", {}).get("ways", {})
    found = executed.metadata.get("grpo_ways", {})
    for cell in run_notebooks.code_cells(executed):
        for line, here in _outcomes(found.get(cell.id, [])).items():
            tiny = _outcomes(known.get(cell.id, [])).get(line)
            if tiny is not None and tiny != here:
                code = cell.source.splitlines()[line - 1].strip()[:WIDTH]
                yield f"{cell.id}: {code}  ({here}; tiny recipe: {tiny})"


def _outcomes(pairs: Sequence[Sequence[Any]]) -> dict[int, str]:
    """Line -> yes, no, or both."""
    by_line: dict[int, set[bool]] = {}
    for line, outcome in pairs:
        by_line.setdefault(line, set()).add(outcome)
    return {line: "both" if len(seen) == 2 else "yes" if True in seen else "no" for line, seen in by_line.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dev/tools/rehearse.py", description=__doc__.splitlines()[0])
    given = os.environ.get("GRPO_RECIPE")
    parser.add_argument("recipes", nargs="*", default=[given] if given else [], help="recipe files, or FILE@PROFILE")
    parser.add_argument("--overrides", default=os.environ.get("GRPO_OVERRIDES") or "", help="SECTION.KEY=VALUE …")
    parser.add_argument("--notebooks", nargs="+", default=NOTEBOOKS, choices=NOTEBOOKS, help="default: all five")
    parser.add_argument("--again", action="store_true", help="move an earlier rehearsal aside, and start anew")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        environment.prepare()
        if not options.recipes:
            raise CourseError("name a recipe: make rehearse RECIPE=recipes/llama3.1-8b-gsm8k.yaml")
        recipes = [load_recipe(recipe, options.overrides) for recipe in options.recipes]
        for recipe in recipes:
            rehearse(recipe, options.notebooks, options.again)
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except run_notebooks.NotebookFailed as error:
        print("failed", flush=True)  # behind the notebook's name
        print(f"error: {error}; the same command goes on from there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    print(f"\n{len(recipes)} rehearsed in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
