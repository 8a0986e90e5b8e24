"""The groups that the plots of a preflight draw add up to its numbers."""

import preflight_results
import pytest

from grpo_train.tpu.memory import GIB, PHASES, ChipMemory, MemoryItem


def line(name: str, gib: float, *phases: str) -> MemoryItem:
    return MemoryItem(name=name, bytes=int(gib * GIB), phases=phases or PHASES, origin="arithmetic", how="")


LINES = (
    line("actor weights", 2), line("optimizer state, gradients", 6), line("programs", 0.5),
    line("sampler weights", 1), line("KV cache", 4, "sampling", "update"), line("update: temporaries", 3, "update"),
)  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_groups_add_up_to_the_phase(phase: str) -> None:
    chip = ChipMemory(role="trains and samples", usable=20 * GIB, lines=LINES)
    groups = preflight_results.bytes_by_group(chip, phase)
    assert sum(groups.values()) == chip.total(phase)
    assert ("KV cache" in groups) == (phase in ("sampling", "update"))
    assert groups[preflight_results.OTHER] == (3.5 if phase == "update" else 0.5) * GIB  # lines without a colour
