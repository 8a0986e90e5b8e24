"""Empty plots for figures that a notebook shows by name: one size of text, no frame, and a description.

figure, (left, right) = panels(2, height=2.6)
label(left, "test accuracy", x="step", y="%")
legend(figure, left)
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_train.report.figures import described_png
from grpo_train.report.palette import INK

WIDTH = 8.2  # inches; with DPI the width of a notebook's text
DPI = 110


class NotebookFigure(Figure):
    """A figure that a notebook shows once, with its description, when a cell returns it."""

    _repr_png_ = described_png


def panels(columns: int = 1, rows: int = 1, height: float = 2.6, width: float = WIDTH, **options) -> tuple:
    """A figure and its plots, row by row.

    Args:
      height: of one row, in inches.
      options: of matplotlib's `Figure.subplots`, such as sharey.
    """
    figure = NotebookFigure(figsize=(width, height * rows), dpi=DPI, layout="constrained")
    plots = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(np.ravel(plots))


def label(axes: Axes, title: str = "", x: str = "", y: str = "", grid: str = "both") -> None:
    """Words and ticks of one plot, after everything is drawn in it."""
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=False)
    if grid:
        axes.grid(visible=True, axis=grid, color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)


def legend(figure: Figure, axes: Axes, columns: int = 4, names: Sequence[str] = ()) -> None:
    """One legend below all plots, where it covers no line; the names are those of `axes` unless others are given."""
    handles, own = axes.get_legend_handles_labels()
    look = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 3}
    figure.legend(handles, names or own, loc="outside lower center", ncols=columns, **look)
