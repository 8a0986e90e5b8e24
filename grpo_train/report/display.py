"""What the notebooks display besides numbers: source code, tables, tokens, completions; and one style for figures.

Every function but `style` returns an object that Jupyter displays.
"""

import base64
import html
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from IPython import get_ipython
from IPython.display import HTML
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from grpo_train.recipes.text_table import text_table
from grpo_train.report import figures
from grpo_train.report.palette import BLUE, GREEN, GREY, INK, LINES, ORANGE, PURPLE, SKY, VERMILLION

__all__ = [
    "BLUE", "GREEN", "GREY", "INK", "ORANGE", "PURPLE", "SKY", "VERMILLION",
    "completions", "folded", "picture", "source", "style", "table", "text", "tokens",
]  # fmt: skip

TINTS = ("#d6ebf8", "#fbe9c6")  # backgrounds of neighbouring tokens

# JupyterLab's names for colours of code, which nbconvert's page and the course's site define, too, for light and dark.
# Behind each is what stands in elsewhere: it can be read on white and on black.
_CODE_COLOURS = {
    Keyword: "var(--jp-mirror-editor-keyword-color, #8a63d2)",
    Operator.Word: "var(--jp-mirror-editor-keyword-color, #8a63d2)",
    Name.Function: "var(--jp-mirror-editor-def-color, #0b7bb5)",
    Name.Class: "var(--jp-mirror-editor-def-color, #0b7bb5)",
    String: "var(--jp-mirror-editor-string-color, #2f855a)",
    Number: "var(--jp-mirror-editor-number-color, #b35c00)",
    Comment: "var(--jp-mirror-editor-comment-color, #767676)",
}

_CODE = "font-family:monospace;font-size:13px;line-height:1.35;white-space:pre;overflow-x:auto"
_CELL = "text-align:left;vertical-align:top;padding:3px 12px 3px 0;border-bottom:1px solid #d0d7de"
_MONO = "font-family:monospace;font-size:13px;white-space:pre-wrap;overflow-wrap:break-word"


@dataclass(frozen=True)
class Picture:
    """A drawing in lines and text that needs no kernel: SVG, and what it shows in words, for a screen reader."""

    svg: str
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        return {"image/svg+xml": self.svg, "text/plain": self.alt}, {"image/svg+xml": {"alt": self.alt}}


@dataclass(frozen=True)
class Table:
    """Lines of text cells, the head first: HTML in a notebook, Markdown for an export to PDF, elsewhere plain text."""

    lines: Sequence[Sequence[str]]
    cell_style: str = ""

    def _repr_html_(self) -> str:
        head, *rows = ([_escaped(cell) for cell in line] for line in self.lines)
        style = f'style="{_CELL};font-weight:normal;{self.cell_style}"'
        # A first column without repetitions names the rows.
        first = 'th scope="row"' if len({row[0] for row in rows}) == len(rows) else "td"
        top = "".join(f'<th scope="col" style="{_CELL}">{cell}</th>' for cell in head)
        body = ""
        for name, *cells in rows:
            others = "".join(f"<td {style}>{cell}</td>" for cell in cells)
            body += f"<tr><{first} {style}>{name}</{first[:2]}>{others}</tr>"
        return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

    def _repr_markdown_(self) -> str:
        head, *rows = ([_markdown(cell) for cell in line] for line in self.lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))

    def __repr__(self) -> str:
        return text_table(self.lines[0], self.lines[1:])


@dataclass(frozen=True)
class Folded:
    """A table behind a line that opens it, where HTML is shown; elsewhere the table itself."""

    table: Table
    summary: str

    def _repr_html_(self) -> str:
        return f"<details><summary>{_escaped(self.summary)}</summary>{self.table._repr_html_()}</details>"

    def _repr_markdown_(self) -> str:
        return self.table._repr_markdown_()

    def __repr__(self) -> str:
        return repr(self.table)


@dataclass(frozen=True)
class Text:
    """Lines in a monospaced font, coloured as `language`: HTML, a fenced block of Markdown, elsewhere plain text."""

    content: str
    language: str = ""

    def _repr_html_(self) -> str:
        return f'<pre style="{_CODE}"><code style="{_CODE}">{_coloured(self.content, self.language)}</code></pre>'

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self.content}\n```"

    def __repr__(self) -> str:
        return self.content


@dataclass(frozen=True)
class FoldedFigure:
    """A figure behind a line that opens it, where HTML is shown; elsewhere what it shows, in words."""

    figure: figures.Figure
    summary: str

    def _repr_html_(self) -> str:
        png, about = figures.described_png(self.figure)
        image = f'<img alt="{_escaped(about["alt"])}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        return f"<details><summary>{_escaped(self.summary)}</summary>{image}</details>"

    def __repr__(self) -> str:
        return figures.alt_text(self.figure)


def source(*things: Callable) -> Text:
    """The library's own source of functions and classes, as a highlighted block."""
    return text("\n\n\n".join(inspect.getsource(thing).rstrip() for thing in things), "python")


def text(content: str, language: str = "") -> Text:
    """A text file's content as a block, highlighted as `language`, a name that Pygments knows."""
    return Text(content.rstrip(), language)


def table(rows: Iterable[Mapping[str, Any]], *, digits: int = 3, cell_style: str = "") -> Table:
    """Rows with the same keys as a table, the keys as its head.  Floats are rounded to `digits` significant digits."""
    rows = list(rows) or [{"": "none"}]
    return Table(
        [[*map(str, rows[0])], *([_cell(value, digits) for value in row.values()] for row in rows)], cell_style
    )


def advantages(rewards: Sequence[float], kinds: Mapping[str, str]) -> Table:
    """The advantages of the completions of one group: a row for each kind, label -> `grpo.advantage`."""
    from grpo_lib import plain_grpo  # here, because it imports JAX, which takes seconds

    rows = []
    for label, kind in kinds.items():
        found = plain_grpo.group_advantages(np.array(rewards), len(rewards), kind)
        rows.append({"": label} | {f"completion {i}": float(one) for i, one in enumerate(found, start=1)})
    return table(rows)


def folded(shown: Table | figures.Figure, summary: str) -> Folded | FoldedFigure:
    """A table or a figure that few readers need, behind its `summary`."""
    return Folded(shown, summary) if isinstance(shown, Table) else FoldedFigure(shown, summary)


def completions(rows: Iterable[Mapping[str, Any]]) -> Table:
    """As `table`, with line breaks kept and in a monospaced font: for text that a model wrote."""
    return table(rows, cell_style=_MONO)  # on the cells: Jupyter's own style for them would override a parent's


def tokens(tokenizer: Any, text: str) -> HTML:
    """A text split into tokens, one box per token with its id below; spaces are shown as ␣."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    boxes = ""
    for number, (token, (start, end)) in enumerate(pairs):
        boxes += (
            '<span style="display:inline-block;text-align:center;margin:2px 1px;padding:1px 3px;'
            f'background:{TINTS[number % 2]};color:{INK}">{_visible(text[start:end])}'
            f'<br><small style="color:#57606a">{token}</small></span>'
        )
    return HTML(f'<div style="{_MONO};line-height:1.3">{boxes}</div>')


def picture(figure: figures.Figure, alt: str) -> Picture:
    """A figure as SVG, for shapes that pixels would blur; `alt` says in words what it shows."""
    import matplotlib

    buffer = io.StringIO()
    # With the salt, the same figure always gives the same SVG; letters are drawn, as no reader's fonts are known.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": alt}):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    drawing = " ".join(buffer.getvalue().partition("<svg")[2].split())  # one line of a notebook's file
    return Picture(f'<svg role="img" aria-label="{html.escape(alt)}" {drawing}', alt)


def style() -> None:
    """Set the style of every figure of a notebook: palette.LINES, no frame, readable at a notebook's width."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.prop_cycle": LINES,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e8ec",
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.handlelength": 2.8,
    }
    if shell := get_ipython():
        import matplotlib_inline.backend_inline  # noqa: F401  first, because it sets its own formatter when imported

        shell.display_formatter.formatters["image/png"].for_type(figures.Figure, figures.described_png)


def _cell(value: Any, digits: int) -> str:
    match value:
        case float():
            return f"{value:.{digits}g}".replace("-", "\u2212")
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case None:
            return "–"
        case [*parts]:
            return " × ".join(map(str, parts))
        case _:
            return str(value)


def _coloured(content: str, language: str) -> str:
    """Code as HTML, each coloured token in an element."""
    if not language:
        return html.escape(content)
    shown = ""
    for kind, value in get_lexer_by_name(language, stripnl=False, ensurenl=False).get_tokens(content):
        colour = next((_CODE_COLOURS[one] for one in reversed(kind.split()) if one in _CODE_COLOURS), "")
        written = html.escape(value)
        shown += f'<span style="color:{colour}">{written}</span>' if colour else written
    return shown


def _escaped(text: str) -> str:
    """Text that neither HTML nor the notebook's MathJax interprets.

    A formula begins with a dollar sign, or with a backslash: `\\(`, `\\[`, `\\begin{}`.  MathJax looks for its marks in
    text without tags between, so each of the two characters gets an element of its own.
    """
    return re.sub(r"[$\\]", r"<span>\g<0></span>", html.escape(text))


def _markdown(text: str) -> str:
    """Text in one cell of a Markdown table, where it starts no markup, no tag and no formula."""
    return "<br>".join(re.sub(r"([\\`*_\[\]<>&|~$#])", r"\\\1", line) for line in text.splitlines())


def _visible(text: str) -> str:
    return _escaped(text).replace(" ", "␣").replace("\n", "↵") or "∅"
