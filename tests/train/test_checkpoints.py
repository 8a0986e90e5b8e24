"""Checkpoints: when they are saved, which one a run continues from, and how damage is recognised."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError

environment.prepare()

import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

from grpo_train.runs import checkpoints  # noqa: E402

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


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_no_damage_changes_what_is_restored(saved, tmp_path, how):
    """Each file in turn: the damage is recognised, or the fingerprint is another, or no value has changed."""
    assert checkpoints.updates(saved) == [2, 4] and checkpoints.unreadable(saved) is None
    good = values_of(saved / "4")
    recognised, rng = 0, random.Random(how)
    for number, path in enumerate(files_of(saved / "4")):
        copy = epath.Path(tmp_path / str(number) / "actor")
        shutil.copytree(saved, copy)
        damaged, data = copy / path.relative_to(saved), bytearray(path.read_bytes())
        if how == "gone":
            damaged.unlink()
        elif how == "cut":
            damaged.write_bytes(bytes(data[: len(data) // 2]))
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            damaged.write_bytes(bytes(data))
        if reason := checkpoints.unreadable(copy):
            said = checkpoints.quarantine_checkpoint(copy, reason)
            recognised += 1
            assert checkpoints.updates(copy) == [2]
            assert (copy.parent / "damaged" / "actor-4").is_dir()  # moved, not deleted
            assert "cannot be restored" in said and "continuing from update 2" in said
        else:
            values = values_of(copy / "4")
            same = all(np.array_equal(one, other) for one, other in zip(good, values, strict=True))
            assert same == (checkpoints.fingerprint(good) == checkpoints.fingerprint(values)), path
    assert recognised >= 4


@given(
    array=arrays(st.sampled_from([np.float32, np.int32, np.uint16]), array_shapes(max_dims=3, max_side=5)),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_one_bit_is_enough_for_another_fingerprint(array, place, bit):
    flipped = array.copy()
    flipped.view(np.uint8).reshape(-1)[place % array.nbytes] ^= 1 << bit
    assert checkpoints.fingerprint(array) != checkpoints.fingerprint(flipped)
    assert checkpoints.fingerprint(array) == checkpoints.fingerprint(array.copy())


def test_arrays_in_another_order_have_another_fingerprint():
    one, other = np.arange(6, dtype=np.float32), np.ones(6, np.float32)
    assert checkpoints.fingerprint([one, other]) != checkpoints.fingerprint([other, one])
    assert checkpoints.fingerprint(one) != checkpoints.fingerprint(one[::-1].copy())


def test_the_last_one_is_said_to_be_the_last(folder):
    (folder / "4").rmtree()
    for path in files_of(folder / "2" / "model_params"):
        path.write_bytes(b"")
    reason = checkpoints.unreadable(folder)
    assert "there is no older one, so training starts again" in checkpoints.quarantine_checkpoint(folder, reason)
    assert checkpoints.updates(folder) == []


@pytest.mark.parametrize(("rows", "iterations", "left"), [(4, 1, [2, 4]), (3, 1, [2]), (2, 2, [2, 4]), (1, 2, [2])])
def test_a_checkpoint_without_its_row_is_taken_again_but_not_for_rows_that_were_removed(folder, rows, iterations, left):
    with pytest.raises(CourseError, match=r"ends with step 1, but the newest checkpoint is of step 4: rows were lost"):
        checkpoints.drop_unlogged_checkpoint(folder, 1, 1)
    assert checkpoints.updates(folder) == [2, 4]
    checkpoints.drop_unlogged_checkpoint(folder, rows, iterations)
    assert checkpoints.updates(folder) == left
