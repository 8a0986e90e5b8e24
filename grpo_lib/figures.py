"""Figures of a run: training curves, bars before and after, and a slider over figures.

    figures.training_curves(rows)               # a notebook shows what a cell returns
    figures.before_after(summary)
    figures.slider([("n = 50", one), ("n = 100", other)])

Colours are those of Okabe and Ito ("Color universal design", 2008), which hold for the common kinds of colour
blindness; before is always light blue, after dark blue.
"""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib import comparison, environment, pages, rewards, statistics
from grpo_lib.metrics import REWARD_PART
from grpo_lib.palette import AFTER, BEFORE, BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from grpo_lib.records import EvalRun
from grpo_lib.wording import MINUS, NBSP, percent

environment.prepare()

import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402

Row = dict[str, float | None]


@dataclass(frozen=True)
class Panel:
    """One small plot: its title, the unit of its vertical axis, and (key in metrics.jsonl, label) of each line."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    share: bool = False  # from 0 to 1, shown in percent
    from_zero: bool = False
    smallest_span: float = 1e-3  # of the vertical axis: rounding noise should look like it


PANELS = (
    Panel("Reward", "mean per completion", (("reward", "reward"),)),
    Panel(
        "Accuracy",
        "share of completions",
        (
            ("accuracy", "strict"),
            ("lenient_accuracy", "lenient"),
            ("validation_accuracy", "validation, strict"),
        ),
        share=True,
    ),
    Panel("Exact format", "share of completions", (("format", "format"),), share=True),
    Panel("Completion length", "tokens, mean", (("completion_length", "length"),), from_zero=True),
    Panel("Groups without a signal", "share of groups", (("zero_variance_groups", "groups"),), share=True),
    Panel("Gradient norm", "L2 norm", (("grad_norm", "norm"),), from_zero=True),
    Panel("Entropy", "nats per token", (("entropy", "entropy"),), from_zero=True),
    Panel("Loss (about 0 on-policy)", "policy loss", (("loss", "loss"),), smallest_span=0.02),
    Panel("KL to the reference", "nats per token", (("kl", "kl"),), from_zero=True),
)
LINES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)


class _NotebookFigure(Figure):
    """A figure that a notebook shows once: it belongs to no pyplot list, and draws itself when it is displayed."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi, facecolor="white")
        return buffer.getvalue()


def training_curves(rows: Sequence[Row], total_steps: int | None = None) -> Figure:
    """Small multiples of the training metrics over steps.

    Thin lines are single steps; thick ones are the mean of the last few steps, from 15 steps on. Metrics that no
    row holds (`kl` when beta is 0) get no panel; missing and non-finite values are left out.

    Args:
      rows: rows of metrics.jsonl. Of two rows for one step the later one counts.
      total_steps: the right end of the horizontal axis, for a run that is not finished.
    """
    rows = by_step(rows)
    shown = panels(rows)
    if not shown:
        return _message_figure("No training step has finished yet.")
    columns = min(4, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = _figure(3.0 * columns, 2.3 * lines)
    for index, panel in enumerate(shown):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw_panel(axes, panel, rows, total_steps)
        if index + columns < len(shown):
            axes.set_xlabel("")
    return figure


def before_after(summary: dict[str, Any]) -> Figure:
    """Strict and lenient accuracy before and after, with 95 % Wilson intervals, from the dict of summary.json.

    A summary without "after" (or "before") gives the bars that there are.
    """
    phases = [(name, colour) for name, colour in (("before", BEFORE), ("after", AFTER)) if summary.get(name)]
    if not phases:
        return _message_figure("No evaluation has finished yet.")
    figure = _figure(4.6, 3.0)
    axes = figure.add_subplot()
    width = 0.8 / len(phases)
    for number, (name, colour) in enumerate(phases):
        part = summary[name]
        for position, key in enumerate(("accuracy", "lenient_accuracy")):
            rate, (low, high) = part[key], statistics.wilson_interval(min(1.0, part[key]) * part["n"], part["n"])
            x = position + (number - (len(phases) - 1) / 2) * width
            axes.bar(x, rate, width * 0.92, color=colour, label=name if position == 0 else None)
            axes.errorbar(x, rate, [[rate - low], [high - rate]], color=INK, capsize=3, linewidth=1)
            axes.annotate(
                percent(rate), (x, high), (0, 3), textcoords="offset points", ha="center", va="bottom", color=INK
            )
    axes.set_xticks([0, 1], ["strict:\ntags required", "lenient:\nlast number"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=f"{NBSP}%"))
    axes.set_ylabel("accuracy")
    axes.set_title(f"{summary[phases[0][0]]['n']:,} problems, 95{NBSP}% intervals", loc="left", color=INK, fontsize=10)
    _tidy(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=INK)
    return figure


def flips(before: EvalRun, after: EvalRun) -> Figure:
    """How many verdicts (strict) changed, in each direction.

    Raises:
      CourseError: the two runs are not of the same problems.
    """
    counts = comparison.flip_counts(before, after)
    figure = _figure(4.6, 2.1)
    axes = figure.add_subplot()
    bars = (("right, then wrong", "right_wrong", VERMILLION), ("wrong, then right", "wrong_right", GREEN))
    for position, (_, key, colour) in enumerate(bars):
        axes.barh(position, counts[key], 0.65, color=colour)
        axes.annotate(
            f"{counts[key]:,}", (counts[key], position), (4, 0), textcoords="offset points", va="center", color=INK
        )
    axes.set_yticks([0, 1], [label for label, _, _ in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(1, *(counts[key] for _, key, _ in bars)) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("answers")
    unchanged = f"unchanged: {counts['right_right']:,} right, {counts['wrong_wrong']:,} wrong"
    axes.set_title(unchanged, loc="left", color=INK, fontsize=10)
    _tidy(axes, grid="x")
    return figure


def categories(before: EvalRun | None, after: EvalRun | None) -> Figure:
    """How many answers fall in each category of the taxonomy, before and after."""
    rows = comparison.category_counts(before, after)
    return _paired_bars([(row["category"], row) for row in rows], "problems", "{:,}".format)


def reward_parts(
    before: EvalRun | None,
    after: EvalRun | None,
    functions: Sequence[rewards.RewardFunction] = rewards.REFERENCE_REWARDS,
) -> Figure:
    """The mean of each reward part over the problems, before and after, and of their sum."""
    rows = comparison.reward_means(before, after, functions)
    return _paired_bars([(row["part"], row) for row in rows], "points, mean per problem", _signed)


def slider(frames: Sequence[tuple[str, Figure]], start: int = 0) -> pages.Frame:
    """Figures of one kind behind a slider: (what the slider says, figure) each, beginning with number `start`.

    The pictures are drawn here, so that the slider works without a kernel: in a saved notebook and in its HTML.

    Raises:
      ValueError: no frames, or `start` is not the number of one.
    """
    if not 0 <= start < len(frames):
        raise ValueError(f"start is {start}, and there are {len(frames)} frames; give one of their numbers")
    script = pages.asset("slider.js")
    width, height = (max(figure.get_size_inches()[axis] for _, figure in frames) for axis in (0, 1))
    document = pages.render(
        "slider.html.j2",
        frames=[(label, pages.trusted(svg(figure, f"{n}: {label}"))) for n, (label, figure) in enumerate(frames)],
        start=start,
        width=round(100 * width),
        style=pages.asset("style.css"),
        script=script,
        digest=pages.digest(script),
    )
    return pages.Frame(document, "figures behind a slider", 60, picture=(round(100 * width), round(100 * height)))


# --- how they are drawn ---


def _figure(width: float, height: float) -> Figure:
    """An empty figure, inches; 100 dpi is enough for a notebook and keeps its file small."""
    return _NotebookFigure(figsize=(width, height), dpi=100, layout="constrained")


def _paired_bars(rows: Sequence[tuple[str, dict[str, Any]]], unit: str, written: Callable[[float], str]) -> Figure:
    """Two horizontal bars for each row, before over after; `written` spells the number at a bar's end."""
    if not rows:
        return _message_figure("No evaluation has finished yet.")
    phases = [phase for phase in ("before", "after") if phase in rows[0][1]]
    figure = _figure(5.4, 0.7 + 0.46 * len(rows))
    axes = figure.add_subplot()
    height = 0.8 / len(phases)
    for number, phase in enumerate(phases):
        for position, (_, row) in enumerate(rows):
            value, y = row[phase], position + (number - (len(phases) - 1) / 2) * height
            label = phase if position == 0 else None
            axes.barh(y, value, height * 0.9, color=BEFORE if phase == "before" else AFTER, label=label)
            end = (max(0, value), y)
            axes.annotate(written(value), end, (4, 0), textcoords="offset points", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(unit)
    if any(row[phase] < 0 for _, row in rows for phase in phases):
        axes.axvline(0, color=INK, linewidth=0.8)
    _tidy(axes, grid="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=INK)
    return figure


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def _message_figure(text: str) -> Figure:
    figure = _figure(4.6, 1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=INK)
    return figure


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The panels for which these rows hold something."""

    def has_something_to_show(panel: Panel) -> bool:
        values = [value for key, _ in panel.series for value in _points(rows, key)[1]]
        return any(values) if panel.series[0][0] == "kl" else bool(values)  # without a reference the KL is 0

    parts = dict.fromkeys(key for row in rows for key in row if key.startswith(REWARD_PART))
    series = tuple((key, key.removeprefix(REWARD_PART)) for key in parts)
    by_part = [Panel("Reward by part", "mean per completion", series)] if len(parts) > 1 else []
    return [panel for panel in (PANELS[0], *by_part, *PANELS[1:]) if has_something_to_show(panel)]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row], total_steps: int | None = None) -> None:
    present = [(key, label) for key, label in panel.series if _points(rows, key)[0]]
    for (key, label), colour in zip(panel.series, itertools.cycle(LINES), strict=False):
        if (key, label) not in present:
            continue
        steps, values = _points(rows, key)
        if key.startswith("validation"):  # measured now and then, on many problems: points, not smoothed
            axes.plot(steps, values, "o-", color=colour, label=label, linewidth=1, markersize=4)
            continue
        window = smoothing(len(values))
        marker = "o" if len(values) < 3 else None
        if window > 1:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.4)
            values = [sum(part) / len(part) for part in _trailing(values, window)]
        axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=marker, markersize=4)
    if panel.share:
        axes.set_ylim(-0.04, 1.04)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=f"{NBSP}%"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.ticklabel_format(axis="y", scilimits=(-5, 6), useOffset=False)  # a factor above would hit the title
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        (low, high), span = axes.get_ylim(), panel.smallest_span
        if high - low < span:
            middle = span / 2 if panel.from_zero else (low + high) / 2
            if abs(middle) < span / 100:
                middle = 0
            axes.set_ylim(middle - span / 2, middle + span / 2)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    last = max([row["step"] for row in rows] + ([total_steps] if total_steps else []))
    axes.set_xlim(0, max(1, last) * 1.02)
    axes.set_title(panel.title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel("training step")
    axes.set_ylabel(panel.unit)
    _tidy(axes)
    if len(present) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=1.2, loc="best")


def _tidy(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(axis=grid, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set(color=INK, size=9)
    axes.yaxis.label.set(color=INK, size=9)


def by_step(rows: Iterable[Row]) -> list[Row]:
    """One row for each step, in order; of two for one step the later one counts."""
    latest = {row["step"]: row for row in rows if row.get("step") is not None}
    return [latest[step] for step in sorted(latest)]


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of one metric, without what is missing, NaN or infinite."""
    kept = [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]
    return [step for step, _ in kept], [value for _, value in kept]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def smoothing(n: int) -> int:
    """How many steps the thick line averages: about a fifteenth of the run, nothing for a short one."""
    return 1 if n < 15 else max(3, round(n / 15))


def _trailing(values: list[float], window: int) -> list[list[float]]:
    return [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]


def svg(figure: Figure, label: str) -> str:
    """A figure as inline SVG: text stays text, and ink and blues follow the page's light or dark colours."""
    buffer = io.StringIO()
    # The salt makes the same figure give the same file, and keeps the ids of two figures apart.
    options = {"svg.fonttype": "none", "svg.hashsalt": label}
    with matplotlib.rc_context(options):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg)  # HTML knows the namespaces of inline SVG
    prefix = "f" + hashlib.sha256(label.encode()).hexdigest()[:8] + "-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}", svg)
    svg = svg.replace(INK, "currentColor").replace(BLUE, "var(--blue)").replace(SKY, "var(--sky)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def panel_svg(panel: Panel, rows: Sequence[Row]) -> str:
    """One panel alone, as inline SVG."""
    figure = _figure(3.4, 2.5)
    _draw_panel(figure.add_subplot(), panel, rows)
    return svg(figure, f"{panel.title}, {panel.unit}, over training steps")
