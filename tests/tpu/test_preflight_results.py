"""The groups that the plots of a preflight draw add up to its numbers."""

import preflight_results
import pytest

from grpo_train.recipes.slices import parse_slice
from grpo_train.tpu import preflight
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


def test_the_page_has_the_table_of_the_saved_results(root) -> None:
    table = preflight_results.hardware_table(preflight.saved_results())
    assert table in (root / "docs" / "tpu.md").read_text(encoding="utf-8"), "docs/tpu.md: put hardware_table's text in"


def test_the_table_is_sorted_by_slice_and_no_bound_is_above_its_estimate() -> None:
    rows = preflight_results.hardware_table(preflight.saved_results()).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]
    slices = [parse_slice(one[0]) for one in cells]
    order = [(one.chip.generation, one.devices) for one in slices]
    assert order == sorted(order)
    assert len({one[1] for one in cells}) == len(cells)
    times = [(float(bound), float(estimate)) for *_, bound, estimate, _, _, _ in cells if "-" not in (bound, estimate)]
    assert len(times) > 20
    assert all(bound <= estimate for bound, estimate in times)
    assert any(one[1].startswith("qwen2.5-3b-gsm8k-pallas (times of plain JAX)") for one in cells)
