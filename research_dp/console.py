"""Tables, text and progress: as wide as a terminal is. In a pipe each row of a table is a line.

The variable COLUMNS sets a width, in a pipe too. A terminal that cannot move its cursor (TERM=dumb)
is a pipe here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

_PIPE_WIDTH = 10_000  # nothing is wrapped in a pipe
_GAP, _INDENT = 2, 4
_PROSE = 24  # prose is wrapped to no less than this
_PATIENCE = 2.0  # seconds that an activity may take before a pipe gets a line about it
_SECONDS = 4.0  # between two lines about an activity in a pipe

# A number and its unit are one word: the space between them is no place to break a line.
_WORD = re.compile(r"(?:\S|(?<=\d) (?=(?:[kMGT]?B|ms|s|ULPs|bytes|steps|tokens/s)\b))+")

Report = Callable[..., None]  # called with an activity and a detail, as `Progress` is


@dataclasses.dataclass
class Table:
    """Rows of cells under named columns.

    A column whose name ends with a colon has numbers, to the right; one whose name ends with a
    tilde has prose, which may be wrapped between words. `grouped` rows that begin with the same
    cell show it once.
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

    def layout(self, width: int) -> list[RenderableType]:
        """The table in at most `width` columns, if its longest words allow that.

        Each row is a line, under heads that may be wrapped. Where that does not fit, a row is a
        paragraph: each cell has its column's name before it.
        """
        title = wrapped(Text(self.title), width) if self.title else []
        for wraps_heads in (False, True):
            grid = self._grid(wraps_heads)
            if Console(width=_PIPE_WIDTH).measure(grid).minimum <= width:
                return [*title, grid]
        lines: list[Text] = []
        for row in self.rows:
            pairs = [(head, cell) for head, cell in zip(self.heads, row, strict=True) if str(cell)]
            named = (Text.assemble((f"{head}: " if head else "", "bold"), x) for head, x in pairs)
            lines += filled(named, width)
        return [*title, Text(), *lines, Text()]

    def _grid(self, wraps_heads: bool) -> Grid:
        """Rows under heads. What is not prose has the width that it needs."""
        style = box.SIMPLE if self.rows else box.SIMPLE_HEAD
        grid = Grid(box=style, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for i, (name, head) in enumerate(zip(self.columns, self.heads, strict=True)):
            texts = [
                *(head.split() if wraps_heads else [head]),
                *(str(row[i]) for row in self.rows),
            ]
            width = max(map(cell_len, texts), default=0)
            if name.endswith("~"):
                grid.add_column(Text(head, "bold"), min_width=min(width, _PROSE))
            else:
                is_number = name.endswith(":")
                grid.add_column(
                    Text(head, "bold"), width=width, justify="right" if is_number else "left"
                )
        before = None
        for key, *cells in self.rows:
            is_same = self.grouped and str(key) == before
            grid.add_row(*map(Text.assemble, ["" if is_same else key, *cells]))
            before = str(key)
        return grid


def table(title: str, *columns: str, grouped: bool = False) -> Table:
    """An empty `Table`."""
    return Table(title, columns, grouped)


def wrapped(text: Text, width: int) -> list[Text]:
    """Lines of at most `width` columns, broken between words: a longer word, such as a path, not.

    The terminal itself wraps that one, so that it can be copied.
    """
    lines: list[Text] = []
    for line in text.split(allow_blank=True):
        begin, starts = 0, []
        for word in _WORD.finditer(line.plain):
            has_words = line.plain[begin : word.start()].strip()
            if has_words and cell_len(line.plain[begin : word.end()]) > width:
                begin = word.start()
                starts.append(begin)
        lines += line.divide(starts)
    return lines


def filled(parts: Iterable[Text], width: int) -> list[Text]:
    """Parts in lines of at most `width`, of which the later are indented.

    A part is broken, between words, only if it is longer than a line.
    """
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + _GAP + part.cell_len <= width - _INDENT:
            lines[-1].append(" " * _GAP).append_text(part)
        else:
            lines += wrapped(part, width - _INDENT)
    return [Text(" " * _INDENT if i else "").append_text(line) for i, line in enumerate(lines)]


def _console(stream: TextIO, *, quiet: bool = False) -> Console:
    """Rich's console of a stream: one of a terminal only if the stream is a terminal."""
    is_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    width = None if is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(
        file=stream, force_terminal=is_terminal, highlight=False, quiet=quiet, width=width
    )


def put(*parts: Any, file: TextIO | None = None) -> None:
    """Prints text, tables and lists of the parts of a line, to standard output without a `file`.

    Text on a terminal is wrapped between words, and has its style. No word is broken.
    """
    console = _console(file or sys.stdout)
    width = console.width
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, Table):
                lines: Sequence[RenderableType] = part.layout(width)
            elif isinstance(part, list):
                lines = filled(part, width)
            else:
                lines = wrapped(Text.assemble(part), width)
            console.print(*lines, sep="\n", soft_wrap=True)
    if parts:
        printed = (line.rstrip() for line in captured.get().splitlines())
        print("\n".join(printed), file=file, flush=True)


class Progress:
    """Shows what is being done, and for how long, on standard error, as a context.

    On a terminal it is one line, which is gone at the end. In a pipe each activity is a line. One
    that takes long is repeated every few seconds, with its detail only where that has changed.
    """

    _repeats = True

    def __init__(self, activity: str = "", stream: TextIO | None = None, *, quiet: bool = False):
        self._activity, self._detail, self._since = "", "", 0.0
        self._first, self._ended = activity, threading.Event()
        self._console = _console(stream or sys.stderr, quiet=quiet)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # What is printed meanwhile is shown above the line.
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
        self(self._first)
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._live:
            self._live.stop()

    def __call__(self, activity: str, detail: str = "", *, at_once: bool = True) -> None:
        """Begins an activity, or continues it with another detail, e.g. 'step 3 of 30'.

        In a pipe it is a line `at_once`, or only if it takes long; '' ends an activity.
        """
        if activity == self._activity:
            self._detail = detail
            return
        self._ended.set()
        self._activity, self._detail = activity, detail
        self._since, self._ended = time.monotonic(), threading.Event()
        if activity and not self._live:
            if at_once:
                self.say(activity)
            waits = itertools.chain(
                [] if at_once else [_PATIENCE], itertools.repeat(_SECONDS) if self._repeats else []
            )
            threading.Thread(target=self._remind, args=(self._ended, waits), daemon=True).start()

    @property
    def width(self) -> int:
        """The columns that a line may have."""
        return self._console.width if self._live else _PIPE_WIDTH

    def say(self, text: str) -> None:
        """Prints a line; a terminal wraps it between words."""
        if self._live:
            lines = wrapped(Text(text), self.width)
            self._console.print(*lines, sep="\n", soft_wrap=True)
        elif not self._console.quiet:
            print(text, file=self._console.file, flush=True)

    def _line(self) -> RenderableType:
        detail = f", {self._detail}" if self._detail else ""
        words = f"{self._activity}{detail} ... {time.monotonic() - self._since:.0f} s"
        return Text(words, no_wrap=True, overflow="ellipsis")

    def _remind(self, ended: threading.Event, waits: Iterable[float]) -> None:
        """Prints what is being done after each of the waits, until it has ended."""
        said = ""
        for wait in waits:
            if ended.wait(wait):
                return
            detail, line = self._detail, str(self._line())
            if (not detail or detail != said) and not ended.is_set():
                self.say(line)
            said = detail


def silent(activity: str, detail: str = "") -> None:
    """Reports nothing."""
