"""When a run saves a checkpoint, and which one it continues from.

Tunix saves actor and optimizer with Orbax, in the background, and restores the newest checkpoint. This module makes
sure that the newest one may be restored: its step has a row in metrics.jsonl (rows come one step late, so a run that is
killed right after a save has a checkpoint without one), and what was restored is what was saved. Orbax finds a file
that is missing or cut short, but not every flipped bit, so the metadata of each checkpoint have a fingerprint of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from grpo_lib.common.errors import CourseError
from grpo_train.recipes import Recipe
from grpo_train.runs import multihost

ITEMS = ("model_params", "optimizer_state")


def checkpoint_root(recipe: Recipe, directory: Path) -> epath.Path:
    """Where a run keeps its checkpoints: in itself, or under its name in a folder or bucket for those of all runs."""
    if recipe.training.checkpoints is None:
        return epath.Path(directory) / "checkpoints"
    return epath.Path(recipe.training.checkpoints) / directory.name


def updates(folder: epath.Path) -> list[int]:
    """The updates of the finished checkpoints in a folder, oldest first."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def drop_unlogged_checkpoint(folder: epath.Path, rows: int, iterations: int) -> None:
    """Delete the newest checkpoint if its step has no row in metrics.jsonl yet: the run takes that step again.

    `rows` is the step of the last row, `iterations` the updates per step.  Raises CourseError when more than that one
    row is missing: rows of the run were removed.
    """
    found = updates(folder)
    step = found[-1] // iterations if found else 0
    if step > rows + 1:
        raise CourseError(
            f"metrics.jsonl ends with step {rows}, but the newest checkpoint is of step {step}: rows were lost; "
            f"put the file back, or remove the checkpoints after step {rows} from {folder}"
        )
    if step == rows + 1:
        (folder / str(found[-1])).rmtree()


class CheckpointPolicy:
    """When checkpoints are saved and how many are kept, in `folder`; adds the fingerprint to those of a trainer."""

    def __init__(self, recipe: Recipe, folder: epath.Path):
        self.folder = folder
        self._every = recipe.training.checkpoint_every * recipe.grpo.iterations  # in updates
        self._last = recipe.training.steps * recipe.grpo.iterations
        self.options = ocp.CheckpointManagerOptions(  # for Tunix
            # Not save_interval_steps: with it Orbax also saves the first update, which may be in mid-step.
            should_save_fn=lambda update, _: self._is_due(update),
            max_to_keep=recipe.training.max_to_keep,
            cleanup_tmp_directories=True,
        )

    def _is_due(self, update: int) -> bool:
        return update % self._every == 0 or update == self._last

    def add_fingerprints(self, trainer: Any) -> None:
        """From now on each checkpoint of Tunix's trainer has the fingerprint of its values in its metadata.

        Tunix has a hook for metadata, but not for those of the checkpoint that it saves when it closes.
        """
        save = trainer.checkpoint_manager.save

        def save_with_fingerprint(update, model, optimizer, force=False, custom_metadata=None, **options):
            if force or self._is_due(update):
                values = fingerprint(nnx.state(model), nnx.state(optimizer, nnx.optimizer.OptState))
                custom_metadata = (custom_metadata or {}) | {"fingerprint": values}
            return save(update, model, optimizer, force=force, custom_metadata=custom_metadata, **options)

        trainer.checkpoint_manager.save = save_with_fingerprint


def restore[T](
    build: Callable[[], tuple[T, Any]], policy: CheckpointPolicy, log: Callable[[str], None]
) -> tuple[T, Any]:
    """The actor and the cluster, from the newest checkpoint that is intact.

    Args:
      build: makes (actor, Tunix's RLCluster), which restores the newest checkpoint.
      log: called with a sentence about each damaged checkpoint; it is moved to `damaged/`.
    """
    folder, distributed = policy.folder, multihost.is_distributed()
    while True:
        # Several processes restore together, and it must not fail in only one of them: process 0 reads it all before.
        reason = multihost.broadcast(unreadable(folder)) if distributed else None
        if reason is None:
            try:
                actor, cluster = build()
            except Exception:
                reason = None if distributed else unreadable(folder)
                if reason is None:  # something else is wrong
                    raise
            else:
                reason = multihost.broadcast(_changed(folder, cluster.actor_trainer))
                if reason is None:
                    policy.add_fingerprints(cluster.actor_trainer)
                    return actor, cluster
        if multihost.is_main_process():
            log(quarantine_checkpoint(folder, reason))
        multihost.barrier("a damaged checkpoint")


def quarantine_checkpoint(folder: epath.Path, reason: str) -> str:
    """Move the newest checkpoint to `damaged/`; returns a sentence about it."""
    *older, newest = updates(folder)
    target = folder.parent / "damaged" / f"{folder.name}-{newest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rmtree()
    (folder / str(newest)).rename(target)
    instead = f"continuing from update {older[-1]}" if older else "there is no older one, so training starts again"
    return f"the checkpoint of update {newest} cannot be restored ({reason}) and was moved to {target}; {instead}"


def unreadable(folder: epath.Path) -> str | None:
    """In process 0: why the newest checkpoint cannot be read; None if it can, or if there is none."""
    found = updates(folder)
    if not found or not multihost.is_main_process():
        return None
    try:
        _metadata(folder / str(found[-1]))
        for item in ITEMS:
            read(folder / str(found[-1]) / item)
    except Exception as error:  # Orbax, TensorStore and JSON raise types of their own
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None


def _changed(folder: epath.Path, trainer: Any) -> str | None:
    """What is wrong with the values that a trainer restored, or None.  Called by all processes."""
    if not trainer.train_steps:  # nothing was restored
        return None
    restored = fingerprint(nnx.state(trainer.model), nnx.state(trainer.optimizer, nnx.optimizer.OptState))
    saved = _metadata(folder / str(trainer.train_steps)).get("fingerprint", restored)
    return None if saved == restored else "its values are not those that were saved"


def _metadata(checkpoint: epath.Path) -> dict[str, Any]:
    return json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]


def read(item: epath.Path) -> Any:
    """One item of a checkpoint as a tree of NumPy arrays, whatever devices it was saved from.

    Only this process reads it; Orbax does not wait for others.
    """
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process-{this}"
    )
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    ) as reader:
        tree = reader.metadata(item).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def fingerprint(*trees: Any) -> int:
    """A number from 0 to 2^32 − 1 that changes with any bit of any array (of at most 32 bits), and with their order.

    Integers that wrap around: the same however the arrays are spread over devices.
    """
    return int(_fingerprint(jax.block_until_ready(jax.tree.leaves(trees))))


@jax.jit
def _fingerprint(leaves: list[jax.Array]) -> jax.Array:
    total = jnp.uint32(0)
    for number, leaf in enumerate(leaves):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        places = jnp.uint32(number)
        for axis in range(leaf.ndim):
            places = places * jnp.uint32(1_000_003) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        # Odd factors: a single flipped bit always changes the sum.
        total += jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)
    return total
