"""The plots of a preflight add up to its numbers."""

import matplotlib.pyplot as plt
import pytest

from grpo_tpu import memory_plots
from grpo_tpu.memory import GIB, PHASES, ChipMemory, MemoryItem


def line(name: str, gib: float, *phases: str) -> MemoryItem:
    return MemoryItem(name=name, bytes=int(gib * GIB), phases=phases or PHASES, origin="arithmetic", how="")


@pytest.fixture
def chip() -> ChipMemory:
    lines = (
        line("actor weights", 2), line("optimizer state, gradients", 6), line("programs", 0.5),
        line("sampler weights", 1), line("KV cache", 4, "sampling", "update"), line("update: temporaries", 3, "update"),
    )  # fmt: skip
    return ChipMemory(role="trains and samples", usable=20 * GIB, lines=lines)


@pytest.mark.parametrize("phase", PHASES)
def test_groups_add_up_to_the_phase(chip: ChipMemory, phase: str) -> None:
    groups = memory_plots.bytes_by_group(chip, phase)
    assert sum(groups.values()) == chip.total(phase)
    assert ("KV cache" in groups) == (phase in ("sampling", "update"))
    assert groups[memory_plots.OTHER] == (3.5 if phase == "update" else 0.5) * GIB  # lines without a colour


def test_bars_end_where_the_phase_ends_and_touch_each_other(chip: ChipMemory) -> None:
    figure, axes = plt.subplots()
    memory_plots.draw_phases(axes, chip)
    for position, phase in enumerate(PHASES):
        bars = sorted(
            (bar.get_x(), bar.get_width())
            for bar in axes.patches
            if bar.get_width() and abs(bar.get_y() + bar.get_height() / 2 - position) < 0.1
        )
        ends = [x + width for x, width in bars]
        assert bars[0][0] == 0 and [x for x, _ in bars[1:]] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(chip.total(phase) / GIB)
    plt.close(figure)
