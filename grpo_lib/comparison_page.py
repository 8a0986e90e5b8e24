"""Two runs compared, in words: for a terminal, and as a page with the curves of both over each other.

compared = run_comparison.compare("runs/a", "runs/b")
print(text(compared))
write_page(compared, "runs/compare-a-b.html")
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from grpo_lib import figures, pages
from grpo_lib.errors import CourseError
from grpo_lib.files import write_text_atomic
from grpo_lib.palette import BLUE, VERMILLION
from grpo_lib.run_comparison import WINDOW, Pairing, Rate, RunComparison, printable
from grpo_lib.wording import MINUS, NBSP, p_value, percent, points, rate_range

MARK = '<meta name="generator" content="grpo compare">'  # by which a page is known that may be replaced
COLOURS = {"A": BLUE, "B": VERMILLION}  # the first two of figures.LINES
DIFFERENCE = f"B{NBSP}{MINUS}{NBSP}A"

Said = tuple[str, str]  # a rate, and its interval


def page_name(compared: RunComparison) -> str:
    """`compare-A-B.html`, with the names of the runs, of characters that every file system takes."""
    names = [re.sub(r"[^\w.-]+", "-", side.name)[:80] for side in (compared.a, compared.b)]
    return f"compare-{names[0]}-{names[1]}.html"


def verdict(compared: RunComparison) -> str:
    """Which of the two is better after training, in a sentence; honest about noise."""
    pairing = compared.paired
    if pairing is None:
        return f"No paired comparison: {compared.unpaired}."
    rates = f"A {percent(compared.a.after.accuracy)}, B {percent(compared.b.after.accuracy)} of {pairing.n:,} problems"
    evidence = f"{DIFFERENCE} = {points(pairing.difference)} points (95{NBSP}% interval {_interval(pairing)})"
    if pairing.p_value is not None:
        evidence += f"; McNemar's exact test: {p_value(pairing.p_value)}"
    if pairing.clear:
        return f"{'B' if pairing.difference > 0 else 'A'} is more often right: {rates}. {evidence}."
    return f"No clear difference: {rates}. {evidence}. A difference of this size can be chance."


def text(compared: RunComparison) -> str:
    """The comparison for a terminal."""
    runs = [
        [*line[:3], *(f"{rate} ({interval})" if interval else rate for rate, interval in line[3:])]
        for line in _run_table(compared)
    ]
    blocks = [_table([["", "run", "steps", "before", "after"], *runs], left=2), verdict(compared)]
    if compared.paired and compared.paired.both_right is not None:
        blocks[-1] += "\n" + ", ".join(f"{label} {count:,}" for label, count in _counts(compared.paired))
    blocks.append("\n".join([_recipe_sentence(compared), *(f"  {_clip(line)}" for line in compared.recipe)]))
    if compared.metrics:
        head = [f"mean of the last {WINDOW} steps", "A", "B", DIFFERENCE, "unit"]
        blocks.append(_table([head, *_metric_table(compared)], left=1, last_left=True))
    blocks += [f"only in {label}: {', '.join(names)}" for label, names in _only(compared)]
    blocks += [f"early warning in {label}: {sign}" for label, sign in _signs(compared)]
    return "\n\n".join(blocks)


def write_page(compared: RunComparison, path: str | os.PathLike) -> Path:
    """Write the comparison as one HTML file that asks nothing of the network, and return its path.

    An earlier page of `grpo compare` is replaced.

    Raises:
      CourseError: another file is there, or it cannot be written.
    """
    path = Path(path)
    _check_output(path)
    page = pages.render(
        "compare.html.j2",
        mark=pages.trusted(MARK),
        style=pages.asset("style.css"),
        digest=pages.digest(""),  # the page has no script
        colours=COLOURS,
        title=f"{compared.a.name} and {compared.b.name}",
        verdict=verdict(compared),
        runs=_run_table(compared),
        counts=_counts(compared.paired) if compared.paired and compared.paired.both_right is not None else [],
        recipe_sentence=_recipe_sentence(compared),
        recipe=compared.recipe,
        window=WINDOW,
        metrics=_metric_table(compared),
        only=_only(compared),
        signs=_signs(compared),
        curves=[pages.trusted(curve) for curve in _curves(compared.a.rows, compared.b.rows)],
        smoothed=any(figures.smoothing(side.steps) > 1 for side in (compared.a, compared.b)),
    )
    try:
        return write_text_atomic(path, page)
    except OSError as error:
        raise CourseError(f"--output {path} cannot be written ({error.strerror}); choose another") from None


def _check_output(path: str | os.PathLike) -> None:
    """Raises CourseError when something is there that is no page of `grpo compare`."""
    path = Path(path)
    if path.is_dir() or (path.exists() and MARK.encode() not in path.read_bytes()[:1000]):
        raise CourseError(f"{path} exists and is no page of grpo compare; choose another --output")


# --- how it is said ---


def _run_table(compared: RunComparison) -> list[tuple[str, str, str, Said, Said]]:
    """Label, name, steps, accuracy before and after of each run."""
    return [
        (label, side.name, f"{side.steps:,}", _said(side.before), _said(side.after))
        for label, side in (("A", compared.a), ("B", compared.b))
    ]


def _said(rate: Rate | None) -> Said:
    return (percent(rate.accuracy), f"{rate_range(rate.interval)}, n{NBSP}={NBSP}{rate.n:,}") if rate else ("–", "")


def _metric_table(compared: RunComparison) -> list[list[str]]:
    return [
        [pair.name, _number(pair.a), _number(pair.b), _number(pair.difference, "+.2g"), pair.unit.replace("none", "")]
        for pair in compared.metrics
    ]


def _counts(pairing: Pairing) -> list[tuple[str, int]]:
    return [
        ("both right", pairing.both_right),
        ("only A right", pairing.only_a),
        ("only B right", pairing.only_b),
        ("both wrong", pairing.both_wrong),
    ]


def _recipe_sentence(compared: RunComparison) -> str:
    if compared.recipe_unread:
        return f"The recipes could not be compared: {printable(compared.recipe_unread)}"
    if not compared.recipe:
        return "The recipes are the same."
    fields = "1 field" if len(compared.recipe) == 1 else f"{len(compared.recipe)} fields"
    return f"The recipes differ in {fields} (A != B):"


def _only(compared: RunComparison) -> list[tuple[str, list[str]]]:
    return [(label, names) for label, names in (("A", compared.only_a), ("B", compared.only_b)) if names]


def _signs(compared: RunComparison) -> list[tuple[str, str]]:
    sides = (("A", compared.a), ("B", compared.b))
    return [(label, printable(str(sign))) for label, side in sides for sign in side.signs]


def _number(value: float, form: str = ".4g") -> str:
    return "0" if value == 0 else f"{value:{form}}".replace("-", MINUS)


def _interval(pairing: Pairing) -> str:
    return f"{points(pairing.interval[0])} to {points(pairing.interval[1])}"


def _table(rows: Sequence[Sequence[str]], left: int, last_left: bool = False) -> str:
    """Aligned columns: the first `left` ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1

    def cell(value: str, number: int) -> str:
        to_left = number < left or (last_left and number == last)
        return value.ljust(widths[number]) if to_left else value.rjust(widths[number])

    return "\n".join("  ".join(cell(value, n) for n, value in enumerate(row)).rstrip() for row in rows)


def _clip(value: str, most: int = 160) -> str:
    value = printable(value)
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _curves(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> list[str]:
    """One small plot for each metric, both runs over each other, as inline SVG."""
    drawn = []
    for panel in figures.panels([*a, *b]):
        for key, label in panel.series:
            merged: dict[float, dict[str, float]] = {}
            for letter, rows in zip(COLOURS, (a, b), strict=True):
                for row in rows:
                    if key in row:
                        merged.setdefault(row["step"], {"step": row["step"]})[f"{key} {letter}"] = row[key]
            if merged:
                title = panel.title if len(panel.series) == 1 else f"{panel.title}: {label}"
                lines = tuple((f"{key} {letter}", letter) for letter in COLOURS)
                single = dataclasses.replace(panel, title=title.replace("$", r"\$"), series=lines)
                drawn.append(figures.panel_svg(single, [merged[step] for step in sorted(merged)]))
    return drawn
