"""Log metrics to TensorBoard, and to Weights & Biases if the recipe asks for it.

wandb itself reads its API key, from WANDB_API_KEY or a login on this machine; no code here does.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_lib.recipes import Recipe, TrackingRecipe
from grpo_lib.runs.metric_glossary import Row


def require(tracking: TrackingRecipe) -> None:
    """Raise CourseError where W&B is asked for and wandb is not installed, or asked online without a valid login."""
    if tracking.wandb == "off":
        return
    if not importlib.util.find_spec("wandb"):
        raise CourseError(
            f"tracking.wandb={tracking.wandb} needs wandb, which is not installed; pip install wandb, or use off"
        )
    if tracking.wandb == "online" and not _logged_in():
        raise CourseError("tracking.wandb=online finds no login that W&B accepts; set WANDB_API_KEY, or use offline")


def start(recipe: Recipe, directory: Path, finished: int) -> list[Any]:
    """The run's trackers.  Each has `close()` and `log(row)`, which may be called again with more metrics of a step.

    Args:
      finished: steps that are done; TensorBoard discards what it has of later ones.
    """
    trackers: list[Any] = [TensorBoard(directory / "tensorboard", finished)]
    if recipe.tracking.wandb != "off":
        trackers.append(WeightsAndBiases(recipe, directory))
    return trackers


class TensorBoard:
    """Writes one event per row, with all its values, to disk before the next step.

    Not through tensorboardX, as Tunix does: when the disk is full its thread ends, and the run waits for it forever.
    """

    def __init__(self, folder: Path, finished: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.events: Any = event_pb2  # protobuf makes the classes when the module is imported: no checker sees them
        self.summaries: Any = summary_pb2
        self.writer = EventFileWriter(str(folder))
        restarted = self.events.SessionLog(status=self.events.SessionLog.START)
        self._write(step=finished + 1, session_log=restarted)

    def log(self, row: Row) -> None:
        values = [self.summaries.Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in _values(row)]
        self._write(step=int(row["step"]), summary=self.summaries.Summary(value=values))

    def close(self) -> None:
        self.writer.close()

    def _write(self, **what: Any) -> None:
        self.writer.add_event(self.events.Event(wall_time=time.time(), **what))
        self.writer.flush()


class WeightsAndBiases:
    """A W&B run named after the recipe, with the recipe as its config, through Tunix's logging backend.

    A resumed run continues the same W&B run: its id is kept in the run directory, in wandb-id.  Offline runs are
    written to wandb/ there; `wandb sync` uploads one.
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
        """W&B drops values of a step before its last one, so rows must come complete and in order."""
        for name, value in _values(row):
            self.backend.log_scalar(name, value, step=row["step"])

    def close(self) -> None:
        self.backend.close()


def _values(row: Row) -> list[tuple[str, float]]:
    """The metrics of a row, without the step and without values that were not finite."""
    return [(name, value) for name, value in row.items() if name != "step" and value is not None]


def _logged_in() -> bool:
    """Whether W&B's server accepts this machine's key; checked before the run, which would otherwise lose its log."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return bool(wandb.login(prompt=False, verify=True))
    except wandb.errors.Error:
        return False
