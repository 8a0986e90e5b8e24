"""What notebook 06 shows of preflights: memory of a TPU chip in two figures, and all recipes in a table.

phases(result.tightest)             # a notebook shows what a cell returns
one_value_changed()
print(hardware_table(results))      # the table of docs/tpu.md, too
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from grpo_lib.common.environment import repo_root
from grpo_train.recipes.slices import parse_slice
from grpo_train.report import canvas
from grpo_train.report.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from grpo_train.tpu.compile_jobs import GIB
from grpo_train.tpu.estimate import short
from grpo_train.tpu.memory import PHASES, ChipMemory
from grpo_train.tpu.preflight import SAVED, Result, read_result, saved_results
from grpo_train.tpu.roofline import at_least

# Lines with a colour and a hatching of their own, by name, in the order of the bars; the others are one group.
LOOKS = {
    "actor weights": (BLUE, ""),
    "reference weights": (SKY, "///"),
    "optimizer state, gradients": (ORANGE, "\\\\\\"),
    "sampler weights": (GREEN, "xxx"),
    "KV cache": (PURPLE, "..."),
}
OTHER = "temporaries, other"
SHIPPED = "llama3.1-8b-gsm8k-g8"  # the recipe that the refused commands change


def bytes_by_group(chip: ChipMemory, phase: str) -> dict[str, int]:
    """Bytes of each group on the chip in one phase; they add up to `chip.total(phase)`."""
    groups = dict.fromkeys((*LOOKS, OTHER), 0)
    for line in chip.lines:
        if phase in line.phases:
            groups[line.name if line.name in LOOKS else OTHER] += line.bytes
    return {name: count for name, count in groups.items() if count}


def phases(chip: ChipMemory) -> Figure:
    """One stacked bar per phase of a step, in GiB, against the usable memory."""
    return _stacked({phase: bytes_by_group(chip, phase) for phase in PHASES}, chip.usable, "GiB on a chip")


def one_value_changed() -> Figure:
    """A shipped recipe and the two commands that change one value of it and are refused: the fullest chip of each."""
    refused = [read_result(path) for path in sorted((repo_root() / SAVED).glob("refused-*.json"))]
    shipped = next(result for result in saved_results() if result.name == SHIPPED)
    named = {"as it ships": shipped} | {one.command.split()[-1]: one for one in refused}
    chips = {name: _trainer(result) for name, result in named.items()}
    bars = {name: bytes_by_group(chip, chip.phase) for name, chip in chips.items()}
    return _stacked(bars, next(iter(chips.values())).usable, "GiB on a chip that trains, in its fullest phase")


def _trainer(result: Result) -> ChipMemory:
    """The chip that trains: the two refused commands change its memory only."""
    return next(chip for chip in result.chips if chip.role == "trains")


def hardware_table(results: Sequence[Result]) -> str:
    """Results as a Markdown table, sorted by slice: of a generation the small ones first."""
    rows = [
        "| slice | recipe | chips that train / sample | GiB on the fullest chip | of usable | left | "
        "decoding at full length, s, at least | update, s, at least | update, s, roofline | update at a third of the "
        "length, s, roofline | run, chip-hours, roofline | likely step, s, estimate from the compiled program |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in sorted(results, key=_size):
        chip = result.tightest
        split = f"{result.trainer_devices} / {result.sampler_devices}"
        if result.colocated:
            split = f"{result.trainer_devices}, both"
        left = f"{chip.margin / GIB:.1f}, tight" if result.is_tight else f"{chip.margin / GIB:.1f}"
        memory = f"{chip.largest / GIB:.1f} | {chip.usable / GIB:.1f} | {left}"
        times = " | ".join([*_times(result), _step(result)])
        rows.append(f"| {result.accelerator} | {_named(result)} | {split} | {memory} | {times} |")
    return "\n".join(rows)


def _size(result: Result) -> tuple[str, int, str]:
    where = parse_slice(result.accelerator)
    return where.chip.generation, where.devices, result.name


def _named(result: Result) -> str:
    """The recipe; marked where its loss is a kernel, in which the compiler counts nothing."""
    of_plain_jax = any("that of loss.implementation=jax" in note for note in result.notes)
    return f"{result.name} (times of plain JAX)" if of_plain_jax else result.name


def _times(result: Result) -> list[str]:
    """Of decoding, of the update (by its FLOPs, and the roofline, also at a third of the length), and of the run."""
    bound = result.lower_bound
    if not bound:
        return ["-"] * 5
    chip = parse_slice(result.accelerator).chip
    decoding, update = bound.parts[0], bound.parts[-1]
    shorter = result.lower_bound_at_mean
    digits = ".2g" if bound.chip_hours < 99.5 else ".0f"  # two digits, and no exponent
    seconds = (decoding.seconds, at_least(update, chip), update.seconds)
    at_a_third = f"{shorter.parts[-1].seconds:.2f}" if shorter else "-"
    return [*(f"{each:.2f}" for each in seconds), at_a_third, f"{bound.chip_hours:{digits}}"]


def _step(result: Result) -> str:
    """Of a step in which completions have a third of the length on average and one of each batch all of it; where vLLM
    decodes, which has a bound alone, the rest of the step."""
    if not (found := result.estimate):
        return "-"
    if found.step:
        return short(found.step.likely)
    return found.shown_step


def _stacked(bars: Mapping[str, Mapping[str, int]], usable: int, x: str) -> Figure:
    """Bytes of each group in each bar, in GiB, and a dashed line at what a program may use."""
    figure, (axes,) = canvas.panels(height=1.4 + 0.36 * len(bars))
    starts = [0.0] * len(bars)
    for name, (colour, hatch) in (LOOKS | {OTHER: (GREY, "---")}).items():
        lengths = [bar.get(name, 0) / GIB for bar in bars.values()]
        if any(lengths):
            look = {"color": colour, "hatch": hatch, "hatchcolor": "white"}
            axes.barh(range(len(bars)), lengths, 0.66, left=starts, label=name, **look)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.axvline(usable / GIB, color=VERMILLION, linestyle="--", label=f"usable: {usable / GIB:.2f}")
    for place, end in enumerate(starts):
        axes.text(end, place, f" {end:.2f}", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set(xlim=(0, 1.12 * max(usable / GIB, *starts)), ylim=(len(bars) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    canvas.label(axes, x=x, grid="x")
    canvas.legend(figure, axes, columns=3)
    return figure
