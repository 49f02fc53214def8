"""Tables for terminals."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(title: str, *columns: str) -> Table:
    """A table; columns whose name ends with a colon are of numbers."""
    shown = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        shown.add_column(column.rstrip(":"), justify="right" if column.endswith(":") else "left")
    return shown
