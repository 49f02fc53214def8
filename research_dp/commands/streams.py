"""Standard streams that can no longer be written: `| head`, a closed terminal, a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class Unwritten(Exception):
    """A command's result cannot be written to standard output.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: OSError):
        super().__init__(f"standard output cannot be written: {reason.strerror}")
        self.reason = reason


def repair() -> None:
    """Gives standard streams that were closed before the start (`>&-`) a descriptor again.

    Otherwise the next file to be opened would get their number, and with it what libraries print.
    The descriptor is read-only: a write to it fails, as a write to any other dead stream does.
    Letters that an open stream's encoding lacks are escaped from now on, and no error.
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
    with _redirected(_drop, _drop):
        yield


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Raises `Unwritten` where standard output cannot be written, which is a command's result.

    Standard error is dropped where it cannot be written.
    """
    with _redirected(_raise, _drop):
        try:
            yield
        except SystemExit:  # of --help, too
            sys.stdout.flush()
            raise
        sys.stdout.flush()


def discard_pending() -> None:
    """Throws away what a dead stream still buffers: the interpreter's end would stumble over it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


@contextlib.contextmanager
def _redirected(
    on_stdout: Callable[[OSError], None], on_stderr: Callable[[OSError], None]
) -> Iterator[None]:
    with (
        contextlib.redirect_stdout(_guarded(sys.stdout, on_stdout)),
        contextlib.redirect_stderr(_guarded(sys.stderr, on_stderr)),
    ):
        yield


def _guarded(stream: TextIO, failed: Callable[[OSError], None]) -> TextIO:
    """A stream with a handler of its failures, instead of the one that it may have."""
    plain = stream.wrapped if isinstance(stream, _Stream) else stream
    return cast(TextIO, _Stream(plain, failed))


def _drop(error: OSError) -> None:
    del error  # each later write tries again: a full disk may get room


def _raise(error: OSError) -> None:
    raise Unwritten(error) from error


class _Stream:
    """A text stream that hands its failures to a function; all else is the wrapped stream's."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]):
        self.wrapped, self._failed = stream, failed
        self._pending = False  # what others wrote to the same stream is theirs to flush

    def write(self, text: str) -> int:
        self._pending = True
        try:
            return self.wrapped.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        pending, self._pending = self._pending, False
        try:
            if pending:
                self.wrapped.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
