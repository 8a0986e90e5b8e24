"""TPU slices by the names that Cloud TPU gives them, and what their chips can do.

    parse_slice("v6e-8").devices     # 8
    parse_slice("v4-16").devices     # 8: the names of v4 and v5p count cores, two to a chip
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lib.errors import CourseError


@dataclass(frozen=True)
class Chip:
    """One TPU chip.  JAX sees it as one device; its two cores on v4 and v5p work as one (megacore)."""

    generation: str
    cores_in_name: int  # how much one chip adds to the number in a slice's name
    chips_per_host: int  # of a slice of several hosts


CHIPS = {
    "v4": Chip("v4", cores_in_name=2, chips_per_host=4),
    "v5e": Chip("v5e", cores_in_name=1, chips_per_host=4),
    "v5p": Chip("v5p", cores_in_name=2, chips_per_host=4),
    "v6e": Chip("v6e", cores_in_name=1, chips_per_host=4),
}


@dataclass(frozen=True)
class Slice:
    """A slice such as v6e-8."""

    name: str
    chip: Chip
    devices: int


def parse_slice(name: str) -> Slice:
    """Read a slice's name.  Raises CourseError when it names no slice."""
    generation, _, number = name.partition("-")
    chip = CHIPS.get(generation)
    if not chip or not number.isdigit() or int(number) < 1 or int(number) % chip.cores_in_name:
        raise CourseError(
            f"hardware.accelerator={name} is no TPU slice; write it like v6e-8, v5p-8 or v4-16 "
            f"(generations: {', '.join(CHIPS)}; v4 and v5p count two cores to a chip)"
        )
    return Slice(name, chip, int(number) // chip.cores_in_name)
