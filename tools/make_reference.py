"""Keep finished runs as reference results, and draw the figure of the README from runs/course.

    python tools/make_reference.py runs/course runs/seed1 runs/seed2 runs/hacked* runs/repaired*

Writes assets/reference/NAME/ (recipe, environment, metrics, summary; of those in SHIPPED also what notebook 05 reads),
assets/reference/results.md and hacking.md, tables of all of them, and assets/figures/result.png.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo_lib.common.files import write_text_atomic
from grpo_train import report
from grpo_train.recipes import Recipe
from grpo_train.report import comparison, palette
from grpo_train.runs import run_directory
from grpo_train.runs.metric_glossary import Row, read_metrics

ASSETS = Path(__file__).resolve().parents[1] / "assets"
KEPT = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json")
ANSWERS = ("evals/before.jsonl", "evals/after.jsonl")
SHIPPED = {"course": (*ANSWERS, "evals/sampled.jsonl", "sync.json", "export"), "hacked": ANSWERS, "repaired": ANSWERS}


def keep(directory: Path) -> Path:
    """Copy the files of a finished run that assets/reference keeps; returns the copy."""
    copy = ASSETS / "reference" / directory.name
    shutil.rmtree(copy, ignore_errors=True)
    for name in (*KEPT, *SHIPPED.get(directory.name, ())):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (directory / name).is_dir():
            shutil.copytree(directory / name, copy / name)
        else:
            shutil.copyfile(directory / name, copy / name)
    return copy


def read(directory: Path) -> tuple[Recipe, dict[str, Any], list[Row]]:
    """Recipe, summary and metrics of a run."""
    _, recipe = run_directory.load_run(directory)
    return recipe, comparison.read_json(directory / "summary.json"), read_metrics(directory / "metrics.jsonl")


def result_row(directory: Path) -> str:
    """One line of the results table."""
    recipe, summary, _ = read(directory)
    before, after = summary["before"], summary["after"]
    low, high = summary["difference_interval"]
    cells = (
        f"seed {recipe.seed}",
        f"{before['accuracy']:.1%} → {after['accuracy']:.1%}",
        f"{before['lenient_accuracy']:.1%} → {after['lenient_accuracy']:.1%}",
        f"{100 * low:+.1f} to {100 * high:+.1f} points",
        f"{summary['mcnemar_p']:.0e}",
        f"{summary['train_seconds']:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def hacking_row(directory: Path) -> str:
    """One line of the table of the hacked runs and their twins: means of the first and of the last five steps."""
    recipe, summary, rows = read(directory)
    first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:5], rows[-5:]))
    shrugs = [sum(row["format_without_number"] for row in part) / len(part) for part in (rows[:5], rows[-5:])]
    cells = (
        "reference" if "check_answer" in recipe.rewards else "repaired",
        f"{recipe.seed}",
        f"{first:.2f} → {last:.2f}",
        f"{shrugs[0]:.0%} → {shrugs[1]:.0%}",
        f"{summary['before']['accuracy']:.1%} → {summary['after']['accuracy']:.1%}",
        " to ".join(f"{100 * end:+.1f}" for end in summary["difference_interval"]) + " points",
    )
    return f"| {' | '.join(cells)} |"


def draw(directory: Path) -> Figure:
    """Accuracy before and after with its intervals, and the accuracy during training."""
    _, summary, rows = read(directory)
    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for position, (name, colour) in enumerate((("before", palette.BEFORE), ("after", palette.AFTER))):
        rate, (low, high) = summary[name]["accuracy"], summary[name]["interval"]
        left.bar(position, rate, 0.7, color=colour)
        left.errorbar(position, rate, [[rate - low], [high - rate]], color=palette.INK, capsize=4)
        left.annotate(report.percent(rate), (position, high), (0, 4), textcoords="offset points", ha="center")
    left.set_xticks([0, 1], ["before", "after"])
    left.set_title(f"{summary['after']['n']:,} held-out problems, greedy", loc="left", fontsize=10)
    steps = [row["step"] for row in rows]
    right.plot(steps, [row["accuracy"] for row in rows], color=palette.BLUE, label="training problems, sampled")
    measured = [(row["step"], row["validation_accuracy"]) for row in rows if "validation_accuracy" in row]
    right.plot(*zip(*measured, strict=True), "o", color=palette.GREEN, label="validation problems, greedy")
    right.set(xlabel="training step")
    right.set_title(f"{len(rows)} steps of GRPO", loc="left", fontsize=10)
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.set_ylim(0, 1.1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(directories: list[str]) -> None:
    if not directories:
        sys.exit(f"usage: {__doc__.splitlines()[2].strip()}")
    kept = [keep(Path(name).resolve()) for name in directories]
    hard = [directory for directory in kept if read(directory)[0].name.startswith("tiny-hard")]
    tables = {
        "results.md": [
            "| run | strict | lenient | 95 % interval of the difference | McNemar p | training |",
            "|---|---|---|---|---|---|",
            *(result_row(directory) for directory in kept if directory not in hard),
        ],
        "hacking.md": [
            "| reward | seed | mean reward | `?` in perfect tags | greedy accuracy | 95 % interval of the difference |",
            "|---|---|---|---|---|---|",
            *(hacking_row(directory) for directory in hard),
        ],
    }
    for name, lines in tables.items():
        if len(lines) > 2:
            write_text_atomic(ASSETS / "reference" / name, "\n".join(lines) + "\n")
            print("\n".join(lines))
    (ASSETS / "figures").mkdir(exist_ok=True)
    draw(ASSETS / "reference" / "course").savefig(ASSETS / "figures" / "result.png")


if __name__ == "__main__":
    main(sys.argv[1:])
