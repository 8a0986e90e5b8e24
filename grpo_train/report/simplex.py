"""A triangle of all policies over three answers, with an arrow at each point: where an update moves it; notebook 03.

    simplex(("18", "99", "?"), {"policy gradient": changes}, start=(0.1, 0.3, 0.6))

A point is a policy: at a corner one answer is certain, in the middle all three are equally likely.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_train.report.display import Picture, picture
from grpo_train.report.palette import BLUE, GREY, INK, VERMILLION

CORNERS = np.array([[0.5, 0.866], [0.0, 0.0], [1.0, 0.0]])  # of the first, second and third answer: top, left, right
OUTWARDS = np.array([[0.0, 0.05], [-0.05, -0.05], [0.05, -0.05]])  # from a corner to its name
PARTS = 8  # of each side; the grid is made of the points inside
LONGEST = 0.11  # of an arrow, in sides of the triangle
THICK, THIN = 0.0085, 0.005  # of an arrow, in widths of a plot

Update = Callable[[np.ndarray], np.ndarray]  # probabilities [3] -> how fast each of them moves [3]


def simplex(
    answers: Sequence[str],
    updates: Mapping[str, Update],
    start: Sequence[float],
    border: Sequence[Sequence[float]] = (),
) -> Picture:
    """One triangle for each kind of update, as a static SVG with a description.

    Thick orange arrows: the third answer becomes more likely; thin blue ones: less likely. The length of an arrow is
    the square root of the change, relative to the largest one of its triangle, so that small ones are seen.

    Args:
      answers: the names of the three answers.
      updates: name of a triangle -> its update.
      start: the policy [3] that is marked with a dot.
      border: the ends [2, 3] of a dashed line.

    Raises:
      ValueError: not three answers.
    """
    if len(answers) != 3 or len(start) != 3:
        raise ValueError(f"a triangle has three answers; got {len(answers)}, and a start of {len(start)}")
    figure = Figure(figsize=(3.2 * len(updates), 3.1), layout="constrained")
    said = []
    for number, (name, update) in enumerate(updates.items()):
        axes = figure.add_subplot(1, len(updates), number + 1)
        axes.set_title(name, fontsize=11, pad=10)
        _triangle(axes, answers, border)
        gains = _arrows(axes, update, np.asarray(start, float))
        changes = ", ".join(f"{answer} {change:+.3f}" for answer, change in zip(answers, update(start), strict=True))
        said.append(f"{name}: {changes}; {answers[2]} gains at {gains} of {len(_grid())} points")
    place = ", ".join(f"{answer} {share:g}" for answer, share in zip(answers, start, strict=True))
    alt = f"A triangle for each kind of update. Changes of the probabilities at the dot ({place}): {'. '.join(said)}."
    return picture(figure, alt)


def _grid() -> np.ndarray:
    """The policies [points, 3] at which arrows begin, without the sides."""
    counts = range(1, PARTS)
    return np.array([(a, b, PARTS - a - b) for a in counts for b in counts if a + b < PARTS]) / PARTS


def _triangle(axes: Axes, answers: Sequence[str], border: Sequence[Sequence[float]]) -> None:
    axes.fill(*CORNERS.T, facecolor="none", edgecolor=GREY, linewidth=0.9)
    if len(border):
        axes.plot(*(np.asarray(border, float) @ CORNERS).T, "--", color=GREY, linewidth=1)
    for answer, (x, y) in zip(answers, CORNERS + OUTWARDS, strict=True):
        axes.text(x, y, answer, ha="center", va="center")
    axes.set(xlim=(-0.15, 1.15), ylim=(-0.1, 0.97), aspect="equal")
    axes.axis("off")


def _arrows(axes: Axes, update: Update, start: np.ndarray) -> int:
    """Draw them, and return at how many points of the grid the third answer gains."""
    points = np.vstack([_grid(), start])
    changes = np.array([update(point) for point in points])  # [points, 3]
    moves = changes @ CORNERS  # in the plane; as the changes add up to 0, the place does not matter
    sizes = np.linalg.norm(moves, axis=1, keepdims=True)
    arrows = LONGEST * moves / np.sqrt(np.maximum(sizes, 1e-12) * max(sizes.max(), 1e-12))
    colours = np.where(changes[:, 2] > 0, VERMILLION, BLUE)
    widths = np.where(changes[:, 2] > 0, THICK, THIN)
    for place, arrow, colour, width in zip(points @ CORNERS, arrows, colours, widths, strict=True):
        axes.quiver(*place, *arrow, color=colour, width=width, angles="xy", scale_units="xy", scale=1, zorder=3)
    axes.plot(*(start @ CORNERS), "o", color=INK, markersize=4)
    return int((changes[:-1, 2] > 0).sum())
