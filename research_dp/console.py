"""Tables and text on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200  # table rows are not truncated in a pipe


def table(title: str, *columns: str) -> Table:
    """A table; a column whose name ends with a colon is right-aligned, for numbers."""
    result = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        result.add_column(column.rstrip(":"), justify="right" if column.endswith(":") else "left")
    return result


def put(*parts: Any) -> None:
    """Prints text and tables: colored and as wide as the terminal, or plain and uncut in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=not isinstance(part, Table))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
