"""The rows of metrics.jsonl where people look at curves: TensorBoard, and Weights & Biases when a recipe asks for it.

The key of W&B is read by wandb itself, from WANDB_API_KEY or a login on this machine; it passes through nothing here.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from pathlib import Path
from typing import Any

from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.recipes import Recipe, TrackingRecipe

Row = dict[str, float | None]


def require(tracking: TrackingRecipe) -> None:
    """Refuse a run that wants W&B where wandb is not installed, or online where nobody has logged in."""
    if tracking.wandb == "off":
        return
    if not importlib.util.find_spec("wandb"):
        raise CourseError(
            f"tracking.wandb={tracking.wandb} needs wandb, which is not installed; pip install wandb, or use off"
        )
    if tracking.wandb == "online" and not _logged_in():
        raise CourseError(
            "tracking.wandb=online finds no login that W&B accepts; set WANDB_API_KEY, or run `wandb login`, "
            "or use offline or off"
        )


def start(recipe: Recipe, directory: Path, finished: int) -> list[Any]:
    """What this run is shown by: each has `log(row)`, which may come again with more of the same step, and `close()`.

    Args:
      finished: steps that have been done; what TensorBoard has of later ones, it forgets.
    """
    trackers: list[Any] = [TensorBoard(directory / "tensorboard", finished)]
    if recipe.tracking.wandb != "off":
        trackers.append(WeightsAndBiases(recipe, directory))
    return trackers


class TensorBoard:
    """One event for a row, with all its values, on disk before the next step.

    Tunix's backend writes an event for each value, through a queue between threads: three dozen in a step.
    """

    def __init__(self, folder: Path, finished: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.writer = EventFileWriter(str(folder))
        restarted = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=finished + 1, session_log=restarted)

    def log(self, row: Row) -> None:
        values = [self.summary.Value(tag=f"train/{name}", simple_value=value) for name, value in _values(row)]
        self._write(step=int(row["step"]), summary=self.summary(value=values))

    def close(self) -> None:
        self.writer.close()

    def _write(self, **what: Any) -> None:
        self.writer.add_event(self.event(wall_time=time.time(), **what))
        self.writer.flush()


class WeightsAndBiases:
    """A W&B run named after the recipe, with the recipe as its config, through Tunix's logging backend.

    A run that goes on, goes on in the same W&B run: its id is kept in the run directory, in wandb-id.  Offline runs lie
    there under wandb/; `wandb sync` sends one.
    """

    def __init__(self, recipe: Recipe, directory: Path):
        from tunix.sft import metrics_logger

        os.environ.setdefault("WANDB_SILENT", "true")
        kept = directory / "wandb-id"
        if not kept.exists():
            write_text_atomic(kept, secrets.token_hex(4))
        self.backend = metrics_logger.WandbBackend(
            project=recipe.tracking.project,
            name=recipe.name,
            mode=recipe.tracking.wandb,
            dir=str(directory),
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=recipe.model_dump(mode="json"),
        )

    def log(self, row: Row) -> None:
        """W&B drops what comes with a step before the last one: rows come in order, whole."""
        for name, value in _values(row):
            self.backend.log_scalar(name, value, step=row["step"])

    def close(self) -> None:
        self.backend.close()


def _values(row: Row) -> list[tuple[str, float]]:
    """What a row measures: not its number, nor what was no finite number."""
    return [(name, value) for name, value in row.items() if name != "step" and value is not None]


def _logged_in() -> bool:
    """Does W&B take the key of this machine?  Asked of its server, before a run begins that would lose its log."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return bool(wandb.login(prompt=False, verify=True))
    except wandb.errors.Error:
        return False
