"""Handles standard streams that cannot be written: `| head`, a closed terminal, a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class Unwritten(Exception):
    """A command's result cannot be written to standard output; `reason` is the error."""

    def __init__(self, reason: OSError):
        super().__init__(f"standard output cannot be written: {reason.strerror}")
        self.reason = reason


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
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDONLY), mode))
        elif mode == "w" and stream.errors == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def dispensable() -> Iterator[None]:
    """Drops output that cannot be written: for work whose results are elsewhere."""
    with _redirected(_drop):
        yield


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Raises `Unwritten` where standard output, a command's result, cannot be written.

    Standard error is dropped where it cannot be written.
    """
    with _redirected(_raise):
        try:
            yield
        except SystemExit:  # of --help, too
            sys.stdout.flush()
            raise
        sys.stdout.flush()


def discard_pending() -> None:
    """Discards the buffer of a dead stream, whose flush would fail when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


@contextlib.contextmanager
def _redirected(on_stdout_error: Callable[[OSError], None]) -> Iterator[None]:
    with (
        contextlib.redirect_stdout(_guarded(sys.stdout, on_stdout_error)),
        contextlib.redirect_stderr(_guarded(sys.stderr, _drop)),
    ):
        yield


def _guarded(stream: TextIO, on_error: Callable[[OSError], None]) -> TextIO:
    """A stream with this error handler instead of the one that it may have."""
    plain = stream.wrapped if isinstance(stream, _Stream) else stream
    return cast(TextIO, _Stream(plain, on_error))


def _drop(error: OSError) -> None:
    del error  # each later write tries again: a full disk may get room


def _raise(error: OSError) -> None:
    raise Unwritten(error) from error


class _Stream:
    """A text stream that passes its errors to a function; all else is the wrapped stream's."""

    def __init__(self, stream: TextIO, on_error: Callable[[OSError], None]):
        self.wrapped, self._on_error = stream, on_error
        self._pending = False  # others flush what they wrote to the same stream

    def write(self, text: str) -> int:
        self._pending = True
        try:
            return self.wrapped.write(text)
        except OSError as error:
            self._on_error(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        pending, self._pending = self._pending, False
        try:
            if pending:
                self.wrapped.flush()
        except OSError as error:
            self._on_error(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
