"""A table as plain text, by rich."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table

WIDTH = 240  # columns of text; longer cells are folded


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table without rules; `right` columns after the first hold numbers."""
    table = Table(
        *(Column(name, justify="right" if 0 < n <= right else "left") for n, name in enumerate(head)),
        box=None,
        pad_edge=False,
        header_style=None,
    )
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    # In a notebook rich would show the table itself, and leave the file empty.
    Console(
        file=file, width=WIDTH, force_jupyter=False, color_system=None, highlight=False, markup=False, emoji=False
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
