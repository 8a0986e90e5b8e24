"""The page of a run, and what a notebook shows of one.

report.write_report("runs/course")    # runs/course/report.html, one file, works offline
report.inspector("runs/course")       # its table of all answers, inside a notebook
report.training_curves(rows)          # figures; a notebook shows what a cell returns
live = report.LivePlot(total_steps)   # live(row) after each training step
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lib import comparison, figures, pages, statistics, warning_signs
from grpo_lib.comparison import Comparison, calculation_rates, category_counts, flip_counts, reward_means
from grpo_lib.errors import CourseError
from grpo_lib.export import export_table
from grpo_lib.figures import (
    before_after,
    categories,
    flips,
    reward_parts,
    slider,
    training_curves,
)
from grpo_lib.files import read_jsonl, write_text_atomic
from grpo_lib.inspector import inspector, page_values
from grpo_lib.live import LivePlot
from grpo_lib.palette import AFTER, BEFORE, BLUE, GREEN, INK
from grpo_lib.records import EvalRun, summarize
from grpo_lib.wording import NBSP, duration, headline, p_value, percent, points, rate_range

__all__ = [
    "AFTER", "BEFORE", "BLUE", "GREEN", "INK", "NBSP", "LivePlot", "before_after", "calculation_rates", "categories",
    "category_counts", "export_table", "flip_counts", "flips", "headline", "inspector", "p_value", "percent", "points",
    "reward_means", "reward_parts", "slider", "training_curves", "write_report",
]  # fmt: skip

RATES = {
    "strict": "strict (the number in the answer tags)",
    "lenient": "lenient (the last number anywhere)",
    "partial": f"within 10{NBSP}% of the gold number",
    "format": "format exactly as asked",
    "truncated": "cut short by the length limit",
}
MACHINE = {"processor": "", "cores": " cores"}
SOURCES = {"words": "generated word problems", "gsm8k": "GSM8K"}


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page is one file that asks nothing of the network: result, curves, and every problem with the completions
    before and after. What the run does not have yet (an evaluation, metrics) is said in a sentence.

    Raises:
      CourseError: there is no such directory, or before and after are of different problems.
    """
    run_dir = Path(run_dir)
    compared = comparison.load(run_dir)
    before, after = compared.before, compared.after
    metrics = run_dir / "metrics.jsonl"
    rows = figures.by_step(read_jsonl(metrics)) if metrics.exists() else []
    summary = _summary(run_dir, before, after)
    result = [(before_after(summary), headline(summary))] if summary else []
    if before and after:
        result.append((flips(before, after), "verdicts that changed"))
    page = pages.render(
        "report.html.j2",
        title=run_dir.resolve().name,
        headline=headline(summary),
        rates=_rate_table(summary, before, after),
        facts=[_facts(summary, rows), _setup(run_dir, compared)],
        result_figures=[_picture(figure, label) for figure, label in result],
        calculation_rates=_calculation_table(before, after),
        first_of_many=any(_all_sampled(run) for run in compared.runs.values()),
        categories=category_counts(before, after),
        category_figure=_picture(categories(before, after), "answers by kind, before and after"),
        reward_means=reward_means(before, after, compared.functions),
        reward_figure=_picture(
            reward_parts(before, after, compared.functions), "mean reward by part, before and after"
        ),
        curves=[pages.trusted(figures.panel_svg(panel, rows)) for panel in figures.panels(rows)],
        smoothed=figures.smoothing(len(rows)),
        signs=warning_signs.signs(rows),
        validated=any(row.get("validation_accuracy") is not None for row in rows),
        files=_text_files(run_dir),
        **page_values(compared),
    )
    return write_text_atomic(run_dir / "report.html", page)


def _all_sampled(run: EvalRun) -> bool:
    """Whether problems were answered several times, and never greedily."""
    return any(record["sample"] for record in run.counted)


def _picture(figure: figures.Figure, label: str) -> Any:
    return pages.trusted(figures.svg(figure, label))


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise CourseError(f"{path}: not JSON ({error.msg}); remove the file") from None


def _summary(run_dir: Path, before: EvalRun | None, after: EvalRun | None) -> dict[str, Any]:
    """From the records where there are both, so that the page cannot disagree with itself; else summary.json."""
    saved = _json(run_dir / "summary.json")
    if before and after:
        times = {key: saved.get(key) for key in ("wall_seconds", "train_seconds", "steps")}
        return summarize(before, after, **times)
    if before:
        return {"before": before.summary()}
    return saved


def _rate_table(summary: dict[str, Any], before: EvalRun | None, after: EvalRun | None) -> list[dict[str, str]]:
    table = []
    for verdict, label in RATES.items():
        key = {"strict": "accuracy", "truncated": "truncated"}.get(verdict, f"{verdict}_accuracy")
        line = {"label": label, "before": "", "before_range": "", "after": "", "after_range": "", "change": ""}
        for name in ("before", "after"):
            if part := summary.get(name):
                line[name] = percent(part[key])
                interval = statistics.wilson_interval(min(1.0, part[key]) * part["n"], part["n"])
                line[f"{name}_range"] = rate_range(interval)
        if before and after:
            old, new = before.rates(verdict), after.rates(verdict)
            change = statistics.paired_bootstrap(list(old.values()), [new[key] for key in old])
            line["change"] = points(change.difference)
            line["change_range"] = f"{points(change.low)} to {points(change.high)}"
        table.append(line)
    return [*table, *_sampled_table(summary)] if summary else []


def _sampled_table(summary: dict[str, Any]) -> list[dict[str, str]]:
    """Lines of the rate table for what was sampled besides the greedy completions, where anything was."""
    phases = {phase: part for phase in comparison.PHASES if "pass_at_k" in (part := summary.get(phase) or {})}
    samples = min((part["samples"] for part in phases.values()), default=0)
    shares = {"one sampled answer": {phase: part["sampled_accuracy"] for phase, part in phases.items()}}
    for k in (2**power for power in range(1, samples.bit_length())):
        shares[f"pass@{k}: at least one of {k} sampled answers"] = {
            phase: part["pass_at_k"][str(k)] for phase, part in phases.items()
        }
    if samples > 1:
        shares["maj: the most frequent of all sampled answers"] = {p: part["maj_at_k"] for p, part in phases.items()}
    empty = {"before": "", "before_range": "", "after": "", "after_range": "", "change": "", "change_range": ""}
    table = []
    for label, rates in shares.items():
        line = empty | {"label": label} | {phase: percent(rate) for phase, rate in rates.items()}
        if len(rates) == 2:
            line["change"] = points(rates["after"] - rates["before"])
        table.append(line)
    return table if phases else []


def _calculation_table(before: EvalRun | None, after: EvalRun | None) -> list[dict[str, str]]:
    table = []
    for row in calculation_rates(before, after):
        rates = {phase: percent(row[phase]) for phase in comparison.PHASES if phase in row}
        change = points(row["after"] - row["before"]) if len(rates) == 2 else ""
        table.append(
            {"calculations": row["calculations"], "problems": f"{row['problems']:,}", **rates, "change": change}
        )
    return table


def _setup(run_dir: Path, compared: Comparison) -> list[str]:
    """What was trained and evaluated, on what, and where; of that what the run directory knows."""
    facts, recipe = [], compared.recipe
    if recipe:
        facts.append(f"model {Path(recipe.model.path).name}")
    for run in list(compared.runs.values())[-1:]:
        n = len({record["id"] for record in run.records})
        source = f" ({SOURCES[recipe.problems.source]})" if recipe else ""
        facts.append(f"{n:,} test problems{source}")
        samples = len(run.records) // n
        greedy = any(record.get("greedy") for record in run.records)
        sampled = f"{samples - greedy} sampled" if samples > greedy else ""
        facts.append(" and ".join(filter(None, ["greedy" if greedy else "", sampled])) + " answers")
    if recipe:
        plan = f"{recipe.training.steps:,} steps × {recipe.prompts_per_step} prompts"
        facts += [f"{plan} × {recipe.grpo.group_size} completions", f"seed {recipe.seed}"]
    facts.append(_machine(_json(run_dir / "environment.json")))
    for phase in list(compared.runs)[-1:]:
        written = (run_dir / "evals" / f"{phase}.jsonl").stat().st_mtime
        facts.append(f"evaluation of {datetime.date.fromtimestamp(written)}")
    return [fact for fact in facts if fact]


def _machine(environment: dict[str, Any]) -> str:
    """The accelerators; of a machine without any, its processor."""
    devices = [device for device in environment.get("devices", []) if not device.startswith("cpu")]
    if devices:
        return f"{len(devices)} × {devices[0].partition(': ')[2]}"
    return ", ".join(f"{environment[key]}{text}" for key, text in MACHINE.items() if environment.get(key))


def _facts(summary: dict[str, Any], rows: Sequence[figures.Row]) -> list[str]:
    facts = []
    if steps := summary.get("steps") or (int(rows[-1]["step"]) if rows else None):
        facts.append(f"{steps:,} training steps")
    for key, text in (("train_seconds", "of training"), ("wall_seconds", "in all")):
        if seconds := summary.get(key):
            facts.append(f"{duration(seconds)} {text}")
    return facts


def _text_files(run_dir: Path) -> list[tuple[str, str]]:
    """What produced the numbers: (name, content) of the recipe and the description of the machine."""
    names = ("recipe.yaml", "environment.json")
    found = [name for name in names if (run_dir / name).exists()]
    return [(name, (run_dir / name).read_text(encoding="utf-8", errors="replace")) for name in found]
