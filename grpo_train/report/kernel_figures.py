"""Figures of notebook 07, by name: what is in a chip's memory during the loss, tiles of a kernel, rows of tokens.

memory_over_time({"all logits": alive}, names, moments={"loss": 48})
tiles(tokens=5, entries=10, tile=(2, 4))
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from grpo_train.report import canvas
from grpo_train.report.display import TINTS
from grpo_train.report.palette import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILLION

STACK = {"colors": (SKY, GREY, ORANGE, VERMILLION), "hatch": ["", "///", "...", "xxx"], "edgecolor": "white"}
WAYS = {"jax": GREY, "chunked": SKY, "pallas": BLUE}  # implementation of the loss -> its colour
KEPT = ("$l_y$", "$m$", "$z$", "$s$")  # numbers that the kernel keeps of each token
BESIDE = 4.5  # entries between the logits and what is kept of them


def memory_bars(gib: Mapping[str, float]) -> Figure:
    """One bar for each program, in GiB, with the number at its end."""
    figure, (axes,) = canvas.panels(height=0.7 + 0.42 * len(gib))
    bars = axes.barh(list(gib), list(gib.values()), 0.62, color=[VERMILLION, BLUE][: len(gib)])
    axes.bar_label(bars, fmt="{:.2f}", padding=4, color=INK)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    canvas.label(axes, x="GiB on each chip beside weights and optimizer, by the TPU compiler", grid="x")
    return figure


def memory_over_time(
    alive: Mapping[str, np.ndarray], names: Sequence[str], moments: Mapping[str, float], unit: str
) -> Figure:
    """What is alive at each moment, one plot for each way, stacked.

    Args:
      alive: title of a plot -> [parts, moments].
      names: of the parts.
      moments: what happens -> the middle of it, in moments.
    """
    figure, plots = canvas.panels(len(alive), height=2.9, sharey=True)
    for axes, (title, parts) in zip(plots, alive.items(), strict=True):
        places = range(parts.shape[1])
        axes.stackplot(places, *parts, labels=names, step="mid", linewidth=0, **STACK)
        axes.set_xlim(0, places[-1])
        axes.set_xticks(list(moments.values()), list(moments))
        most = f"{title}: {parts.sum(0).max():.2f} GiB at most"
        canvas.label(axes, most, y=unit if axes is plots[0] else "", grid="y")
    canvas.legend(figure, plots[0])
    return figure


def terms(logits: np.ndarray, ends: Sequence[int]) -> Figure:
    """The terms exp(logit − m) of a softmax's sum after each tile, those of the newest tile hatched.

    Args:
      logits: one row, [entries].
      ends: how many entries have been seen after each tile.
    """
    figure, plots = canvas.panels(len(ends), height=2.5, sharey=True)
    for axes, old, seen in zip(plots, (0, *ends), ends, strict=False):
        m = logits[:seen].max()
        weights = np.exp(logits[:seen] - m)
        for name, part, look in (
            ("seen before", slice(0, old), {"color": BLUE}),
            ("this tile", slice(old, seen), {"color": ORANGE, "hatch": "///", "hatchcolor": "white"}),
        ):
            axes.bar(range(seen)[part], weights[part], **look, label=name)
        axes.set(xticks=range(len(logits)), xlim=(-0.6, len(logits) - 0.4))
        title = f"{seen} entries seen: m = {m:g}, z = {weights.sum():.3f}"
        canvas.label(axes, title, x="entry of the vocabulary", y="exp(logit − m)" if old == 0 else "", grid="y")
    canvas.legend(figure, plots[-1])
    return figure


def tiles(tokens: int, entries: int, tile: tuple[int, int]) -> Figure:
    """Logits [tokens, entries] in tiles, numbered in the order of the grid, and the numbers kept of each token."""
    high, wide = tile
    figure, (axes,) = canvas.panels(height=2.7)
    colours = (SKY, ORANGE, GREEN)
    for number, (top, left) in enumerate(product(range(0, tokens, high), range(0, entries, wide)), 1):
        inside = left, top, min(wide, entries - left), min(high, tokens - top)
        _tile(axes, (left, top, wide, high), inside, colours[top // high % len(colours)], str(number))
    right = entries + BESIDE
    for top in range(0, tokens, high):
        _box(axes, (right, top, len(KEPT), min(high, tokens - top)), fc=colours[top // high % len(colours)], alpha=0.5)
    _box(axes, (0, 0, entries, tokens), fill=False, linewidth=2.5)
    for place, name in enumerate(KEPT):
        _box(axes, (right + place, 0, 1, tokens), fill=False)
        axes.text(right + place + 0.5, -0.3, name, ha="center")
    _names_of_tiles(axes, tokens, entries)
    across, down = -(-entries // wide), -(-tokens // high)
    axes.set(xlim=(-1.2, right + len(KEPT) + 0.2), ylim=(down * high + 0.2, -1), aspect="equal")
    told = f"{across * down} tiles of {high} tokens and {wide} entries, numbered row by row"
    axes.set_xlabel(f"{told}; kept is one block for the {across} tiles of a row")
    axes.axis("off")  # the label is not drawn, but read in the alternative text
    return figure


def memory_and_traffic(ways: Sequence[Mapping], gib: float, lower_bound: float) -> Figure:
    """Memory and traffic of each way to value and gradient, with the lower bound of those that start from logits.

    Args:
      ways: rows of policy_loss.json, those from logits first.
      gib: bytes of the unit.
      lower_bound: of the traffic, in bytes.
    """
    figure, plots = canvas.panels(2, height=2.5, sharey=True)
    names = [f"from {way['source']}: {way['implementation']}" for way in ways]
    titles = {"temporaries": "memory beside inputs and results", "traffic": "traffic between chip and memory"}
    for axes, (key, title) in zip(plots, titles.items(), strict=True):
        values = [way[key] / gib for way in ways]
        bars = axes.barh(names, values, 0.66, color=[WAYS[way["implementation"]] for way in ways])
        axes.bar_label(bars, fmt="{:.2f}", padding=4, color=INK, fontsize=9)
        axes.set_xlim(0, 1.2 * max(values))
        canvas.label(axes, title, x="GiB", grid="x")
    from_logits = sum(way["source"] == "logits" for way in ways)
    right = plots[1]
    look = {"color": VERMILLION, "linestyle": "--", "label": "lower bound from logits"}
    right.vlines(lower_bound / gib, -0.5, from_logits - 0.5, **look)
    plots[0].invert_yaxis()
    canvas.legend(figure, right)
    return figure


def rows_of_tokens(layouts: Mapping[str, np.ndarray]) -> Figure:
    """How a batch is laid in rows, one plot below the other, all to one scale.

    Args:
      layouts: name -> [rows, tokens] of 0 padding, 1 prompt, 2 and 3 completions.
    """
    shades = ListedColormap([TINTS[1], INK, BLUE, SKY])
    heights = [len(table) for table in layouts.values()]  # so that a token has the same area in all of them
    figure, plots = canvas.panels(rows=len(layouts), height=1.7, height_ratios=heights, sharex=True)
    widest = max(table.shape[1] for table in layouts.values())
    for axes, (name, table) in zip(plots, layouts.items(), strict=True):
        rows, width = table.shape
        axes.imshow(table, cmap=shades, vmin=0, vmax=3, aspect="auto", interpolation="none")
        axes.set(xlim=(-0.5, widest), yticks=range(rows), yticklabels=range(1, rows + 1))
        title = f"{name}: {rows} rows of {width} tokens, {(table == 0).mean():.0%} padding"
        canvas.label(axes, title, x="token of the row" if axes is plots[-1] else "", y="row", grid="")
        axes.tick_params(labelsize=7)
        axes.spines[:].set_visible(False)
    return figure


def _tile(axes: Axes, whole: tuple, inside: tuple, colour: str, number: str) -> None:
    """One tile: hatched where it reaches beyond the array."""
    left, top, wide, high = inside
    _box(axes, whole, fill=False, hatch="///", ec=GREY)
    _box(axes, inside, fc="white")
    _box(axes, inside, fc=colour, ec=INK, alpha=0.5)
    axes.text(left + wide / 2, top + high / 2, number, ha="center", va="center")


def _box(axes: Axes, box: tuple, **look) -> None:
    left, top, wide, high = box
    axes.add_patch(Rectangle((left, top), wide, high, **look))


def _names_of_tiles(axes: Axes, tokens: int, entries: int) -> None:
    axes.text(entries / 2, -0.3, f"logits: {entries} entries", ha="center")
    axes.text(-0.5, tokens / 2, f"{tokens} tokens", ha="center", va="center", rotation=90)
    axes.text(entries + BESIDE + len(KEPT) / 2, tokens + 0.9, f"kept: {len(KEPT)} numbers", ha="center")
