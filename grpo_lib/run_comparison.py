"""Two runs beside each other: their recipes and last metrics, and a paired test on their evaluations.

    compared = compare("runs/a", "runs/b")
    compared.paired.difference

Whatever is a difference is B - A.  What one of the runs does not have is left out, and the rest is compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import metrics, statistics, warning_signs
from grpo_lib.errors import CourseError
from grpo_lib.files import read_jsonl
from grpo_lib.recipes import differences, load_recipe
from grpo_lib.records import EvalRun
from grpo_lib.warning_signs import Sign

PHASES = ("before", "after")
WINDOW = 10  # steps that a last metric is the mean of


@dataclass(frozen=True)
class Rate:
    """Strict accuracy of an evaluation, a fraction, with its 95 % Wilson interval; n counts problems."""

    accuracy: float
    interval: tuple[float, float]
    n: int


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    steps: int  # that metrics.jsonl holds
    before: Rate | None
    after: Rate | None
    signs: list[Sign]  # early warnings
    rows: list[dict[str, float]]  # by step, without what is not a finite number


@dataclass(frozen=True)
class MetricPair:
    """A metric that both runs have: its mean over the last steps of each."""

    name: str
    unit: str
    a: float
    b: float
    difference: float


@dataclass(frozen=True)
class Pairing:
    """The two evaluations after training, problem by problem.

    `interval` is the 95 % paired bootstrap's, `p_value` McNemar's exact one.  It is None, as are the four counts,
    where a problem was answered several times: then it has no single verdict.
    """

    n: int
    difference: float
    interval: tuple[float, float]
    p_value: float | None = None
    both_right: int | None = None
    only_a: int | None = None
    only_b: int | None = None
    both_wrong: int | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero and, where there is a p-value, p < 0.05."""
        low, high = self.interval
        return (low > 0 or high < 0) and (self.p_value is None or self.p_value < 0.05)


@dataclass(frozen=True)
class RunComparison:
    """What two runs have in common, and in what they differ."""

    a: Side
    b: Side
    recipe: list[str]  # fields that differ, as `section.key: a != b`
    recipe_unread: str | None  # why they could not be compared
    metrics: list[MetricPair]
    only_a: list[str]  # metrics that one run alone has
    only_b: list[str]
    paired: Pairing | None
    unpaired: str | None  # why there is no paired comparison

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the rows."""
        result = dataclasses.asdict(self)
        for side in ("a", "b"):
            del result[side]["rows"]
        return result


def compare(run_a: str | os.PathLike, run_b: str | os.PathLike) -> RunComparison:
    """Read two run directories and compare them; neither is changed.

    Raises:
      CourseError: one is no run, both are the same one, a file cannot be read, or they have neither a metric nor an
        evaluation in common.
    """
    folders = _run_folder(run_a), _run_folder(run_b)
    if folders[0] == folders[1]:
        raise CourseError(f"{run_a} and {run_b} are the same run; name two")
    a, b = (_side(folder, name) for folder, name in zip(folders, _names(*folders), strict=True))
    names = [{name for row in side.rows for name in row} - {"step"} for side in (a, b)]
    pairs = [pair for name in _reading_order(names[0] & names[1]) if (pair := _metric_pair(name, a.rows, b.rows))]
    if not pairs and not any(getattr(a, phase) and getattr(b, phase) for phase in PHASES):
        raise CourseError(
            f"{a.name} and {b.name} have no metric and no evaluation in common; train or evaluate the one that has none"
        )
    differing, unread = _recipe_differences(*folders)
    paired, unpaired = _pair(folders, (a, b))
    return RunComparison(
        a, b, differing, unread, pairs,
        _reading_order(names[0] - names[1]), _reading_order(names[1] - names[0]), paired, unpaired,
    )  # fmt: skip


def find_run(name: str | os.PathLike, runs: str | os.PathLike) -> Path:
    """The folder of a run that is given by its path, or by its name among all runs."""
    path, named = Path(name), Path(runs) / name
    return named if (named / "recipe.yaml").is_file() and not (path / "recipe.yaml").is_file() else path


def printable(value: str) -> str:
    """On one line, without characters that steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in value)


def _run_folder(path: str | os.PathLike) -> Path:
    folder = Path(path).resolve()
    if not (folder / "recipe.yaml").is_file():
        raise CourseError(f"{path} is not a run (it has no recipe.yaml); name a folder in runs/")
    return folder


def _names(a: Path, b: Path) -> list[str]:
    """The last parts of both paths, as many as it takes to tell them apart."""
    parts = 1
    while a.parts[-parts:] == b.parts[-parts:]:
        parts += 1
    return [printable("/".join(folder.parts[-parts:])) for folder in (a, b)]


def _side(folder: Path, name: str) -> Side:
    path = folder / "metrics.jsonl"
    rows = warning_signs.by_step(read_jsonl(path) if path.exists() else [])
    kept = [
        {printable(key): number for key, value in row.items() if (number := warning_signs.finite(value)) is not None}
        for row in rows
    ]
    rates = [_rate(folder, phase) for phase in PHASES]
    return Side(name, len(rows), *rates, warning_signs.signs(rows), kept)


def _rate(folder: Path, phase: str) -> Rate | None:
    """From the records where they are kept; else from summary.json, which outlives them."""
    records, summary = folder / "evals" / f"{phase}.jsonl", folder / "summary.json"
    if records.exists():
        part = EvalRun.load(records).summary()
    elif summary.exists():
        try:
            part = json.loads(summary.read_text(encoding="utf-8", errors="replace"))[phase]
            part = {"accuracy": float(part["accuracy"]), "n": int(part["n"]), "interval": part["interval"]}
            low, high = map(float, part["interval"])
        except (ValueError, KeyError, TypeError):
            return None
        if not (part["n"] >= 1 and 0 <= low <= part["accuracy"] <= high <= 1):
            return None
    else:
        return None
    return Rate(part["accuracy"], tuple(part["interval"]), part["n"])


def _recipe_differences(a: Path, b: Path) -> tuple[list[str], str | None]:
    """The fields that differ; where a recipe is not of this version, why they are not known."""
    try:
        return differences(*(load_recipe(folder / "recipe.yaml") for folder in (a, b))), None
    except CourseError as error:
        return [], str(error)


def _reading_order(names: set[str]) -> list[str]:
    """As in the glossary, and what is not in it at the end."""
    known = {name: number for number, name in enumerate(metrics.METRICS)}
    part = known[metrics.REWARD_PART + "…"]
    return sorted(names, key=lambda name: (part if _is_part(name) else known.get(name, len(known)), name))


def _is_part(name: str) -> bool:
    return name.startswith(metrics.REWARD_PART)


def _metric_pair(name: str, *runs: Sequence[dict[str, float]]) -> MetricPair | None:
    a, b = (_last_mean(rows, name) for rows in runs)
    unit = metrics.metric(name).unit if _is_part(name) or name in metrics.METRICS else ""
    return MetricPair(name, unit, a, b, b - a) if math.isfinite(a) and math.isfinite(b) else None


def _last_mean(rows: Sequence[dict[str, float]], name: str) -> float:
    """Over the last steps; of a metric that is measured seldom, the last value."""
    values = [row[name] for row in rows[-WINDOW:] if name in row]
    values = values or [row[name] for row in rows if name in row][-1:]
    return sum(values) / len(values)


def _pair(folders: tuple[Path, Path], sides: tuple[Side, Side]) -> tuple[Pairing | None, str | None]:
    """The evaluations after training against each other, or why not."""
    paths = [folder / "evals" / "after.jsonl" for folder in folders]
    missing = [side.name for side, path in zip(sides, paths, strict=True) if not path.exists()]
    if missing:
        return None, f"{' and '.join(missing)} {'have' if missing[1:] else 'has'} no evals/after.jsonl"
    runs = [EvalRun.load(path) for path in paths]
    kinds = [{record.get("greedy") for record in run.counted} for run in runs]
    if kinds[0] != kinds[1]:
        return None, "one was answered greedily and the other sampled, so their difference is one of temperature, too"
    asked = [{record["id"]: (record["question"], record["gold"]) for record in run.counted} for run in runs]
    if asked[0] != asked[1]:
        common = len(asked[0].items() & asked[1].items())
        return None, (
            f"their evaluations after training are of different problems ({len(asked[0]):,} and {len(asked[1]):,}, "
            f"{common:,} in common)"
        )
    verdicts = [run.verdicts("strict") for run in runs]
    a, b = [[verdict[key] for key in verdicts[0]] for verdict in verdicts]
    bootstrap = statistics.paired_bootstrap(a, b)
    interval = (bootstrap.low, bootstrap.high)
    if any(len(samples) > 1 for samples in (*a, *b)):
        return Pairing(len(a), bootstrap.difference, interval), None
    a, b = ([samples[0] for samples in verdict] for verdict in (a, b))
    test = statistics.mcnemar(a, b)
    both = sum(map(min, a, b))
    return Pairing(
        len(a), bootstrap.difference, interval, test.p_value,
        both, test.only_before, test.only_after, len(a) - both - test.only_before - test.only_after,
    ), None  # fmt: skip
