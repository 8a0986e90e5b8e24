"""Keep finished runs as reference results, and draw the figure of the README from runs/course and runs/smollm2.

    python dev/tools/make_reference.py runs/course runs/seed1 runs/seed2 runs/hacked* runs/repaired* runs/smollm2*

Writes assets/reference/NAME/ (recipe, environment, metrics, summary; of those in SHIPPED also what notebook 05 reads),
assets/reference/results.md, smollm2.md and hacking.md, tables of all of them, and assets/figures/result.png.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo_lib.common.files import read_json_if_exists, write_text_atomic
from grpo_train import report
from grpo_train.recipes import Recipe
from grpo_train.report import palette
from grpo_train.runs import run_directory
from grpo_train.runs.metric_glossary import Row, read_metrics

ASSETS = Path(__file__).resolve().parents[2] / "assets"
KEPT = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json")
ANSWERS = ("evals/before.jsonl", "evals/after.jsonl")
SHIPPED = {
    "course": (*ANSWERS, "evals/sampled.jsonl", "sync.json", "export"), "hacked": ANSWERS, "repaired": ANSWERS,
    "smollm2": ("evals/base.jsonl", *ANSWERS, "sync.json"),
}  # fmt: skip


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
    return recipe, read_json_if_exists(directory / "summary.json"), read_metrics(directory / "metrics.jsonl")


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


def real_row(directory: Path) -> str:
    """One line of the table of the runs with a cold start: greedy, and one answer sampled at temperature 1."""
    recipe, summary, rows = read(directory)
    before, after, base = summary["before"], summary["after"], summary["cold_start"]["before"]
    low, high = summary["difference_interval"]
    cells = (
        f"{recipe.seed}",
        f"{base['accuracy']:.1%} ({base['lenient_accuracy']:.1%})",
        f"{before['accuracy']:.1%}",
        f"{after['accuracy']:.1%}",
        f"{100 * low:+.1f} to {100 * high:+.1f} points",
        f"{before['sampled_accuracy']:.1%} → {after['sampled_accuracy']:.1%}",
        f"{rows[0]['entropy']:.2f} → {rows[-1]['entropy']:.2f}",
        f"{summary['wall_seconds'] / 60:.0f} min",
    )
    return f"| {' | '.join(cells)} |"


def draw_bars(axes: Any, summaries: dict[str, dict[str, Any]], title: str) -> None:
    """Accuracies with their intervals; the last bar is what training gave."""
    for position, summary in enumerate(summaries.values()):
        rate, (low, high) = summary["accuracy"], summary["interval"]
        axes.bar(position, rate, 0.7, color=palette.AFTER if position == len(summaries) - 1 else palette.BEFORE)
        axes.errorbar(position, rate, [[rate - low], [high - rate]], color=palette.INK, capsize=4)
        axes.annotate(report.percent(rate), (position, high), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(summaries)), summaries)
    axes.set_title(title, loc="left", fontsize=10)


def draw(tiny: Path, real: Path) -> Figure:
    """Both models: greedy accuracy on test problems with intervals, and on validation problems during training."""
    figure = Figure(figsize=(10, 3.2), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(2, 3, 4))
    summary, other = read(tiny)[1], read(real)[1]
    draw_bars(left, {name: summary[name] for name in ("before", "after")}, "tiny model")
    stages = {"base": other["cold_start"]["before"], "cold start": other["before"], "GRPO": other["after"]}
    draw_bars(middle, stages, "SmolLM2-135M")
    curves = (tiny, "tiny model", "o-", palette.GREEN), (real, "SmolLM2-135M", "s--", palette.BLUE)
    for directory, label, marks, colour in curves:
        rows = [row for row in read(directory)[2] if "validation_accuracy" in row]
        found = [row["validation_accuracy"] for row in rows]
        right.plot([row["step"] for row in rows], found, marks, color=colour, label=label)
    right.set(xlabel="training step")
    right.set_title("validation problems, greedy", loc="left", fontsize=10)
    right.legend(frameon=False, loc="lower right")
    for axes in (left, middle, right):
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
    real = [directory for directory in kept if read(directory)[0].training.cold_start]
    tables = {
        "smollm2.md": [
            "| seed | base (last number) | after the cold start | after GRPO | 95 % interval of GRPO's difference "
            "| sampled | entropy, nats | in all |",
            "|---|---|---|---|---|---|---|---|",
            *map(real_row, real),
        ],
        "results.md": [
            "| run | strict | lenient | 95 % interval of the difference | McNemar p | training |",
            "|---|---|---|---|---|---|",
            *(result_row(directory) for directory in kept if directory not in hard + real),
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
    draw(ASSETS / "reference" / "course", ASSETS / "reference" / "smollm2").savefig(ASSETS / "figures" / "result.png")


if __name__ == "__main__":
    main(sys.argv[1:])
