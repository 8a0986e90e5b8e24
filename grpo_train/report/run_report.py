"""report.html of a run: one file with the result, the curves, and every problem with its completions."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_lib import statistics
from grpo_lib.analysis import completion_pairs
from grpo_lib.common.files import write_text_atomic
from grpo_lib.records import EvalRun, Record, summarize
from grpo_train.recipes import Recipe, load_recipe
from grpo_train.report import answer_inspector, comparison, figures, html_page
from grpo_train.report.comparison import PHASES, Comparison
from grpo_train.report.formatting import NBSP, duration, headline, percent, points, rate_range
from grpo_train.runs import health_checks
from grpo_train.runs.metric_glossary import Row, read_metrics
from grpo_train.runs.run_directory import describe_change, read_changes
from grpo_train.runs.run_files import read_environment, read_summary

# Rates of an evaluation -> what a table calls them.
RATES = {
    "strict": "strict (the number in the answer tags)",
    "lenient": "lenient (the last number anywhere)",
    "partial": f"within 10{NBSP}% of the gold number",
    "format": "format exactly as asked",
    "truncated": "truncated at the length limit",
}
SOURCES = {
    "words": "generated word problems",
    "gsm8k": "GSM8K",
    "dapo-math": "DAPO-Math-17k",
    "aime": "AIME",
    "math500": "MATH-500",
    "math": "MATH",
    "code": "Python functions",
    "file": "a file of the user's",
}


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page is one file that loads nothing from the network. Where the run has no evaluation or no metrics yet, a
    sentence says so.

    Raises:
      CourseError: there is no such directory, or before and after have different problems.
    """
    run_dir = Path(run_dir)
    compared = comparison.load(run_dir)
    before, after = compared.before, compared.after
    rows = health_checks.by_step(read_metrics(run_dir / "metrics.jsonl"))
    summary = _summary(run_dir, before, after)
    result = [figures.svg(figures.before_after(summary), headline(summary))] if summary else []
    if before and after:
        result.append(figures.svg(figures.flips(before, after), "verdicts that changed"))
    if summary and any("pass_at_k" in (summary.get(phase) or {}) for phase in comparison.PHASES):
        result.append(figures.svg(figures.pass_at_k(summary), "pass@k before and after, with 95 % intervals"))
    page = html_page.render(
        "report.html.j2",
        "inspector.js",
        title=_title(run_dir, summary),
        run_name=run_dir.resolve().name,
        headline=headline(summary),
        example=_example(before, after),
        rates=_rate_table(summary, before, after),
        task_rates=_task_table(compared),
        facts=[_facts(run_dir, summary, rows), _setup(run_dir, compared)],
        result_figures=result,
        first_of_many=any(map(_has_a_later_sample, compared.runs.values())),
        categories=comparison.category_counts(compared),
        category_figure=figures.svg(figures.categories(before, after), "answers by kind, before and after"),
        reward_means=comparison.reward_means(compared),
        reward_figure=figures.svg(figures.reward_parts(compared), "mean reward by part, before and after"),
        curves=[figures.panel_svg(panel, rows) for panel in figures.panels(rows)],
        smoothed=figures.smoothing(len(rows)),
        alerts=health_checks.find_alerts(rows),
        changes=[describe_change(change) for change in read_changes(run_dir)],
        validated=any(row.get("validation_accuracy") is not None for row in rows),
        files=_text_files(run_dir),
        percent=percent,
        points=points,
        **answer_inspector.page_values(compared),
    )
    return write_text_atomic(run_dir / "report.html", page)


def _title(run_dir: Path, summary: dict[str, Any]) -> str:
    """What was done, in words; the name of the run where it has no recipe."""
    recipe = _recipe(run_dir)
    if not recipe:
        return run_dir.resolve().name
    steps = summary.get("steps")
    trained = f"{steps:,} training steps" if steps else "training"
    return f"{Path(recipe.model.path).name} on {_sources(recipe)}, before and after {trained}"


def _example(before: EvalRun | None, after: EvalRun | None) -> dict[str, Any] | None:
    """The first problem whose verdict changed as most changed ones did: its two answers, and how many there are."""
    if not before or not after:
        return None
    counts = comparison.flip_counts(before, after)
    gained = counts["wrong_right"] >= counts["right_wrong"]
    changed = (pair for pair in completion_pairs(before, after) if _verdicts(pair) == (not gained, gained))
    pair = next(changed, None)
    if pair is None:
        return None
    ways = [(counts["wrong_right"], "wrong → right"), (counts["right_wrong"], "right → wrong")]
    (many, way), (few, other) = ways if gained else ways[::-1]
    answers = dict(zip(PHASES, pair, strict=True))
    return {"answers": answers, "problem": pair[0], "many": many, "way": way, "few": few, "other": other}


def _verdicts(pair: tuple[Record, Record]) -> tuple[bool, bool]:
    return pair[0]["strict"], pair[1]["strict"]


def _recipe(run_dir: Path) -> Recipe | None:
    file = run_dir / "recipe.yaml"
    return load_recipe(file) if file.exists() else None


def _sources(recipe: Recipe) -> str:
    """Where the test problems come from, in words."""
    names = [SOURCES[part.test_source or part.source] for part in recipe.sources]
    return ", ".join(dict.fromkeys(names))


def _has_a_later_sample(run: EvalRun) -> bool:
    return any(record["sample"] for record in run.counted)


def _summary(run_dir: Path, before: EvalRun | None, after: EvalRun | None) -> dict[str, Any]:
    """From the records where both exist, so that the page is consistent; otherwise from summary.json."""
    saved = read_summary(run_dir)
    if before and after:
        kept = {key: saved.get(key) for key in ("wall_seconds", "train_seconds", "steps")}
        return saved | summarize(before, after, **kept)
    return {"before": before.summary()} if before else saved


def _rate_table(summary: dict[str, Any], before: EvalRun | None, after: EvalRun | None) -> list[dict[str, str]]:
    """Lines of label, and for each phase and the change a text and its interval, as far as they are known."""
    table = []
    phases = {phase: part for phase in PHASES if (part := summary.get(phase))}
    for verdict, label in RATES.items():
        key = {"strict": "accuracy", "truncated": "truncated"}.get(verdict, f"{verdict}_accuracy")
        line = {"label": label}
        for phase, part in phases.items():
            interval = statistics.wilson_interval(part[key] * part["n"], part["n"])
            line |= {phase: percent(part[key]), f"{phase}_range": rate_range(interval)}
        if before and after:
            old, new = before.rates(verdict), after.rates(verdict)
            change = statistics.paired_bootstrap(list(old.values()), [new[key] for key in old])
            line |= {
                "change": points(change.difference),
                "change_range": f"{points(change.low)} to {points(change.high)}",
            }
        table.append(line)
    return [*table, *_sampled_table(phases)] if phases else []


def _task_table(compared: Comparison) -> list[dict[str, Any]]:
    """Strict accuracy of each task, where there are several: as _rate_table, with the number of problems."""
    tasks = {phase: run.by_task() for phase, run in compared.runs.items()}
    table = []
    for task in next(iter(tasks.values()), {}):
        runs = {phase: parts[task] for phase, parts in tasks.items()}
        summary = {phase: run.summary() for phase, run in runs.items()}
        line, *_ = _rate_table(summary, runs.get("before"), runs.get("after"))
        table.append(line | {"label": task, "problems": next(iter(summary.values()))["n"]})
    return table


def _sampled_table(phases: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Lines of the table of rates for the sampled completions, where there are any."""
    phases = {phase: part for phase, part in phases.items() if "pass_at_k" in part}
    samples = min((part["samples"] for part in phases.values()), default=0)

    def line(label: str, rate: Callable[[dict[str, Any]], float]) -> dict[str, str]:
        rates = {phase: rate(part) for phase, part in phases.items()}
        change = {"change": points(rates["after"] - rates["before"])} if len(rates) == 2 else {}
        return {"label": label} | {phase: percent(value) for phase, value in rates.items()} | change

    table = []
    if phases:
        table.append(line("one sampled answer", lambda part: part["sampled_accuracy"]))
    for power in range(1, samples.bit_length()):
        k = 2**power
        label = f"pass@{k}: at least one of {k} sampled answers"
        table.append(line(label, lambda part, k=k: part["pass_at_k"][str(k)]))
    if samples > 1:
        table.append(line("maj: the most frequent of all sampled answers", lambda part: part["maj_at_k"]))
    return table


def _setup(run_dir: Path, compared: Comparison) -> list[str]:
    """What was trained and evaluated, and on which machine, as far as the run directory has it."""
    facts = []
    sources = ""
    if recipe := _recipe(run_dir):
        sources = f" ({_sources(recipe)})"
        facts.append(f"model {Path(recipe.model.path).name}")
        facts.append(f"seed {recipe.seed}")
        facts.append(
            f"{recipe.training.steps:,} steps × {recipe.plan.prompts_per_step} prompts × "
            f"{recipe.grpo.group_size} completions"
        )
    if compared.runs:
        *_, last = compared.runs.values()
        facts.append(f"{len(last.verdicts('strict')):,} test problems{sources}")
    return [*facts, *_machine(read_environment(run_dir))]


def _machine(environment: dict[str, Any]) -> list[str]:
    """The accelerators; without any, the processor."""
    devices = [device for device in environment.get("devices", []) if not device.startswith("cpu")]
    if devices:
        return [f"{len(devices)} × {devices[0].partition(': ')[2]}"]
    if {"processor", "cores"} <= environment.keys():
        return [f"{environment['processor']}, {environment['cores']} cores"]
    return []


def _facts(run_dir: Path, summary: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """The name of the run, its steps and its time, as far as they are known."""
    steps = summary.get("steps") or (int(rows[-1]["step"]) if rows else 0)
    times = {"train_seconds": "of training", "wall_seconds": "in all"}
    spent = [f"{duration(summary[key])} {text}" for key, text in times.items() if summary.get(key)]
    trained = [f"{steps:,} training steps"] if steps else []
    return [f"run {run_dir.resolve().name}", *trained, *spent]


def _text_files(run_dir: Path) -> list[tuple[str, str]]:
    """What produced the numbers: (name, content) of the recipe and the description of the machine."""
    return [
        (name, (run_dir / name).read_text(encoding="utf-8", errors="replace"))
        for name in ("recipe.yaml", "environment.json")
        if (run_dir / name).exists()
    ]
