"""Keep finished runs as reference results, and draw the figure of the README from the first of them.

    python tools/make_reference.py runs/course runs/seed1 runs/seed2

Writes assets/reference/NAME/ (recipe, environment, metrics, summary; of the first run also the answers to every
problem), assets/reference/results.md, a table of all of them, and assets/figures/result.png.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo_lib import report
from grpo_lib.common import palette
from grpo_lib.common.files import read_jsonl, write_text_atomic
from grpo_lib.runs import run_directory

ASSETS = Path(__file__).resolve().parents[1] / "assets"
KEPT = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json")
ANSWERS = ("evals/before.jsonl", "evals/after.jsonl")


def keep(directory: Path, with_answers: bool) -> Path:
    """Copy the files of a finished run that assets/reference keeps; returns the copy."""
    copy = ASSETS / "reference" / directory.name
    shutil.rmtree(copy, ignore_errors=True)
    for name in (*KEPT, *(ANSWERS if with_answers else ())):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, copy / name)
    return copy


def result_row(directory: Path) -> str:
    """One line of the results table."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    _, recipe = run_directory.load_run(directory)
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


def draw(directory: Path) -> Figure:
    """Accuracy before and after with its intervals, and the accuracy during training."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    rows = read_jsonl(directory / "metrics.jsonl")
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
    kept = [keep(Path(name).resolve(), with_answers=not number) for number, name in enumerate(directories)]
    head = (
        "| run | strict | lenient | 95 % interval of the difference | McNemar p | training |\n|---|---|---|---|---|---|"
    )
    table = "\n".join([head, *(result_row(directory) for directory in kept)])
    write_text_atomic(ASSETS / "reference" / "results.md", table + "\n")
    (ASSETS / "figures").mkdir(exist_ok=True)
    draw(kept[0]).savefig(ASSETS / "figures" / "result.png")
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
