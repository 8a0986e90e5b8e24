"""One row of metrics.jsonl per training step: computed here or taken from Tunix's logger, and written.

Tunix logs a step's metrics in pieces, some of them one step late.  `Recorder` is one of its logging backends: it
collects the pieces and appends the row once it is complete.  `batch_metrics` computes what Tunix does not log.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft import hooks

from grpo_lib.common.files import append_jsonl, read_json_if_exists, write_jsonl_atomic
from grpo_lib.prompts import opens_thoughts, with_prefix
from grpo_lib.records import grade
from grpo_train.runs.metric_glossary import REWARD_MEAN, REWARD_STD, TASK_METRIC, Row, last_row_is_torn, read_metrics

# Tunix's metric -> the name in metrics.jsonl.  The rest of a row is computed here.
TUNIX_METRICS = {
    "actor/train/loss": "loss",
    "actor/train/grad_norm": "grad_norm",
    "actor/train/kl": "kl",
    "actor/train/pg_clipfrac": "clip_ratio",
    "actor/train/entropy": "entropy",
    "actor/train/importance_ratio": "sampling/importance_sampling_ratio/mean",
}
# A row is complete once it has these: Tunix logs the entropy of a step last.
ESTIMATE = "estimate.json"  # in the run's folder
REQUIRED_METRICS = {"reward", "seconds", "loss", "entropy"}
# JAX's event for each program that it compiles, or reads from its cache on disk.
COMPILED = "/jax/core/compile/backend_compile_duration"


class TimedReward:
    """A reward function as Tunix calls it; keeps the values of its last call and adds up the time of its calls.

    The function gets completions as an evaluation grades them, with the end of their prompts in front
    (`prompts.completion_prefix`).
    """

    def __init__(self, function: Callable[..., list[float]]):
        self.function = function
        self.__name__ = function.__name__
        self.values: list[float] = []
        self.seconds: dict[str, float] = defaultdict(float)  # "grading", since it was taken out last

    def __call__(self, prompts, completions, completion_prefix=None, **columns: Any) -> list[float]:
        started = time.perf_counter()
        completions = with_prefix(completion_prefix, completions)
        self.values = self.function(prompts=prompts, completions=completions, **columns)
        self.seconds["grading"] += time.perf_counter() - started
        return self.values


def batch_metrics(
    sampler: Any,
    group_size: int,
    parts: Sequence[TimedReward],
    gap: Callable[[], float],
    prompts,
    completions,
    rewards,
    advantages,
    answer,
    kind,
    task=None,
    completion_prefix=None,
    **_: Any,
) -> dict[str, tuple[Any, Callable]]:
    """Metrics of the completions of one rollout micro-batch, in Tunix's form {name: (value, how to join several)}.

    Args:
      sampler: has sampled them; has their `lengths` and `truncated`, and the `seconds` of sampling and weight sync.
      group_size: G, completions per prompt; the completions of a group are next to each other.
      parts: the reward functions, which have just been called on this batch.
      gap: see `training.sampler_trainer_gap`.
      prompts, completions, rewards, answer, kind, task: (B,) texts as sent and as sampled, sums of the reward
        functions, golds, how each is graded, and where a recipe has several tasks, which it is.
      completion_prefix: (B,) ends of the prompts that count as the beginnings of completions; None: none.
    """
    # Graded exactly as an evaluation grades, so that the training curves and before/after measure the same thing.
    graded = with_prefix(completion_prefix, completions)
    verdicts = [
        grade(text, gold, how, thinking=opens_thoughts(prompt))
        for prompt, text, gold, how in zip(prompts, graded, answer, kind, strict=True)
    ]
    without_number = [verdict["format"] and verdict["extracted"] is None for verdict in verdicts]
    columns = {
        "reward": rewards,
        "accuracy": [verdict["strict"] for verdict in verdicts],
        "lenient_accuracy": [verdict["lenient"] for verdict in verdicts],
        "format": [verdict["format"] for verdict in verdicts],
        "format_without_number": without_number,
        "completions/mean_length": sampler.lengths,
        "completions/clipped_ratio": sampler.truncated,
    }
    for part in parts:
        columns[REWARD_MEAN.format(part.__name__)] = part.values
    columns = {name: np.asarray(column, np.float32) for name, column in columns.items()}  # (B,) each
    groups = columns["reward"].reshape(-1, group_size)  # (B / G, G)
    values = {name: column.mean() for name, column in columns.items()}
    for part in parts:
        values[REWARD_STD.format(part.__name__)] = columns[REWARD_MEAN.format(part.__name__)].std()
    values["reward_std"] = groups.std(axis=1).mean()
    # Largest minus smallest, not a standard deviation: rounding may leave that above 0 for equal rewards.
    values["frac_reward_zero_std"] = (np.ptp(groups, axis=1) == 0).mean()
    values["sampler_trainer_gap"] = gap()
    seconds = {
        "seconds_rollout": sampler.seconds.pop("generating", 0.0),
        "seconds_sync": sampler.seconds.pop("syncing", 0.0),
        "seconds_reward": sum(part.seconds.pop("grading", 0.0) for part in parts),
    }
    # Of several batches in a step: the mean of the metrics, the sum of the seconds.
    metrics: dict[str, tuple[Any, Callable]] = {}
    for name, value in values.items():
        metrics[f"step/{name}"] = (float(value), np.mean)
    for name, value in seconds.items():
        metrics[f"step/{name}"] = (value, np.sum)
    return metrics | _task_metrics(columns, groups, task)


def _task_metrics(columns: dict[str, np.ndarray], groups: np.ndarray, task: Any) -> dict[str, tuple[Any, Callable]]:
    """The metrics of each task.  Batches have different numbers of its prompts: (sum, count) are joined, not means.

    Args:
      columns: metric -> (B,).
      groups: (B / G, G) rewards.
      task: (B,) names; None where there is one task.
    """
    if task is None:
        return {}
    values = {
        "reward": columns["reward"],
        "accuracy": columns["accuracy"],
        "frac_reward_zero_std": (np.ptp(groups, axis=1) == 0).repeat(groups.shape[1]),
    }
    metrics = {}
    for name in np.unique(task):
        of_task = np.asarray(task) == name  # (B,)
        for metric, column in values.items():
            pair = float(column[of_task].sum()), int(np.sum(of_task))
            metrics[f"step/{TASK_METRIC.format(name, metric)}"] = (pair, _mean_of_pairs)
    return metrics


def _mean_of_pairs(pairs: np.ndarray) -> Any:
    """The mean over several batches, from (sum, count) of each: [N, 2] -> []."""
    return pairs[:, 0].sum() / pairs[:, 1].sum()


def _note_compiled(programs: list[str], event: str, seconds: float, *, fun_name: str = "", **_: Any) -> None:
    if event == COMPILED:
        programs.append(fun_name)


class StepTimer(hooks.TrainingHooks):
    """Times the update and the whole step, counts what was compiled, and adds this to Tunix's metrics.

    With gradient accumulation Tunix calls the trainer once per micro-batch, hence the sums over a step.
    """

    def __init__(self, cluster: Any):
        self.cluster = cluster
        self.last = self.update_started = 0.0
        self.compiled: list[str] = []  # programs, since the last update
        jax.monitoring.register_event_duration_secs_listener(functools.partial(_note_compiled, self.compiled))

    def start(self) -> None:
        """Begin with the first step; what was sampled or evaluated before does not count."""
        self.last = time.perf_counter()
        self.cluster.rollout.seconds.clear()

    def on_train_start(self, train_ctx) -> None:
        self.update_started = time.perf_counter()

    def on_train_end(self, train_ctx) -> None:
        now = time.perf_counter()
        metrics: dict[str, Any] = {
            "step/seconds_update": (now - self.update_started, np.sum),
            "step/seconds": (now - self.last, np.sum),
            "step/compilations": (len(self.compiled), np.sum),
        }
        self.compiled.clear()
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
        if all(peaks):  # a CPU device reports none
            metrics["step/peak_memory_gib"] = (max(peaks) / 2**30, np.max)
        state: Any = nnx.as_pure(self.cluster.actor_trainer.optimizer.opt_state)
        if (applied := optax.tree.get(state, "applied")) is not None:  # of engines.optimizer.rounded
            # A copy, since the next update takes the state; nothing waits for it here.
            metrics["step/update_applied"] = (jnp.copy(applied), np.mean)
        self.cluster.buffer_metrics(metrics)
        self.last = now

    # Tunix's base class asks for these, too.
    on_train_step_start = on_train_step_end = on_eval_step_start = on_eval_step_end = lambda *_: None  # pyright: ignore[reportAssignmentType]


class Recorder:
    """Collects a step's metrics from Tunix's logger into one row, and appends it to metrics.jsonl once complete."""

    def __init__(
        self, directory: Path, *, iterations: int, completions: int, learning_rate: Callable[[int], float],
        writes: bool = True,
    ):  # fmt: skip
        """
        Args:
          iterations: updates per step.
          completions: per step.
          learning_rate: of a step, counted from 0.
          writes: False in every process but the main one.
        """
        self.path = directory / "metrics.jsonl"
        # Seconds of the updates of a step at full length: `grpo train` keeps them on a TPU, where they are known.
        self.estimated_update = read_json_if_exists(directory / ESTIMATE).get("update_seconds")
        self.iterations = iterations
        self.completions = completions
        self.learning_rate = learning_rate
        self.writes = writes
        self.updates: dict[str, list[float]] = {}  # metrics of the updates of the current step
        self.pending: dict[int, Row] = {}
        self.rows: list[Row] = read_metrics(self.path)
        self.torn = last_row_is_torn(self.path)  # the last row is not whole: its step is taken again
        self.trackers: Sequence[Any] = ()  # of grpo_train.runs.tracking; only where this process writes
        self.on_step: Callable[[Row], None] | None = None
        # JAX sends every scalar to every listener in the process, those of other sessions included.
        self.recording = False

    @property
    def last_step(self) -> int:
        """Step of the last complete row; 0 without one."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def begin(self, finished: int, on_step: Callable[[Row], None] | None) -> list[Row]:
        """Start recording.  Rows of steps after `finished` are dropped: those steps are taken again."""
        self.on_step = on_step
        self.recording = True
        if self.last_step > finished or self.torn:
            self.rows[:] = [row for row in self.rows if row["step"] <= finished]
            self._rewrite()
            self.torn = False
        return self.rows

    def add(self, step: int, values: Row) -> None:
        """Add values to a step's row, such as a validation's; the row may have been written already."""
        written = next((row for row in self.rows if row["step"] == step), None)
        if written is None:
            self.pending.setdefault(step, {}).update(values)
            return
        written.update(values)
        self._rewrite()
        self._report(written, {"step": step, **values})

    def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
        """Tunix's LoggingBackend.  RL metrics count steps from 0, the trainer's from 1."""
        if not self.recording or kwargs.get("step") is None:
            return
        step = int(kwargs["step"])
        name = event.lstrip("/")
        if name.startswith("step/train/"):
            self.pending.setdefault(step + 1, {})[name.removeprefix("step/train/")] = float(value)
        elif name in TUNIX_METRICS:
            # A row has the mean over the updates of its step.
            values = self.updates.setdefault(TUNIX_METRICS[name], [])
            values.append(float(value))
            if step % self.iterations == 0:
                self.pending.setdefault(step // self.iterations, {})[TUNIX_METRICS[name]] = sum(values) / len(values)
                values.clear()
        self._write_complete_rows()

    def close(self) -> None:
        """Tunix calls this when training ends; the last row may still wait for its validation."""

    def finish(self) -> None:
        """Stop recording."""
        self.recording = False
        for tracker in self.trackers:
            tracker.close()
        self.trackers = ()

    def _write_complete_rows(self) -> None:
        for step in sorted(step for step, values in self.pending.items() if values.keys() >= REQUIRED_METRICS):
            values = self.pending.pop(step)
            row = {"step": step, "learning_rate": float(self.learning_rate(step - 1)), **values}
            if values["seconds"]:
                tokens = values["completions/mean_length"] * self.completions * values.get("dynamic_sampling/passes", 1)
                row["tokens_per_second"] = tokens / values["seconds"]
            if self.estimated_update and "seconds_update" in values:
                row["update_over_estimate"] = values["seconds_update"] / self.estimated_update
            row = {key: (value if np.isfinite(value) else None) for key, value in row.items()}
            self.rows.append(row)
            if self.writes:
                append_jsonl(self.path, row)
            self._report(row, row)

    def _rewrite(self) -> None:
        if self.writes:
            write_jsonl_atomic(self.path, self.rows)

    def _report(self, row: Row, news: Row) -> None:
        """`news`: the part of the row that has not been reported yet."""
        for tracker in self.trackers:
            tracker.log(news)
        if self.on_step:
            self.on_step(row)
