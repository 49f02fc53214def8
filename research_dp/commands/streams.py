"""Handles standard streams that cannot be written: `| head`, a closed terminal, a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

SIGPIPE = 141  # the status of a program that the signal ended


class Unwritten(Exception):
    """A command's result cannot be written to standard output; `reason` is the error."""

    def __init__(self, reason: OSError):
        super().__init__(f"standard output cannot be written: {reason.strerror}")
        self.reason = reason

    def report(self) -> int:
        """Says so, but in a pipe that was closed (`--list | head`); returns the exit status."""
        if self.reason.errno == errno.EPIPE:
            return SIGPIPE
        print(f"error: {self}", file=sys.stderr)
        return 1


def width() -> int:
    """The columns of the terminal, or COLUMNS; at least 40, which help texts need."""
    return max(40, shutil.get_terminal_size().columns)


def repair() -> None:
    """Reopens standard streams that were closed before the start (`>&-`).

    Otherwise the next opened file would get their descriptor, and with it what libraries print.
    The new descriptor is read-only: writes to it fail, as those to any other dead stream do.
    Letters that an open stream's encoding lacks are escaped, instead of raising an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # The system gives the lowest free number, which is the stream's own.
            null = os.open(os.devnull, os.O_RDONLY)
            setattr(sys, name, os.fdopen(null, mode, errors="backslashreplace"))
        elif mode == "w" and stream.errors == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def dispensable(*, but_results: bool = False) -> Iterator[None]:
    """Drops output that cannot be written: for work whose results are elsewhere.

    With `but_results` standard output has them: where it cannot be written, raises `Unwritten`.
    """
    with (
        contextlib.redirect_stdout(_Stream(sys.stdout, but_results)),
        contextlib.redirect_stderr(_Stream(sys.stderr, False)),
    ):
        try:
            yield
        except SystemExit:  # of --help, too
            sys.stdout.flush()
            raise
        sys.stdout.flush()


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Repairs the streams for a command, and at its end discards what could not be written.

    Otherwise the interpreter, too, would flush a dead stream's buffer, and fail.
    """
    repair()
    try:
        with dispensable():
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
                stream.flush()


class _Stream:
    """A text stream whose errors are dropped, or `Unwritten`; all else is the wrapped stream's."""

    def __init__(self, stream: Any, is_result: bool):
        self.wrapped: Any = stream.wrapped if isinstance(stream, _Stream) else stream
        self._is_result = is_result
        self._pending = False  # others flush what they wrote to the same stream

    def write(self, text: str) -> int:
        self._pending = True
        with self._guarded():
            return self.wrapped.write(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        pending, self._pending = self._pending, False
        if pending:
            with self._guarded():
                self.wrapped.flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # each later write tries again: a full disk may get room
            if self._is_result:
                raise Unwritten(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
