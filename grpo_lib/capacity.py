"""Pictures of a preflight: what fills a TPU chip, phase by phase, and how near to full the chips of recipes are.

figure, axes = plt.subplots()
draw_phases(axes, result.tightest)
draw_recipes(axes, results)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_lib.memory import PHASES, ChipMemory
from grpo_lib.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from grpo_lib.programs import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from grpo_lib.preflight import Result

# What stays, by the name of its line, in the order of the bars; all other lines are what a phase needs while it works.
COLOURS = {
    "actor weights": BLUE,
    "reference weights": SKY,
    "optimizer state, gradients": ORANGE,
    "sampler weights": GREEN,
    "KV cache": PURPLE,
}
WORK = "while it works"


def shares(chip: ChipMemory, phase: str) -> dict[str, int]:
    """Bytes of each group on the chip in one phase; they add up to `chip.total(phase)`."""
    found = dict.fromkeys((*COLOURS, WORK), 0)
    for line in chip.lines:
        if phase in line.phases:
            found[line.name if line.name in COLOURS else WORK] += line.bytes
    return {name: count for name, count in found.items() if count}


def draw_phases(axes: Axes, chip: ChipMemory) -> None:
    """One stacked bar for each phase of a step, in GiB, against what the chip has."""
    _stack(axes, {phase: shares(chip, phase) for phase in PHASES}, unit=[GIB] * len(PHASES))
    axes.axvline(chip.usable / GIB, color=VERMILLION, linestyle="--")
    axes.annotate(
        "usable",
        (chip.usable / GIB, -0.55),
        (-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=VERMILLION,
    )
    axes.set(xlim=(0, 1.04 * max(chip.usable, chip.largest) / GIB), xlabel="GiB on a chip")


def draw_recipes(axes: Axes, results: Sequence[Result]) -> None:
    """One stacked bar for each recipe, of its tightest chip in its fullest phase, as a share of what the chip has."""
    chips = {f"{result.name}\n{result.accelerator}, {result.tightest.phase}": result.tightest for result in results}
    bars = {label: shares(chip, chip.phase) for label, chip in chips.items()}
    _stack(axes, bars, unit=[chip.usable / 100 for chip in chips.values()])
    axes.axvline(100, color=VERMILLION, linestyle="--")
    axes.set(xlim=(0, 104), xlabel="% of the chip's usable memory")


def _stack(axes: Axes, bars: Mapping[str, Mapping[str, int]], unit: Sequence[float]) -> None:
    for name, colour in (COLOURS | {WORK: GREY}).items():
        lengths = [bar.get(name, 0) / one for bar, one in zip(bars.values(), unit, strict=True)]
        starts = [_before(bar, name) / one for bar, one in zip(bars.values(), unit, strict=True)]
        if any(lengths):
            axes.barh(range(len(bars)), lengths, left=starts, height=0.66, color=colour, label=name)
    axes.set_yticks(range(len(bars)), list(bars), color=INK, fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(bars) - 0.4, -0.9)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _before(bar: Mapping[str, int], name: str) -> int:
    """Bytes of the groups that stand to the left of this one."""
    order = [*COLOURS, WORK]
    return sum(bar.get(other, 0) for other in order[: order.index(name)])
