"""What a run looks like: figures, a live plot, and the page on which every answer can be inspected.

    report.training_curves(rows)          # matplotlib figures; a notebook shows what a cell returns
    live = report.LivePlot(total_steps)   # live(row) after each training step
    report.write_report("runs/course")    # runs/course/report.html, one file, works offline

Colours are those of Okabe and Ito ("Color universal design", 2008), which hold for the common kinds of colour
blindness; before is always light blue, after dark blue.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib import environment, statistics
from grpo_lib.errors import CourseError
from grpo_lib.evaluation import EvalRun, summarize
from grpo_lib.files import read_jsonl, write_text_atomic

environment.prepare()

import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402

Row = dict[str, float | None]

INK, SKY, BLUE, GREEN, VERMILLION = "#1b1f24", "#56b4e9", "#0072b2", "#009e73", "#d55e00"
BEFORE, AFTER = SKY, BLUE
NBSP, MINUS = "\u00a0", "\u2212"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
RATES = {
    "strict": "strict (the number in the answer tags)",
    "lenient": "lenient (the last number anywhere)",
    "partial": "within 10 % of the gold number",
    "format": "format exactly as asked",
    "truncated": "cut short by the length limit",
}


@dataclass(frozen=True)
class Panel:
    """One small plot: its title, the unit of its vertical axis, and (key in metrics.jsonl, label) of each line."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    share: bool = False  # from 0 to 1, shown in percent
    from_zero: bool = False


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
    Panel("Loss", "policy loss", (("loss", "loss"),)),
    Panel("KL to the reference", "nats per token", (("kl", "kl"),), from_zero=True),
)
SMALLEST_SPAN = 1e-3  # of a vertical axis: on-policy the loss is rounding noise, and should look like it
LINES = (BLUE, VERMILLION, GREEN)


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
    rows = _by_step(rows)
    panels = _panels(rows)
    if not panels:
        return _message_figure("No training step has finished yet.")
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = _figure(3.0 * columns, 2.3 * lines)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw_panel(axes, panel, rows, total_steps)
        if index + columns < len(panels):
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
            rate, (low, high) = part[key], _interval(part[key], part["n"])
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
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
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
    counts = flip_counts(before, after)
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


def flip_counts(before: EvalRun, after: EvalRun) -> dict[str, int]:
    """Answers by strict verdict before and after: right_right, right_wrong, wrong_right, wrong_wrong."""
    counts = dict.fromkeys(("right_right", "right_wrong", "wrong_right", "wrong_wrong"), 0)
    for old, new in _pairs(before, after):
        counts[f"{'right' if old['strict'] else 'wrong'}_{'right' if new['strict'] else 'wrong'}"] += 1
    return counts


class LivePlot:
    """The training curves, redrawn in place while training runs.

        live = LivePlot(total_steps=60)
        train(session, on_step=live)

    Call it with each row of metrics. It redraws at most twice a second, and less often where drawing is slow, so
    that it takes no more than a tenth of the time; the last step is always drawn. `finish()` draws what an
    interrupted run left undrawn. Outside a notebook it does nothing.
    """

    SECONDS_BETWEEN = 0.5
    LARGEST_SHARE = 0.1

    def __init__(self, total_steps: int | None = None, rows: Iterable[Row] = ()):
        self.total_steps = total_steps
        self.rows: list[Row] = list(rows)  # those of an earlier session of the same run
        self._handle: Any = None
        self._next = 0.0
        self._undrawn = False

    def __call__(self, row: Row) -> None:
        self.rows.append(row)
        self._undrawn = True
        last = self.total_steps is not None and (row.get("step") or 0) >= self.total_steps
        if last or time.monotonic() >= self._next:
            self._draw()

    def finish(self) -> None:
        """Draw the rows that came too soon after the last drawing."""
        if self._undrawn:
            self._draw()

    def _draw(self) -> None:
        self._undrawn = False
        if not _in_notebook():
            return
        from IPython.display import display

        started = time.monotonic()
        figure = training_curves(self.rows, self.total_steps)
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)
        ended = time.monotonic()
        pause = (ended - started) * (1 / self.LARGEST_SHARE - 1)
        self._next = ended + max(self.SECONDS_BETWEEN, pause)


def headline(summary: dict[str, Any]) -> str:
    """The result in one or two plain sentences, from the dict of summary.json; honest about noise.

    A change counts as one only if the interval of the difference leaves out zero and, where there is a p-value,
    p < 0.05.
    """
    before, after = summary.get("before"), summary.get("after")
    if not before:
        return "The model has not been evaluated yet."
    if not after:
        return (
            f"Before training the model answers {percent(before['accuracy'])} of {before['n']:,} problems correctly "
            f"({_range(before['interval'])}). There is no evaluation after training yet."
        )
    low, high = summary["difference_interval"]
    p = summary.get("mcnemar_p")
    clear = (low > 0 or high < 0) and (p is None or p < 0.05)
    rates = f"{percent(before['accuracy'])} before, {percent(after['accuracy'])} after, on {after['n']:,} problems"
    evidence = f"{points(summary['difference'])} points (95{NBSP}% interval {points(low)} to {points(high)})"
    if p is not None:
        evidence += f"; McNemar's exact test: {p_value(p)}"
    if clear:
        verdict = "Accuracy rose" if summary["difference"] > 0 else "Accuracy fell"
        return f"{verdict}: {rates}. {evidence}."
    return f"No clear change: {rates}. {evidence}. A difference of this size can be chance."


def percent(rate: float) -> str:
    """0.4213 -> "42.1 %", with a space that does not break."""
    return f"{100 * rate:.1f}{NBSP}%"


def points(difference: float) -> str:
    """0.0312 -> "+3.1": percentage points, always signed."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", MINUS)


def p_value(p: float) -> str:
    """0.0312 -> "p = 0.031", 4e-12 -> "p = 4 × 10⁻¹²"."""
    if p >= 0.001:
        return f"p = {p:.3f}".replace(" ", NBSP)
    if p <= 0:
        return f"p < 10{'-300'.translate(SUPERSCRIPTS)}".replace(" ", NBSP)
    mantissa, exponent = f"{p:.0e}".split("e")
    return f"p = {mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}".replace(" ", NBSP)


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page is one file that asks nothing of the network: result, curves, and every problem with the completions
    before and after. What the run does not have yet (an evaluation, metrics) is said in a sentence.

    Raises:
      CourseError: there is no such directory, or before and after are of different problems.
    """
    import jinja2
    from markupsafe import Markup

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise CourseError(f"{run_dir}: no such run directory; train first, or correct the path")
    before, after = (_load_run(run_dir / "evals" / f"{name}.jsonl") for name in ("before", "after"))
    rows = _by_step(read_jsonl(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else []
    summary = _summary(run_dir, before, after)

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["sha256"] = _sha256
    result_figures = [_svg(before_after(summary), headline(summary))] if summary else []
    if before and after:
        result_figures.append(_svg(flips(before, after), "verdicts that changed"))
    page = templates.get_template("report.html.j2").render(
        title=_run_name(run_dir),
        headline=headline(summary),
        rates=_rate_table(summary, before, after),
        facts=_facts(summary, rows),
        result_figures=[Markup(figure) for figure in result_figures],
        curves=[Markup(_svg_panel(panel, rows)) for panel in _panels(rows)],
        smoothed=_window(len(rows)),
        answers=len((before or after).records) if before or after else 0,
        both=bool(before and after),
        data=Markup(_json_for_html(_answers(before, after))),
        files=_text_files(run_dir),
    )
    return write_text_atomic(run_dir / "report.html", page)


# --- figures ---


def _figure(width: float, height: float) -> Figure:
    """An empty figure, inches; 100 dpi is enough for a notebook and keeps its file small."""
    return _NotebookFigure(figsize=(width, height), dpi=100, layout="constrained")


def _message_figure(text: str) -> Figure:
    figure = _figure(4.6, 1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=INK)
    return figure


def _panels(rows: Sequence[Row]) -> list[Panel]:
    def has_something_to_show(panel: Panel) -> bool:
        values = [value for key, _ in panel.series for value in _points(rows, key)[1]]
        return any(values) if panel.series[0][0] == "kl" else bool(values)  # without a reference the KL is 0

    return [panel for panel in PANELS if has_something_to_show(panel)]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row], total_steps: int | None = None) -> None:
    present = [(key, label) for key, label in panel.series if _points(rows, key)[0]]
    for (key, label), colour in zip(present, LINES, strict=False):
        steps, values = _points(rows, key)
        if key.startswith("validation"):  # measured now and then, on many problems: points, not smoothed
            axes.plot(steps, values, "o-", color=colour, label=label, linewidth=1, markersize=4)
            continue
        window = _window(len(values))
        marker = "o" if len(values) < 3 else None
        if window > 1:
            axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.4)
            values = [sum(part) / len(part) for part in _trailing(values, window)]
        axes.plot(steps, values, color=colour, linewidth=1.8, label=label, marker=marker, markersize=4)
    if panel.share:
        axes.set_ylim(-0.04, 1.04)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        low, high = axes.get_ylim()
        if high - low < SMALLEST_SPAN:
            axes.set_ylim((low + high - SMALLEST_SPAN) / 2, (low + high + SMALLEST_SPAN) / 2)
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


def _by_step(rows: Iterable[Row]) -> list[Row]:
    latest = {row["step"]: row for row in rows if row.get("step") is not None}
    return [latest[step] for step in sorted(latest)]


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of one metric, without what is missing, NaN or infinite."""
    kept = [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]
    return [step for step, _ in kept], [value for _, value in kept]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _window(n: int) -> int:
    """How many steps the thick line averages: about a fifteenth of the run, nothing for a short one."""
    return 1 if n < 15 else max(3, round(n / 15))


def _trailing(values: list[float], window: int) -> list[list[float]]:
    return [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]


def _interval(rate: float, n: int) -> tuple[float, float]:
    return statistics.wilson_interval(min(1.0, rate) * n, n)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; a plain IPython terminal cannot show a picture."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


# --- the page ---


def _svg(figure: Figure, label: str) -> str:
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


def _svg_panel(panel: Panel, rows: Sequence[Row]) -> str:
    figure = _figure(3.4, 2.5)
    _draw_panel(figure.add_subplot(), panel, rows)
    return _svg(figure, f"{panel.title}, {panel.unit}, over training steps")


def _json_for_html(value: Any) -> str:
    r"""JSON that cannot end the script element it stands in: "<" is written \u003c, which JSON reads as "<"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _sha256(text: str) -> str:
    """The source expression with which a Content-Security-Policy allows exactly this script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode()


def _load_run(path: Path) -> EvalRun | None:
    return EvalRun.load(path) if path.exists() else None


def _summary(run_dir: Path, before: EvalRun | None, after: EvalRun | None) -> dict[str, Any]:
    """From the records where there are both, so that the page cannot disagree with itself; else summary.json."""
    try:
        saved = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        saved = {}
    except json.JSONDecodeError as error:
        raise CourseError(f"{run_dir / 'summary.json'}: not JSON ({error.msg}); remove the file") from None
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
                line[f"{name}_range"] = _range(_interval(part[key], part["n"]))
        if before and after:
            old, new = before.rates(verdict), after.rates(verdict)
            change = statistics.paired_bootstrap(list(old.values()), [new[key] for key in old])
            line["change"] = points(change.difference)
            line["change_range"] = f"{points(change.low)} to {points(change.high)}"
        table.append(line)
    return table if summary else []


def _range(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * low:.1f}–{100 * high:.1f}{NBSP}%"


def _facts(summary: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    facts = []
    if steps := summary.get("steps") or (int(rows[-1]["step"]) if rows else None):
        facts.append(f"{steps:,} training steps")
    for key, text in (("train_seconds", "of training"), ("wall_seconds", "in all")):
        if seconds := summary.get(key):
            facts.append(f"{_duration(seconds)} {text}")
    return facts


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _pairs(before: EvalRun, after: EvalRun) -> list[tuple[dict, dict]]:
    newer = {(record["id"], record["sample"]): record for record in after.records}
    keys = [(record["id"], record["sample"]) for record in before.records]
    if set(keys) != set(newer):
        raise CourseError("before and after are of different problems; evaluate both on the same ones")
    return [(record, newer[key]) for record, key in zip(before.records, keys, strict=True)]


def _answers(before: EvalRun | None, after: EvalRun | None) -> list[dict[str, Any]]:
    """The data of the page's table: one entry per problem and sample."""
    if before and after:
        pairs: list[tuple[dict | None, dict | None]] = list(_pairs(before, after))
    else:
        pairs = [(record, None) for record in before.records] if before else []
        pairs += [(None, record) for record in after.records] if after and not before else []
    entries = []
    for old, new in pairs:
        one = old or new
        entries.append(
            {
                "id": one["id"] if not one["sample"] else f"{one['id']} #{one['sample']}",
                "question": one["question"],
                "gold": one["gold"],
                "steps": one.get("steps"),
                "prompt": one["prompt"],
                "before": _answer(old, one["prompt"]),
                "after": _answer(new, one["prompt"]),
            }
        )
    return entries


def _answer(record: dict[str, Any] | None, prompt: str) -> dict[str, Any] | None:
    if record is None:
        return None
    keys = ("completion", "extracted", *RATES, "tokens", "error")
    answer = {key: record.get(key) for key in keys}
    if record["prompt"] != prompt:
        answer["prompt"] = record["prompt"]
    return answer


def _text_files(run_dir: Path) -> list[tuple[str, str]]:
    """What produced the numbers: (name, content) of the recipe and the description of the machine."""
    names = ("recipe.yaml", "environment.json")
    found = [name for name in names if (run_dir / name).exists()]
    return [(name, (run_dir / name).read_text(encoding="utf-8", errors="replace")) for name in found]


def _run_name(run_dir: Path) -> str:
    return run_dir.resolve().name
