"""What is a terminal, and how text is wrapped on it."""

from __future__ import annotations

import os
import re
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


def console_of(stream: TextIO, **settings: Any) -> Console:
    """Rich's console of a stream: one of a terminal only if the stream is a terminal."""
    is_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Console(file=stream, force_terminal=is_terminal, highlight=False, **settings)


def wrapped(text: Text, width: int) -> list[Text]:
    """Lines of at most `width` columns, broken between words: a longer word, such as a path, not.

    The terminal itself wraps that one, so that it can be copied.
    """
    lines: list[Text] = []
    for line in text.split(allow_blank=True):
        begin, starts = 0, []
        for word in re.finditer(r"\S+", line.plain):
            has_words = line.plain[begin : word.start()].strip()
            if has_words and cell_len(line.plain[begin : word.end()]) > width:
                begin = word.start()
                starts.append(begin)
        lines += line.divide(starts)
    return lines
