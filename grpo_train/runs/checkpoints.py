"""When a run saves a checkpoint, and which one it continues from.

Tunix saves actor and optimizer with Orbax, in the background, and restores the newest checkpoint. This module makes
sure that the newest one may be restored: its step has a row in metrics.jsonl (rows come one step late, so a run that is
killed right after a save has a checkpoint without one), and it can be read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from grpo_lib.common.errors import CourseError
from grpo_train.recipes.schema import TrainingRecipe
from grpo_train.runs import multihost

ITEMS = ("model_params", "optimizer_state")


def checkpoint_root(training: TrainingRecipe, directory: Path) -> epath.Path:
    """Where a run keeps its checkpoints: in itself, or under its name in a folder or bucket for those of all runs."""
    return (
        epath.Path(directory) / "checkpoints"
        if training.checkpoints is None
        else epath.Path(training.checkpoints) / directory.name
    )


def updates(folder: epath.Path) -> list[int]:
    """The updates of the finished checkpoints in a folder, oldest first."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def drop_unlogged_checkpoints(folder: epath.Path, rows: int, iterations: int, torn: bool = False) -> None:
    """Delete the newest checkpoint if its step has no row in metrics.jsonl yet: the run takes that step again.

    Where the last row was torn, two steps have none: both are taken again if there is a checkpoint before them.

    Args:
      rows: the step of the last whole row.
      iterations: updates per step.
      torn: a kill or a full disk left half a row behind it.

    Raises CourseError when more rows are missing: rows of the run were removed.
    """
    found = updates(folder)
    logged = [update for update in found if update // iterations <= rows]
    newest = found[-1] // iterations if found else 0
    allowed = rows + 2 if torn and logged else rows + 1
    if newest > allowed:
        raise CourseError(
            f"metrics.jsonl ends with step {rows}, but the newest checkpoint is of step {newest}: rows were lost; "
            f"put the file back, or remove the checkpoints after step {rows} from {folder}"
        )
    for update in found[len(logged) :]:
        (folder / str(update)).rmtree()


def save_options(training: TrainingRecipe, iterations: int, in_background: bool = True) -> ocp.CheckpointManagerOptions:
    """For Tunix: which updates are saved, at `iterations` updates per step.

    `in_background`: training goes on meanwhile.  On a CPU an update cannot write over what is still being saved, and
    takes new memory for it.
    """
    every, last = training.checkpoint_every * iterations, training.steps * iterations
    return ocp.CheckpointManagerOptions(
        # Not save_interval_steps: with it Orbax also saves the first update, which may be in mid-step.
        should_save_fn=lambda update, _: update % every == 0 or update == last,
        max_to_keep=training.max_to_keep,
        enable_async_checkpointing=in_background,
        cleanup_tmp_directories=True,
    )


def restore[T](build: Callable[[], T], folder: epath.Path, log: Callable[[str], None]) -> T:
    """What `build` makes, from the newest checkpoint in `folder` that can be read.

    Args:
      build: makes actor and cluster; Tunix's RLCluster restores the newest checkpoint.
      log: called with a sentence about each checkpoint that cannot be read.
    """
    distributed = multihost.is_distributed()
    while True:
        # Several processes restore together, and it must not fail in only one of them: process 0 reads it all before.
        reason = multihost.broadcast(unreadable(folder)) if distributed else None
        if reason is None:
            try:
                return build()
            except Exception:
                reason = None if distributed else unreadable(folder)
                if reason is None:  # something else is wrong
                    raise
        if multihost.is_main_process():
            log(move_aside(folder, reason))
        multihost.barrier("a damaged checkpoint")


def move_aside(folder: epath.Path, reason: str) -> str:
    """Move the newest checkpoint to `damaged/`: Tunix then restores the one before.  Returns a sentence about it."""
    *older, newest = updates(folder)
    target = folder.parent / "damaged" / f"{folder.name}-{newest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.rmtree(missing_ok=True)
    (folder / str(newest)).rename(target)
    instead = f"continuing from update {older[-1]}" if older else "there is no older one, so training starts again"
    return f"the checkpoint of update {newest} cannot be restored ({reason}) and was moved to {target}; {instead}"


def unreadable(folder: epath.Path) -> str | None:
    """In process 0: why the newest checkpoint cannot be read; None if it can, or if there is none."""
    found = updates(folder)
    if not found or not multihost.is_main_process():
        return None
    try:
        for item in ITEMS:
            read(folder / str(found[-1]) / item)
    except Exception as error:  # Orbax, TensorStore and JSON raise types of their own
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None


def has_gradient_sum(folder: epath.Path) -> bool | None:
    """Whether the newest checkpoint in a folder has a sum of gradients (optax.MultiSteps); None if there is none.

    Runs of several micro-batches save it, and so did all runs of grpo-hands-on before it was left out for one.
    Raises what `read` does.
    """
    found = updates(folder)
    if not found:
        return None
    item = folder / str(found[-1]) / "optimizer_state"
    with _reader() as reader:
        return "acc_grads" in _tree(reader, item)["opt_state"]


def read(item: epath.Path) -> Any:
    """One item of a checkpoint as a tree of NumPy arrays, whatever devices it was saved from.

    Only this process reads it; Orbax does not wait for others.
    """
    with _reader() as reader:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), _tree(reader, item))
        return reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def _reader() -> ocp.Checkpointer:
    """A reader for this process alone."""
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process-{this}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _tree(reader: ocp.Checkpointer, item: epath.Path) -> Any:
    """Names, shapes and types of an item's arrays."""
    metadata = reader.metadata(item).item_metadata
    if metadata is None:
        raise FileNotFoundError(f"{item.name} has lost its metadata")
    return metadata.tree
