"""A table as plain text, by rich."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

WIDTH = 240  # columns of text; longer cells are folded


def plain_table(title: str, *columns: str, right: int = 0) -> Table:
    """A table without rules; its first column is headed by `title`, and `right` columns after it hold numbers."""
    table = Table(title, box=None, pad_edge=False, header_style=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number < right else "left")
    return table


def table_text(table: Table) -> str:
    file = io.StringIO()
    Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
