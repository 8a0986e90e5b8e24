"""The trained policy, or that of any checkpoint of a run, as a Hugging Face directory that others read."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError, first_line
from grpo_lib.common.files import require_space
from grpo_train import training  # first: it prepares the environment before JAX is imported
from grpo_train.training import Session

# isort: split

import jax
from flax import nnx

from grpo_train.engines import conversion, maxtext_model
from grpo_train.engines.model_files import ITEMSIZE
from grpo_train.recipes import Recipe
from grpo_train.runs import checkpoints
from grpo_train.runs.checkpoints import checkpoint_root
from grpo_train.runs.run_directory import base_of


def export_policy(session: Session, last: bool = False) -> Path:
    """The trained policy as a Hugging Face directory, in the run's `export/`.

    The checkpoint of the last step has its weights already, but of adapters, which are added to the base's.

    Args:
      last: the session is not used again.  On one CPU its memory is then for the converter.
    """
    recipe, actor, target = session.recipe, session.actor, session.directory / "export"
    update = session.step * recipe.grpo.iterations
    find = functools.partial(conversion.save_weights, actor)
    if not recipe.lora.rank and update in checkpoints.updates(session.checkpoints):
        find = _where(session.checkpoints / str(update) / "model_params")

    lets_go = last and recipe.rollout.engine == "tunix" and maxtext_model.is_one_cpu(actor.mesh)

    def find_and_let_go(folder: Path) -> Any:
        if lets_go:
            session.sampler.drop_weights()
            environment.release_freed_memory()
        found = find(folder)
        if lets_go:
            training.drop_arrays(session)
        return found

    return conversion.export_weights(find_and_let_go, recipe.model, target)


def export_step(
    recipe: Recipe,
    directory: Path,
    step: int | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    log: Callable[[str], None] = print,
) -> tuple[Path, int]:
    """A checkpoint of a run as a Hugging Face directory: the directory and the step.  On the CPU, in one process.

    It is what `export_policy` writes after that step.

    Args:
      step: None takes the newest checkpoint that can be read.
      output: default: `export-STEP` in the run.
      overwrite: replace an export that is there; any other folder is never replaced.
      log: called with a sentence about each newer checkpoint that cannot be read.

    Raises CourseError when there is no such checkpoint, it cannot be read, or the folder exists.
    """
    folder = checkpoint_root(recipe.training, directory) / "actor"
    iterations = recipe.grpo.iterations
    saved = [update // iterations for update in checkpoints.updates(folder)]
    if not saved:
        raise CourseError(
            f"{folder} has no checkpoint yet; there is one after every {recipe.training.checkpoint_every} steps "
            "(training.checkpoint_every) and after the last"
        )
    if step is not None and step not in saved:
        raise CourseError(
            f"{folder} has no checkpoint of step {step}; there are those of step {', '.join(map(str, saved))}"
        )
    model_directory = maxtext_model.model_directory(recipe.model)
    for candidate in reversed(saved) if step is None else [step]:
        target = Path(output or directory / f"export-{candidate}").expanduser().resolve()
        _require_replaceable(target, model_directory, overwrite)
        try:
            saved_weights = folder / str(candidate * iterations) / "model_params"
            with maxtext_model.quiet():
                tree = checkpoints.read(saved_weights)
        except Exception as error:  # Orbax, TensorStore and JSON raise types of their own
            log(f"the checkpoint of step {candidate} cannot be read ({type(error).__name__}: {first_line(error)})")
            continue
        find, space = _where(saved_weights), 0
        if recipe.lora.rank:
            tree = _with_adapters(recipe, directory, tree)
            find = functools.partial(conversion.save_tree, tree)
            space = sum(array.nbytes for array in jax.tree.leaves(tree))
        space += sum(array.size for array in jax.tree.leaves(tree)) * ITEMSIZE[recipe.model.dtype]
        require_space([(target, space)], "give another --output, on a larger disk")
        del tree  # the converter's process needs the memory
        conversion.export_weights(find, recipe.model, target)
        return target, candidate
    raise CourseError(f"{folder}: no checkpoint can be read; give another --step, or continue the run with grpo train")


def _require_replaceable(target: Path, model_directory: Path, overwrite: bool) -> None:
    """Raise CourseError where an export would replace something else than an export, or was not asked to."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CourseError(f"{target} exists; add --overwrite to replace it, or choose another --output")
    is_export = (target / "config.json").is_file() and any(target.glob("*.safetensors"))
    if not is_export or target == model_directory.resolve():
        raise CourseError(f"{target} is not an export of a run, and is not replaced; choose another --output")


def _where(saved: Any) -> Callable[[Path], Any]:
    """For conversion.export_weights: these weights are saved already."""
    return lambda folder: saved


def _with_adapters(recipe: Recipe, directory: Path, saved: Any) -> Any:
    """The weights of the base with the adapters that Tunix has saved."""
    from grpo_train.engines import lora

    start = directory / "checkpoints" / "start" if recipe.training.cold_start else base_of(directory)
    actor = maxtext_model.load_actor(recipe.model, start / "0" / "items", max_length=64, lora=recipe.lora)
    lora.put_adapters(actor.module, saved)
    return nnx.to_pure_dict(actor.weights())["base"]
