"""What a long job has finished so far: a file that may lose its process at any moment.

The first line says what the job is; each further line holds one finished batch, all of it or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.errors import CourseError
from grpo_lib.files import append_jsonl, read_jsonl


@dataclass(frozen=True)
class Journal:
    """`job` describes the work in JSON's own types: a journal is continued only by the job that began it."""

    path: Path
    job: dict[str, Any]

    def read(self, replace: bool = False) -> dict[int, list[dict[str, Any]]]:
        """Records of the finished batches, by number.

        A line that was being written when the process ended is not there: its batch was never finished. A file
        without a finished batch holds nothing back: it is removed, whatever job began it. With `replace` a file of
        another job is removed, too.

        Raises:
          CourseError: the file belongs to another job, or was not written by `add`.
        """
        try:
            lines = read_jsonl(self.path)
        except FileNotFoundError:
            lines = []
        found = lines[0].get("job") if lines else {}
        if (len(lines) < 2 and isinstance(found, dict)) or (replace and found != self.job):
            self.remove()
            return {}
        self._check_job(found)
        batches: dict[int, list[dict[str, Any]]] = {}
        for number, line in enumerate(lines[1:], start=2):
            if not isinstance(line.get("batch"), int) or not isinstance(line.get("records"), list):
                raise CourseError(f"{self.path}: line {number} is not a batch; remove the file to begin anew")
            batches.setdefault(line["batch"], line["records"])  # the first one counts: nothing is graded twice
        return batches

    def add(self, batch: int, records: list[dict[str, Any]]) -> None:
        """Write down one finished batch and wait until the disk has it."""
        if not self.path.exists():
            append_jsonl(self.path, {"job": self.job})
        append_jsonl(self.path, {"batch": batch, "records": records})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _check_job(self, found: Any) -> None:
        if found == self.job:
            return
        remedy = "remove it to begin anew, or go on with what began it"
        if not isinstance(found, dict):
            raise CourseError(f"{self.path}: not a journal of this version; {remedy}")
        other = [key for key in sorted(found.keys() | self.job.keys()) if found.get(key) != self.job.get(key)]
        raise CourseError(f"{self.path}: begun by another evaluation ({', '.join(other)} differ); {remedy}")
