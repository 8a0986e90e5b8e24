"""Log metrics and evaluations to TensorBoard, and to Weights & Biases if the recipe asks for it.

wandb itself reads its API key, from WANDB_API_KEY or a login on this machine; no code here does.
"""

import contextlib
import importlib.util
import os
import secrets
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import write_text_atomic
from grpo_train.recipes import TrackingRecipe
from grpo_train.runs.metric_glossary import Row, read_metrics
from grpo_train.runs.run_directory import describe_change, read_changes

# Of the evaluation after training: our name -> the name in the summary of published runs.
ALIASES = {
    "accuracy": "eval_full/accuracy",
    "reward": "eval/reward/total/mean",
    "seconds": "time/eval_full/step_s",
}


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


def evaluation_row(step: int, summary: dict[str, Any]) -> Row:
    """What is logged of an evaluation, given its part of summary.json; of pass@k the one with the largest k."""
    row = {name: summary.get(name) for name in ("accuracy", "reward", "seconds", "sampled_accuracy", "maj_at_k")}
    row |= {f"rewards/{name}/mean": value for name, value in summary.get("rewards", {}).items()}
    if "samples" in summary:
        row[f"pass_at_{summary['samples']}"] = summary["pass_at_k"][str(summary["samples"])]
    return {"step": step, **{name: value for name, value in row.items() if value is not None}}


def log_evaluation(tracking: TrackingRecipe, directory: Path, rows: dict[str, Row], config: dict[str, Any]) -> None:
    """Log the last of `rows`, {"before": …} or {"before": …, "after": …}, in each of the run's trackers."""
    for tracker in start(tracking, directory, config=config):
        with contextlib.closing(tracker):
            tracker.log_evaluation(rows)


def start(
    tracking: TrackingRecipe, directory: Path, finished: int | None = None, *, config: dict[str, Any]
) -> list[Any]:
    """The run's trackers.

    Each has `close()`, `log_evaluation(rows)`, and `log(row)`, which may be called again with more metrics of a
    step.

    Args:
      config: the whole recipe, which W&B keeps.
      finished: steps that are done; TensorBoard discards what it has of later ones, and shows as a text with what
        changes the run goes on from there. None: it keeps all.
    """
    boards = [TensorBoard(directory / "tensorboard", finished)]
    for change in read_changes(directory):
        if change["step"] == finished:
            boards[0].log_text("changes", finished, describe_change(change))
    return boards if tracking.wandb == "off" else [*boards, WeightsAndBiases(tracking, directory, config)]


class TensorBoard:
    """Writes one event per row, with all its values, to disk before the next step.

    Not through tensorboardX, as Tunix does: when the disk is full its thread ends, and the run waits for it forever.
    """

    def __init__(self, folder: Path, finished: int | None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.events: Any = event_pb2  # protobuf makes the classes when the module is imported: no checker sees them
        self.summaries: Any = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names. Its EventFileWriter names them by the second, the
        # process and a counter, as text: of one second, the tenth file would come before the ninth.
        self.file = (folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}").open("xb")
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")  # what every file of TensorBoard begins with
        if finished is not None:
            self._write(step=finished + 1, session_log=self.events.SessionLog(status=self.events.SessionLog.START))

    def log(self, row: Row, group: str = "train") -> None:
        values = [
            self.summaries.Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in _values(row)
        ]
        self._write(step=int(row["step"]), summary=self.summaries.Summary(value=values))

    def log_text(self, name: str, step: int, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step=step, summary=text_pb(name, text))

    def log_evaluation(self, rows: dict[str, Row]) -> None:
        *_, row = rows.values()
        self.log(row, "eval")

    def close(self) -> None:
        self.file.close()

    def _write(self, **what: Any) -> None:
        event = self.events.Event(wall_time=time.time(), **what)
        self.records.write(event.SerializeToString())
        self.records.flush()


class WeightsAndBiases:
    """A W&B run named after the run, with the recipe as its config.

    A resumed run continues the same W&B run: its id is kept in the run directory, in wandb-id.  Offline runs are
    written to wandb/ there, a folder for each time that it was continued; `wandb sync` uploads them in order.
    """

    def __init__(self, tracking: TrackingRecipe, directory: Path, config: dict[str, Any]):
        import wandb

        self.metrics = directory / "metrics.jsonl"
        kept = directory / "wandb-id"
        if not kept.exists():
            write_text_atomic(kept, secrets.token_hex(4))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo-hands-on"),
            name=directory.name,
            mode=tracking.wandb,
            dir=str(directory),
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=config,
        )

    def log(self, row: Row) -> None:
        """W&B drops values of a step before its last one, so rows must come complete and in order."""
        self.run.log(dict(_values(row)), step=row["step"])

    def log_evaluation(self, rows: dict[str, Row]) -> None:
        """To the summary of the W&B run, as before/accuracy and so on: its history cannot have a last step twice.
        That after training also under the names of published GRPO runs (ALIASES), whose scripts read them: a run
        that has not ended has no value there.

        With everything that the summary had: `wandb sync` replaces it by that of the newest offline folder.
        """
        steps = read_metrics(self.metrics)
        trained = {name: value for row in steps[-1:] for name, value in _values(row)}
        evaluations = {f"{which}/{name}": value for which, row in rows.items() for name, value in _values(row)}
        after = rows.get("after", {})
        others = {alias: after[name] for name, alias in ALIASES.items() if after.get(name) is not None}
        others |= {
            f"eval/reward/func/{name.split('/')[1]}/mean": value
            for name, value in _values(after)
            if name.startswith("rewards/")
        }
        if seconds := [row["seconds"] for row in steps[-10:] if row.get("seconds") is not None]:
            others["time/train/step_avg_last10_s"] = statistics.fmean(seconds)
        self.run.summary.update(trained | evaluations | others)

    def close(self) -> None:
        self.run.finish()


def _values(row: Row) -> list[tuple[str, float]]:
    """The metrics of a row, without the step and without values that were not finite."""
    return [(name, value) for name, value in row.items() if name != "step" and value is not None]


def _logged_in() -> bool:
    """Whether W&B's server accepts this machine's key; checked before the run, which would otherwise lose its log."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=True))
    except wandb.errors.Error:
        return False
