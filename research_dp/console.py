"""Tables, text and progress: as wide as a terminal is. In a pipe text is plain and uncut.

A table in a pipe has at most 100 columns. The variable COLUMNS sets another width, in a pipe too.
A terminal that cannot move its cursor (TERM=dumb) is a pipe here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from research_dp.terminal import console_of, wrapped

_PIPE_WIDTH = 10_000  # no text is wrapped in a pipe
_PIPE_TABLE = 100  # columns of a table there, which people read in logs
_GAP, _INDENT = 2, 4
_PROSE = 24  # prose is wrapped to no less than this
_SECONDS = 4.0  # between two lines of progress in a pipe


# A number and its unit stay on one line: the space between them is this while lines are made.
_GLUE = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|ms|s|ULPs|bytes|steps|tokens/s)\b)")

Report = Callable[..., None]  # called with an activity and a detail, as `Progress` is


@dataclasses.dataclass
class Table:
    """Rows of cells under named columns, the first of which names the row.

    A column whose name ends with a colon has numbers, to the right; one whose name ends with a
    tilde has prose, which may be wrapped between words. No other cell is wrapped or cut. `grouped`
    rows that begin with the same cell show it once.
    """

    title: str
    columns: tuple[str, ...]
    grouped: bool = False
    rows: list[tuple[str | Text, ...]] = dataclasses.field(default_factory=list)

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row, of as many cells as there are columns; cells may have a style."""
        self.rows.append(cells)

    @property
    def heads(self) -> list[str]:
        """The names of the columns, without what marks their kind."""
        return [name.rstrip(":~") for name in self.columns]

    def layout(self, width: int) -> RenderableType:
        """The table in at most `width` columns, if its longest cells allow that.

        The rows are lines if that fits. Else they are columns, if they fit side by side. Else the
        first cell of a row has a line of its own, or the rows are columns of several blocks,
        whichever is shorter.
        """
        title = [Text(self.title)] if self.title else []
        heads = [_Cell.head(name) for name in self.columns]
        rows = [
            list(itertools.starmap(_Cell.of, zip(row, self.columns, strict=True)))
            for row in self.rows
        ]
        lines = _keys_shown_once(rows) if self.grouped else rows
        if widths := _widths([heads, *lines], width):
            return Group(*title, _grid(widths, heads, lines))
        blocks = list(_transposed(heads, rows, width))
        if len(blocks) > 1 and 2 * len(rows) < len(blocks) * len(heads):
            is_prose = [i == 0 or name.endswith("~") for i, name in enumerate(self.columns)]
            if stacked := _stacked(heads, lines, is_prose, width):
                return Group(*title, *stacked)
        return Group(*title, *blocks)


class _Cell(NamedTuple):
    """A cell; `least` is the number of terminal columns that it needs."""

    text: Text
    least: int
    justify: Literal["left", "right"] = "left"

    @classmethod
    def head(cls, name: str) -> _Cell:
        """The head of a column, which is wrapped between words."""
        text = Text(name.rstrip(":~"), "bold")
        return cls(text, _longest_word(text), "right" if name.endswith(":") else "left")

    @classmethod
    def of(cls, content: str | Text, column: str) -> _Cell:
        """A cell of a column."""
        text = content if isinstance(content, Text) else Text(content)
        least = text.cell_len
        if column.endswith("~"):
            least = max(_longest_word(text), min(least, _PROSE))
        return cls(text, least, "right" if column.endswith(":") else "left")


def _longest_word(text: Text) -> int:
    return max((Text(word).cell_len for word in text.plain.split()), default=0)


def _keys_shown_once(rows: Sequence[list[_Cell]]) -> list[list[_Cell]]:
    previous = [None, *(row[0].text.plain for row in rows)]
    return [
        [_Cell(Text(), 0), *row[1:]] if row[0].text.plain == before else row
        for row, before in zip(rows, previous, strict=False)
    ]


def _widths(rows: Sequence[Sequence[_Cell]], width: int) -> list[int]:
    """The width of each column, the widest that fit; empty if the least ones do not."""
    columns = list(zip(*rows, strict=True))
    least = [max(cell.least for cell in column) for column in columns]
    widths = [max(cell.text.cell_len for cell in column) for column in columns]
    while sum(widths) + _GAP * len(widths) > width:
        slack = [now - needed for now, needed in zip(widths, least, strict=True)]
        if not any(slack):
            return []
        widths[slack.index(max(slack))] -= 1
    return widths


def _grid(widths: Sequence[int], heads: Sequence[_Cell], rows: Sequence[Sequence[_Cell]]) -> Grid:
    """Rows under heads, with columns of the given widths."""
    style = box.SIMPLE if rows else box.SIMPLE_HEAD
    grid = Grid(box=style, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for head, width in zip(heads, widths, strict=True):
        grid.add_column(head.text, width=width, justify=head.justify)
    for row in rows:
        grid.add_row(*(cell.text for cell in row))
    return grid


def _transposed(
    heads: Sequence[_Cell], rows: Sequence[Sequence[_Cell]], width: int
) -> Iterator[Grid]:
    """Blocks of as many rows as fit side by side, each a column."""
    start = 0
    while start < len(rows):
        widths: list[int] = []
        block: list[list[_Cell]] = []
        for count in range(1, len(rows) - start + 1):
            wider = [list(line) for line in zip(heads, *rows[start : start + count], strict=True)]
            fitting = _widths(wider, width)
            if not fitting and block:
                break
            least = [max(cell.least for cell in column) for column in zip(*wider, strict=True)]
            widths, block = fitting or least, wider
        (first, *keys), *body = block
        yield _grid(widths, [first, *(key._replace(justify="right") for key in keys)], body)
        start += len(keys)


def _stacked(
    heads: Sequence[_Cell], rows: Sequence[Sequence[_Cell]], is_prose: Sequence[bool], width: int
) -> list[RenderableType]:
    """The key and the prose of each row on a line above its other cells; empty if too wide."""
    above = [[c for c, prose in zip(row, is_prose, strict=True) if prose] for row in (heads, *rows)]
    below = [
        [c for c, prose in zip(row, is_prose, strict=True) if not prose] for row in (heads, *rows)
    ]
    widths = _widths(below, width - _INDENT)
    if not widths:
        return []
    texts = [Text("  ").join(cell.text for cell in line if cell.text) for line in above]
    parts: list[RenderableType] = [Text(), Padding(texts[0], (0, 0, 0, 1))]
    parts.append(Padding(_grid(widths, below[0], []), (0, 0, 0, _INDENT - 1)))
    for text, cells in zip(texts[1:], below[1:], strict=True):
        grid = Grid.grid(padding=(0, _GAP, 0, 0))
        for cell, one in zip(cells, widths, strict=True):
            grid.add_column(width=one, justify=cell.justify)
        grid.add_row(*(cell.text for cell in cells))
        parts += [Padding(text, (0, 0, 0, 1))] if text else []
        parts.append(Padding(grid, (0, 0, 0, _INDENT)))
    return [*parts, Text()]


def table(title: str, *columns: str, grouped: bool = False) -> Table:
    """An empty `Table`."""
    return Table(title, columns, grouped)


def _console(file: TextIO | None) -> Console:
    console = console_of(file or sys.stdout)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return console_of(file or sys.stdout, width=_PIPE_WIDTH)


def with_remarks(lines: Iterable[tuple[str, str]], most: int) -> list[Text]:
    """Lines, each with a remark to the right of all, or below it if the line is long.

    Remarks begin after `most` columns, sooner on a narrow terminal.
    """
    pairs = list(lines)
    widest = max((len(remark) for _, remark in pairs), default=0)
    column = max(_PROSE, min(most, _console(None).width - widest - _GAP))
    return [
        Text(line.ljust(column) if len(line) <= column else f"{line}\n{' ' * column}")
        .append(" " * _GAP)
        .append(remark, "cyan")
        for line, remark in pairs
    ]


def put(*parts: Any, file: TextIO | None = None) -> None:
    """Prints text and tables, to standard output without a `file`.

    Text on a terminal is wrapped between words, and has its style. No word is broken.
    """
    console = _console(file)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, Table):
                is_pipe = console.width == _PIPE_WIDTH
                console.print(part.layout(_PIPE_TABLE if is_pipe else console.width))
            else:
                text = part if isinstance(part, Text) else Text(part)
                glued = Text(_UNIT.sub(_GLUE, text.plain), text.style, spans=text.spans)
                for line in wrapped(glued, console.width):
                    console.print(line, soft_wrap=True)
    printed = captured.get().replace(_GLUE, " ")
    if parts:
        lines = (line.rstrip() for line in printed.splitlines())
        print("\n".join(lines), file=file, flush=True)


class Progress:
    """Shows what a command is doing, and for how long, on standard error, as a context.

    On a terminal it is one line, which is gone at the end. In a pipe each activity is a line. One
    that takes long is repeated every few seconds, with its detail only where that has changed.
    """

    def __init__(self, activity: str):
        self._activity, self._detail, self._since = activity, "", time.monotonic()
        self._ended, self._on_exit = threading.Event(), contextlib.ExitStack()

    def __call__(self, activity: str, detail: str = "") -> None:
        """Begins an activity, or continues it with another detail, e.g. 'step 3 of 30'."""
        is_new, self._activity, self._detail = activity != self._activity, activity, detail
        if is_new:
            self._since = time.monotonic()
            self._print(activity)

    def __enter__(self) -> Self:
        console = console_of(sys.stderr)
        self._in_pipe = not console.is_terminal
        if self._in_pipe:
            self._print(self._activity)
            repeater = threading.Thread(target=self._repeat, daemon=True)
            repeater.start()
            self._on_exit.callback(repeater.join)
            self._on_exit.callback(self._ended.set)
        else:
            # What is printed meanwhile is shown above the line.
            live = Live(
                get_renderable=self._line,
                console=console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._on_exit.enter_context(live)
        return self

    def __exit__(self, *error: object) -> None:
        self._on_exit.close()

    def _line(self) -> Text:
        detail = f", {self._detail}" if self._detail else ""
        return Text(f"{self._activity}{detail} ... {time.monotonic() - self._since:.0f} s")

    def _print(self, line: str) -> None:
        if self._in_pipe:
            self._printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        shown = ("", "")
        while not self._ended.wait(max(0.1, self._printed + _SECONDS - time.monotonic())):
            now = (self._activity, self._detail)
            has_changed = not self._detail or now != shown
            if time.monotonic() >= self._printed + _SECONDS and has_changed:
                shown = now
                self._print(self._line().plain)


def silent(activity: str, detail: str = "") -> None:
    """Reports nothing."""
