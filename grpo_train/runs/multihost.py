"""Multi-process runs: one process per host, or several on one machine, connected by JAX's distributed runtime.

    with distributed_context(None, processes=2, process=None, digest=recipe_text):  # JAX finds the others
        rows = process_slice(len(prompts))              # the rows of this process
        completions = gather(sample(prompts[rows]))     # the rows of all, in order, in every process

All processes run the same program on the same batch. What is large or slow is divided among them: the model, its
gradient, the sampling of completions. What is small is done by every process, from the gathered completions: rewards,
advantages, metrics. So data, seeds and groups do not depend on the number of processes. Only process 0 writes files,
except for checkpoints: each process adds its part to those. In a single process every function here returns at once.

On CPU devices, one program at a time: with several devices per process, two programs that exchange data over gloo
at the same time deadlock, sooner or later (jaxlib 0.11). So the functions here wait for what they start.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_lib.common import environment
from grpo_lib.common.errors import CourseError
from grpo_train.runs.preemption import Interrupted

environment.prepare()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from etils import epath  # noqa: E402
from jax._src import distributed  # noqa: E402  (its client compares recipes before JAX looks for devices)
from jax.experimental import multihost_utils  # noqa: E402

# How long a process waits for the others to connect.
ARRIVAL_SECONDS = 45
# The same where a scheduler starts them: hosts and pods become ready minutes apart.
CLUSTER_ARRIVAL_SECONDS = 300
# A process that sends no heartbeats for so long counts as lost; JAX then aborts the others.
HEARTBEAT_SECONDS = 20
# How long a process that stops waits for the others, which often stop for the same reason.
LEAVE_SECONDS = 10
# How long a process looks for a file that another one has written; network file systems show it late.
SHARED_SECONDS = 10
# Texts are exchanged in arrays of a few sizes, from this one on in powers of two: each size is compiled once.
SMALLEST_TEXT = 1024
_barriers = itertools.count()

LOST = (
    "if another process was lost, see its own output; start all processes again with the same command, and the run "
    "continues from its last checkpoint"
)


def is_distributed() -> bool:
    """True in a multi-process run."""
    return jax.distributed.is_initialized()  # unlike process_count, it does not make JAX look for devices


def is_main_process() -> bool:
    """True on process 0, which does all file I/O and logging."""
    return not is_distributed() or jax.process_index() == 0


@contextlib.contextmanager
def distributed_context(
    coordinator: str | None, processes: int, process: int | None, *, digest: str = ""
) -> Iterator[int]:
    """Context: connected to the other processes; yields this process's index.  JAX must not have looked for devices.

    Args:
      coordinator: HOST:PORT of process 0, the same for all; None on a TPU slice, on GKE, under SLURM and wherever else
        JAX itself finds process 0, how many there are, and which one this is.
      processes: how many there should be.
      process: the number of this one, from 0; None without a coordinator.
      digest: what has to be the same in all of them, such as the text of the recipe.

    Raises CourseError for an address that cannot be used, where JAX does not find the processes or finds another number
    of them, and in all processes when they were started differently.  If a process does not arrive, JAX ends this one,
    with its own error.  If one is lost later, JAX ends the others: at once when it was killed, HEARTBEAT_SECONDS later
    when it is frozen.
    """
    if coordinator:
        _require_address(coordinator, processes, process)
    _connect(coordinator, processes, process)
    try:
        _compare(processes, digest)
        yield jax.process_index()
        barrier("the end")  # process 0 has more to do than the others
    except (CourseError, Interrupted):
        _leave_together()
        raise
    except Exception as error:
        error.add_note(LOST)
        raise
    jax.distributed.shutdown()


def _require_address(coordinator: str, processes: int, process: int | None) -> None:
    """Raise CourseError for a coordinator or a number that cannot be."""
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise CourseError(
            f"--coordinator {coordinator!r} is not HOST:PORT; write it like 10.0.0.2:8476, the same for all processes"
        )
    if process is None or not 0 <= process < processes:
        raise CourseError(f"--process {process}: a run of {processes} processes numbers them from 0 to {processes - 1}")


def _connect(coordinator: str | None, processes: int, process: int | None) -> None:
    """Start JAX's distributed runtime; on CPU devices, gloo carries what the processes exchange."""
    where = "the processes that JAX finds by itself"
    patience = CLUSTER_ARRIVAL_SECONDS
    if coordinator:
        where = f"--coordinator {coordinator}"
        patience = ARRIVAL_SECONDS
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not environment.has_accelerator():
        keep_gloo_off_stdout()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=processes if coordinator else None,
            process_id=process,
            initialization_timeout=patience,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # of the runtime; without a coordinator also of metadata servers and Kubernetes
        if coordinator and not isinstance(error, RuntimeError):
            raise
        number = "this process" if process is None else f"process {process}"
        reason = " ".join(str(error).split()) or type(error).__name__
        instead = f"; give --coordinator HOST:PORT and --process 0 to {processes - 1}" if not coordinator else ""
        raise CourseError(f"{where}: {number} cannot connect ({reason}){instead}") from None


def keep_gloo_off_stdout() -> None:
    """Let only Python print to stdout, for the rest of this process.

    jaxlib 0.11 prints "[Gloo] Rank 0 is connected to 1 peer ranks. …" there for each group of devices, in the middle of
    our lines, and has no setting for it.  So Python gets another descriptor of the same file, and what compiled code
    prints to the old one is dropped; stderr stays as it is.
    Test: test_gloo_still_prints_to_stdout.
    """
    try:
        if sys.stdout.fileno() != 1:  # a notebook's or a test's, and not the terminal
            return
    except OSError:  # io.UnsupportedOperation: it has none
        return
    before: Any = sys.stdout
    before.flush()
    own = os.fdopen(os.dup(1), "wb", 0 if before.write_through else -1)
    sys.stdout = io.TextIOWrapper(
        own,
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _compare(processes: int, digest: str) -> None:
    """Raise CourseError, in all processes, unless all were started with the same digest and number of processes, and
    are so many.

    Through the key-value store of the coordinator, and not an all-gather: with different numbers of processes JAX would
    wait for devices that never come.
    """
    started = distributed.global_state
    started.client.key_value_set(
        f"grpo/started/{started.process_id}", f"{processes} {hashlib.sha256(digest.encode()).hexdigest()}"
    )
    started.client.wait_at_barrier("grpo/started", 1000 * ARRIVAL_SECONDS)
    if len({value for _, value in started.client.key_value_dir_get("grpo/started")}) > 1:
        raise CourseError(
            "the processes were started with different recipes or different numbers of processes; give all of them the "
            "same RECIPE, overrides and --processes"
        )
    if (found := started.num_processes) != processes:
        raise CourseError(
            f"the run has {processes} processes, {'more' if processes > found else 'fewer'} than the {found} that JAX "
            f"finds on this slice or cluster; set hardware.accelerator to this slice, or hardware.processes={found}"
        )


def _leave_together() -> None:
    """Disconnect, if all processes do so now; JAX would abort those that see process 0 disappear."""
    with contextlib.suppress(Exception):
        distributed.global_state.client.wait_at_barrier("grpo/leave", 1000 * LEAVE_SECONDS)
        jax.distributed.shutdown()


def process_slice(number: int) -> slice:
    """The rows of this process, of `number` in all: consecutive, in the order of the processes, as even as possible."""
    cuts = [number * process // jax.process_count() for process in range(jax.process_count() + 1)]
    return slice(cuts[jax.process_index()], cuts[jax.process_index() + 1])


def gather[T](rows: Sequence[T]) -> list[T]:
    """The rows of all processes, in the order of the processes.  Called by all; rows are JSON-serializable."""
    return [row for part in _exchange(list(rows)) for row in part] if is_distributed() else list(rows)


def any_process(flag: bool) -> bool:
    """Logical OR over processes.  Called by all."""
    return any(gather([bool(flag)]))


def broadcast[T](value: T) -> T:
    """Broadcast from process 0.  Called by all; the value is JSON-serializable."""
    if not is_distributed():
        return value
    return _exchange(value if is_main_process() else None)[0]


def barrier(what: str) -> None:
    """Wait until all processes are here; the others may be minutes late, as the one that converts the model.

    By the coordinator's store, looked at again and again: in a collective no signal would be handled meanwhile.
    """
    if is_distributed():
        client = distributed.global_state.client
        arrived = f"grpo/{next(_barriers)} {what}"
        client.key_value_set(f"{arrived}/{jax.process_index()}", "")
        while len(client.key_value_dir_get(arrived)) < jax.process_count():
            time.sleep(0.1)


def require_shared(folder: str | os.PathLike, remedy: str) -> None:
    """Raise CourseError, in all processes, unless all see in their `folder` what process 0 writes to its own.

    Called by all.  `folder` may be in a bucket; process 0 makes it.  `remedy`: what to put where.
    """
    if not is_distributed():
        return
    folder = epath.Path(folder)
    reason = None
    # A new name: no file system has noted yet that it is missing.
    token, shown = broadcast((f".shared-{secrets.token_hex(8)}", str(folder)))
    if is_main_process():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).write_text("from process 0, for the others to find")
        except Exception as error:  # of the file system, or of the bucket's client
            reason = f"process 0 cannot write there ({type(error).__name__}: {' '.join(str(error).split())})"
    reason = broadcast(reason)
    missing = gather([] if reason or _appears(folder / token) else [str(jax.process_index())])
    if is_main_process():
        with contextlib.suppress(Exception):
            (folder / token).unlink()
    if missing:
        reason = f"process {', '.join(missing)} does not see there what process 0 writes"
    if reason:
        raise CourseError(f"{shown} is not shared by all processes: {reason}; put {remedy}")


def _appears(path: epath.Path) -> bool:
    """Whether a file is there within SHARED_SECONDS."""
    for _ in range(5 * SHARED_SECONDS):
        with contextlib.suppress(Exception):  # a folder that this process may not read
            if path.exists():
                return True
        time.sleep(0.2)
    return False


def _exchange(value: Any) -> list[Any]:
    """The values of all processes, in their order."""
    text = json.dumps(value).encode()
    with jax.transfer_guard("allow"):
        lengths = np.ravel(multihost_utils.process_allgather(np.array([len(text)])))
        padded = np.zeros((1, max(SMALLEST_TEXT, 1 << int(max(lengths) - 1).bit_length())), np.uint8)
        padded[0, : len(text)] = np.frombuffer(text, np.uint8)
        texts = multihost_utils.process_allgather(padded, tiled=True)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def shard_batch[T](tree: T, mesh: jax.sharding.Mesh) -> T:
    """Shard arrays that every process has in full over the devices of all: rows over the axis `fsdp`.

    Tunix shards the batch of a single process like this.  With several it takes an array for the rows of its own
    process, and replicates it when there are fewer rows than devices.
    """
    if not is_distributed():
        return tree
    from tunix.sft import sharding_utils

    def one(leaf: Any) -> jax.Array:
        sharding = sharding_utils.get_sharding(leaf, mesh, jax.sharding.PartitionSpec("fsdp"))
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.block_until_ready(_move_to(sharding)(leaf))
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    with jax.transfer_guard("allow"):
        return jax.tree.map(one, tree)


def to_numpy(array: Any) -> np.ndarray:
    """The full array in NumPy.  Called by all processes if it is sharded over them."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def reshard_locally(array: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """The array on this process's devices.  Called by all processes if it is sharded over them.

    Args:
      sharding: over a mesh of this process's devices; the other processes give the same over theirs.
    """
    with jax.transfer_guard("allow"):  # Tunix forbids transfers while it syncs, those between virtual devices, too
        if array.is_fully_addressable:
            return reshard(array, sharding)
        # The same sharding in every process is one over a mesh of all devices, with an axis more.
        mesh = sharding.mesh
        count = jax.process_count()
        own = [[device for device in jax.devices() if device.process_index == number] for number in range(count)]
        whole = jax.sharding.Mesh(np.array(own).reshape(count, *mesh.devices.shape), ("process", *mesh.axis_names))
        spread = jax.device_put(array, jax.sharding.NamedSharding(whole, sharding.spec))
        pieces = [shard.data for shard in jax.block_until_ready(spread).addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def reshard(array: Any, sharding: Any) -> jax.Array:
    """The array with another sharding, on the same devices or on others, without a way through the host's memory.

    jax.device_put (JAX 0.11) gathers an array on the host wherever the new devices do not hold the slices that the old
    ones do.  Here its own devices slice it first as the new ones will, and then whole slices move.
    """
    here = getattr(getattr(array, "sharding", None), "mesh", None)
    if here is None or here.size == 1:  # of one device, or of the host
        return jax.device_put(array, sharding)
    if len(sharding.device_set) == here.size:
        mesh = jax.sharding.Mesh(here.devices.reshape(sharding.mesh.devices.shape), sharding.mesh.axis_names)
        return jax.device_put(_move_to(jax.sharding.NamedSharding(mesh, sharding.spec))(array), sharding)
    whole = _move_to(jax.sharding.NamedSharding(here, jax.sharding.PartitionSpec()))(array)
    return jax.device_put(whole.addressable_data(0), sharding)


@functools.cache
def _move_to(sharding: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A program that all processes run together: it moves an array to a sharding."""
    return jax.jit(lambda array: array, out_shardings=sharding)
