"""Checkpoints: when they are saved, which a run continues from, which cannot be read; and runs that stop in time."""

import contextlib
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from helpers import wait_for

from grpo_lib.common.errors import CourseError
from grpo_train.runs import checkpoints
from grpo_train.runs.preemption import Interrupted, PreemptionHandler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the updates 2 and 4, as Tunix writes them: two items, by the same manager and handlers."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "actor"
    rng = np.random.default_rng(0)
    handlers = {item: ocp.PyTreeCheckpointHandler() for item in checkpoints.ITEMS}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        for update in (2, 4):
            tree = {"layers": {"w": rng.normal(size=(64, 48))}, "step": np.array(update)}
            items = {item: ocp.args.PyTreeSave(jax.tree.map(jax.numpy.asarray, tree)) for item in checkpoints.ITEMS}
            manager.save(update, args=ocp.args.Composite(**items), custom_metadata={"global_step": update})
    return epath.Path(folder)


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints" / "actor")
    return epath.Path(tmp_path / "checkpoints" / "actor")


def values_of(checkpoint):
    return jax.tree.leaves([checkpoints.read(checkpoint / item) for item in checkpoints.ITEMS])


def files_of(checkpoint):
    return sorted(path for path in Path(checkpoint).rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_checkpoint_is_recognised_or_has_its_values(saved, tmp_path, how):
    """Each file in turn.  A checkpoint that cannot be read is moved, not deleted."""
    assert checkpoints.updates(saved) == [2, 4]
    assert checkpoints.unreadable(saved) is None
    good = values_of(saved / "4")
    recognised = 0
    for number, path in enumerate(files_of(saved / "4")):
        copy = epath.Path(tmp_path / str(number) / "actor")
        shutil.copytree(saved, copy)
        damaged = copy / path.relative_to(saved)
        data = path.read_bytes()
        if how == "gone":
            damaged.unlink()
        else:
            damaged.write_bytes(data[: len(data) // 2])
        reason = checkpoints.unreadable(copy)
        if reason:
            said = checkpoints.move_aside(copy, reason)
            recognised += 1
            assert checkpoints.updates(copy) == [2]
            assert (copy.parent / "damaged" / "actor-4").is_dir()
            assert "continuing from update 2" in said
        else:
            values = values_of(copy / "4")
            assert all(np.array_equal(one, other) for one, other in zip(good, values, strict=True)), path
    assert recognised >= 4


@pytest.mark.parametrize(("rows", "iterations", "left"), [(4, 1, [2, 4]), (3, 1, [2]), (2, 2, [2, 4]), (1, 2, [2])])
def test_a_checkpoint_without_its_row_is_taken_again_but_not_for_rows_that_were_removed(folder, rows, iterations, left):
    with pytest.raises(CourseError, match=r"ends with step 1, but the newest checkpoint is of step 4: rows were lost"):
        checkpoints.drop_unlogged_checkpoints(folder, 1, 1)
    assert checkpoints.updates(folder) == [2, 4]
    checkpoints.drop_unlogged_checkpoints(folder, rows, iterations)
    assert checkpoints.updates(folder) == left


@pytest.mark.parametrize(("rows", "left"), [(4, [2, 4]), (3, [2]), (2, [2]), (1, None)])
def test_behind_a_torn_row_two_steps_are_taken_again_from_a_checkpoint_before_them(folder, rows, left):
    if left is None:
        with pytest.raises(CourseError, match="rows were lost"):
            checkpoints.drop_unlogged_checkpoints(folder, rows, 1, torn=True)
    else:
        checkpoints.drop_unlogged_checkpoints(folder, rows, 1, torn=True)
    assert checkpoints.updates(folder) == (left or [2, 4])


@pytest.mark.parametrize("deferred", [False, True])
def test_a_run_stops_when_its_time_is_over(deferred):
    said = "training.stop_after after step 7" if deferred else "training.stop_after$"
    with pytest.raises(Interrupted, match=said), PreemptionHandler("1s") as preemption:  # noqa: SIM117
        with preemption.defer() if deferred else contextlib.nullcontext():
            assert wait_for(lambda: preemption.requested) == deferred
            preemption.progress = "after step 7"
