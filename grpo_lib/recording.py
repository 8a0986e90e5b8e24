"""What a training step is measured by: the numbers of one row of metrics.jsonl, and the file itself.

Tunix logs a step's metrics in pieces, some of them one step late.  `Recorder` is one of its logging backends: it
collects the pieces and writes a row when it is whole.  `batch_metrics` are the pieces that Tunix does not have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tunix.sft import hooks

from grpo_lib import answers
from grpo_lib.files import append_jsonl, read_jsonl, write_jsonl_atomic
from grpo_lib.metrics import REWARD_PART, REWARD_SPREAD

Row = dict[str, float | None]

# Tunix's metric -> the name in metrics.jsonl.  The rest of a row is computed here.
TUNIX_METRICS = {
    "actor/train/loss": "loss",
    "actor/train/grad_norm": "grad_norm",
    "actor/train/kl": "kl",
    "actor/train/pg_clipfrac": "clip_fraction",
    "actor/train/entropy": "entropy",
}
# A row is whole when these are in it.
WHOLE = {"reward", "seconds", "loss", "entropy"}


class MeasuredReward:
    """A reward function as Tunix calls it, which keeps what it gave last and adds up the time that it takes."""

    def __init__(self, function: Callable[..., list[float]]):
        self.function = function
        self.__name__ = function.__name__
        self.values: list[float] = []
        self.seconds = 0.0

    def __call__(self, prompts, completions, **columns: Any) -> list[float]:
        started = time.perf_counter()
        self.values = self.function(prompts=prompts, completions=completions, **columns)
        self.seconds += time.perf_counter() - started
        return self.values

    def take_seconds(self) -> float:
        """Seconds since the last time this was asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def batch_metrics(
    sampler: Any,
    group_size: int,
    parts: Sequence[MeasuredReward],
    gap: Callable[[], float],
    prompts,
    completions,
    rewards,
    advantages,
    answer,
    **_: Any,
) -> dict[str, tuple[float, Callable]]:
    """Metrics of the completions of one pass, in Tunix's form {name: (value, how to join several passes)}.

    Args:
      sampler: what sampled them; it knows their lengths, and the seconds that it took.
      parts: the reward functions, which have just been called.
      gap: mean difference between the sampler's log-probabilities and the trainer's, in nats.
      completions, rewards, advantages, answer: one per completion; groups lie together.
    """
    columns = {
        "reward": rewards,
        "accuracy": [answers.is_correct(text, gold) for text, gold in zip(completions, answer, strict=True)],
        "lenient_accuracy": [
            answers.is_correct_leniently(text, gold) for text, gold in zip(completions, answer, strict=True)
        ],
        "format": [answers.format_is_exact(text) for text in completions],
        "completion_length": sampler.lengths,
        "truncated": sampler.truncated,
        **{REWARD_PART + part.__name__: part.values for part in parts},
    }
    columns = {name: np.asarray(column, np.float32) for name, column in columns.items()}
    groups = columns["reward"].reshape(-1, group_size)
    values = {name: column.mean() for name, column in columns.items()}
    values |= {REWARD_SPREAD + part.__name__: columns[REWARD_PART + part.__name__].std() for part in parts}
    values |= {
        "reward_std": groups.std(axis=1).mean(),
        "zero_variance_groups": (np.ptp(groups, axis=1) == 0).mean(),
        "sampler_trainer_gap": gap(),
    }
    seconds = {
        "seconds_rollout": sampler.take_seconds("generating"),
        "seconds_sync": sampler.take_seconds("syncing"),
        "seconds_reward": sum(part.take_seconds() for part in parts),
    }
    return {f"step/{name}": (float(value), np.mean) for name, value in values.items()} | {
        f"step/{name}": (value, np.sum) for name, value in seconds.items()
    }


class Clock(hooks.TrainingHooks):
    """Measures the update and the whole step, and hands both to Tunix's metrics.

    With gradient accumulation Tunix calls the trainer once per micro-batch; the sums over a step are what counts.
    """

    def __init__(self, cluster: Any):
        self.cluster = cluster
        self.last = self.update_started = 0.0

    def start(self) -> None:
        """Time begins with the training, whatever was sampled or evaluated before."""
        self.last = time.perf_counter()
        for what in ("generating", "syncing"):
            self.cluster.rollout.take_seconds(what)

    def on_train_start(self, train_ctx) -> None:
        self.update_started = time.perf_counter()

    def on_train_end(self, train_ctx) -> None:
        now = time.perf_counter()
        self.cluster.buffer_metrics(
            {
                "step/seconds_update": (now - self.update_started, np.sum),
                "step/seconds": (now - self.last, np.sum),
            }
        )
        self.last = now

    def on_train_step_start(self, train_ctx) -> None: ...
    def on_train_step_end(self, train_ctx, train_step, train_loss) -> None: ...
    def on_eval_step_start(self, train_ctx) -> None: ...
    def on_eval_step_end(self, train_ctx, eval_loss) -> None: ...


class Recorder:
    """Collects a step's metrics from Tunix's logger into one row, and writes it to metrics.jsonl when it is whole."""

    def __init__(
        self, directory: Path, *, iterations: int, completions: int, learning_rate: Callable[[int], float],
        writes: bool = True,
    ):  # fmt: skip
        """`iterations`: updates per step; `completions`: of a step; `learning_rate`: of a step, counted from 0;
        `writes`: False in all processes of a run but the first.
        """
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.iterations, self.completions, self.learning_rate = iterations, completions, learning_rate
        self.writes = writes
        self.updates: dict[str, list[float]] = {}  # metrics of the updates of the step that is under way
        self.pending: dict[int, Row] = {}
        self.rows: list[Row] = read_jsonl(self.path) if self.path.exists() else []
        self.trackers: Sequence[Any] = ()  # of grpo_lib.tracking; only where this process writes
        self.on_step: Callable[[Row], None] | None = None
        # JAX hands every scalar to every listener of the process, those of other sessions included.
        self.recording = False

    @property
    def last_step(self) -> int:
        """Of the last whole row; 0 without one."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def backends(self) -> list[Callable[[], Any]]:
        """Factories for Tunix's MetricsLogger: this recorder alone."""
        return [lambda: self]

    def begin(self, finished: int, on_step: Callable[[Row], None] | None) -> list[Row]:
        """Keep the rows of finished steps, drop those of steps that will be done again."""
        self.on_step, self.recording = on_step, True
        if self.last_step > finished:
            self.rows[:] = [row for row in self.rows if row["step"] <= finished]
            self._rewrite()
        return self.rows

    def add(self, step: int, values: Row) -> None:
        """Values of a step from elsewhere, such as a validation; its row may have been written already."""
        written = next((row for row in self.rows if row["step"] == step), None)
        if written is None:
            self.pending.setdefault(step, {}).update(values)
            return
        written.update(values)
        self._rewrite()
        self._report(written, {"step": written["step"], **values})

    def has(self, step: int, name: str) -> bool:
        """Is the row of this step written, with this metric?"""
        return any(row["step"] == step and name in row for row in self.rows)

    def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
        """Tunix's LoggingBackend.  RL metrics count steps from 0, the trainer's from 1."""
        if not self.recording or kwargs.get("step") is None:
            return
        step, name = int(kwargs["step"]), event.lstrip("/")
        if name.startswith("step/train/"):
            self.pending.setdefault(step + 1, {})[name.removeprefix("step/train/")] = float(value)
        elif name in TUNIX_METRICS:
            self._add_update(step, TUNIX_METRICS[name], float(value))
        self._write_whole_rows()

    def _add_update(self, update: int, name: str, value: float) -> None:
        """A metric of one update, counted from 1.  A row has the mean over the updates of its step."""
        values = self.updates.setdefault(name, [])
        values.append(value)
        if update % self.iterations == 0:
            self.pending.setdefault(update // self.iterations, {})[name] = sum(values) / len(values)
            values.clear()

    def close(self) -> None:
        """Tunix calls this when training ends; the last row may still wait for its validation."""

    def finish(self) -> None:
        """Nothing more is recorded."""
        self.recording = False
        for tracker in self.trackers:
            tracker.close()
        self.trackers = ()

    def _write_whole_rows(self) -> None:
        # Tunix logs the entropy last, after the loss, when the next step is done; the rest came before it.
        for step in sorted(step for step, values in self.pending.items() if values.keys() >= WHOLE):
            values = self.pending.pop(step)
            row = {"step": step, "learning_rate": float(self.learning_rate(step - 1)), **values}
            if values["seconds"]:
                row["tokens_per_second"] = values["completion_length"] * self.completions / values["seconds"]
            row = {key: (value if math.isfinite(value) else None) for key, value in row.items()}
            self.rows.append(row)
            if self.writes:
                append_jsonl(self.path, row)
            self._report(row, row)

    def _rewrite(self) -> None:
        if self.writes:
            write_jsonl_atomic(self.path, self.rows)

    def _report(self, row: Row, news: Row) -> None:
        """`news`: what of the row has not been reported."""
        for tracker in self.trackers:
            tracker.log(news)
        if self.on_step:
            self.on_step(row)
