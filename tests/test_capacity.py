"""The pictures of a preflight add up to its numbers."""

import matplotlib.pyplot as plt
import pytest

from grpo_lib import capacity
from grpo_lib.memory import PHASES, ChipMemory, Line

GIB = 2**30


def line(name: str, gib: float, *phases: str) -> Line:
    return Line(name=name, bytes=int(gib * GIB), phases=phases or PHASES, origin="arithmetic", how="")


@pytest.fixture
def chip() -> ChipMemory:
    lines = (
        line("actor weights", 2), line("optimizer state, gradients", 6), line("programs", 0.5),
        line("sampler weights", 1), line("KV cache", 4, "sampling", "update"), line("update: temporaries", 3, "update"),
    )  # fmt: skip
    return ChipMemory(role="trains and samples", usable=20 * GIB, lines=lines)


@pytest.mark.parametrize("phase", PHASES)
def test_groups_add_up_to_the_phase(chip: ChipMemory, phase: str) -> None:
    assert sum(capacity.shares(chip, phase).values()) == chip.total(phase)


def test_what_a_phase_needs_is_apart_from_what_stays(chip: ChipMemory) -> None:
    assert capacity.shares(chip, "update")[capacity.WORK] == 3.5 * GIB
    assert "KV cache" not in capacity.shares(chip, "sync")


def test_bars_end_where_the_phase_ends_and_touch_each_other(chip: ChipMemory) -> None:
    figure, axes = plt.subplots()
    capacity.draw_phases(axes, chip)
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
