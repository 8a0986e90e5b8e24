"""What several test files use: programs in processes of their own, waiting, --json, rows without clocks, a model with
an output layer of its own."""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["grpo_train.pipeline"])  # what most of the programs import, and seconds each time
TRAIN = "from grpo_train.cli import main; main()"

# Clocks differ between two runs of the same steps, and what they compile; nothing else may.
CLOCKS = (
    *("seconds", "seconds_reward", "seconds_rollout", "seconds_sync", "seconds_update", "tokens_per_second"),
    "compilations",
)


def without_clocks(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]


def result_of(done) -> Any:
    """The JSON on the last line of a command that has succeeded."""
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def without_make() -> dict[str, str]:
    """The environment for a `make` of a test's own: below `make test` it would say which folder it enters."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}


def wait_for(condition: Callable[[], bool], seconds: float = 40, pause: float = 0.01) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return False


@contextlib.contextmanager
def within(seconds: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """What happens inside takes no longer: by this process's CPU, or by another clock."""
    started = clock()
    yield
    assert clock() - started < seconds, f"{clock() - started:.1f} s"


def untied(folder: Path, tiny_base: Path, noise: float = 0.0) -> Path:
    """The tiny base with an output layer of its own: its embedding, and `noise` of its standard deviation.

    Without noise it answers as the tied one does.  Random models of other architectures: grpo_train.tpu.random_model.
    """
    shutil.copytree(tiny_base, folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    drawn = np.random.default_rng(0).normal(size=embedding.shape, scale=noise * embedding.std())
    weights["lm_head.weight"] = (embedding + drawn).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Program(FORKS.Process):
    """A program, as text, in a process of its own that is forked where its libraries are imported.  It has its own JAX.

    What it prints is in the file `output`.  `XLA_FLAGS=devices(4)`: with four virtual devices.
    """

    def __init__(self, text: str, *arguments: Any, output: Path, **environment: str):
        super().__init__(daemon=True)
        self.text = text
        self.output = output
        self.environment = environment
        self.arguments = ["program", *map(str, arguments)]
        output.write_text("")
        self.start()

    def run(self) -> None:
        os.environ.update(self.environment)
        file = os.open(self.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = self.arguments
        exec(self.text, {"__name__": "__main__"})

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")  # it may be in the middle of a character

    def lines(self, code: int = 0, seconds: float = 900) -> list[str]:
        """What it has printed when it ends, with this exit code; a negative one is the signal that killed it."""
        self.join(seconds)
        assert self.exitcode == code, f"exit code {self.exitcode}: {self.said()[-3000:]}"
        return self.said().splitlines()


def devices(count: int) -> str:
    return f"--xla_force_host_platform_device_count={count}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
