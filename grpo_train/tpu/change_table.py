"""What a change of the recipe does to memory, seconds and chip-hours: `grpo preflight RECIPE --compare CHANGES…`.

variants = variants_of(["hardware.accelerator=v5p-8", "grpo.group_size=8,16"])
rows = [row(name, preflight_of(overrides)) for name, overrides in variants]
print(table(rows))
"""

from grpo_lib.common.errors import CourseError
from grpo_train.tpu.compile_jobs import GIB
from grpo_train.tpu.preflight import Result
from grpo_train.tpu.roofline import DECODING

AS_IT_IS = "as it is"
HEADINGS = ("change", "slice", "GiB left", "update, s", "decoding, s", "step, s", "run, hours", "chip-hours")


def variants_of(changes: list[str]) -> list[tuple[str, list[str]]]:
    """(name, overrides) of the recipe as it is and of each change, alone: KEY=A,B are two, KEY=A+OTHER=B is one.

    Raises CourseError for a change that sets nothing.
    """
    variants: list[tuple[str, list[str]]] = [(AS_IT_IS, [])]
    for change in changes:
        key, equals, values = change.partition("=")
        if not equals or not values:
            raise CourseError(f"--compare {change}: a change is KEY=VALUE, or KEY=VALUE,VALUE for several")
        listed = [values] if values[0] in "[{" else values.split(",")
        for value in listed:
            name = f"{key}={value}"
            variants.append((name, name.split("+")))
    return variants


def row(name: str, result: Result | CourseError) -> list[str]:
    """The cells of a change; a reason in place of numbers where there are none."""
    if isinstance(result, CourseError):
        return [name, f"not possible: {result}"]
    cells = [name, result.accelerator]
    if not result.fits:
        return [*cells, f"does not fit: {result.problem}"]
    left = f"{result.margin / GIB:.1f}{', tight' if result.is_tight else ''}"
    if not (estimate := result.estimate):
        return [*cells, left, f"not estimated: {result.not_estimated}"]
    decoding = estimate.part(DECODING)
    whole = [each.shown(estimate.is_bound) for each in (estimate.step, estimate.run_hours, estimate.chip_hours)]
    return [
        *cells,
        left,
        str(estimate.update),
        decoding.seconds.shown(decoding.is_bound) if decoding else "",
        *whole,
    ]


def table(rows: list[list[str]]) -> str:
    """Rows under their headings; the last cell of a row may be a reason, and takes no column's width."""
    whole = [list(HEADINGS), *rows]
    full = [cells for cells in whole if len(cells) == len(HEADINGS)]
    named = [*full, *([*cells[:-1]] for cells in whole if len(cells) < len(HEADINGS))]
    widths = [max((len(cells[column]) for cells in named if column < len(cells)), default=0) for column in range(8)]
    lines = []
    for cells in whole:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append("  ".join(padded).rstrip())
    lines.append(
        "From completions of a third of the longest length to those of all of it; ≥: decoding is a bound by bytes. "
        "What an estimate leaves out, and how far off it may be: grpo preflight on one of them."
    )
    return "\n".join(lines)
