"""Keep finished runs as reference results, and draw the figure of the README.

    python dev/tools/make_reference.py runs/course runs/seed1 runs/seed2 runs/hacked* runs/repaired* runs/smollm2*
    python dev/tools/make_reference.py --figure      # the figure alone, from what is kept

Writes assets/reference/NAME/ (recipe, environment, metrics, summary; of those in SHIPPED also what notebook 05 reads),
assets/reference/results.md, smollm2.md and hacking.md, tables of all of them, and assets/figures/result.png: the tiny
model's run `course`, and the five seeds of the experiment `real-blind`.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo_lib.common.files import read_json_if_exists, write_text_atomic
from grpo_lib.statistics import mean_interval
from grpo_train import report
from grpo_train.recipes import Recipe
from grpo_train.report import experiments, palette
from grpo_train.runs import run_directory
from grpo_train.runs.metric_glossary import Row, read_metrics

ASSETS = Path(__file__).resolve().parents[2] / "assets"
KEPT = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json")
ANSWERS = ("evals/before.jsonl", "evals/after.jsonl")
SHIPPED = {
    "course": (*ANSWERS, "evals/sampled.jsonl", "sync.json", "export"), "hacked": ANSWERS, "repaired": ANSWERS,
    "smollm2": ("evals/base.jsonl.gz", *(f"{name}.gz" for name in ANSWERS), "sync.json"),
    "smollm2-spaces": ("evals/base.jsonl.gz", *(f"{name}.gz" for name in ANSWERS)),
}  # fmt: skip
BLIND = "real-blind"  # the experiment with SmolLM2 on problems that no earlier choice has seen


def keep(directory: Path) -> Path:
    """Copy the files of a finished run that assets/reference keeps, some of them compressed; returns the copy."""
    copy = ASSETS / "reference" / directory.name
    shutil.rmtree(copy, ignore_errors=True)
    for name in (*KEPT, *SHIPPED.get(directory.name, ())):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (directory / name).is_dir():
            shutil.copytree(directory / name, copy / name)
        elif name.endswith(".gz"):
            answers = (directory / name.removesuffix(".gz")).read_bytes()
            (copy / name).write_bytes(gzip.compress(answers, mtime=0))
        else:
            shutil.copyfile(directory / name, copy / name)
    return copy


def read(directory: Path) -> tuple[Recipe, dict[str, Any], list[Row]]:
    """Recipe, summary and metrics of a run."""
    _, recipe = run_directory.load_run(directory)
    return recipe, read_json_if_exists(directory / "summary.json"), read_metrics(directory / "metrics.jsonl")


def change(before: float, after: float) -> str:
    return f"{before:.1%} → {after:.1%}"


def points(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * low:+.1f} to {100 * high:+.1f} points"


def mean_of(column: str, rows: list[Row]) -> float:
    return sum(row[column] for row in rows) / len(rows)


def result_row(directory: Path) -> str:
    """One line of the results table."""
    recipe, summary, _ = read(directory)
    before = summary["before"]
    after = summary["after"]
    cells = (
        f"seed {recipe.seed}",
        change(before["accuracy"], after["accuracy"]),
        change(before["lenient_accuracy"], after["lenient_accuracy"]),
        points(summary["difference_interval"]),
        f"{summary['mcnemar_p']:.0e}",
        f"{summary['train_seconds']:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def hacking_row(directory: Path) -> str:
    """One line of the table of the hacked runs and their twins: means of the first and of the last five steps."""
    recipe, summary, rows = read(directory)
    first = rows[:5]
    last = rows[-5:]
    rewards = f"{mean_of('reward', first):.2f} → {mean_of('reward', last):.2f}"
    shrugs = f"{mean_of('format_without_number', first):.0%} → {mean_of('format_without_number', last):.0%}"
    cells = (
        "reference" if "check_answer" in recipe.rewards else "repaired",
        f"{recipe.seed}",
        rewards,
        shrugs,
        change(summary["before"]["accuracy"], summary["after"]["accuracy"]),
        points(summary["difference_interval"]),
    )
    return f"| {' | '.join(cells)} |"


def real_row(directory: Path) -> str:
    """One line of the table of the runs with a cold start: greedy, and one answer sampled at temperature 1."""
    recipe, summary, rows = read(directory)
    before = summary["before"]
    after = summary["after"]
    base = summary["cold_start"]["before"]
    entropy = f"{rows[0]['entropy']:.2f} → {rows[-1]['entropy']:.2f}"
    cells = (
        f"{recipe.seed}",
        f"{base['accuracy']:.1%} ({base['lenient_accuracy']:.1%})",
        f"{before['accuracy']:.1%}",
        f"{after['accuracy']:.1%}",
        points(summary["difference_interval"]),
        change(before["sampled_accuracy"], after["sampled_accuracy"]),
        entropy,
        f"{summary['wall_seconds'] / 60:.0f} min",
    )
    return f"| {' | '.join(cells)} |"


def draw_bar(axes: Any, position: int, mean: float, low: float, high: float, trained: bool) -> None:
    """One accuracy with its interval."""
    axes.bar(position, mean, 0.7, color=palette.AFTER if trained else palette.BEFORE)
    axes.errorbar(position, mean, [[mean - low], [high - mean]], color=palette.INK, capsize=4)


def draw_name(axes: Any, position: int, mean: float, above: float) -> None:
    """The accuracy as text, above all that is drawn there."""
    axes.annotate(report.percent(mean), (position, above), (0, 6), textcoords="offset points", ha="center")


def draw_tiny(axes: Any, summary: dict[str, Any]) -> None:
    """The tiny model's accuracy before and after, with the interval over test problems."""
    for position, name in enumerate(("before", "after")):
        rate = summary[name]["accuracy"]
        low, high = summary[name]["interval"]
        draw_bar(axes, position, rate, low, high, trained=name == "after")
        draw_name(axes, position, rate, above=high)
    axes.set_xticks([0, 1], ["before", "after"])
    axes.set_title("tiny model, one run", loc="left", fontsize=10)


def draw_seeds(axes: Any, stages: dict[str, np.ndarray]) -> None:
    """SmolLM2's accuracy at each stage: the mean of the seeds, its interval over them, and a dot for each seed."""
    for position, (name, rates) in enumerate(stages.items()):
        mean = float(rates.mean())
        low, high = mean_interval(rates) if rates.any() else (mean, mean)
        draw_bar(axes, position, mean, low, high, trained=name in ("MaxRL", "GRPO"))
        if rates.any():
            draw_dots(axes, position + 0.22, rates)
        draw_name(axes, position, mean, above=max(high, *rates))
    axes.set_xticks(range(len(stages)), stages)
    axes.set_title(f"SmolLM2-135M, {len(rates)} seeds", loc="left", fontsize=10)


def draw_dots(axes: Any, beside: float, rates: np.ndarray) -> None:
    """A dot for each seed; the first, on which the recipe was tuned, is red, and above the others."""
    colours = ["white"] * (len(rates) - 1) + [palette.VERMILLION]
    axes.scatter([beside] * len(rates), rates[::-1], 16, colours, edgecolors=palette.INK, zorder=3)


def draw_curves(axes: Any, tiny: list[Row], real: np.ndarray) -> None:
    """Right samples of each step: the tiny model's run, and SmolLM2's seeds with their mean, [seeds, steps]."""
    axes.plot([row["step"] for row in tiny], [row["accuracy"] for row in tiny], color=palette.GREEN, label="tiny model")
    steps = np.arange(1, 1 + real.shape[1])
    axes.plot(steps, real.T, color=palette.BLUE, linewidth=0.7, alpha=0.5)
    axes.plot(steps, real.mean(axis=0), color=palette.BLUE, linewidth=2, label="SmolLM2-135M, MaxRL")
    axes.set(xlabel="training step")
    axes.set_title("right samples in training", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")


def draw() -> Figure:
    """Both models: greedy accuracy on test problems with intervals, and the right samples on the way."""
    _, of_tiny, steps = read(ASSETS / "reference" / "course")
    _, of_base, _ = read(ASSETS / "reference" / "smollm2-spaces")
    stages = {"base": np.array([of_base["cold_start"]["before"]["accuracy"]])}
    for label, arm in (("cold start", "start"), ("MaxRL", "maxrl"), ("GRPO", "grpo")):
        stages[label] = experiments.by_seed(BLIND, arm, lambda run: run["accuracy"])
    runs = [run for run in experiments.record(BLIND)["runs"] if run["arm"] == "maxrl"]

    figure = Figure(figsize=(10, 3.2), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(2, 4, 4))
    draw_tiny(left, of_tiny)
    draw_seeds(middle, stages)
    draw_curves(right, steps, np.array([run["curves"]["accuracy"] for run in runs]))
    for axes in (left, middle, right):
        axes.set_ylim(0, 1.1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(directories: list[str]) -> None:
    if not directories:
        sys.exit(f"usage: {__doc__.splitlines()[2].strip()}")
    if directories != ["--figure"]:
        write_tables(directories)
    (ASSETS / "figures").mkdir(exist_ok=True)
    draw().savefig(ASSETS / "figures" / "result.png")


def write_tables(directories: list[str]) -> None:
    kept = [keep(Path(name).resolve()) for name in directories]
    hard, real, others = [], [], []
    for directory in kept:
        recipe, _, _ = read(directory)
        if recipe.name.startswith("tiny-hard"):
            hard.append(directory)
        elif recipe.training.cold_start:
            real.append(directory)
        else:
            others.append(directory)
    tables = {
        "smollm2.md": [
            "| seed | base (last number) | after the cold start | after MaxRL | 95 % interval of MaxRL's difference "
            "| sampled | entropy, nats | in all |",
            "|---|---|---|---|---|---|---|---|",
            *map(real_row, real),
        ],
        "results.md": [
            "| run | strict | lenient | 95 % interval of the difference | McNemar p | training |",
            "|---|---|---|---|---|---|",
            *map(result_row, others),
        ],
        "hacking.md": [
            "| reward | seed | mean reward | `?` in perfect tags | greedy accuracy | 95 % interval of the difference |",
            "|---|---|---|---|---|---|",
            *map(hacking_row, hard),
        ],
    }
    for name, lines in tables.items():
        if len(lines) > 2:
            write_text_atomic(ASSETS / "reference" / name, "\n".join(lines) + "\n")
            print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
