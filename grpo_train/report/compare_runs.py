"""Compare two runs: their recipes and last metrics, and a paired test on their evaluations.

    compared = compare("runs/a", "runs/b")
    print(text(compared))

Every difference is B - A.  What only one of the runs has is shown with a dash for the other.  Where the runs were
evaluated on different problems, those that both have are paired.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.common.errors import CourseError
from grpo_lib.records import EvalRun, summarize
from grpo_train.recipes import differences
from grpo_train.recipes.text_table import text_table
from grpo_train.report.comparison import flip_counts
from grpo_train.report.formatting import CHANCE, MINUS, NBSP, evidence, is_clear, percent
from grpo_train.runs.health_checks import by_step, finite
from grpo_train.runs.metric_glossary import METRICS, Row, read_metrics, reading_order
from grpo_train.runs.run_directory import describe_change, load_run, read_changes

WINDOW = 10  # steps whose mean is compared, at most
CLOCKS = ("seconds", "tokens_per_second")  # how the names of metrics begin that a step's compilation changes


@dataclass(frozen=True)
class RunComparison:
    """What two runs have in common, and where they differ."""

    names: tuple[str, str]  # of A and B; their paths where the names are the same
    recipe: list[str]  # fields that differ, as `section.key: a != b`
    metrics: dict[str, tuple[float | None, float | None]]  # the mean over the last steps of A and B
    steps: tuple[int, int]  # how many last steps that are, of A and B: WINDOW or fewer
    # Of the evaluations after training, problem by problem and strict: records.summarize with A as `before` and B as
    # `after`, and `flips`, comparison.flip_counts (None where a problem was answered several times).
    paired: dict[str, Any] | None
    unpaired: str | None  # why there is no paired comparison
    left_out: tuple[int, int]  # problems of A, and of B, that only one of them was evaluated on; the others are paired
    changes: tuple[list[str], list[str]]  # of A and B: with what other values it went on, and when


def compare(run_a: str | os.PathLike, run_b: str | os.PathLike) -> RunComparison:
    """Read two run directories and compare them; neither is changed.

    Raises:
      CourseError: one is not a run, both are the same, or a file cannot be read.
    """
    (a, recipe_a), (b, recipe_b) = load_run(run_a), load_run(run_b)
    if a == b:
        raise CourseError(f"{run_a} and {run_b} are the same run; name two")
    names = (str(a), str(b)) if a.name == b.name else (a.name, b.name)
    rows_a, rows_b = (by_step(read_metrics(folder / "metrics.jsonl")) for folder in (a, b))
    known = {name for row in (*rows_a, *rows_b) for name in row if finite(row[name]) is not None} - {"step"}
    metrics = {name: (_last_mean(rows_a, name), _last_mean(rows_b, name)) for name in reading_order(known)}
    steps = min(WINDOW, len(rows_a)), min(WINDOW, len(rows_b))
    paired, unpaired, left_out = _pair((a, b), names)
    changes = _changes(a), _changes(b)
    return RunComparison(names, differences(recipe_a, recipe_b), metrics, steps, paired, unpaired, left_out, changes)


def _changes(run: Path) -> list[str]:
    return [describe_change(row) for row in read_changes(run)]


def find_run(name: str | os.PathLike, runs: str | os.PathLike) -> Path:
    """The folder of a run, given its path, or its name in the folder `runs`."""
    path = Path(name)
    named = Path(runs) / name
    return named if (named / "recipe.yaml").is_file() and not (path / "recipe.yaml").is_file() else path


def _last_mean(rows: Sequence[Row], name: str) -> float | None:
    """Over the last steps; for a metric that is measured at few steps, the last value.

    Of a clock only steps count that compiled nothing: a program is compiled once, and takes longer than many steps.
    """
    if name.startswith(CLOCKS):
        rows = [row for row in rows if not row.get("compilations")]
    values = [finite(row.get(name)) for row in rows]
    recent = [value for value in values[-WINDOW:] if value is not None]
    recent = recent or [value for value in values if value is not None][-1:]
    return sum(recent) / len(recent) if recent else None


def _pair(folders: Sequence[Path], names: tuple[str, str]) -> tuple[dict[str, Any] | None, str | None, tuple[int, int]]:
    """The evaluations after training against each other, or why not; and how many problems only one of them has."""
    paths = [folder / "evals" / "after.jsonl" for folder in folders]
    if missing := [name for name, path in zip(names, paths, strict=True) if not path.exists()]:
        return None, f"no evals/after.jsonl in {' and '.join(missing)}", (0, 0)
    run_a, run_b = (EvalRun.load(path) for path in paths)
    common_a, common_b = _on_common_problems(run_a, run_b)
    try:
        result = summarize(common_a, common_b)
    except CourseError as error:
        return None, str(error), (0, 0)
    result["flips"] = None if result["mcnemar_p"] is None else flip_counts(common_a, common_b)
    left_out = len(_problems(run_a)) - len(_problems(common_a)), len(_problems(run_b)) - len(_problems(common_b))
    return result, None, left_out


def _on_common_problems(run_a: EvalRun, run_b: EvalRun) -> tuple[EvalRun, EvalRun]:
    """What both runs say about the problems that both were evaluated on; all they say, where there are none."""
    problems_a, problems_b = _problems(run_a), _problems(run_b)
    common = {key for key, problem in problems_a.items() if problems_b.get(key) == problem}
    if not common:
        return run_a, run_b
    kept_a, kept_b = (EvalRun([record for record in run.records if record["id"] in common]) for run in (run_a, run_b))
    return kept_a, kept_b


def _problems(run: EvalRun) -> dict[str, tuple[str, str]]:
    """Id -> question and gold of each problem."""
    return {record["id"]: (record["question"], record["gold"]) for record in run.counted}


def verdict(compared: RunComparison) -> str:
    """Which of the two is better after training, in a sentence; a difference within noise is called so."""
    paired = compared.paired
    if paired is None:
        return f"No paired comparison: {compared.unpaired}."
    a, b, n = paired["before"]["accuracy"], paired["after"]["accuracy"], paired["after"]["n"]
    rates = f"A {percent(a)}, B {percent(b)} of {n:,} problems"
    if any(compared.left_out):
        only_a, only_b = compared.left_out
        rates += f" that both were evaluated on (left out: {only_a:,} of A alone, {only_b:,} of B alone)"
    found = paired["difference"], paired["difference_interval"], paired["mcnemar_p"]
    difference = f"B {MINUS} A = {evidence(*found)}"
    if not is_clear(*found[1:]):
        return f"No clear difference: {rates}. {difference}. {CHANCE}"
    return f"{'B' if found[0] > 0 else 'A'} is more often right: {rates}. {difference}."


def text(compared: RunComparison) -> str:
    """The comparison for a terminal, without characters that control one."""
    blocks = [f"A: {compared.names[0]}\nB: {compared.names[1]}", verdict(compared)]
    if compared.paired and (flips := compared.paired["flips"]):
        names = ("both right", "only A right", "only B right", "both wrong")
        blocks[-1] += "\n" + ", ".join(f"{name} {count:,}" for name, count in zip(names, flips.values(), strict=True))
    blocks.append(
        "\n".join(["The recipes differ (A != B):", *(f"  {line}" for line in compared.recipe)])
        if compared.recipe
        else "The recipes are the same."
    )
    for run, changes in zip("AB", compared.changes, strict=True):
        if changes:
            blocks.append("\n".join([f"{run} was changed while it ran:", *(f"  {line}" for line in changes)]))
    rows = []
    for name, (a, b) in compared.metrics.items():
        shown = ["–" if value is None else f"{value:.4g}" for value in (a, b)]
        difference = "–" if a is None or b is None else f"{b - a:+.2g}"
        rows.append((name, *shown, difference, METRICS[name].unit if name in METRICS else ""))
    blocks.append(text_table((_heading(compared.steps), "A", "B", f"B {MINUS} A", "unit"), rows, right=3))
    if any(name.startswith(CLOCKS) for name in compared.metrics):
        blocks[-1] += "\nSeconds and tokens per second are of steps that compiled nothing."
    return "".join(c if c.isprintable() or c in f"\n{NBSP}" else " " for c in "\n\n".join(blocks))


def _heading(steps: tuple[int, int]) -> str:
    """Of the table of metrics."""
    of_a, of_b = steps
    if of_a == of_b:
        return f"mean of the last {of_a} steps" if of_a != 1 else "of the only step"
    return f"mean of the last {of_a} steps (A), {of_b} steps (B)"
