"""What a figure shows, in words, from the numbers that it draws: the text that a screen reader reads out.

    alt_text(figure)    # "Reward, mean per completion by training step. reward: from 0.42 to 1.08, ..."

matplotlib has no such text: `Figure.set_label` is kept by the figure and written to no file (3.11).
"""

import re
from collections.abc import Iterator

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

LONGEST = 600  # characters; nobody can skim what is read out
MOST_VALUES = 16  # of more bars or points the text has only the range


def alt_text(figure: Figure) -> str:
    """One sentence for each thing that the figure draws, panel by panel; without details where it would be too long."""
    for brief in (False, True):
        said = [note.get_text() for note in figure.texts]
        for axes in figure.axes:
            said += _of_axes(axes, brief)
        plain = [_plain(sentence).rstrip(".") for sentence in said]
        sentences = [f"{text}." for text in plain if text]
        if len(" ".join(sentences)) <= LONGEST:
            break
    while len(" ".join(sentences)) > LONGEST:
        sentences.pop()
    return " ".join(sentences) or " ".join(said)[:LONGEST]


def _of_axes(axes: Axes, brief: bool) -> Iterator[str]:
    title = axes.get_title(loc="left") or axes.get_title()
    labels = " by ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
    yield title if title and brief else ", ".join(filter(None, (title, labels)))
    for bars in axes.containers:
        if isinstance(bars, BarContainer) and len(bars):
            yield (_name(bars) or _name(bars[0])) + _of_bars(axes, bars, brief)
    lines = [line for line in axes.get_lines() if line.get_label() != "_nolegend_"]  # the ends of error bars
    for line in lines:
        name = _name(line)
        points = _finite(line.get_xydata())
        # Beside lines with a name, one without is an aid to the eye.
        if len(points) and (name or (len(points) > 2 and not any(map(_name, lines)))):
            yield (name or "a series: ") + _described(axes, line, points, brief)
    for found in axes.collections:
        if isinstance(found, PathCollection) and len(points := _finite(found.get_offsets())):
            yield (_name(found) or "dots: ") + _of_points(points, brief)
        elif name := _name(found):
            yield f"{name}an area"
    for image in axes.images:
        rows, columns = np.shape(image.get_array())[:2]
        names = (", ".join(_tick_names(axis).values()) for axis in (axes.yaxis, axes.xaxis))
        down, across = (f" ({text})" if text else "" for text in names)
        yield f"a grid of {rows} rows{down} and {columns} columns{across}"
    notes = [_plain(note.get_text()) for note in axes.texts if not brief]
    # The number at the end of a bar was said with the bar.
    yield "; ".join(note for note in notes if note and (axes.images or not _is_number(note)))


def _described(axes: Axes, line: Line2D, points: np.ndarray, brief: bool) -> str:
    """Dots or a line; of dots in a row that has a name, where they are in the row."""
    if line.get_linestyle() != "None":
        return _of_line(points, brief)
    in_a_row = bool(_tick_names(axes.yaxis)) and np.ptp(points[:, 1]) == 0
    return _of_points(points[:, :1] if in_a_row else points, brief)


def _of_bars(axes: Axes, bars: BarContainer, brief: bool) -> str:
    """Name and value of each bar; of many, as a histogram has, the range and the highest one."""
    values = np.array(bars.datavalues, dtype=float)
    named = _tick_names(axes.yaxis if bars.orientation == "horizontal" else axes.xaxis)
    names = [named.get(round(at)) or f"{at:.4g}" for at in bars.position_centers]
    if brief or len(values) > MOST_VALUES:
        most = f"the highest {values.max():.4g} at {names[values.argmax()]}"
        return most if brief else f"bars from {names[0]} to {names[-1]}, {most}"
    return ", ".join(f"{name} {value:.3g}" for name, value in zip(names, values, strict=True))


def _of_line(points: np.ndarray, brief: bool) -> str:
    """Both ends, and the extremes where they lie between."""
    xs, ys = points.T
    if len(xs) > 1 and np.ptp(xs) == 0:  # upright
        return f"at {xs[0]:.4g}"
    if np.ptp(ys) == 0:
        return f"{ys[0]:.3g}"
    extremes = () if brief else (("lowest", ys.min()), ("highest", ys.max()))
    between = [f"{name} {value:.3g}" for name, value in extremes if value not in (ys[0], ys[-1])]
    return ", ".join([f"from {ys[0]:.3g} to {ys[-1]:.3g}", *between])


def _of_points(points: np.ndarray, brief: bool) -> str:
    """Each point, without a direction in which they do not differ; of many the ranges and the correlation."""
    told = [values for values in points.T if np.ptp(values)] or [points[:, -1]]
    if not brief and len(points) <= MOST_VALUES:
        return ", ".join(" and ".join(f"{value:.3g}" for value in point) for point in zip(*told, strict=True))
    ranges = [f"{len(points):,} points", *(f"{values.min():.3g} to {values.max():.3g}" for values in told)]
    alike = [f"correlation {np.corrcoef(told)[0, 1]:.3g}"] if len(told) > 1 else []
    return ", ".join([*ranges, *alike])


def _finite(points: np.ndarray) -> np.ndarray:
    """The points [N, 2] that are drawn, without a negative zero."""
    points = np.ma.filled(points, np.nan)
    return points[np.isfinite(points).all(axis=1)] + 0.0


def _tick_names(axis: Axis) -> dict[int, str]:
    """The ticks of an axis that have names, not numbers, by their place; also those that are hidden."""
    places = axis.get_ticklocs()
    # A formatter of fixed labels gives them as they were set, integers too.
    names = zip(places, map(str, axis.get_major_formatter().format_ticks(places)), strict=True)
    return {round(float(at)): _plain(name) for at, name in names if not _is_number(name)}


def _name(thing: Artist | BarContainer) -> str:
    """As in a legend, and a colon; matplotlib begins the names that it makes itself with an underscore."""
    label = _plain(str(thing.get_label()))
    return f"{label}: " if label and not label.startswith("_") else ""


def _is_number(text: str) -> bool:
    """Whether it is a number as ticks and bars have it, also a power of ten; or nothing."""
    return bool(re.fullmatch(r"[-+−.,%$\s\d]*|.*\\mathdefault.*", text))


def _plain(text: str) -> str:
    return " ".join(text.replace("$", "").split())
