"""Which checkpoint a run continues from, and what is kept beside each.

Tunix saves the actor and the optimizer with Orbax, in the background, and restores the newest checkpoint by itself.
Here it is made sure that the newest one may be restored: that its row is in metrics.jsonl (rows come one step late, so
a run killed right after a save has a checkpoint without one), and that what was restored is what was saved: Orbax finds
a file that is missing or cut short, and not every flipped bit.  So a fingerprint of all values is kept beside each
checkpoint, together with the states of Python's and NumPy's random numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from grpo_lib.errors import CourseError

ITEMS = ("model_params", "optimizer_state")


def manager_options(every: int, keep: int, last: int, on_save: Callable[[int], None]) -> Any:
    """Options for Tunix's checkpoint manager: save after every `every`-th update, and after the last.

    Args:
      on_save: called with the update, before its checkpoint is written.
    """
    told = None

    # Not save_interval_steps: with it Orbax also saves the first update, which may lie in mid-step.
    def should_save(update: int, _: int | None) -> bool:
        nonlocal told
        due = update % every == 0 or update == last
        if due and update != told:  # Tunix asks, and then Orbax does
            on_save(update)
            told = update
        return due

    return ocp.CheckpointManagerOptions(should_save_fn=should_save, max_to_keep=keep, cleanup_tmp_directories=True)


def updates(folder: epath.Path) -> list[int]:
    """The updates after which there are finished checkpoints, oldest first."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def drop_one_without_its_row(folder: epath.Path, rows: int, iterations: int) -> None:
    """Delete the newest checkpoint if its step has no row in metrics.jsonl yet: that step is taken again.

    Args:
      rows: step of the last row.
      iterations: updates per step.

    Raises CourseError when more than that one row is missing: rows of the run were removed.
    """
    found = updates(folder)
    step = found[-1] // iterations if found else 0
    if step > rows + 1:
        raise CourseError(
            f"metrics.jsonl ends with step {rows}, and the newest checkpoint is of step {step}: rows were lost; "
            f"put the file back, or remove the checkpoints after step {rows} from {folder}"
        )
    if step == rows + 1:
        (folder / str(found[-1])).rmtree()


def set_damaged_aside(folder: epath.Path, reason: str | None = None) -> str | None:
    """Move the newest checkpoint to `damaged/` if it cannot be read, or for the `reason` given.

    Returns a sentence about it, or None when nothing is wrong with it.
    """
    found = updates(folder)
    if not found or (reason := reason or _damage(folder / str(found[-1]))) is None:
        return None
    aside = folder.parent / "damaged" / f"{folder.name}-{found[-1]}"
    aside.parent.mkdir(parents=True, exist_ok=True)
    if aside.exists():
        aside.rmtree()
    (folder / str(found[-1])).rename(aside)
    before = f"the one of update {found[-2]} is taken" if found[1:] else "none is before it, so training starts again"
    return f"the checkpoint of update {found[-1]} cannot be restored ({reason}) and was moved to {aside}; {before}"


def read(item: epath.Path) -> Any:
    """One item of a checkpoint as a tree of NumPy arrays, whatever devices it was saved from.

    Of several processes this one reads it, and does not wait for the others.
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


def seed_random_numbers(seed: int) -> None:
    """Of Python and NumPy, for rewards that draw some; the sampler's come from the recipe's seed and the step."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@jax.jit
def _fingerprint(leaves: list[jax.Array]) -> jax.Array:
    total = jnp.uint32(0)
    for number, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        places = jnp.uint32(number)
        for axis in range(leaf.ndim):
            places = places * jnp.uint32(1_000_003) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        # Odd factors: a single flipped bit changes the sum for certain.
        total += jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)
    return total


def fingerprint(*trees: Any) -> int:
    """A number from 0 to 2^32 − 1 that changes with any bit of any array (of at most 32 bits), and with their order.

    Integers that wrap around: the same however the arrays are spread over devices.
    """
    return int(_fingerprint(jax.block_until_ready(jax.tree.leaves(trees))))


def keep_beside(folder: epath.Path, update: int, values: int) -> None:
    """Keep what belongs to the checkpoint of an update; call it before that is saved.

    Args:
      values: the fingerprint of what is saved.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "fingerprint": values,
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }
    path = _beside(folder, update)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {update, *updates(folder)}
    for old in path.parent.glob("*.json"):
        if int(old.name.split(".")[0]) not in kept:
            old.unlink()
    # Not atomic, and need not be: its checkpoint is finished later, and without that it is never read.
    path.write_text(json.dumps(state))


def restore_beside(folder: epath.Path, update: int) -> int:
    """Set the random numbers back to where they were, and return the fingerprint.

    Raises CourseError when the file is missing or damaged.
    """
    path = _beside(folder, update)
    try:
        state = json.loads(path.read_text())
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        return state["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "it is damaged" if path.exists() else "it is missing"
        raise CourseError(
            f"{path} belongs to a checkpoint, and {reason}; remove {folder / str(update)} to continue from the "
            "checkpoint before"
        ) from error


def _beside(folder: epath.Path, update: int) -> epath.Path:
    return folder.parent / "beside" / f"{update}.json"


def _damage(checkpoint: epath.Path) -> str | None:
    """Why a checkpoint cannot be read, or None."""
    try:
        json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text())
        for item in ITEMS:
            read(checkpoint / item)
    except Exception as error:  # Orbax, TensorStore and JSON raise types of their own
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return None
