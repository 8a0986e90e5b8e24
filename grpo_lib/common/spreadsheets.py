"""Cells of a CSV that a spreadsheet shows and does not evaluate."""

import re
from typing import Any

BYTE_ORDER_MARK = "\ufeff"  # begins a CSV that Excel is to read as UTF-8

# What makes a cell a formula ("CSV injection"), also in full width; of "-", only a plain number does not.
FORMULA = re.compile(r"[=+@\t\r\n＝＋－＠]|-(?![0-9]+(?:\.[0-9]+)?\Z)")


def for_spreadsheet(value: Any) -> Any:
    """A value of a CSV: text that begins like a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value
