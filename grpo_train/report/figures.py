"""Figures by name: those of a run, those of the lessons, and a slider over figures.

    figures.training_curves(rows)               # a notebook shows what a cell returns
    figures.before_after(summary)
    figures.clip(objective, epsilon)            # of a lesson: what it teaches stays in the cell, drawing is here
    figures.slider([("n = 50", one), ("n = 100", other)])

A figure fits a page of 900 pixels. Before is always light blue and hatched or dashed, after dark blue.
"""

import hashlib
import html
import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib import analysis, rewards, statistics
from grpo_lib.common import environment
from grpo_lib.common.files import read_json
from grpo_lib.records import EvalRun
from grpo_train.report import comparison, html_page
from grpo_train.report.alt_text import alt_text
from grpo_train.report.formatting import MINUS, NBSP, percent
from grpo_train.report.palette import AFTER, BEFORE, BLUE, GREEN, GREY, INK, LINES, SKY, VERMILLION
from grpo_train.runs.health_checks import by_step, finite
from grpo_train.runs.metric_glossary import REWARD_MEAN, TASK_METRIC, Row, name_in, read_metrics

environment.prepare()

import matplotlib  # noqa: E402
from markupsafe import Markup  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter  # noqa: E402


@dataclass(frozen=True)
class Panel:
    """One small plot: its title, the unit of its vertical axis, and (key in metrics.jsonl, label) of each line."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    fraction: bool = False  # from 0 to 1, shown in percent
    from_zero: bool = False
    smallest_span: float = 1e-3  # of the vertical axis, so that rounding noise does not look like a trend


_ACCURACIES = (("accuracy", "strict"), ("lenient_accuracy", "lenient"), ("validation_accuracy", "validation, strict"))
_SECONDS = (
    ("seconds", "all"),
    ("seconds_rollout", "rollout"),
    ("seconds_update", "update"),
    ("seconds_sync", "sync"),
)
PANELS = (
    Panel("Reward", "mean per completion", (("reward", "reward"),)),
    Panel("Accuracy", "fraction of completions", _ACCURACIES, fraction=True),
    Panel("Exact format", "fraction of completions", (("format", "format"),), fraction=True),
    Panel("Completion length", "tokens, mean", (("completions/mean_length", "length"),), from_zero=True),
    Panel("Zero-variance groups", "fraction of groups", (("frac_reward_zero_std", "groups"),), fraction=True),
    Panel("Gradient norm", "L2 norm", (("grad_norm", "norm"),), from_zero=True),
    Panel("Entropy", "nats per token", (("entropy", "entropy"),), from_zero=True),
    Panel("Sampling temperature", "of a step", (("temperature", "temperature"),), from_zero=True),
    Panel("Loss (about 0 on-policy)", "policy loss", (("loss", "loss"),), smallest_span=0.02),
    Panel("KL to the reference", "nats per token", (("kl", "kl"),), from_zero=True),
    Panel("β, adapted", "weight of the KL penalty", (("beta", "beta"),), from_zero=True),
    Panel("Seconds of a step", "seconds", _SECONDS, from_zero=True),
)
_NO_SHARES = {key for panel in PANELS if not panel.fraction for key, _ in panel.series}
MAIN = ("Reward", "Accuracy", "Zero-variance groups", "Entropy")  # what a reader watches first
PANEL_WIDTHS = {1: 3.0, 2: 4.3, 3: 3.0}  # inches, by the number of columns
BARS = {"before": {"color": BEFORE, "hatch": "///", "hatchcolor": "white"}, "after": {"color": AFTER}}
CURVES = {
    "before": {"color": BEFORE, "linestyle": "--", "marker": "s"},
    "after": {"color": AFTER, "linestyle": "-", "marker": "o"},
}


def described_png(figure: Figure) -> tuple[bytes, dict[str, str]]:
    """A figure as a notebook shows it: PNG, with its description for those who cannot see it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", facecolor="white")
    return buffer.getvalue(), {"alt": alt_text(figure)}


class _NotebookFigure(Figure):
    """A figure that a notebook shows once: pyplot does not know it, and it draws itself when it is displayed."""

    _repr_png_ = described_png


def training_curves(rows: Sequence[Row], total_steps: int | None = None) -> Figure:
    """Small multiples of all training metrics over steps.

    Thin lines are single steps; thick ones are the mean of the last few steps, from 15 steps on. Metrics that no
    row has (`kl` where nothing measures it) get no panel; missing and non-finite values are left out.

    Args:
      rows: rows of metrics.jsonl. Of two rows for one step the later one counts.
      total_steps: the right end of the horizontal axis, for a run that is not finished.
    """
    rows = by_step(rows)
    return _curves(panels(rows), rows, total_steps)


def main_curves(rows: Sequence[Row], total_steps: int | None = None) -> Figure:
    """As `training_curves`, only what a reader watches first: reward, accuracy, zero-variance groups and entropy."""
    rows = by_step(rows)
    return _curves([panel for panel in panels(rows) if panel.title in MAIN], rows, total_steps)


def more_curves(rows: Sequence[Row]) -> Figure:
    """As `training_curves`, without those of `main_curves`."""
    rows = by_step(rows)
    return _curves([panel for panel in panels(rows) if panel.title not in MAIN], rows, None)


def _curves(shown: Sequence[Panel], rows: Sequence[Row], total_steps: int | None) -> Figure:
    if not shown:
        return _message_figure("No training step has finished yet.")
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = _figure(PANEL_WIDTHS[columns] * columns, 2.3 * lines)
    for index, panel in enumerate(shown):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw_panel(axes, panel, rows, total_steps)
        if index + columns < len(shown):
            axes.set_xlabel("")
    return figure


def before_after(summary: dict[str, Any]) -> Figure:
    """Strict and lenient accuracy before and after, with 95 % Wilson intervals, from the dict of summary.json.

    Without "after" (or "before") its bars are left out.
    """
    phases = [phase for phase in comparison.PHASES if summary.get(phase)]
    if not phases:
        return _message_figure("No evaluation has finished yet.")
    figure, axes = _subplot(4.6, 3.0)
    width = 0.8 / len(phases)
    for phase, offset in zip(phases, _offsets(phases, width), strict=True):
        part = summary[phase]
        rates = [part["accuracy"], part["lenient_accuracy"]]
        ends = [statistics.wilson_interval(rate * part["n"], part["n"]) for rate in rates]
        errors = [[abs(rate - end[side]) for rate, end in zip(rates, ends, strict=True)] for side in (0, 1)]
        bars = axes.bar(
            [offset, 1 + offset], rates, width * 0.92, **BARS[phase], label=phase,
            yerr=errors, ecolor=INK, capsize=3, error_kw={"linewidth": 1},
        )  # fmt: skip
        axes.bar_label(bars, [percent(rate) for rate in rates], padding=3, color=INK)
    axes.set_xticks([0, 1], ["strict:\ntags required", "lenient:\nlast number"])
    axes.tick_params(axis="x", length=0)
    _in_percent(axes, 0, 1.12)
    _tidy(axes, f"{summary[phases[0]]['n']:,} problems, 95{NBSP}% intervals", y="accuracy", legend=True)
    return figure


def pass_at_k(summary: dict[str, Any]) -> Figure:
    """pass@k against k before and after, with 95 % intervals over problems, from the dict of summary.json."""
    phases = [phase for phase in comparison.PHASES if "pass_at_k" in (summary.get(phase) or {})]
    if not phases:
        return _message_figure("No completion was sampled for the evaluations.")
    figure, axes = _subplot(4.6, 3.0)
    for phase in phases:
        part = summary[phase]
        ks = [int(k) for k in part["pass_at_k"]]
        rates = list(part["pass_at_k"].values())
        axes.plot(ks, rates, **CURVES[phase], label=phase, markersize=4)
        if ends := part.get("pass_at_k_interval"):
            axes.fill_between(
                ks, *zip(*ends.values(), strict=True), color=CURVES[phase]["color"], alpha=0.18, linewidth=0
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    _in_percent(axes, 0, 1.02)
    first = summary[phases[0]]
    _tidy(axes, f"{first['n']:,} problems, {first['samples']} samples each", x="k", y="pass@k", legend=True)
    return figure


def flips(before: EvalRun, after: EvalRun) -> Figure:
    """McNemar's four counts as areas: a column for the verdict (strict) before, split by the one after.

    Raises:
      CourseError: the two runs have different problems.
    """
    counts = comparison.flip_counts(before, after)
    sums = {was: counts[f"{was}_right"] + counts[f"{was}_wrong"] for was in ("right", "wrong")}
    total = max(1, sum(sums.values()))
    figure, axes = _subplot(7.0, 3.0)
    left = 0.0
    for was, outside in (("right", -0.02), ("wrong", 1.04)):
        width = sums[was] / total
        _draw_column(axes, left, width, was, {now: counts[f"{was}_{now}"] for now in ("wrong", "right")}, outside)
        axes.text(left + width / 2, 1.03, f"{was} before: {sums[was]:,}", ha="center", va="bottom", size=9, color=INK)
        left += width + 0.02
    axes.set(xlim=(-0.3, 1.32), ylim=(0, 1.1))
    axes.axis("off")
    return figure


def _draw_column(axes: Axes, left: float, width: float, was: str, counts: Mapping[str, int], outside: float) -> None:
    """A column of a mosaic: from below, how many answers are then wrong and right; small parts are named `outside`."""
    total = max(1, sum(counts.values()))
    bottom = 0.0
    for now, count in counts.items():
        height = count / total
        changed = was != now
        colour = {"right": GREEN, "wrong": VERMILLION}[now] if changed else "#d8dde3"
        axes.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="white"))
        said = f"{was}, then {now}\n{count:,}"
        small = height < 0.14 or width < 0.2
        place, side = (outside, "right" if outside < 0 else "left") if small else (left + width / 2, "center")
        ink = INK if small else "white" if changed else "black"  # INK follows a dark page, and these grounds do not
        axes.text(place, max(0.05, bottom + height / 2), said, ha=side, va="center", size=9, color=ink)
        bottom += height


def categories(before: EvalRun | None, after: EvalRun | None) -> Figure:
    """How many answers are in each category of the taxonomy, before and after."""
    rows = comparison.category_counts(comparison.Comparison(before, after))
    return _paired_bars(rows, "category", "problems", "{:,.0f}")


def decomposition(before: EvalRun, after: EvalRun) -> Figure:
    """The gain in strict accuracy, part by part (analysis.gain_parts), with 95 % intervals."""
    rows = analysis.gain_parts(before, after)
    figure, axes = _subplot(5.4, 0.9 + 0.36 * len(rows))
    gains = [100 * row["gain"] for row in rows]
    below = [abs(100 * row["low"] - gain) for row, gain in zip(rows, gains, strict=True)]
    above = [abs(100 * row["high"] - gain) for row, gain in zip(rows, gains, strict=True)]
    bars = axes.barh(
        range(len(rows)),
        gains,
        0.65,
        color=[GREEN if gain >= 0 else VERMILLION for gain in gains],
        xerr=[below, above],
        ecolor=INK,
        error_kw={"linewidth": 1.5},
    )
    axes.bar_label(bars, [f"{gain:+.1f}".replace("-", MINUS) for gain in gains], padding=5)
    _name_rows(axes, [row["part"] for row in rows])
    _tidy(
        axes, f"sum: {sum(gains):+.1f} points".replace("-", MINUS), x="percentage points of strict accuracy", grid="x"
    )
    return figure


def runs_side_by_side(runs: Mapping[str, Sequence[Row]], names: Sequence[str]) -> Figure:
    """The same metrics of several runs, one panel for each key of `names`; `runs` has the rows of metrics.jsonl."""
    figure = _figure(min(3.0 * len(names), 9.0), 2.6)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for (label, rows), look in zip(runs.items(), LINES(), strict=False):
            steps, values = _points(by_step(rows), name)
            axes.plot(steps, values, **look, label=label, marker="o" if len(values) < 15 else None)
        if name not in _NO_SHARES and axes.dataLim.ymin >= 0 and axes.dataLim.ymax <= 1:
            _in_percent(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        _tidy(axes, name, x="training step")
    if len(runs) > 1:
        named = figure.axes[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside lower center", ncols=len(runs), frameon=False, fontsize=8, labelcolor=INK)
    return figure


def reward_parts(compared: comparison.Comparison) -> Figure:
    """The mean of each reward part over the problems, before and after, and of their sum."""
    return _paired_bars(comparison.reward_means(compared), "part", "points, mean per problem", "{:.2f}")


# --- of the lessons: notebooks 00 to 05 ---


def result(reference: Path) -> Figure:
    """What training does: one question, answered before it and after it under two rewards, and the curve of a run.

    The question is the first test problem to which the base states a wrong number, the run with the repaired reward
    the right one, and the run with the reference reward none.

    Args:
      reference: the folder of the shipped records, assets/reference.
    """
    figure = _figure(9.0, 3.3)
    answers, curve = figure.subplots(1, 2, width_ratios=(5, 3))
    _draw_answers(answers, *_three_answers(reference))
    _draw_course(curve, reference / "course")
    return figure


def _three_answers(reference: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Records of one test problem: of the base, of the repaired run and of the hacked one."""
    files = ("repaired/evals/before", "repaired/evals/after", "hacked/evals/after")
    answered = [EvalRun.load(reference / f"{name}.jsonl").records for name in files]
    for base, repaired, hacked in zip(*answered, strict=True):
        stated_wrongly = base["extracted"] is not None and not base["strict"]
        if stated_wrongly and repaired["strict"] and hacked["extracted"] is None:
            return base, repaired, hacked
    raise ValueError(f"{reference}: no test problem has these three kinds of answers")


def _draw_answers(axes: Axes, base: dict[str, Any], repaired: dict[str, Any], hacked: dict[str, Any]) -> None:
    """The question, and under it three answers with their verdicts."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_title("one hard problem, three models", loc="left", color=INK, fontsize=10)
    axes.text(0, 0.97, textwrap.fill(base["question"], 62), va="top", size=9.5, color=INK)
    rows = (
        ("before training", base, f"wrong: it is {base['gold']}", GREY),
        ("trained with a reward for right answers", repaired, "right", GREEN),
        ("trained with a reward that has a loophole", hacked, "no answer at all", VERMILLION),
    )
    for y, (when, record, verdict, colour) in zip((0.75, 0.46, 0.17), rows, strict=True):
        axes.text(0, y, when, va="bottom", size=9, color=INK, weight="bold")
        axes.text(1, y, verdict, va="bottom", ha="right", size=9, color=INK)
        axes.plot([0.005, 0.005], [y - 0.155, y - 0.02], "-", color=colour, linewidth=4)
        axes.text(0.03, y - 0.09, record["completion"], va="center", size=8.5, family="monospace", color=INK)


def _draw_course(axes: Axes, run: Path) -> None:
    """Accuracy over the steps of the shipped run: on validation problems, and on the test problems at both ends."""
    rows = by_step(read_metrics(run / "metrics.jsonl"))
    summary = read_json(run / "summary.json", "it comes with the course")
    last, ends = rows[-1]["step"], [summary[phase]["accuracy"] for phase in comparison.PHASES]
    on_the_way = _points(rows, "validation_accuracy")
    axes.plot(*on_the_way, "-", color=BLUE, linewidth=1.8, label="validation problems, on the way")
    axes.plot([0, last], ends, "o", color=INK, label=f"{summary['before']['n']:,} test problems", clip_on=False)
    first_said, last_said = (f"{100 * end:.0f}{NBSP}%" for end in ends)
    axes.text(0, ends[0] - 0.05, first_said, ha="left", va="top", color=INK)
    axes.text(last, ends[1] - 0.05, last_said, ha="right", va="top", color=INK)
    _in_percent(axes)
    seconds = sum(row["seconds"] for row in rows)
    _tidy(axes, f"another run, easier problems: {seconds:.0f} seconds", x="training step", y="right answers")
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK)


def token_lengths(asked: Sequence[int], written: Sequence[int], limit: int) -> Figure:
    """How many tokens questions and worked solutions have, and the longest completion that a recipe allows."""
    figure = _figure(8.6, 2.7)
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("Questions", "Worked solutions in the template")
    for axes, lengths, title, colour in zip(panels, (asked, written), titles, (SKY, BLUE), strict=True):
        axes.hist(lengths, bins=np.arange(min(lengths) - 0.5, max(lengths) + 1), color=colour)
        _tidy(axes, title, x="tokens")
    panels[0].set_ylabel(f"of {len(asked):,} problems", size=9)
    panels[1].axvline(limit, color=VERMILLION, linestyle="--", label=f"limit: {limit} tokens")
    panels[1].set_ylim(top=1.25 * panels[1].get_ylim()[1])
    panels[1].legend(loc="upper left", frameon=False, fontsize=8)
    return figure


def gaps(by_name: Mapping[str, np.ndarray]) -> Figure:
    """How far two programs' log-probabilities of the same tokens are apart: a histogram for each name.

    Args:
      by_name: absolute differences [tokens], in nats; those below 1e-8 stand in the leftmost bar.
    """
    figure = _figure(8.6, 1.6 * len(by_name))
    panels = figure.subplots(len(by_name), 1, sharex=True, sharey=True)
    for axes, (name, differences) in zip(panels, by_name.items(), strict=True):
        axes.hist(np.maximum(differences, 1e-8), np.logspace(-8.1, 0, 55), color=BLUE)
        axes.set_xscale("log")
        _tidy(axes, name, y="tokens")
    panels[-1].set_xlabel("gap of log-probabilities, nats (leftmost bar: 0)", size=9)
    return figure


def agreement(logps: np.ndarray, others: Mapping[str, np.ndarray]) -> Figure:
    """Log-probabilities [tokens] by one program against those by others: on the diagonal they agree."""
    figure = _figure(4.2 * len(others), 3.7)
    panels = figure.subplots(1, len(others), sharex=True, sharey=True)
    low = min(logps.min(), *(values.min() for values in others.values()))
    for axes, (name, values), colour in zip(panels, others.items(), (BLUE, VERMILLION), strict=True):
        axes.plot([low, 0], [low, 0], "-", color=GREY, linewidth=1)
        axes.scatter(logps, values, s=9, alpha=0.5, color=colour)
        _tidy(axes, name, x="log-probability in MaxText", grid="both")
    panels[0].set_ylabel("in the other implementation", size=9)
    return figure


def reward_grid(rows: Sequence[str], columns: Sequence[str], points: np.ndarray) -> Figure:
    """Points [rows, columns] as a grid of colours with numbers; the last column, a sum, stands apart."""
    figure, axes = _subplot(8.6, 0.9 + 0.36 * len(rows))
    most = float(np.abs(points).max())
    axes.imshow(points, cmap="PuOr_r", vmin=-most, vmax=most, aspect="auto")
    for (row, column), value in np.ndenumerate(points):
        text = f"{value:+.2g}".replace("-", MINUS) if value else "0"
        axes.text(column, row, text, ha="center", va="center", color="white" if abs(value) > 0.7 * most else INK)
    axes.axvline(len(columns) - 1.5, color="white", linewidth=4)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    _tidy(axes)
    axes.grid(visible=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    return figure


def reward_counts(values: Sequence[float], counts: Sequence[int]) -> Figure:
    """How many completions earned each value of a reward."""
    figure, axes = _subplot(8.6, 2.3)
    bars = axes.bar(values, counts, width=0.2, color=BLUE)
    axes.bar_label(bars, padding=2, color=INK, fontsize=8)
    axes.margins(y=0.2)
    _tidy(axes, x="reward", y=f"of {sum(counts):,} completions")
    return figure


def break_even(right: float, wrong: float, garbage: float) -> Figure:
    """What an attempt earns on average, by how often it is right, against garbage that always earns the same."""
    figure, axes = _subplot(8.6, 2.8)
    even = (garbage - wrong) / (right - wrong)
    axes.plot([0, 1], [wrong, right], "-", color=BLUE, label="an honest attempt")
    axes.axhline(garbage, linestyle="--", color=VERMILLION, label="garbage in perfect tags")
    axes.axvspan(0, even, color=VERMILLION, alpha=0.12)
    axes.text(even / 2, right, "garbage\npays more", ha="center", va="top", size=9, color=INK)
    axes.set_xlim(0, 1)
    _tidy(axes, x="probability that the attempt is right", y="expected reward")
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=f"{NBSP}%"))
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return figure


def trying(runs: Mapping[str, Sequence[float]]) -> Figure:
    """The probability of trying over the steps of a policy that knows two ways to answer, for each reward."""
    figure = _lines(range(1, 1 + len(next(iter(runs.values())))), runs, x="step", y="probability of trying")
    _in_percent(figure.axes[0])
    return figure


def groups(members: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """One group of completions in each panel, with the reward of each one and its advantage as a bar.

    Args:
      members: name of a panel -> {"completion", "reward", "advantage"} of each completion.
    """
    most = max(1.0, *(abs(one["advantage"]) for group in members.values() for one in group))
    figure = _figure(8.6, sum(0.85 + 0.23 * len(group) for group in members.values()))
    panels = figure.subplots(len(members), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, group) in zip(panels, members.items(), strict=True):
        _draw_group(axes, group)
        _tidy(axes, name, grid="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(-1.3 * most, 1.3 * most)
    panels[-1].set_xlabel("advantage", size=9)
    return figure


def one_group(reference: Path) -> Figure:
    """Eight completions of one question before training, what the repaired reward pays for each, and their advantages.

    Args:
      reference: the folder of the shipped records, assets/reference.
    """
    eight = EvalRun.load(reference / "course" / "evals" / "sampled.jsonl").records[:8]
    texts, golds = ([record[field] for record in eight] for field in ("completion", "gold"))
    functions = rewards.get_rewards(["correct_answer", "tidy_format"])
    paid = np.sum([function(None, texts, golds) for function in functions], axis=0)
    found = (paid - paid.mean()) / (paid.std(ddof=1) + 1e-6)
    numbers = zip(texts, paid, found, strict=True)
    group = [{"completion": text, "reward": reward, "advantage": advantage} for text, reward, advantage in numbers]
    figure = groups({"": group})
    figure.suptitle(f"{eight[0]['question']} (It is {golds[0]}.)", x=0.01, ha="left", size=10, color=INK)
    return figure


def _draw_group(axes: Axes, group: Sequence[Mapping[str, Any]]) -> None:
    advantages = [one["advantage"] for one in group]
    above = f"{sum(a > 0.005 for a in advantages)} of {len(group)} above the mean of the group"  # for the description
    colours = [GREEN if a > 0 else VERMILLION for a in advantages]
    bars = axes.barh(range(len(group)), advantages, 0.7, color=colours, label=above)
    numbers = [f"{a:+.2f}".replace("-", MINUS) if abs(a) >= 0.005 else "0" for a in advantages]
    axes.bar_label(bars, numbers, padding=3, color=INK, fontsize=8)
    texts = [_short(one["completion"]) for one in group]
    names = [f"{text}  {one['reward']:4.1f}" for text, one in zip(texts, group, strict=True)]
    axes.set_yticks(range(len(group)), names, family="monospace")
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.text(-0.02, 1.02, "completion, reward", transform=axes.transAxes, ha="right", va="bottom", size=8, color=INK)


def _short(completion: str, most: int = 56) -> str:
    """A completion in one line; of a long one its beginning and its end."""
    line = completion.replace("\n", "↵")
    return line if len(line) <= most else f"{line[: most // 2]}…{line[1 - most // 2 :]}"


def advantages(compared: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Advantages against the distance from the mean of the group, in one panel for each size of a group.

    Args:
      compared: name of a panel -> distances and advantages, [completions] each.
    """
    figure = _figure(4.3 * len(compared), 2.8)
    panels = figure.subplots(1, len(compared), sharex=True, sharey=True)
    for axes, (name, (distances, found)) in zip(panels, compared.items(), strict=True):
        axes.scatter(distances, found, s=12, alpha=0.5, color=BLUE)
        different = len(np.unique(np.round(found, 3)))
        _tidy(axes, f"{name}: {different} different advantages", x=f"reward {MINUS} mean of its group", grid="both")
    panels[0].set_ylabel("advantage", size=9)
    return figure


def zero_variance(p: np.ndarray, shares: Mapping[str, np.ndarray]) -> Figure:
    """The share of groups that teach nothing, by how often a completion is right; a line for each size of a group."""
    figure = _lines(p, shares, x="probability that a completion is right", y="zero-variance groups")
    _in_percent(figure.axes[0])
    figure.axes[0].xaxis.set_major_formatter(PercentFormatter(1, symbol=f"{NBSP}%"))
    return figure


def clip(objective: Callable[[np.ndarray, float], np.ndarray], epsilon: float) -> Figure:
    """The objective of one token over the ratio ρ, with a good token on the left and a bad one on the right.

    Args:
      objective: (ratios, advantage) -> the objective of each ratio.
      epsilon: the clip is at 1 - ε and 1 + ε.
    """
    ratio = np.linspace(0.4, 1.6, 241)
    figure = _figure(8.6, 2.8)
    panels = figure.subplots(1, 2)
    for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
        axes.axvspan(1 - epsilon, 1 + epsilon, color=SKY, alpha=0.18)
        axes.plot(ratio, ratio * advantage, ":", color=GREY, label="without the clip")
        axes.plot(ratio, objective(ratio, advantage), "-", color=BLUE, linewidth=2.2, label="with the clip")
        axes.plot(1, advantage, "o", color=VERMILLION, label="where an update begins")
        _tidy(axes, f"advantage {advantage:+.0f}".replace("-", MINUS), x="ratio ρ")
    panels[0].set_ylabel("objective", size=9)
    panels[0].legend(loc="upper left", frameon=False, fontsize=8)
    return figure


def kl(estimators: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Figure:
    """Estimates of the KL divergence from one token, over x = log π - log π_ref."""
    x = np.linspace(-1.5, 1.5, 241)
    estimates = {name: estimate(x) for name, estimate in estimators.items()}
    figure = _lines(x, estimates, x=f"x: log-probability of the token, policy {MINUS} reference", y="estimate, nats")
    figure.axes[0].axhline(0, color=INK, linewidth=0.8)
    return figure


def two_pulls(p: np.ndarray, reward: np.ndarray, back: Mapping[str, np.ndarray], reference: float) -> Figure:
    """How hard the reward pulls a policy away from its reference and a KL penalty back, and where they are equal.

    Args:
      p: probabilities of the right answer.
      reward: the pull of the reward at each of them.
      back: name of a line -> the pull back to the reference at each of them.
      reference: the probability of the right answer in the reference.
    """
    figure = _lines(p, {"the reward, up": reward, **back}, x="probability of the right answer", y="pull on its logit")
    axes = figure.axes[0]
    axes.axvline(reference, color=GREY, linewidth=0.8)
    axes.text(
        reference, 1.02 * reward.max(), f" reference: {100 * reference:.0f}{NBSP}%", va="bottom", size=8, color=INK
    )
    for pull in back.values():
        for equal in np.flatnonzero(reward < pull)[:1]:  # from there on the penalty is stronger
            axes.plot(p[equal], reward[equal], "o", color=INK, label="_nolegend_")
            said, side = f"equal at {100 * p[equal]:.0f}{NBSP}%", "right" if p[equal] < 0.7 else "left"
            axes.text(p[equal], reward[equal] + 0.01, said, ha=side, va="bottom", size=9, color=INK)
    axes.set(xlim=(0, 1), ylim=(0, 1.2 * reward.max()))
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=f"{NBSP}%"))
    return figure


_SAMPLER, _PLAIN, _TRAINER = ("#d6ebf8", "--"), ("#eef0f2", "-"), ("#fbe9c6", ":")  # colour, and line of the edge
_LOOP = {  # part of a step -> (place, what happens, whose work it is)
    "prompts": ((0, 1), "a few problems", _PLAIN),
    "rollout": ((1, 1), "$G$ completions of each", _SAMPLER),
    "rewards": ((2, 1), "a number for each", _PLAIN),
    "advantages": ((3, 1), "better or worse\nthan its group?", _PLAIN),
    "update": ((3, 0), "one step on\nthe weights", _TRAINER),
    "sync": ((1, 0), "new weights\nfor the sampler", _SAMPLER),
}


def loop() -> Figure:
    """One training step: six boxes, and what goes from one to the next."""
    figure, axes = _subplot(8.6, 2.5)
    half_width, half_height = 0.4, 0.3
    for name, ((x, y), note, (colour, edge)) in _LOOP.items():
        corner = (x - half_width, y - half_height)
        box = FancyBboxPatch(corner, 2 * half_width, 2 * half_height, boxstyle="round,pad=0,rounding_size=0.06")
        box.set(facecolor=colour, edgecolor=INK, linestyle=edge)
        axes.add_patch(box)
        axes.text(x, y, f"{name}\n{note}", ha="center", va="center", fontsize=9, linespacing=1.3, color=INK)
    for start, end in [*itertools.pairwise(_LOOP), ("sync", "rollout")]:
        (x0, y0), (x1, y1) = _LOOP[start][0], _LOOP[end][0]
        dx, dy = half_width * np.sign(x1 - x0), half_height * np.sign(y1 - y0)
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x1 - dx, y1 - dy), (x0 + dx, y0 + dy), arrowprops=arrow)
    axes.set(xlim=(-0.45, 3.45), ylim=(-0.35, 1.35))
    axes.axis("off")
    return figure


def ways(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Curves over the training steps, each as a share of its whole change."""
    steps = range(1, 1 + len(next(iter(curves.values()))))
    figure = _lines(steps, curves, x="training step", y="share of its whole change")
    figure.axes[0].axhline(0.5, color=GREY, linewidth=0.8)
    return figure


def bootstrap(differences: Sequence[float], interval: statistics.PairedDifference) -> Figure:
    """Differences on test sets that were drawn from one, and the ends of a 95 % interval."""
    figure, axes = _subplot(6.4, 2.5)
    axes.hist(100 * np.asarray(differences), bins=30, color=SKY)
    for edge in (interval.low, interval.high):
        axes.axvline(100 * edge, color=VERMILLION, linestyle="--")
    _tidy(axes, x="difference, after minus before, in points", y=f"of {len(differences):,} draws")
    return figure


def puzzle(differences: np.ndarray, variances: Mapping[str, float], seen: float = 4) -> Figure:
    """Left: differences that chance makes. Right: half the width of a 95 % interval on n problems.

    Args:
      differences: between two measurements of one unchanged model, in points.
      variances: name of a line -> the variance of a difference on one problem.
      seen: the difference that was seen, in points.
    """
    figure = _figure(8.8, 2.8)
    chance, needed = figure.subplots(1, 2)
    chance.hist(differences, bins=np.arange(-30.5, 31), color=SKY)
    chance.axvline(-seen, color=VERMILLION, linestyle="--", label=f"{MINUS}{seen:g} points")
    _tidy(chance, x="difference in points, when nothing changed", y=f"of {len(differences):,} repetitions")
    n = np.geomspace(30, 10_000, 200)
    for (name, variance), look in zip(variances.items(), LINES(), strict=False):
        needed.loglog(n, 196 * np.sqrt(variance / n), **look, label=name)
    needed.axhline(seen, color=VERMILLION, linewidth=0.8)
    _tidy(needed, x="problems", y="half width in points")
    for axis, ticks in ((needed.xaxis, (100, 1000, 10_000)), (needed.yaxis, (1, 2, 4, 10, 20))):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_minor_formatter(NullFormatter())
    for axes in (chance, needed):
        axes.legend(loc="upper right", frameon=False, fontsize=8)
    return figure


def verdict(
    old: Sequence[bool], new: Sequence[bool], change: statistics.PairedDifference, said: str, clear: bool
) -> Figure:
    """Two accuracies with Wilson's intervals, and their difference with its own; orange where it is `clear`."""
    figure = _figure(8.0, 2.1)
    rates, difference = figure.subplots(1, 2, width_ratios=(3, 2))
    for y, verdicts, colour in ((0, new, AFTER), (1, old, BEFORE)):
        ends = statistics.wilson_interval(sum(verdicts), len(verdicts))
        _draw_interval(rates, y, ends, sum(verdicts) / len(verdicts), colour)
    _tidy(rates, x="accuracy, %", grid="x")
    rates.set(xlim=(30, 70), ylim=(-0.6, 1.6))
    rates.set_yticks([0, 1], ["after", "before"])
    ends, colour = (change.low, change.high), VERMILLION if clear else GREY
    _draw_interval(difference, 0, ends, change.difference, colour)
    difference.axvline(0, color=INK, linewidth=0.8)
    _tidy(difference, said, x="difference, points", grid="x")
    difference.set(xlim=(-19, 12), ylim=(-0.6, 0.6), yticks=())
    return figure


def _draw_interval(axes: Axes, y: float, ends: Sequence[float], value: float, colour: str) -> None:
    """A thick line from one end of the interval to the other, in percent, and a dot at the value."""
    axes.plot([100 * end for end in ends], [y, y], linewidth=7, solid_capstyle="butt", color=colour)
    axes.plot(100 * value, y, "o", color=INK)


def elicited(base: Mapping[str, Sequence[float]], trained: Mapping[str, float]) -> Figure:
    """What the base solves within k attempts, solid, and the trained model at its first one, dashed.

    Args:
      base: name of a kind of problem -> the share solved within 1, 2, ... attempts.
      trained: the same names -> the share solved at the first attempt.
    """
    figure, axes = _subplot(8.0, 2.8)
    for (name, shares), colour, marker in zip(base.items(), (BLUE, VERMILLION, GREEN), "os^", strict=False):
        attempts = range(1, 1 + len(shares))
        axes.plot(attempts, shares, f"{marker}-", color=colour, label=f"{name}, base")
        dashes = {"o": "--", "s": ":", "^": "-."}[marker]
        axes.axhline(trained[name], color=colour, linestyle=dashes, label=f"{name}, trained")
    _in_percent(axes, 0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _tidy(axes, x="attempts k", y="share of problems", legend=True)
    return figure


def _lines(xs: Sequence[float], lines: Mapping[str, Sequence[float]], x: str, y: str) -> Figure:
    """Several lines in one plot, told apart by dashes as well as by colour, with their names on the right."""
    figure, axes = _subplot(8.6, 2.8)
    for (name, values), look in zip(lines.items(), LINES(), strict=False):
        axes.plot(xs, values, **look, linewidth=1.8, label=name)
    _tidy(axes, x=x, y=y, legend=True)
    return figure


# --- behind a slider ---


def slider(frames: Sequence[tuple[str, Figure]], start: int = 0) -> html_page.Frame:
    """Figures behind a slider: (label of the slider, figure) each; `start` is the number of the first one shown.

    All figures are drawn now, so that the slider works without a kernel: in a saved notebook and in its HTML.
    """
    width = round(100 * max(figure.get_size_inches()[0] for _, figure in frames))
    height = round(100 * max(figure.get_size_inches()[1] for _, figure in frames))
    drawn = []
    for number, (name, figure) in enumerate(frames):
        drawn.append((name, svg(figure, f"{number}: {name}. {alt_text(figure)}")))
    content = html_page.render("slider.html.j2", "slider.js", frames=drawn, start=start, width=width)
    still = described_png(frames[start][1])
    return html_page.Frame(content, "figures behind a slider", 60, picture=(width, height), still=still)


# --- drawing ---


def _figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches; 100 dpi is enough for a notebook and keeps its file small."""
    return _NotebookFigure(figsize=(width, height), dpi=100, layout="constrained")


def _subplot(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size with one plot in it."""
    figure = _figure(width, height)
    return figure, figure.add_subplot()


def _offsets(phases: Sequence[str], width: float) -> list[float]:
    """Positions of the phases' bars, next to each other around 0."""
    return [(number - (len(phases) - 1) / 2) * width for number in range(len(phases))]


def _paired_bars(rows: Sequence[dict[str, Any]], name: str, unit: str, form: str) -> Figure:
    """Two horizontal bars for each row, before above after; `form` formats the number at the end of a bar."""
    if not rows:
        return _message_figure("No evaluation has finished yet.")
    phases = [phase for phase in comparison.PHASES if phase in rows[0]]
    figure, axes = _subplot(5.4, 0.7 + 0.46 * len(rows))
    height = 0.8 / len(phases)
    for phase, offset in zip(phases, _offsets(phases, height), strict=True):
        places = [place + offset for place in range(len(rows))]
        values = [row[phase] for row in rows]
        bars = axes.barh(places, values, height * 0.9, **BARS[phase], label=phase)
        axes.bar_label(bars, fmt=lambda value: form.format(value).replace("-", MINUS), padding=4, color=INK, fontsize=8)
    _name_rows(axes, [row[name] for row in rows])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    _tidy(axes, x=unit, grid="x", legend=True)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names of horizontal bars, the first one at the top; a line at zero, and space for the numbers at their ends."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    axes.axvline(0, color=INK, linewidth=0.8)


def _in_percent(axes: Axes, bottom: float = -0.04, top: float = 1.04) -> None:
    axes.set(ylim=(bottom, top), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=f"{NBSP}%"))


def _message_figure(text: str) -> Figure:
    figure = _figure(4.6, 1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=INK)
    return figure


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The panels for which these rows have values."""

    def has_values(panel: Panel) -> bool:
        return any(_points(rows, key)[1] for key, _ in panel.series)

    keys = dict.fromkeys(key for row in rows for key in row)
    series = tuple((key, name) for key in keys if (name := name_in(key, REWARD_MEAN)))
    by_part = [Panel("Reward by part", "mean per completion", series)] if len(series) > 1 else []
    parts = [(key, task) for key in keys if (task := name_in(key, TASK_METRIC.format("{}", "accuracy")))]
    by_task = [Panel("Accuracy by task", "fraction of completions", tuple(parts), fraction=True)] if parts else []
    return [panel for panel in (PANELS[0], *by_part, *PANELS[1:2], *by_task, *PANELS[2:]) if has_values(panel)]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row], total_steps: int | None = None) -> None:
    for (key, label), look in zip(panel.series, LINES(), strict=False):
        steps, values = _points(rows, key)
        if not values:
            continue
        validation = key.startswith("validation")  # measured at few steps, on many problems: points, not smoothed
        window = 1 if validation else smoothing(len(values))
        if window > 1:
            axes.plot(steps, values, color=look["color"], linestyle="-", linewidth=0.7, alpha=0.4)
            parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
            values = [sum(part) / len(part) for part in parts]
        marker = "o" if validation or len(values) < 3 else None
        axes.plot(steps, values, **look, linewidth=1.8, label=label, marker=marker, markersize=4)
    if panel.fraction:
        _in_percent(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.ticklabel_format(axis="y", scilimits=(-5, 6), useOffset=False)  # a factor above would overlap the title
        low, high = axes.get_ylim()
        missing = max(0, panel.smallest_span - (high - low)) / 2
        axes.set_ylim(0 if panel.from_zero else low - missing, high + missing)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, max(1, total_steps or 0, *(row["step"] for row in rows)) * 1.02)
    _tidy(axes, panel.title, x="training step", y=panel.unit)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=2.8, loc="best")


def _tidy(axes: Axes, title: str = "", x: str = "", y: str = "", grid: str = "y", legend: bool = False) -> None:
    """Labels, and one style for all figures; a `legend` goes to the right."""
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(x, color=INK, size=9)
    axes.set_ylabel(y, color=INK, size=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(axis=grid, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    if legend:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=INK)


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of one metric, without what is missing, NaN or infinite."""
    steps = []
    values = []
    for row in rows:
        value = finite(row.get(key))
        if value is not None:
            steps.append(row["step"])
            values.append(value)
    return steps, values


def smoothing(n: int) -> int:
    """How many steps the thick line averages: about a fifteenth of the run, nothing for a short one."""
    return 1 if n < 15 else max(3, round(n / 15))


def svg(figure: Figure, label: str) -> Markup:
    """A figure as inline SVG: text stays text, and black and blues follow the page's light or dark colours."""
    buffer = io.StringIO()
    # With the salt, the same figure always gives the same SVG, and two figures have different ids.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    # HTML knows the namespaces of inline SVG.
    svg = re.sub(
        r'<metadata>.*?</metadata>|\s+xmlns(:xlink)?="[^"]*"',
        "",
        buffer.getvalue().partition("<svg")[2],
        flags=re.DOTALL,
    )
    prefix = "f" + hashlib.sha256(label.encode()).hexdigest()[:8] + "-"
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\1{prefix}", svg)
    svg = svg.replace(INK, "currentColor").replace(BLUE, "var(--blue)").replace(SKY, "var(--sky)")
    return Markup(f'<svg role="img" aria-label="{html.escape(label)}"{svg}')


def panel_svg(panel: Panel, rows: Sequence[Row]) -> Markup:
    """One panel as inline SVG."""
    figure, axes = _subplot(3.4, 2.5)
    _draw_panel(axes, panel, rows)
    return svg(figure, f"{panel.title}, {panel.unit}, over training steps")
