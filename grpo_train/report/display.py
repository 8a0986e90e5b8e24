"""What the notebooks display besides numbers: source code, tables, tokens, completions; and one style for figures.

Every function but `style` returns an object that Jupyter displays.
"""

from __future__ import annotations

import html
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from IPython import get_ipython
from IPython.core.pylabtools import print_figure
from IPython.display import HTML, Markdown

from grpo_train.report.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION

__all__ = [
    "BLUE", "GREEN", "GREY", "INK", "ORANGE", "PURPLE", "SKY", "VERMILLION",
    "completions", "source", "style", "table", "text", "tokens",
]  # fmt: skip

TINTS = ("#d6ebf8", "#fbe9c6")  # backgrounds of neighbouring tokens

_CELL = "text-align:left;vertical-align:top;padding:3px 12px 3px 0;border-bottom:1px solid #d0d7de"
_MONO = "font-family:monospace;font-size:13px;white-space:pre-wrap;overflow-wrap:break-word"


def source(*things: Callable) -> Markdown:
    """The library's own source of functions and classes, as a highlighted block."""
    return text("\n\n\n".join(inspect.getsource(thing).rstrip() for thing in things), "python")


def text(content: str, language: str = "") -> Markdown:
    """A text file's content as a block, highlighted as `language`."""
    return Markdown(f"```{language}\n{content.rstrip()}\n```")


def table(rows: Iterable[Mapping[str, Any]], *, digits: int = 3, cell_style: str = "") -> HTML:
    """Rows with the same keys as a table, the keys as its head.  Floats are rounded to `digits` significant digits."""
    rows = list(rows)
    if not rows:
        return HTML("<p>none</p>")
    head = "".join(f'<th style="{_CELL}">{_escaped(key)}</th>' for key in rows[0])
    lines = (
        "".join(f'<td style="{_CELL};{cell_style}">{_cell(value, digits)}</td>' for value in row.values())
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def completions(rows: Iterable[Mapping[str, Any]]) -> HTML:
    """As `table`, with line breaks kept and in a monospaced font: for text that a model wrote."""
    return table(rows, cell_style=_MONO)  # on the cells: Jupyter's own style for them would override a parent's


def tokens(tokenizer: Any, text: str) -> HTML:
    """A text split into tokens, one box per token with its id below; spaces are shown as ␣."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    boxes = [
        f'<span style="display:inline-block;text-align:center;margin:2px 1px;padding:1px 3px;'
        f'background:{TINTS[number % 2]};color:{INK}">{_visible(text[start:end])}'
        f'<br><small style="color:#57606a">{token}</small></span>'
        for number, (token, (start, end)) in enumerate(pairs)
    ]
    return HTML(f'<div style="{_MONO};line-height:1.3">{"".join(boxes)}</div>')


def style() -> None:
    """Set the style of every figure of a notebook: these colours, no frame, readable at a notebook's width."""
    import matplotlib.pyplot as plt
    from cycler import cycler

    plt.rcParams |= {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.prop_cycle": cycler(color=[BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e8ec",
        "grid.linewidth": 0.8,
        "legend.frameon": False,
    }
    if shell := get_ipython():
        from matplotlib.figure import Figure

        # Imported first, because it sets its own formatter when it is.
        importlib.import_module("matplotlib_inline.backend_inline")
        shell.display_formatter.formatters["image/png"].for_type(Figure, _described)


def _described(figure: Any) -> tuple[Any, dict[str, str]]:
    """A figure as PNG, in base64, with its description for those who cannot see it."""
    from grpo_train.report.alt_text import alt_text

    return print_figure(figure, "png", base64=True), {"alt": alt_text(figure)}


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}".replace("-", "\u2212")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if value is None:
        return "–"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _escaped(" × ".join(map(str, value)))
    return _escaped(value)


def _escaped(value: Any) -> str:
    """Text that neither HTML nor the notebook's MathJax interprets: a dollar sign would start a formula."""
    return html.escape(str(value)).replace("$", "<span>$</span>")


def _visible(text: str) -> str:
    return _escaped(text).replace(" ", "␣").replace("\n", "↵") or "∅"
