"""A run of several processes: one to a host, or several on one machine; JAX's distributed runtime connects them.

    with joined("10.0.0.2:8476", processes=2, process=0, digest=recipe_text):
        own = share(len(prompts))                       # the rows of this process
        completions = gather(sample(prompts[own]))      # the rows of all, in order, in every process

All processes run the same program on the same batch.  What is large or slow is shared out: the model, its gradient, the
sampling of completions.  What is small is done by every process alike, from the gathered completions: rewards,
advantages, metrics.  So data, seeds and groups do not depend on the number of processes, and a group, or a
micro-batch, may lie across two of them.  Only process 0 writes files, but for checkpoints: each adds its part to them.

In a single process every function here answers at once, without any communication.

On CPU devices, one program at a time: with several devices to a process, two programs that exchange data over gloo
at the same time get stuck, sooner or later (jaxlib 0.11). So what is started here is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_lib import environment
from grpo_lib.errors import CourseError
from grpo_lib.roll_call import RollCall, host_and_port

environment.prepare()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

# How long the first process waits for the last one.
ARRIVE_SECONDS = 45
# Texts are exchanged in arrays of a few sizes, from this one on in powers of two: each size is compiled once.
SMALLEST_TEXT = 1024


def several() -> bool:
    """Is this one of several processes, connected to the others?"""
    return jax.distributed.is_initialized()  # unlike process_count, it does not make JAX look for devices


def is_first() -> bool:
    """Is this process 0, which writes and speaks?"""
    return not several() or jax.process_index() == 0


@contextlib.contextmanager
def joined(coordinator: str, processes: int, process: int, *, digest: str = "") -> Iterator[None]:
    """Join the other processes for the time of the block.  JAX must not have looked for devices yet.

    Args:
      coordinator: HOST:PORT on the machine of process 0, the same for all; the port after it is used, too.
      processes: how many there are.
      process: the number of this one, from 0.
      digest: what has to be the same in all of them, such as the text of the recipe.

    Raises:
      CourseError: the address is of no use, or somebody did not arrive.  When a process is lost later, the others say
        so and end at once, with roll_call.EXIT_CODE.
    """
    host, port = host_and_port(coordinator, "--coordinator")
    if port == 65_535:
        raise CourseError(f"--coordinator {coordinator}: the port after it is needed, too; choose a lower one")
    roll_call = RollCall(
        f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}",
        processes,
        process,
        digest=digest,
        arrive_seconds=ARRIVE_SECONDS,
        what="--coordinator",
    )
    with roll_call:
        if processes > 1:
            _connect(coordinator, processes, process)
        yield
        wait("the end")  # process 0 has more to do than the others
        if processes > 1:
            jax.distributed.shutdown()


def _connect(coordinator: str, processes: int, process: int) -> None:
    """Start JAX's distributed runtime; on CPU devices, gloo carries what they exchange."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process)
    if jax.default_backend() == "cpu":
        _hide_native_output()


def _hide_native_output() -> None:
    """Keep for Python what goes to stdout: gloo prints a line for every connection that it makes."""
    sys.stdout.flush()
    own = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)


def share(number: int) -> slice:
    """Which of so many rows are this process's: the processes in order, as evenly as it goes."""
    cuts = [number * process // jax.process_count() for process in range(jax.process_count() + 1)]
    return slice(cuts[jax.process_index()], cuts[jax.process_index() + 1])


def gather[T](rows: Sequence[T]) -> list[T]:
    """The rows of all processes, in the order of the processes.  Called by all; rows are what JSON can spell."""
    if not several():
        return list(rows)
    return [row for part in _exchange(list(rows)) for row in part]


def any_of(flag: bool) -> bool:
    """Does any process say yes?  Called by all."""
    return any(gather([bool(flag)]))


def from_first[T](value: T) -> T:
    """What process 0 says, in all processes.  Called by all; the value is what JSON can spell."""
    return _exchange(value if is_first() else None)[0] if several() else value


def wait(what: str) -> None:
    """Wait until all processes have come here."""
    if several():
        multihost_utils.sync_global_devices(what)


def _exchange(value: Any) -> list[Any]:
    """The values of all processes, by process."""
    text = json.dumps(value).encode()
    with jax.transfer_guard("allow"):
        lengths = np.ravel(multihost_utils.process_allgather(np.array([len(text)])))
        size = max(SMALLEST_TEXT, 1 << int(max(lengths) - 1).bit_length())
        padded = np.zeros((1, size), np.uint8)
        padded[0, : len(text)] = np.frombuffer(text, np.uint8)
        texts = multihost_utils.process_allgather(padded, tiled=True)
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def spread[T](tree: T, mesh: jax.sharding.Mesh) -> T:
    """Arrays that every process has whole, as arrays over the devices of all: rows are spread over the axis `fsdp`.

    That is how Tunix spreads the batch of a single process.  With several it takes an array for the rows of its own
    process, and copies it to all devices when they are fewer than the devices are.
    """
    if not several():
        return tree
    from tunix.sft import sharding_utils

    def one(leaf: Any) -> jax.Array:
        sharding = sharding_utils.get_sharding(leaf, mesh, jax.sharding.PartitionSpec("fsdp"))
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.block_until_ready(_placing(sharding)(leaf))
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    with jax.transfer_guard("allow"):
        return jax.tree.map(one, tree)


def on_host(array: Any) -> np.ndarray:
    """An array as NumPy's, whole.  Called by all processes if it is spread over them."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def copied_here[T](tree: T, sharding: jax.sharding.NamedSharding) -> T:
    """Arrays, whole, on each of this process's devices.  Called by all processes if they are spread over them.

    Args:
      sharding: of the copies: replicated, over a mesh of this process's devices.
    """

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
        pieces = [shard.data for shard in jax.block_until_ready(_placing(everywhere)(leaf)).addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)

    # Between virtual CPU devices JAX copies through the host, which Tunix forbids while it syncs.
    with jax.transfer_guard("allow"):
        return jax.tree.map(one, tree)


@functools.cache
def _placing(sharding: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A program that all processes run together: it moves an array to where the sharding says."""
    return jax.jit(lambda array: array, out_shardings=sharding)
