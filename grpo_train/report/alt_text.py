"""What a figure shows, in words, from the numbers that it draws: the text that a screen reader reads out.

    alt_text(figure)    # "Reward, mean per completion by training step. reward: from 0.42 to 1.08, ..."

matplotlib has no such text: `Figure.set_label` is kept by the figure and written to no file (3.11).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

# Bars or points with a value each in the text: of a histogram, which has more, it has the range and the highest bar.
# Characters of a text: one that would be longer leaves out units and extremes.
MOST, LONGEST = 16, 600


def alt_text(figure: Figure) -> str:
    """One sentence for each thing that the figure draws, panel by panel; at most LONGEST characters."""
    whole, brief = (
        " ".join(f"{sentence}." for axes in figure.axes for sentence in _of_axes(axes, brief) if sentence)
        for brief in (False, True)
    )
    return whole if len(whole) <= LONGEST else brief[:LONGEST]


def _of_axes(axes: Axes, brief: bool) -> Iterator[str]:
    title = next((title for where in ("left", "center") if (title := _plain(axes.get_title(loc=where)))), "")
    x, y = _plain(axes.get_xlabel()), _plain(axes.get_ylabel())
    yield title if brief and title else ", ".join(filter(None, (title, f"{y} by {x}" if x and y else x or y)))
    bars = (found for found in axes.containers if isinstance(found, BarContainer) and len(found))
    yield from (_of_bars(axes, found, brief) for found in bars)
    lines = {line: _label(line) for line in axes.get_lines()}
    for line, label in lines.items():
        xs, ys = (np.ma.masked_invalid(np.asarray(data, dtype=float)) for data in line.get_data(orig=False))
        # Beside lines with a name, one without is an aid to the eye.
        if ys.count() and (label or (ys.count() > 2 and not any(lines.values()))):
            yield (_of_points if line.get_linestyle() == "None" else _of_line)(label or "a series", xs, ys, brief)
    scattered = (found for found in axes.collections if isinstance(found, PathCollection) and len(found.get_offsets()))
    yield from (
        _of_points(_label(found) or "dots", *np.atleast_2d(found.get_offsets()).T, brief=brief) for found in scattered
    )
    if names := [label for found in axes.collections if (label := _label(found))]:
        yield f"areas of {', '.join(names)}"
    for image in axes.images:
        rows, columns = np.shape(image.get_array())[:2]
        down, across = (", ".join(_plain(tick.get_text()) for tick in axis.get_ticklabels()) for axis in _axes(axes))
        yield f"a grid of {rows} rows ({down}) and {columns} columns ({across})".replace(" ()", "")
    yield "; ".join(text for note in axes.texts if (text := _plain(note.get_text())))


def _of_bars(axes: Axes, bars: BarContainer, brief: bool) -> str:
    """Name and value of each bar; of a histogram, or in brief, the range and the highest bar."""
    sideways = bars.orientation == "horizontal"
    values = np.array([bar.get_width() if sideways else bar.get_height() for bar in bars], dtype=float)
    middles = [bar.get_y() + bar.get_height() / 2 if sideways else bar.get_x() + bar.get_width() / 2 for bar in bars]
    label = f"{name}: " if (name := _label(bars) or _label(bars[0])) else ""
    axis = _axes(axes)[0 if sideways else 1]
    ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
    named = {round(float(at)): name for at, tick in ticks if not _is_number(name := _plain(tick.get_text()))}
    names = [named.get(round(at)) or f"{at:.4g}" for at in middles]
    if brief or len(values) > MOST:
        most = f"the highest {values.max():.4g} at {names[values.argmax()]}"
        return label + (most if brief else f"bars from {names[0]} to {names[-1]}, {most}")
    return label + ", ".join(f"{name} {value:.3g}" for name, value in zip(names, values, strict=True))


def _of_points(label: str, xs: np.ndarray, ys: np.ndarray, brief: bool) -> str:
    """Each point, without a direction in which they do not differ; of many the ranges and the correlation."""
    told = [values for values in (xs, ys) if np.ptp(values)] or [ys]
    each = (" and ".join(f"{value:.3g}" for value in point) for point in zip(*told, strict=True))
    ranges = [f"{len(xs):,} points", *(f"{values.min():.3g} to {values.max():.3g}" for values in told)]
    alike = [f"correlation {np.corrcoef(told)[0, 1]:.3g}"] if len(told) > 1 else []
    return f"{label}: {', '.join([*ranges, *alike] if brief or len(xs) > MOST else each)}"


def _of_line(label: str, xs: np.ndarray, ys: np.ma.MaskedArray, brief: bool) -> str:
    """Both ends, and the extremes where they lie between."""
    if len(xs) > 1 and np.ptp(xs) == 0:  # upright
        return f"{label}: at {xs[0]:.4g}"
    seen = ys.compressed()
    first, last, low, high = seen[0], seen[-1], seen.min(), seen.max()
    if low == high:
        return f"{label}: {high:.3g}"
    between = [
        f"{name} {value:.3g}"
        for name, value in (("lowest", low), ("highest", high))
        if value not in (first, last) and not brief
    ]
    return ", ".join([f"{label}: from {first:.3g} to {last:.3g}", *between])


def _axes(axes: Axes) -> tuple[Axis, Axis]:
    return axes.yaxis, axes.xaxis


def _label(thing: Artist | BarContainer) -> str:
    """As in a legend; matplotlib begins the names that it makes itself with an underscore."""
    label = str(thing.get_label())
    return "" if label.startswith("_") else _plain(label)


def _is_number(text: str) -> bool:
    return text.replace("\N{MINUS SIGN}", "").replace(".", "").isdigit()


def _plain(text: str) -> str:
    return " ".join(text.replace("$", "").split())
