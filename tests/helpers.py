"""What several test files use: a model with an output layer of its own, rows without clocks, waiting, --json."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

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


def wait_for(condition: Callable[[], bool], seconds: float = 40, pause: float = 0.01) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return False


def untied(folder: Path, tiny_base: Path, noise: float = 0.0) -> Path:
    """The tiny base with an output layer of its own: its embedding, and `noise` of its standard deviation.

    Without noise it answers as the tied one does.  Random models of other architectures: grpo_tpu.random_model.
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
