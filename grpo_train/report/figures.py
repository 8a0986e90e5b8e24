"""Figures of a run: training curves, bars before and after, and a slider over figures.

    figures.training_curves(rows)               # a notebook shows what a cell returns
    figures.before_after(summary)
    figures.slider([("n = 50", one), ("n = 100", other)])

Before is always light blue and hatched or dashed, after dark blue.
"""

import hashlib
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lib import analysis, statistics
from grpo_lib.common import environment
from grpo_lib.records import EvalRun
from grpo_train.report import comparison, html_page
from grpo_train.report.alt_text import alt_text
from grpo_train.report.formatting import MINUS, NBSP, percent
from grpo_train.report.palette import AFTER, BEFORE, BLUE, GREEN, INK, LINES, SKY, VERMILLION
from grpo_train.runs.health_checks import by_step, finite
from grpo_train.runs.metric_glossary import REWARD_MEAN, TASK_METRIC, Row, name_in

environment.prepare()

import matplotlib  # noqa: E402
from markupsafe import Markup  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402


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
    """Small multiples of the training metrics over steps.

    Thin lines are single steps; thick ones are the mean of the last few steps, from 15 steps on. Metrics that no
    row has (`kl` where nothing measures it) get no panel; missing and non-finite values are left out.

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
    """How many verdicts (strict) changed, in each direction.

    Raises:
      CourseError: the two runs have different problems.
    """
    counts = comparison.flip_counts(before, after)
    changed = counts["right_wrong"], counts["wrong_right"]
    figure, axes = _subplot(4.6, 2.1)
    axes.bar_label(axes.barh([0, 1], changed, 0.65, color=[VERMILLION, GREEN]), fmt="{:,.0f}", padding=4, color=INK)
    _name_rows(axes, ["right, then wrong", "wrong, then right"])
    axes.set_xlim(0, max(1, *changed) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _tidy(
        axes,
        f"unchanged: {counts['right_right']:,} right, {counts['wrong_wrong']:,} wrong",
        x="answers",
        grid="x",
    )
    return figure


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
    figure = _figure(3.0 * len(names), 2.5)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for (label, rows), look in zip(runs.items(), LINES(), strict=False):
            steps, values = _points(by_step(rows), name)
            axes.plot(steps, values, **look, label=label, marker="o" if len(values) < 15 else None)
        if axes.dataLim.ymin >= 0 and axes.dataLim.ymax <= 1:
            _in_percent(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        _tidy(axes, name, x="training step")
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    return figure


def reward_parts(compared: comparison.Comparison) -> Figure:
    """The mean of each reward part over the problems, before and after, and of their sum."""
    return _paired_bars(comparison.reward_means(compared), "part", "points, mean per problem", "{:.2f}")


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
