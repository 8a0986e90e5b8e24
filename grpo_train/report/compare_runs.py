"""Compare two runs: their recipes and last metrics, and a paired test on their evaluations.

    compared = compare("runs/a", "runs/b")
    print(text(compared))

Every difference is B - A.  What only one of the runs has is named, and the rest is compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lib.common.errors import CourseError
from grpo_lib.records import EvalRun, summarize
from grpo_train.recipes import differences, load_recipe
from grpo_train.recipes.text_table import plain_table, table_text
from grpo_train.report.comparison import PHASES, flip_counts, read_json
from grpo_train.report.formatting import CHANCE, MINUS, NBSP, evidence, is_clear, percent, rate_range
from grpo_train.runs.health_checks import Alert, by_step, find_alerts, finite
from grpo_train.runs.metric_glossary import Row, metric, read_metrics, reading_order

WINDOW = 10  # steps whose mean is compared


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
    steps: int  # in metrics.jsonl
    before: Rate | None
    after: Rate | None
    alerts: list[Alert]


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
    """The evaluations after training, problem by problem, strict verdicts.

    The p-value is that of McNemar's exact test.  It and the counts are None where a problem was answered several times
    and therefore has no single verdict.
    """

    n: int
    difference: float
    interval: tuple[float, float]
    p_value: float | None
    both_right: int | None = None
    only_a: int | None = None
    only_b: int | None = None
    both_wrong: int | None = None


@dataclass(frozen=True)
class RunComparison:
    """What two runs have in common, and where they differ."""

    a: Side
    b: Side
    recipe: list[str]  # fields that differ, as `section.key: a != b`
    metrics: list[MetricPair]
    only_a: list[str]  # metrics that only this run has
    only_b: list[str]
    paired: Pairing | None
    unpaired: str | None  # why there is no paired comparison


def compare(run_a: str | os.PathLike, run_b: str | os.PathLike) -> RunComparison:
    """Read two run directories and compare them; neither is changed.

    Raises:
      CourseError: one is not a run, both are the same, or a file cannot be read.
    """
    folders = [Path(run).resolve() for run in (run_a, run_b)]
    for run, folder in zip((run_a, run_b), folders, strict=True):
        if not (folder / "recipe.yaml").is_file():
            raise CourseError(f"{run} is not a run (it has no recipe.yaml); name a folder in runs/")
    if folders[0] == folders[1]:
        raise CourseError(f"{run_a} and {run_b} are the same run; name two")
    rows = [by_step(read_metrics(folder / "metrics.jsonl")) for folder in folders]
    # Runs of one name are told apart by their paths.
    names = [str(folder) if folders[0].name == folders[1].name else folder.name for folder in folders]
    a, b = map(_side, folders, names, rows)
    in_a, in_b = ({name for row in side for name in row if finite(row[name]) is not None} - {"step"} for side in rows)
    recipe = differences(*(load_recipe(folder / "recipe.yaml") for folder in folders))
    metrics = [_metric_pair(name, *rows) for name in reading_order(in_a & in_b)]
    only_a, only_b = reading_order(in_a - in_b), reading_order(in_b - in_a)
    return RunComparison(a, b, recipe, metrics, only_a, only_b, *_pair(folders, (a, b)))


def find_run(name: str | os.PathLike, runs: str | os.PathLike) -> Path:
    """The folder of a run, given its path, or its name in the folder `runs`."""
    path, named = Path(name), Path(runs) / name
    return named if (named / "recipe.yaml").is_file() and not (path / "recipe.yaml").is_file() else path


def _side(folder: Path, name: str, rows: Sequence[Row]) -> Side:
    rates = []
    for phase in PHASES:  # from the records where there are any; otherwise from summary.json
        records = folder / "evals" / f"{phase}.jsonl"
        part = EvalRun.load(records).summary() if records.exists() else read_json(folder / "summary.json").get(phase)
        rates.append(Rate(part["accuracy"], tuple(part["interval"]), part["n"]) if part else None)
    before, after = rates
    return Side(name, len(rows), before, after, find_alerts(rows))


def _metric_pair(name: str, *runs: Sequence[Row]) -> MetricPair:
    try:
        unit = metric(name).unit
    except KeyError:  # not one of this library's metrics
        unit = ""
    a, b = (_last_mean([finite(row.get(name)) for row in rows]) for rows in runs)
    return MetricPair(name, unit, a, b, b - a)


def _last_mean(values: Sequence[float | None]) -> float:
    """Over the last steps; for a metric that is measured at few steps, the last value."""
    recent = [value for value in values[-WINDOW:] if value is not None]
    recent = recent or [value for value in values if value is not None][-1:]
    return sum(recent) / len(recent)


def _pair(folders: Sequence[Path], sides: Sequence[Side]) -> tuple[Pairing | None, str | None]:
    """The evaluations after training against each other, or why not."""
    paths = [folder / "evals" / "after.jsonl" for folder in folders]
    missing = [side.name for side, path in zip(sides, paths, strict=True) if not path.exists()]
    if missing:
        return None, f"no evals/after.jsonl in {' and '.join(missing)}"
    runs = [EvalRun.load(path) for path in paths]
    kinds = [{record.get("greedy") for record in run.counted} for run in runs]
    if kinds[0] != kinds[1]:
        return None, "one was answered greedily and the other sampled, so the difference is also one of temperature"
    asked = [{record["id"]: (record["question"], record["gold"]) for record in run.counted} for run in runs]
    if asked[0] != asked[1]:
        common = len(asked[0].items() & asked[1].items())
        return None, (
            f"their evaluations after training have different problems ({len(asked[0]):,} and {len(asked[1]):,}, "
            f"{common:,} in common)"
        )
    result = summarize(*runs)
    p = result["mcnemar_p"]
    counts = flip_counts(*runs).values() if p is not None else ()  # both right, only A, only B, both wrong
    return Pairing(len(asked[0]), result["difference"], tuple(result["difference_interval"]), p, *counts), None


# --- as text ---


def verdict(compared: RunComparison) -> str:
    """Which of the two is better after training, in a sentence; a difference within noise is called so."""
    pairing = compared.paired
    if pairing is None:
        return f"No paired comparison: {compared.unpaired}."
    rates = f"A {percent(compared.a.after.accuracy)}, B {percent(compared.b.after.accuracy)} of {pairing.n:,} problems"
    difference = f"B {MINUS} A = {evidence(pairing.difference, pairing.interval, pairing.p_value)}"
    if not is_clear(pairing.interval, pairing.p_value):
        return f"No clear difference: {rates}. {difference}. {CHANCE}"
    return f"{'B' if pairing.difference > 0 else 'A'} is more often right: {rates}. {difference}."


def text(compared: RunComparison) -> str:
    """The comparison for a terminal, without characters that control one."""
    sides = {"A": compared.a, "B": compared.b}
    runs = plain_table("", "run", "steps", "before", "after")
    for label, side in sides.items():
        runs.add_row(label, side.name, f"{side.steps:,}", _rate_text(side.before), _rate_text(side.after))
    blocks = [table_text(runs), verdict(compared)]
    if (pairing := compared.paired) and pairing.p_value is not None:
        blocks[-1] += (
            f"\nboth right {pairing.both_right:,}, only A right {pairing.only_a:,}, only B right {pairing.only_b:,}, "
            f"both wrong {pairing.both_wrong:,}"
        )
    head = "The recipes differ (A != B):" if compared.recipe else "The recipes are the same."
    blocks.append("\n".join([head, *(f"  {line}" for line in compared.recipe)]))
    if compared.metrics:
        table = plain_table(f"mean of the last {WINDOW} steps", "A", "B", f"B {MINUS} A", "unit", right=3)
        for m in compared.metrics:
            table.add_row(m.name, f"{m.a:.4g}", f"{m.b:.4g}", f"{m.difference:+.2g}", m.unit.replace("none", ""))
        blocks.append(table_text(table))
    only = {"A": compared.only_a, "B": compared.only_b}
    blocks += [f"only in {label}: {', '.join(names)}" for label, names in only.items() if names]
    blocks += [f"early warning in {label}: {alert}" for label, side in sides.items() for alert in side.alerts]
    return "".join(c if c.isprintable() or c in f"\n{NBSP}" else " " for c in "\n\n".join(blocks))


def _rate_text(rate: Rate | None) -> str:
    return f"{percent(rate.accuracy)} ({rate_range(rate.interval)}, n = {rate.n:,})" if rate else "–"
