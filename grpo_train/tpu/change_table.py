"""What a change of the recipe does to memory, seconds and chip-hours: `grpo preflight RECIPE --compare CHANGES…`.

variants = variants_of(["hardware.accelerator=v5p-8", "grpo.group_size=8,16"])
rows = [row(name, preflight_of(overrides), prices_of("v6e=2.7,v5p=4.2")) for name, overrides in variants]
print(table(rows))
"""

from collections.abc import Mapping

from grpo_lib.common.errors import CourseError
from grpo_train.recipes.slices import CHIPS, parse_slice
from grpo_train.tpu.compile_jobs import GIB
from grpo_train.tpu.estimate import Estimate
from grpo_train.tpu.preflight import Result
from grpo_train.tpu.roofline import DECODING

AS_IT_IS = "as it is"
HEADINGS = ("change", "slice", "GiB left", "update, s", "decoding, s", "step, s", "run, hours", "chip-hours", "money")
EVERY = ""  # in prices: of chips that are not named


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


def prices_of(text: str | None) -> dict[str, float]:
    """The price of a chip-hour by generation: "2.5" is of every chip, "v6e=2.7,v5p=4.2" of two.

    Raises CourseError for anything else.
    """
    prices = {}
    for part in text.split(",") if text else ():
        generation, _, number = part.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if generation not in (EVERY, *CHIPS) or not 0 <= price < float("inf"):
            raise CourseError(
                f"--price {text}: the price of a chip-hour is a number, or GENERATION=NUMBER with one of "
                f"{', '.join(CHIPS)}, separated by commas"
            )
        prices[generation] = price
    return prices


def price_of(accelerator: str | None, prices: Mapping[str, float]) -> float | None:
    """That of a slice's chips; None where it is not given."""
    generation = parse_slice(accelerator).chip.generation if accelerator else EVERY
    return prices.get(generation, prices.get(EVERY))


def row(name: str, result: Result | CourseError, prices: Mapping[str, float] | None = None) -> list[str]:
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
    price = price_of(result.accelerator, prices or {})
    return [*cells, left, str(estimate.update), decoding.shown if decoding else "-", *_whole(estimate, price)]


def _whole(estimate: Estimate, price: float | None) -> list[str]:
    """The step, hours, chip-hours and money; dashes where decoding is a bound alone, of which no sum is made."""
    step, hours, chip_hours = estimate.step, estimate.run_hours, estimate.chip_hours
    if not (step and hours and chip_hours):
        return ["-"] * 4
    money = "-" if price is None else chip_hours.times(price).planned
    return [step.planned, hours.planned, chip_hours.planned, money]


def table(rows: list[list[str]]) -> str:
    """Rows under their headings; the last cell of a row may be a reason, and takes no column's width."""
    whole = [list(HEADINGS), *rows]
    full = [cells for cells in whole if len(cells) == len(HEADINGS)]
    named = [*full, *([*cells[:-1]] for cells in whole if len(cells) < len(HEADINGS))]
    columns = range(len(HEADINGS))
    widths = [max((len(cells[column]) for cells in named if column < len(cells)), default=0) for column in columns]
    lines = []
    for cells in whole:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append("  ".join(padded).rstrip())
    lines.append(
        "From completions of a third of the longest length to those of all of it; likely: a third on average, and one "
        "of each batch all of it. ≥: the time to read the weights, a bound, of which no step is made. What an estimate "
        "leaves out, and how far off it may be: grpo preflight on one of them."
    )
    return "\n".join(lines)
