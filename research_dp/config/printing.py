"""Standard output whose reader may go: `| head`, or a terminal that is closed."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

SIGPIPE = 141  # exit status of a program ended by it
_STDOUT = 1


def is_read() -> bool:
    """Whether what is written to standard output can reach anybody."""
    poll = select.poll()
    poll.register(_STDOUT, 0)  # errors alone
    return not poll.poll(0)


def silence() -> None:
    """Throws away what is printed from now on, and what waits to be."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDOUT)
    os.close(null)


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Within it, what is printed once nobody reads it is thrown away, and no error."""
    with contextlib.redirect_stdout(cast(TextIO, _WhileRead(sys.stdout))):
        yield
        sys.stdout.flush()


class _WhileRead:
    """A text stream that outlives its reader; all else is that of the stream it wraps."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            silence()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            silence()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
