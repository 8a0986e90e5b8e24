"""What several processes exchange: with real processes, and what a single one answers by itself."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_several_processes import free_port
from typer.testing import CliRunner

from grpo_lib import processes, training
from grpo_lib.errors import CourseError

# A process of two, with two devices each.  It prints what it found as one line of JSON.
PROGRAM = """
import json, sys
import numpy as np
from grpo_lib import processes
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number = int(sys.argv[2])
with processes.joined(sys.argv[1], 2, number, digest="the same"):
    print("not what JSON is", file=sys.stderr)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1), ("fsdp", "tensor"))
    here = NamedSharding(Mesh(np.array(jax.local_devices()), ("fsdp",)), P())
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    found = {
        "first": processes.is_first(),
        "share": list(range(10))[processes.share(10)],
        "gather": processes.gather([{"n": number, "text": "é" * n} for n in range(number + 1)]),
        "none": processes.gather([]),
        "long": [len(text) for text in processes.gather(["x" * (3000 if number else 5)])],
        "any": [processes.any_of(False), processes.any_of(number == 1)],
        "from_first": [processes.from_first(["said", None] if number == 0 else "not this"), processes.from_first(None)],
    }
    spread, few = processes.spread((rows, rows[:3]), mesh)
    again = processes.spread(few, mesh)  # of what is spread already
    found["pieces"] = sorted({shard.data.shape[0] for shard in spread.addressable_shards})
    found["replicated"] = [array.is_fully_replicated for array in (spread, few, again)]
    pairs = ((spread, rows), (few, rows[:3]), (rows, rows))
    found["on_host"] = [np.array_equal(processes.on_host(array), whole) for array, whole in pairs]
    total = jax.jit(lambda x: x.sum())(spread)
    found["total"] = float(total)
    copy = processes.copied_here({"a": spread, "b": jax.numpy.ones(3)}, here)
    found["copy"] = [np.array_equal(np.asarray(copy["a"]), rows), copy["a"].sharding == here, float(copy["b"].sum())]
    two = jax.random.split(jax.random.key(0), 2)
    keys = jax.make_array_from_callback((2,), NamedSharding(mesh, P()), lambda index: two[index])
    try:
        jax.device_put(keys, NamedSharding(mesh, P(), memory_kind="pinned_host"))
        found["typed keys"] = "are moved"
    except ValueError:
        found["typed keys"] = "are not moved"
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def two() -> list[dict]:
    address = f"127.0.0.1:{free_port()}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(number)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    said = [member.communicate(timeout=300) for member in members]
    assert [member.returncode for member in members] == [0, 0], said
    return [json.loads(out) for out, _ in said]  # nothing else is on stdout: gloo is talkative


def test_both_get_the_rows_of_all_in_the_order_of_the_processes(two):
    for found in two:
        assert found["gather"] == [{"n": 0, "text": ""}, {"n": 1, "text": ""}, {"n": 1, "text": "é"}]
        assert found["none"] == []
        assert found["long"] == [5, 3000]
    assert [found["share"] for found in two] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_both_hear_the_first_and_agree_when_one_says_yes(two):
    assert [found["first"] for found in two] == [True, False]
    for found in two:
        assert found["any"] == [False, True]
        assert found["from_first"] == [["said", None], None]


def test_a_batch_is_spread_over_the_devices_of_both_and_comes_back_whole(two):
    for found in two:
        assert found["pieces"] == [2]  # 8 rows on 4 devices
        assert found["replicated"] == [False, True, True]  # 3 rows do not divide
        assert found["on_host"] == [True, True, True]
        assert found["total"] == 276.0
        assert found["copy"] == [True, True, 3.0]


def test_jax_still_cannot_move_typed_keys(two):
    """When this fails, models.make_keys_plain has become superfluous."""
    assert [found["typed keys"] for found in two] == ["are not moved"] * 2


@given(number=st.integers(0, 200), count=st.integers(1, 9))
def test_the_shares_are_all_rows_once_and_as_even_as_can_be(number, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: count)
        shares = []
        for index in range(count):
            patch.setattr(jax, "process_index", lambda index=index: index)
            shares.append(list(range(number))[processes.share(number)])
    assert [row for share in shares for row in share] == list(range(number))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_a_single_process_answers_by_itself():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    rows = np.arange(6).reshape(2, 3)
    assert processes.is_first() and not processes.several()
    assert processes.gather((1, 2)) == [1, 2]
    assert processes.from_first(rows) is rows and processes.spread(rows, mesh) is rows
    assert processes.any_of(True) and not processes.any_of(False)
    assert np.array_equal(processes.on_host(jax.numpy.asarray(rows)), rows)
    processes.wait("nobody")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["hardware.processes=2"], r"a run of 2 processes needs --coordinator HOST:PORT.* --process 0 to 1"),
        (["--processes", "3", "--coordinator", "h:1"], r"a run of 3 processes needs --coordinator"),
        (["--processes", "3", "--process", "1"], r"a run of 3 processes needs --coordinator"),
        (["--process", "1"], r"are for several processes: add --processes N"),
        (["hardware.processes=2", "--processes", "4"], r"--processes 4, and hardware\.processes=2: say the same"),
        (["--processes", "2", "--process", "2", "--coordinator", "h:1"], r"process 2 of 2: the processes of a run"),
        (["--processes", "2", "--process", "0", "--coordinator", "here"], r"'here' is not HOST:PORT"),
        (["--processes", "2", "--process", "0", "--coordinator", "h:65535"], r"the port after it is needed"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(options, words, tmp_path):
    from grpo_lib.cli import app

    result = CliRunner().invoke(app, ["train", "recipes/tiny-cpu.yaml", "--runs", str(tmp_path), *options])
    assert isinstance(result.exception, CourseError)
    with pytest.raises(CourseError, match=words):
        raise result.exception
    assert not list(tmp_path.iterdir())


class Device:
    def __init__(self, process_index: int):
        self.process_index = process_index


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, r"rollout\.engine=vllm needs all devices in one process .* use a slice"),
        ({"hardware": {"trainer_devices": 2, "sampler_devices": 2}}, r"set hardware\.sampler_devices to null"),
        ({"hardware": {"trainer_devices": 2}}, r"set hardware\.trainer_devices to 4, or to null"),
        ({"hardware": {"processes": 4}}, r"hardware\.processes=4 and there are 2 here"),
        ({"training": {"prompts_per_step": 5}}, r"prompts_per_step=5 must be a multiple of the 2 processes"),
    ],
)  # fmt: skip
def test_what_several_processes_cannot_do_is_refused(tiny_recipe, overrides, words):
    data = tiny_recipe.model_dump()
    for section, values in overrides.items():
        data[section] |= values
    recipe = type(tiny_recipe).model_validate(data)
    with pytest.raises(CourseError, match=words):
        training.place(recipe, [Device(0), Device(0), Device(1), Device(1)])


def test_all_devices_train_and_each_process_samples_on_its_own(tiny_recipe):
    devices = [Device(0), Device(0), Device(1), Device(1)]
    trainer, sampler = training.place(tiny_recipe, devices)
    assert trainer == devices and sampler == devices[:2]
