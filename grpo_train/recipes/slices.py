"""TPU slices by their Cloud TPU names, and the peak rates of their chips.

parse_slice("v6e-8").devices     # 8
parse_slice("v4-16").devices     # 8: the names of v4 and v5p count cores, two per chip
parse_slice("v4-16").hosts       # 2
"""

from dataclasses import dataclass

from grpo_lib.common.errors import CourseError


@dataclass(frozen=True)
class Chip:
    """One TPU chip.  JAX sees it as one device; its two cores on v4 and v5p work as one (megacore).

    `flops` and `bandwidth` are the vendor's peaks, from the page at `source`; of two roundings the larger, so that a
    lower bound on time computed from them stays one.
    """

    generation: str
    cores_in_name: int  # how much one chip adds to the number in a slice's name
    chips_per_host: int  # of a slice of several hosts
    chips_alone: int  # at most, of a slice of one host
    flops: float  # bfloat16 operations per second
    bandwidth: float  # bytes per second between the chip and its memory
    usable_gib: float  # chip memory that a program may use: above it libtpu 0.0.44 reports out of memory
    source: str
    kinds: tuple[str, ...]  # JAX's names of it (jax/_src/pallas/mosaic/tpu_info.py of 0.11.0)


CHIPS = {
    "v4": Chip("v4", 2, 4, 4, 275e12, 1200e9, 30.75, "https://cloud.google.com/tpu/docs/v4", ("TPU v4",)),
    "v5e": Chip(
        "v5e", 1, 4, 8, 197e12, 819e9, 15.75, "https://cloud.google.com/tpu/docs/v5e", ("TPU v5 lite", "TPU v5e")
    ),
    "v5p": Chip("v5p", 2, 4, 4, 459e12, 2765e9, 95.73, "https://cloud.google.com/tpu/docs/v5p", ("TPU v5", "TPU v5p")),
    "v6e": Chip(
        "v6e", 1, 4, 8, 918e12, 1640e9, 31.24, "https://cloud.google.com/tpu/docs/v6e", ("TPU v6 lite", "TPU v6e")
    ),
}

# Slices that exist, in devices, up to 64 chips.
SLICE_SIZES = {"v4": (4, 8, 16, 32), "v5e": (1, 4, 8, 16, 32, 64), "v5p": (4, 8, 16, 32), "v6e": (1, 4, 8, 16, 32, 64)}


@dataclass(frozen=True)
class Slice:
    """A slice such as v6e-8."""

    name: str
    chip: Chip
    devices: int

    @property
    def hosts(self) -> int:
        """Machines of the slice, each with one process."""
        return 1 if self.devices <= self.chip.chips_alone else -(-self.devices // self.chip.chips_per_host)


def parse_slice(name: str) -> Slice:
    """Read a slice's name.  Raises CourseError if there is no such slice."""
    generation, _, number = name.partition("-")
    chip = CHIPS.get(generation)
    if not chip or not number.isdigit() or int(number) < 1 or int(number) % chip.cores_in_name:
        raise CourseError(
            f"hardware.accelerator={name[:40]} is not a TPU slice; write it like v6e-8, v5p-8 or v4-16 "
            f"(generations: {', '.join(CHIPS)}; v4 and v5p count two cores per chip)"
        )
    devices = int(number) // chip.cores_in_name
    if devices < 64 and devices not in SLICE_SIZES[generation]:
        raise CourseError(
            f"hardware.accelerator={name} is not a size that there is; of {generation} there are "
            f"{', '.join(slice_of(generation, size) for size in SLICE_SIZES[generation])} and larger ones"
        )
    return Slice(name, chip, devices)


def slice_of(generation: str, devices: int) -> str:
    """The name of the slice with this number of devices: slice_of("v5p", 4) is "v5p-8"."""
    return f"{generation}-{devices * CHIPS[generation].cores_in_name}"
