"""Tables and text on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200  # rows of a table are not cut in a pipe


def table(title: str, *columns: str) -> Table:
    """A table; columns whose name ends with a colon are of numbers."""
    shown = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        shown.add_column(column.rstrip(":"), justify="right" if column.endswith(":") else "left")
    return shown


def put(*parts: Any) -> None:
    """Prints text and tables: colored and as wide as a terminal, plain and uncut in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=not isinstance(part, Table))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
