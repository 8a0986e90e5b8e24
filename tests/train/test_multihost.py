"""Communication between real processes, and what several of them cannot do."""

import json
import os
import signal
from types import SimpleNamespace

import jax
import pytest
from helpers import TRAIN, Program, devices, free_port, wait_for
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.common.errors import CourseError
from grpo_train.engines import cluster
from grpo_train.runs import multihost

# One of two processes, with two devices each.  It prints its results as one line of JSON.
PROGRAM = """
import json, sys
import numpy as np
from grpo_train.runs import multihost
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number = int(sys.argv[2])
with multihost.distributed_context(sys.argv[1], 2, number, digest="the same"):
    print("not what JSON is", file=sys.stderr)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1), ("fsdp", "tensor"))
    here = NamedSharding(Mesh(np.array(jax.local_devices()), ("fsdp",)), P())
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    found = {
        "first": multihost.is_main_process(),
        "slice": list(range(10))[multihost.process_slice(10)],
        "gather": multihost.gather([{"n": number, "text": "é" * n} for n in range(number + 1)]),
        "none": multihost.gather([]),
        "long": [len(text) for text in multihost.gather(["x" * (3000 if number else 5)])],
        "any": [multihost.any_process(False), multihost.any_process(number == 1)],
        "from_first": [multihost.broadcast(["said", None] if number == 0 else "not this"), multihost.broadcast(None)],
    }
    spread, few = multihost.shard_batch((rows, rows[:3]), mesh)
    again = multihost.shard_batch(few, mesh)  # of what is spread already
    found["pieces"] = sorted({shard.data.shape[0] for shard in spread.addressable_shards})
    found["replicated"] = [array.is_fully_replicated for array in (spread, few, again)]
    pairs = ((spread, rows), (few, rows[:3]), (rows, rows))
    found["on_host"] = [np.array_equal(multihost.to_numpy(array), whole) for array, whole in pairs]
    total = jax.jit(lambda x: x.sum())(spread)
    found["total"] = float(total)
    found["copy"] = []
    for part, spec in ((rows, P()), (rows[:4], P()), (rows, P("fsdp")), (rows.T, P(None, "fsdp"))):
        target = NamedSharding(Mesh(np.array(jax.local_devices()), ("fsdp",)), spec)
        copy = multihost.reshard_locally(spread if part is rows else multihost.shard_batch(part, mesh), target)
        found["copy"].append(np.array_equal(np.asarray(copy), part) and copy.sharding == target)
    backwards = Mesh(np.array(jax.devices()[::-1]).reshape(4, 1), ("fsdp", "tensor"))  # as on a TPU's torus
    found["copy"].append(np.array_equal(multihost.reshard_locally(multihost.shard_batch(rows, backwards), here), rows))
    two = jax.random.split(jax.random.key(0), 2)
    keys = jax.make_array_from_callback((2,), NamedSharding(mesh, P()), lambda index: two[index])
    try:
        jax.device_put(keys, NamedSharding(mesh, P(), memory_kind="pinned_host"))
        found["typed keys"] = "are moved"
    except ValueError:
        found["typed keys"] = "are not moved"
    print(json.dumps(found))
"""


# Connects, and exchanges values for minutes.  argv: coordinator, processes, process, digest, ARRIVAL_SECONDS.
CONNECT = """
import os, sys, time
from grpo_lib.common.errors import CourseError
from grpo_train.runs import multihost

multihost.ARRIVAL_SECONDS = int(sys.argv[5])
try:
    with multihost.distributed_context(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), digest=sys.argv[4]):
        for round in range(1000):
            multihost.any_process(False)
            if round == 2:
                print("connected", flush=True)
            time.sleep(0.1)
except CourseError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


# Waits for process 0, which does not come.  argv: coordinator, process.
WAIT = """
import os, signal, sys, time
from grpo_train.runs import multihost

with multihost.distributed_context(sys.argv[1], 2, int(sys.argv[2]), digest="the same") as number:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    multihost.barrier("both")
    print("both", flush=True)
    if number:
        multihost.barrier("one")
    time.sleep(60)
"""


# One of two processes that JAX finds by itself.  argv: processes expected, then the folder of this process, if any.
FOUND = """
import os, sys
from grpo_lib.common.errors import CourseError
from grpo_train.runs import multihost
from jax._src.clusters import cloud_tpu_cluster

cloud_tpu_cluster.running_in_cloud_tpu_vm = "TPU_WORKER_ID" in os.environ  # JAX looks for chips
try:
    with multihost.distributed_context(None, int(sys.argv[1]), None, digest="the same") as number:
        print(number, multihost.gather([f"process {number}"]))
        for folder in sys.argv[2:]:
            multihost.require_shared(folder, "it on a disk")
            print("shared", flush=True)
except CourseError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


def slurm(number: int, port: int) -> dict[str, str]:
    """What SLURM sets in process `number` of two."""
    return {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


def gke(number: int, port: int) -> dict[str, str]:
    """What GKE sets in the pods of a slice of two hosts."""
    return {
        "TPU_WORKER_ID": str(number), "TPU_WORKER_HOSTNAMES": "localhost,localhost", "JAX_COORDINATOR_PORT": str(port),
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0",
    }  # fmt: skip


def said_by(members: list[Program]) -> str:
    """The error that all of them end with."""
    last = {member.lines(2)[-1] for member in members}
    assert len(last) == 1, last
    assert min(last).startswith("error: "), last
    return min(last)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    address = f"127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("two")
    members = [Program(PROGRAM, address, n, output=folder / f"{n}", XLA_FLAGS=devices(2)) for n in (0, 1)]
    said = [member.lines() for member in members]
    assert all(len(lines) == 2 and lines[0] == "not what JSON is" for lines in said), said  # nothing of gloo's
    return [json.loads(lines[-1]) for lines in said]


# One of two processes.  argv: coordinator, process.
AS_GLOO_PRINTS = """
import sys
from grpo_train.runs import multihost

multihost.keep_gloo_off_stdout = lambda: None
with multihost.distributed_context(sys.argv[1], 2, int(sys.argv[2]), digest="the same"):
    multihost.gather(["one"])
"""


@pytest.mark.slow
def test_gloo_still_prints_to_stdout(tmp_path):
    """jaxlib 0.11.  When this fails, keep_gloo_off_stdout is no longer needed."""
    address = f"127.0.0.1:{free_port()}"
    members = [Program(AS_GLOO_PRINTS, address, n, output=tmp_path / f"{n}") for n in (0, 1)]
    assert all("[Gloo] Rank " in "\n".join(member.lines()) for member in members)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "message"),
    [
        ([(2, 0, "one"), (2, 1, "another")], "the processes were started with different recipes"),
        ([(2, 0, "one"), (3, 1, "one")], "different numbers of processes; give all of them the same"),
    ],
)
def test_processes_that_do_not_belong_together_stop_with_one_line(tmp_path, started, message):
    address = f"127.0.0.1:{free_port()}"
    members = [Program(CONNECT, address, *more, 60, output=tmp_path / f"{more[1]}") for more in started]
    assert message in said_by(members)


@pytest.mark.slow
def test_a_signal_is_handled_while_a_process_waits_for_another(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    members = [Program(WAIT, address, n, output=tmp_path / f"{n}") for n in (0, 1)]
    assert wait_for(lambda: all("both\n" in member.said() for member in members))
    os.kill(members[1].pid, signal.SIGTERM)
    members[1].lines(75, seconds=30)
    members[0].kill()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [slurm, gke])
def test_where_jax_finds_the_processes_the_same_command_is_enough(tmp_path, cluster):
    port = free_port()
    members = [Program(FOUND, 2, output=tmp_path / f"{n}", **cluster(n, port)) for n in (0, 1)]
    assert [member.lines()[-1] for member in members] == [f"{n} ['process 0', 'process 1']" for n in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (3, "error: the run has 3 processes, more than the 2 that JAX finds on this slice or cluster; set "),
        (1, "error: the run has 1 processes, fewer than the 2 that JAX finds"),
    ],
)  # fmt: skip
def test_more_hosts_than_the_slice_has_are_refused(tmp_path, expected, message):
    port = free_port()
    assert message in said_by([Program(FOUND, expected, output=tmp_path / f"{n}", **slurm(n, port)) for n in (0, 1)])


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_found(tmp_path):
    for name in ("shared", "one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "a file").touch()
    # The first two are shared; the third process 0 makes; the last is not.
    same = tmp_path / "shared"
    new = tmp_path / "new" / "run"
    port = free_port()
    folders = [(same, new, tmp_path / name) for name in ("one", "other")]
    members = [Program(FOUND, 2, *folders[n], output=tmp_path / f"{n}", **slurm(n, port)) for n in (0, 1)]
    error = f"error: {tmp_path / 'one'} is not shared by all processes: process 1 does not see there what process 0 "
    for member in members:
        assert member.lines(2)[-3:] == ["shared", "shared", error + "writes; put it on a disk"]
    assert not list(tmp_path.rglob(".*"))  # nothing stays behind

    port = free_port()
    members = [Program(FOUND, 2, tmp_path / "a file", output=tmp_path / f"{n}", **slurm(n, port)) for n in (0, 1)]
    assert "process 0 cannot write there" in said_by(members)


@pytest.mark.long
def test_a_run_in_two_folders_stops_before_its_first_step(tmp_path):
    port = free_port()
    train = [TRAIN, "train", "recipes/tiny-cpu.yaml", "--processes", 2, "--runs"]
    members = [Program(*train, tmp_path / str(n), output=tmp_path / f"{n}.txt", **slurm(n, port)) for n in (0, 1)]
    assert "is not shared" in said_by(members)
    for number, member in enumerate(members):
        assert f"process {number} of 2: 1 of 2 devices are its own, cpu" in member.said()
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_lost_process_ends_the_other_within_a_minute(tmp_path, victim, how):
    address = f"127.0.0.1:{free_port()}"
    members = [Program(CONNECT, address, 2, n, "one", 60, output=tmp_path / f"{n}") for n in (0, 1)]
    assert wait_for(lambda: all("connected\n" in member.said() for member in members))
    os.kill(members[victim].pid, how)
    other = members[1 - victim]
    other.join(60)
    members[victim].kill()  # what is stopped does not end by itself
    assert other.exitcode
    assert "continues from its last checkpoint" in other.said() or "another task died" in other.said()


def test_both_agree_and_a_batch_is_spread_over_the_devices_of_both_and_comes_back_whole(two):
    both = {
        "gather": [{"n": 0, "text": ""}, {"n": 1, "text": ""}, {"n": 1, "text": "é"}],
        "none": [],
        "long": [5, 3000],
        "any": [False, True],
        "from_first": [["said", None], None],
        "pieces": [2],  # 8 rows on 4 devices
        "replicated": [False, True, True],  # 3 rows do not divide
        "on_host": [True, True, True],
        "total": 276.0,
        "copy": [True] * 5,
        "typed keys": two[0]["typed keys"],  # the next test's
    }
    assert two == [both | {"first": True, "slice": [0, 1, 2, 3, 4]}, both | {"first": False, "slice": [5, 6, 7, 8, 9]}]


def test_jax_still_refuses_typed_keys(two):
    """When this fails, compat.make_keys_plain is not needed any more."""
    assert [found["typed keys"] for found in two] == ["are not moved"] * 2


@given(number=st.integers(0, 200), count=st.integers(1, 9))
def test_the_slices_are_all_rows_once_and_as_even_as_can_be(number, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: count)
        slices = []
        for index in range(count):
            patch.setattr(jax, "process_index", lambda index=index: index)
            slices.append(list(range(number))[multihost.process_slice(number)])
    assert [row for part in slices for row in part] == list(range(number))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, r"rollout\.engine=vllm needs all devices in one process .* use a slice"),
        ({"hardware": {"trainer_devices": 2, "sampler_devices": 2}}, r"set hardware\.sampler_devices to null"),
        ({"hardware": {"trainer_devices": 2}}, r"set hardware\.trainer_devices to 4, or to null"),
        ({"hardware": {"processes": 4}}, r"hardware\.processes=4, but the run has 2"),
        ({"training": {"prompts_per_step": 5}}, r"prompts_per_step=5 must be a multiple of 2 "),
    ],
)  # fmt: skip
def test_what_several_processes_cannot_do_is_refused(tiny_recipe, overrides, words):
    devices = [SimpleNamespace(process_index=n // 2, id=n) for n in range(4)]
    data = tiny_recipe.model_dump()
    assert cluster.assign_devices(tiny_recipe.hardware, "tunix", 1, devices) == (devices, devices[:2])
    for section, values in overrides.items():
        data[section] |= values
    recipe = type(tiny_recipe).model_validate(data)
    with pytest.raises(CourseError, match=words):
        recipe.plan_on(4, 2)
        cluster.assign_devices(recipe.hardware, recipe.rollout.engine, 1, devices)


# Prints the bytes that go through the host for each placement, by JAX's device_put and by ours; and Tunix's.
MOVES = """
import jax, jax.numpy as jnp, numpy as np
from jax._src import array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tunix.rl import reshard
from grpo_train.engines import compat
from grpo_train.runs import multihost

through, fetch = [0], array.ArrayImpl._value.fget

def counted(self):
    through[0] += self.nbytes * (self._npy_value is None)
    return fetch(self)

def moved(move, source, target):
    placed = jax.device_put(values, source)
    through[0] = 0
    arrived = jax.block_until_ready(move(placed, target))
    seen = through[0]
    assert arrived.sharding == target and np.array_equal(np.asarray(arrived), values)
    return seen

array.ArrayImpl._value = property(counted)
devices, values = np.array(jax.devices()), np.arange(48 * 16, dtype=np.float32).reshape(48, 16)
trains, both = lambda n: Mesh(devices[:n], ("fsdp",)), Mesh(devices.reshape(4, 2), ("fsdp", "tensor"))
samples = lambda chosen, *shape: Mesh(devices[chosen].reshape(shape), ("data", "model"))
rows, columns = P("fsdp"), P(None, "model")
for mesh, spec, target in (
    (trains(8), rows, samples(slice(8), 1, 8)),  # the same chips, one replica
    (trains(8), rows, samples(slice(8), 4, 2)),  # four replicas
    (trains(8), rows, samples(slice(8), 8, 1)),  # eight
    (both, P("fsdp", "tensor"), samples(slice(8), 2, 4)),
    (trains(4), rows, samples(slice(4, 8), 1, 4)),  # other chips
    (trains(4), rows, samples(slice(4, 8), 2, 2)),
    (trains(2), rows, samples(slice(4, 8), 1, 4)),  # more of them
    (trains(6), rows, samples(slice(6, 8), 1, 2)),  # fewer
    (trains(8), rows, samples(slice(None, None, -1), 1, 8)),  # as on a TPU's torus
):
    pair = NamedSharding(mesh, spec), NamedSharding(target, columns)
    print(moved(jax.device_put, *pair), moved(multihost.reshard, *pair))
upstream = moved(reshard.reshard_pytree, *pair[:1], NamedSharding(samples(slice(8), 1, 8), columns))
compat.reshard_on_devices()
print(upstream, moved(reshard.reshard_pytree, *pair[:1], NamedSharding(samples(slice(8), 1, 8), columns)))
"""


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    program = Program(MOVES, output=tmp_path_factory.mktemp("moves") / "said.txt", XLA_FLAGS=devices(8))
    return [tuple(map(int, line.split())) for line in program.lines()[-10:]]


@pytest.mark.slow
def test_no_weight_goes_through_the_host_when_it_is_resharded(moves):
    assert len(moves) == 10
    assert {ours for _, ours in moves} == {0}
    assert all(by_jax for by_jax, _ in moves[:8])  # what is avoided


@pytest.mark.slow
def test_tunix_still_reshards_through_the_host(moves):
    """Tunix 0.1.7.  When this fails, compat.reshard_on_devices can go."""
    assert moves[-1][0] > 0
