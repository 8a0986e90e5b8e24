"""The files of an evaluation: the finished one, and the batches of one that was interrupted.

A finished evaluation is PATH, one JSON line per record.  Until then PATH.partial holds a first line that describes the
evaluation, and one line per finished batch: a process that is killed at any moment loses one batch at most.
"""

import hashlib
import json
import reprlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import append_jsonl, read_jsonl
from grpo_lib.problems.types import Problem
from grpo_lib.records import EvalRun, Record, graded_again, what_is_wrong


@dataclass(frozen=True)
class Batch:
    """A finished batch."""

    records: list[Record]
    seconds: float  # that it took


@dataclass(frozen=True)
class Task:
    """One completion to ask for."""

    problem: Problem
    prompt: str  # what `generate` receives
    sent: str  # what the model is sent
    sample: int
    greedy: bool
    completion_prefix: str  # the end of the prompt that counts as the beginning of the completion

    @property
    def key(self) -> tuple[str, int]:
        return self.problem.id, self.sample


class EvalCache:
    """Finished records of one evaluation, on disk.  `settings` are of JSON's own types."""

    def __init__(self, path: Path, tasks: list[Task], model: str | None, settings: Any):
        self.path = path
        self.partial = Path(f"{path}.partial")
        self.tasks = tasks
        self.model = model
        self.settings = digest(settings)
        content = json.dumps([astuple(task) for task in tasks], default=str)
        self.job = {  # everything that decides the records
            "problems, prompts or samples": hashlib.sha256(content.encode()).hexdigest(),
            "model": model,
            "settings": settings,
        }

    def load(self) -> EvalRun:
        """The finished evaluation, in the order of the tasks.  Raises CourseError if it is another one."""
        advice = "move or remove the file to evaluate again, or use the recipe it was made with"
        records = {(record["id"], record["sample"]): record for record in EvalRun.load(self.path).records}
        wanted = [task.key for task in self.tasks]
        if set(records) != set(wanted):
            raise CourseError(
                f"{self.path}: made for other problems or another number of samples ({len(records)} records, "
                f"{len(wanted)} wanted, {len(set(wanted) & set(records))} in common); {advice}"
            )
        for task in self.tasks:
            record, problem = records[task.key], task.problem
            fields = {
                "gold": problem.answer,
                "question": problem.question,
                "prompt": task.sent,
                "completion_prefix": task.completion_prefix,
                "greedy": task.greedy,
            }
            for name, value in (("model", self.model), ("settings", self.settings)):
                if None not in (value, record.get(name)):  # an evaluation that does not name them accepts the file's
                    fields[name] = value
            for name, value in fields.items():
                if record.get(name, "") != value:
                    old, new = reprlib.repr(record.get(name, "")), reprlib.repr(value)
                    raise CourseError(f"{self.path}: {name} of problem {problem.id} is {old}, not {new}; {advice}")
        self.partial.unlink(missing_ok=True)  # a process may have been killed between the two lines of `finish`
        return EvalRun([records[key] for key in wanted])

    def finished_batches(self, overwrite: bool) -> list[Batch]:
        """The finished batches, their records graded again.  They may have been of another size: an evaluation that
        ran out of memory goes on with smaller ones.

        A line that was being written when the process was killed does not count.  A file without a finished batch is
        removed, whatever evaluation it belongs to; with `overwrite` so is the file of another evaluation.

        Raises CourseError if the file belongs to another evaluation, or is damaged.
        """
        lines = read_jsonl(self.partial) if self.partial.exists() else []
        job = _job(lines)
        if len(lines) < 2 or (overwrite and job != self.job):
            self.partial.unlink(missing_ok=True)
            append_jsonl(self.partial, {"job": self.job})  # a place that cannot be written shows before an answer does
            return []
        if other := [key for key in self.job if job.get(key, self) != self.job[key]]:
            raise CourseError(
                f"{self.partial}: started by another evaluation ({', '.join(other)} differ); remove it to start again, "
                "or continue with the command that started it"
            )
        return [_batch(line, f"{self.partial}: line {number}") for number, line in enumerate(lines[1:], start=2)]

    def add(self, batch: Batch) -> None:
        """Write one finished batch, and wait until the disk has it."""
        append_jsonl(self.partial, {"seconds": batch.seconds, "records": batch.records})

    def finish(self, run: EvalRun) -> None:
        run.save(self.path)
        self.partial.unlink(missing_ok=True)


def settings_of_partial(path: str | Path) -> dict[str, Any]:
    """The settings of an evaluation into `path` that was interrupted; empty where there is none."""
    partial = Path(f"{path}.partial")
    lines = read_jsonl(partial) if partial.exists() else []
    settings = _job(lines).get("settings")
    return settings if isinstance(settings, dict) else {}


def _job(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first line of a file says that was interrupted; empty where it says nothing."""
    job = lines[0].get("job") if lines else None
    return job if isinstance(job, dict) else {}


def _batch(line: dict[str, Any], place: str) -> Batch:
    """A finished batch, from a line of such a file.  Raises CourseError, which begins with `place`, for another."""
    records, seconds = line.get("records"), line.get("seconds")
    if not isinstance(records, list) or type(seconds) not in (int, float):
        raise CourseError(f"{place} is no batch of an evaluation; remove the file to start again")
    for number, record in enumerate(records, start=1):
        if wrong := (what_is_wrong(record) if isinstance(record, dict) else "is no object"):
            raise CourseError(f"{place}: record {number} {wrong}; remove the file to start again")
    return Batch([graded_again(record) for record in records], seconds)


def digest(settings: Any) -> str | None:
    """A short hash of settings; None for None."""
    if settings is None:
        return None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
