"""How commands end: with a status, and with what went wrong in a line or two."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable

from research_dp.config import command_line, environment, gin_config, printing
from research_dp.distributed.errors import RunFailure, message_of

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130
SIGPIPE = 141  # as of a program that was ended by it


class Session:
    """What a command has found out; a mistake found later is told with where it is bound.

    Attributes:
        config: The configuration, once it is loaded.
    """

    def __init__(self) -> None:
        self.config: gin_config.Config | None = None

    def load(self, options: command_line.Options) -> gin_config.Config:
        """Loads the whole run that a command line asks for."""
        self.config = gin_config.load(
            options.gin_files,
            options.bindings,
            imports=options.imports,
            allow_unused=options.allow_unused,
            whole=True,
        )
        return self.config


def told(body: Callable[[Session], int]) -> int:
    """Runs the body of a command; returns the exit status.

    A user's mistake is told without a traceback, and so is a failure that says what is to be done;
    whatever else goes wrong is a fault of this program, or of its libraries, and keeps its own.
    """
    printing.repair()
    try:
        with printing.dispensable():
            return _status_of(body, Session())
    finally:
        printing.discard_pending()


def _status_of(body: Callable[[Session], int], session: Session) -> int:
    try:
        with printing.required():
            return body(session)
    except printing.Unwritten as error:
        if error.reason.errno == errno.EPIPE:  # `--list | head`
            return environment.leave(SIGPIPE)
        print(f"error: {error}", file=sys.stderr)
        return environment.leave(FAILED)
    except RunFailure as error:
        _tell_failures(error)
        return environment.leave(FAILED)
    except KeyboardInterrupt:
        print("Interrupted: nothing more was done", file=sys.stderr)
        return environment.leave(INTERRUPTED)
    except Exception as error:
        _tell_failures(error)
        mistake = gin_config.as_mistake(error, session.config)
        print(mistake or traceback.format_exc(), file=sys.stderr)
        return environment.leave(MISTAKEN if mistake else FAILED)


def _tell_failures(error: BaseException | None) -> None:
    """Tells how the run failed; first what came first, if closing it went wrong too."""
    while error is not None and message_of(error) != str(error) and error.__context__ is not None:
        error = error.__context__  # gin raises a copy that says where, and hides what it is of
    if error is None:
        return
    _tell_failures(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
    if isinstance(error, RunFailure):
        print(f"error: {error}", file=sys.stderr)
