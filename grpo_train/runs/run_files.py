"""summary.json and environment.json of a run, as they are read again: what is in them has the right types.

A run may come from elsewhere, out of an editor, or from a copy that was cut short.
"""

import datetime
import reprlib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import read_json_if_exists

MANY = 10**9
Rate = Annotated[float, Field(ge=0, le=1)]
Difference = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=1, le=MANY)]
Seconds = Annotated[float, Field(ge=0, le=MANY)]
Interval = Annotated[list[Difference], Field(min_length=2, max_length=2)]
OF_SAMPLES = ("samples", "sampled_accuracy", "pass_at_k", "pass_at_k_interval", "maj_at_k")


class _Part(BaseModel):
    """Part of a file, whose values are as JSON has them: "5" is no number.  Other keys may be there, too."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Evaluation(_Part):
    """What `EvalRun.summary` gives."""

    accuracy: Rate
    n: Count
    interval: Interval
    lenient_accuracy: Rate
    partial_accuracy: Rate
    format_accuracy: Rate
    truncated: Rate
    # Of sampled answers; there are all of them, or none.
    samples: Count = 0
    sampled_accuracy: Rate = 0.0
    pass_at_k: dict[str, Rate] = {}
    pass_at_k_interval: dict[str, Interval] = {}
    maj_at_k: Rate = 0.0

    @model_validator(mode="after")
    def _has_every_k(self) -> Self:
        missing = [name for name in OF_SAMPLES if name not in self.model_fields_set]
        if missing == list(OF_SAMPLES):
            return self
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        wanted = {str(2**power) for power in range(self.samples.bit_length())} | {str(self.samples)}
        if not wanted == self.pass_at_k.keys() == self.pass_at_k_interval.keys():
            raise ValueError(f"pass_at_k and its intervals must be of {', '.join(sorted(wanted, key=int))}")
        return self


class _Comparison(_Part):
    """What `records.summarize` gives, of the whole or of a part."""

    before: _Evaluation | None = None
    after: _Evaluation | None = None
    difference: Difference = 0.0
    difference_interval: Interval = [0.0, 0.0]
    mcnemar_p: Rate | None = None

    @model_validator(mode="after")
    def _compares_both(self) -> Self:
        missing = {"difference", "difference_interval"} - self.model_fields_set
        if self.before and self.after and missing:
            raise ValueError(f"{min(missing)} is missing")
        return self


class _Summary(_Comparison):
    wall_seconds: Seconds | None = None
    train_seconds: Seconds | None = None
    steps: Annotated[int, Field(ge=0, le=MANY)] | None = None
    tasks: dict[str, _Comparison] = {}
    cold_start: _Comparison = _Comparison()


class _Environment(_Part):
    """What run_directory.open_run writes, as far as it is read again."""

    date: str | None = None
    devices: list[str] = []
    processor: str = ""
    cores: int = 0
    reward_files: dict[str, str] = {}
    problem_files: dict[str, str] = {}

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, date: str | None) -> str | None:
        if date is not None:
            datetime.date.fromisoformat(date)
        return date


def read_summary(directory: str | Path) -> dict[str, Any]:
    """The content of a run's summary.json; empty where there is none.  Raises CourseError for a damaged one."""
    return _read(Path(directory) / "summary.json", _Summary, "remove it, and the same grpo train writes it again")


def read_environment(directory: str | Path) -> dict[str, Any]:
    """The content of a run's environment.json; empty where there is none.  Raises CourseError for a damaged one."""
    return _read(Path(directory) / "environment.json", _Environment, "put it back from a copy, or remove it")


def _read(file: Path, part: type[_Part], remedy: str) -> dict[str, Any]:
    content = read_json_if_exists(file)
    try:
        part.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise CourseError(f"{file}: {place} is {reprlib.repr(first['input'])} ({first['msg']}); {remedy}") from None
    return content
