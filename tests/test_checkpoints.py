"""Checkpoints: which one is continued from, what is damaged, and the random numbers that belong to them."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from grpo_lib import environment
from grpo_lib.errors import CourseError

environment.prepare()

jax = pytest.importorskip("jax")
import orbax.checkpoint as ocp  # noqa: E402

from grpo_lib import checkpoints  # noqa: E402

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


def test_whole_checkpoints_are_left_alone(folder):
    assert checkpoints.updates(folder) == [2, 4]
    assert checkpoints.set_damaged_aside(folder) is None
    assert checkpoints.updates(folder / "nowhere") == []


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_no_damage_changes_what_is_restored(saved, tmp_path, how):
    """Each file in turn: the damage is recognised, or the fingerprint is another, or no value has changed."""
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
        said = checkpoints.set_damaged_aside(copy)
        if said:
            recognised += 1
            assert checkpoints.updates(copy) == [2]
            assert (copy.parent / "damaged" / "actor-4").is_dir()  # moved, not deleted
            assert "cannot be restored" in said and "the one of update 2 is taken" in said
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
    assert "none is before it, so training starts again" in checkpoints.set_damaged_aside(folder)
    assert checkpoints.updates(folder) == []


@pytest.mark.parametrize(("rows", "iterations", "left"), [(4, 1, [2, 4]), (3, 1, [2]), (2, 2, [2, 4]), (1, 2, [2])])
def test_a_checkpoint_without_its_row_is_taken_again(folder, rows, iterations, left):
    checkpoints.drop_one_without_its_row(folder, rows, iterations)
    assert checkpoints.updates(folder) == left


def test_rows_that_were_removed_are_no_reason_to_train_again(folder):
    with pytest.raises(CourseError, match=r"ends with step 1, and the newest checkpoint is of step 4: rows were lost"):
        checkpoints.drop_one_without_its_row(folder, 1, 1)
    assert checkpoints.updates(folder) == [2, 4]


def test_random_numbers_go_on_where_they_were(folder):
    checkpoints.seed_random_numbers(7)
    random.random(), np.random.normal()
    checkpoints.keep_beside(folder, 4, values=123)
    expected = random.random(), np.random.normal(), np.random.normal()
    checkpoints.seed_random_numbers(8)
    assert checkpoints.restore_beside(folder, 4) == 123
    assert (random.random(), np.random.normal(), np.random.normal()) == expected


def test_what_is_kept_beside_stays_as_long_as_its_checkpoint(folder):
    for update in (2, 4, 6, 8):  # the checkpoint is not there yet when it is written
        checkpoints.keep_beside(folder, update, values=0)
    assert sorted(path.name for path in (folder.parent / "beside").iterdir()) == ["2.json", "4.json", "8.json"]


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "is missing"), ("{", "is damaged"), ('{"python": 1}', "is damaged")]
)
def test_what_is_kept_beside_and_cannot_be_read_is_named(folder, text, reason):
    if text is not None:
        (folder.parent / "beside").mkdir()
        (folder.parent / "beside" / "4.json").write_text(text)
    with pytest.raises(CourseError, match=rf"4\.json .*{reason}; remove .*actor/4 to continue"):
        checkpoints.restore_beside(folder, 4)
