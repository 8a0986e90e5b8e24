"""Sampler and trainer over time, one after the other and at the same time; notebook 04.

timeline(rollout=2, update=1)        # a notebook shows what a cell returns
"""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_train.report.display import Picture, picture
from grpo_train.report.palette import INK, ORANGE, SKY

WAYS = {"synchronous": 0, "asynchronous, one step behind": 1}  # -> how many updates a batch may be behind
ROWS = {"sampler": (1, SKY), "trainer": (0, ORANGE)}  # -> height, colour


@dataclass(frozen=True)
class Batch:
    """When a batch is sampled and trained on, and how many updates its sampler's weights have had."""

    number: int  # counted from 1
    sampled: float
    trained: float
    weights: int

    @property
    def behind(self) -> int:
        """Updates between the weights that sampled it and those that learn from it."""
        return self.number - 1 - self.weights


def schedule(rollout: float, update: float, batches: int, behind: int) -> list[Batch]:
    """The batches of a run whose rollout and update take these times, each as early as `behind` allows.

    Raises:
      ValueError: a time that is not above 0, or a negative `behind`.
    """
    if rollout <= 0 or update <= 0 or behind < 0:
        raise ValueError(f"times must be above 0 and behind at least 0; got {rollout}, {update} and {behind}")
    planned: list[Batch] = []
    for number in range(1, batches + 1):
        sampler_free = planned[-1].sampled + rollout if planned else 0.0
        needed = number - 2 - behind  # this batch's update, and those before it, must be done
        weights_ready = planned[needed].trained + update if needed >= 0 else 0.0
        start = max(sampler_free, weights_ready)
        done = sum(batch.trained + update <= start for batch in planned)
        trainer_free = planned[-1].trained + update if planned else 0.0
        planned.append(Batch(number, start, max(start + rollout, trainer_free), done))
    return planned


def timeline(rollout: float, update: float, batches: int = 4) -> Picture:
    """Both ways below each other, as a static SVG; a bar is a batch, and says whose weights sampled it."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    said = []
    for place, (name, behind) in enumerate(WAYS.items()):
        axes = figure.add_subplot(len(WAYS), 1, place + 1)
        planned = schedule(rollout, update, batches, behind)
        _draw(axes, planned, rollout, update)
        axes.set_title(name, fontsize=10.5, loc="left")
        axes.set_xlim(0, batches * (rollout + update))
        last = planned[-1]
        said.append(
            f"{name}: {batches} batches are done at {last.trained + update:g}; batch {last.number} is sampled by the "
            f"weights after {last.weights} updates, {last.behind} behind"
        )
    axes.set_xlabel("time")
    return picture(figure, f"Sampler and trainer over time; {'. '.join(said)}.")


def _draw(axes: Axes, planned: list[Batch], rollout: float, update: float) -> None:
    for batch in planned:
        sampled = f"batch {batch.number}\nby weights {batch.weights}"
        bars = (("sampler", batch.sampled, rollout, sampled), ("trainer", batch.trained, update, f"{batch.number}"))
        for row, start, length, text in bars:
            height, colour = ROWS[row]
            axes.barh(height, length, left=start, height=0.8, color=colour, edgecolor="white")
            axes.text(start + length / 2, height, text, ha="center", va="center", fontsize=8, color=INK)
    axes.set_yticks([height for height, _ in ROWS.values()], list(ROWS))
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
