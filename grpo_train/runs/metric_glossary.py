"""Glossary of metrics.jsonl: what each metric is, its unit, and how it looks in a healthy run.

A metric that TRL's GRPOTrainer logs too has TRL's name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lib.common.errors import CourseError
from grpo_lib.common.files import ends_torn, read_jsonl

Row = dict[str, Any]  # numbers, or None where a value was not finite

# A row has these two keys for each reward function of the recipe.
REWARD_MEAN, REWARD_STD = "rewards/{}/mean", "rewards/{}/std"
# And these, for each task of a recipe with several.
TASK_METRIC = "tasks/{}/{}"


@dataclass(frozen=True)
class Metric:
    """One entry.  A fraction is a number from 0 to 1."""

    meaning: str
    unit: str
    healthy: str


METRICS: dict[str, Metric] = {
    name: Metric(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")).items()
}


def metric(name: str) -> Metric:
    """The entry of a key of metrics.jsonl; KeyError for one that is not in the glossary."""
    return METRICS[_entry(name)]


def glossary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Name -> entry for the metrics that `rows` hold, in the order of METRICS."""
    return {name: metric(name) for name in reading_order({name for row in rows for name in row})}


def reading_order(names: Iterable[str]) -> list[str]:
    """Keys of metrics.jsonl in the order of METRICS; those that are not in the glossary last."""
    order = {name: number for number, name in enumerate(METRICS)}
    return sorted(names, key=lambda name: (order.get(_entry(name), len(order)), name))


def name_in(key: str, form: str) -> str | None:
    """The NAME in a key of this form, such as REWARD_MEAN; None for any other key."""
    match = re.fullmatch(form.format("(.+)"), key)
    return match[1] if match else None


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, in the order of the file; empty where there is no file.

    A last row that is not whole, as a kill or a full disk can leave it, is left out (`last_row_is_torn`).  Rows of
    earlier versions have a `kl` of 0 where nothing measured it: it is left out where the run's recipe, next to the
    file, says so.  Raises CourseError for a row that is not whole before the last.
    """
    rows = _whole_rows(path)
    if any(row.get("kl") == 0 for row in rows) and not _measures_kl(path.with_name("recipe.yaml")):
        return [{name: value for name, value in row.items() if name != "kl"} for row in rows]
    return rows


def _whole_rows(path: Path) -> list[Row]:
    """The rows as they are in the file, without a last one that is not whole."""
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            if number == len(rows):
                return rows[:-1]
            raise CourseError(f"{path}: row {number} has no step; remove the row")
    return rows


def last_row_is_torn(path: Path) -> bool:
    """Whether `read_metrics` leaves out the last row of this file."""
    if not path.exists():
        return False
    return ends_torn(path) or len(read_jsonl(path)) > len(_whole_rows(path))


def _measures_kl(recipe: Path) -> bool:
    """Whether a run of this recipe measures the KL; without the file it is taken to."""
    if not recipe.exists():
        return True
    grpo = (yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}).get("grpo") or {}
    return bool(grpo.get("beta") or grpo.get("watch_kl"))


def _entry(name: str) -> str:
    """The key in METRICS: rewards/correct_answer/mean -> rewards/NAME/mean."""
    return re.sub(r"^(rewards|tasks)/.+/", r"\1/NAME/", name)
