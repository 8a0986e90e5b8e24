"""What notebook 06 shows of preflights: memory of a TPU chip by phase, and several recipes in a plot and in a table.

figure, axes = plt.subplots()
draw_phases(axes, result.tightest)
draw_recipes(axes, results)
print(hardware_table(results))      # the table of docs/tpu.md, too
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from grpo_train.report.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from grpo_train.tpu.compile_jobs import GIB
from grpo_train.tpu.memory import PHASES, ChipMemory
from grpo_train.tpu.preflight import Result
from grpo_train.tpu.roofline import LowerBound

# Lines with a colour and a hatching of their own, by name, in the order of the bars; the others are one group.
LOOKS = {
    "actor weights": (BLUE, ""),
    "reference weights": (SKY, "///"),
    "optimizer state, gradients": (ORANGE, "\\\\\\"),
    "sampler weights": (GREEN, "xxx"),
    "KV cache": (PURPLE, "..."),
}
OTHER = "temporaries, other"


def bytes_by_group(chip: ChipMemory, phase: str) -> dict[str, int]:
    """Bytes of each group on the chip in one phase; they add up to `chip.total(phase)`."""
    groups = dict.fromkeys((*LOOKS, OTHER), 0)
    for line in chip.lines:
        if phase in line.phases:
            groups[line.name if line.name in LOOKS else OTHER] += line.bytes
    return {name: count for name, count in groups.items() if count}


def draw_phases(axes: Axes, chip: ChipMemory) -> None:
    """One stacked bar per phase of a step, in GiB, against the usable memory."""
    _stack(axes, {phase: bytes_by_group(chip, phase) for phase in PHASES}, unit=[GIB] * len(PHASES))
    axes.axvline(chip.usable / GIB, color=VERMILLION, linestyle="--")
    axes.text(0.99 * chip.usable / GIB, -0.55, "usable", ha="right", va="center", color=VERMILLION)
    axes.set(xlim=(0, 1.04 * max(chip.usable, chip.largest) / GIB), xlabel="GiB on a chip")


def draw_recipes(axes: Axes, results: Sequence[Result]) -> None:
    """One stacked bar per recipe: its tightest chip in its fullest phase, in percent of the usable memory."""
    chips = {f"{result.name}\n{result.accelerator}, {result.tightest.phase}": result.tightest for result in results}
    bars = {label: bytes_by_group(chip, chip.phase) for label, chip in chips.items()}
    _stack(axes, bars, unit=[chip.usable / 100 for chip in chips.values()])
    axes.axvline(100, color=VERMILLION, linestyle="--")
    axes.set(xlim=(0, 104), xlabel="% of the chip's usable memory")


def hardware_table(results: list[Result]) -> str:
    """Results as a Markdown table."""
    rows = [
        "| recipe | slice | chips that train / sample | GiB on the fullest chip | of usable | left | "
        "lower bound on step time at full length, s | on the run, chip-hours | on the update at full length, s | at a "
        "third of it, s |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        chip, bound = result.tightest, result.lower_bound
        split = f"{result.trainer_devices} / {result.sampler_devices}"
        if result.colocated:
            split = f"{result.trainer_devices}, both"
        left = f"{chip.margin / GIB:.1f}, tight" if result.is_tight else f"{chip.margin / GIB:.1f}"
        memory = f"{chip.largest / GIB:.1f} | {chip.usable / GIB:.1f} | {left}"
        times = "- | -"
        if bound:  # two digits, and no exponent
            digits = ".2g" if bound.chip_hours < 99.5 else ".0f"
            times = f"{bound.seconds:.2f} | {bound.chip_hours:{digits}}"
        updates = f"{_update_seconds(bound)} | {_update_seconds(result.lower_bound_at_mean)}"
        rows.append(f"| {result.name} | {result.accelerator} | {split} | {memory} | {times} | {updates} |")
    return "\n".join(rows)


def _update_seconds(bound: LowerBound | None) -> str:
    """Of the policy update, which is the last part of a step; "-" where nothing is known."""
    return f"{bound.parts[-1].seconds:.2f}" if bound else "-"


def _stack(axes: Axes, bars: Mapping[str, Mapping[str, int]], unit: Sequence[float]) -> None:
    starts = [0.0] * len(bars)
    for name, (colour, hatch) in (LOOKS | {OTHER: (GREY, "---")}).items():
        lengths = [bar.get(name, 0) / one for bar, one in zip(bars.values(), unit, strict=True)]
        if any(lengths):
            axes.barh(
                range(len(bars)),
                lengths,
                left=starts,
                height=0.66,
                color=colour,
                hatch=hatch,
                hatchcolor="white",
                label=name,
            )
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.set_yticks(range(len(bars)), list(bars), color=INK, fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.9)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
