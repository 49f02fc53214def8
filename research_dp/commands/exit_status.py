"""How commands end: with a status, and with what went wrong in a line or two."""

from __future__ import annotations

import errno
import itertools
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from research_dp.commands import flags, processes, streams
from research_dp.config import load as gin_config
from research_dp.errors import RunFailure, message_of

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130
SIGPIPE = 141  # as of a program that was ended by it
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = [
    Path(site.getusersitepackages()),
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
]
_FILTERING = "JAX_TRACEBACK_FILTERING"


class Session:
    """What a command has found out; a mistake found later is told with where it is bound.

    Attributes:
        config: The configuration, once it is loaded.
    """

    def __init__(self) -> None:
        self.config: gin_config.Config | None = None

    def load(self, options: flags.Options) -> gin_config.Config:
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
    whatever else goes wrong has one: see `traceback_of`.
    """
    streams.repair()
    try:
        with streams.dispensable():
            return _status_of(body, Session())
    finally:
        streams.discard_pending()


def _status_of(body: Callable[[Session], int], session: Session) -> int:
    try:
        with streams.required():
            return body(session)
    except streams.Unwritten as error:
        if error.reason.errno == errno.EPIPE:  # `--list | head`
            return processes.leave(SIGPIPE)
        print(f"error: {error}", file=sys.stderr)
        return processes.leave(FAILED)
    except RunFailure as error:
        _tell_failures(error)
        return processes.leave(FAILED)
    except KeyboardInterrupt:
        print("Interrupted: nothing more was done", file=sys.stderr)
        return processes.leave(INTERRUPTED)
    except Exception as error:
        _tell_failures(error)
        mistake = gin_config.as_mistake(error, session.config)
        print(mistake or traceback_of(error), file=sys.stderr)
        return processes.leave(MISTAKEN if mistake else FAILED)


def traceback_of(error: BaseException) -> str:
    """The traceback of an error; if a user's own code raised it, the frames of that code alone.

    JAX_TRACEBACK_FILTERING=off leaves all of them in.
    """
    all_frames = jax.config.values["jax_traceback_filtering"] == "off"
    user_traceback = "" if all_frames else _user_traceback(_original(error))
    if not user_traceback:
        return "".join(traceback.format_exception(error))
    head = "error: code outside research_dp failed (JAX_TRACEBACK_FILTERING=off shows all frames):"
    return f"{head}\n{user_traceback.rstrip()}"


def is_of_users_code(error: BaseException) -> bool:
    """Whether code outside this package, and not installed, raised an error."""
    return bool(_user_traceback(_original(error)))


def _user_traceback(error: BaseException | None) -> str:
    """The frames outside this package and outside installed ones; '' if it is not their error."""
    if error is None:
        return ""
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [Path(frame.f_code.co_filename) for frame, _ in frames]
    ours = [_PACKAGE in file.parents for file in files]
    users = [not our and not _is_installed(file) for our, file in zip(ours, files, strict=True)]
    raised = [user for user, our in zip(users, ours, strict=True) if user or our]
    if not raised or not raised[-1]:
        return ""
    before = _user_traceback(
        error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    )
    shown = traceback.StackSummary.extract(itertools.compress(frames, users))
    lines = ["Traceback (most recent call last):\n", *shown.format()]
    # JAX adds a note on frames that it left out.
    said = traceback.format_exception_only(error)
    lines += [line for line in said if _FILTERING not in line and line.strip("-\n")]
    return (f"{before}\nwhich led to:\n\n" if before else "") + "".join(lines)


def _is_installed(file: Path) -> bool:
    """Whether code was installed, or comes with Python, or is in no file."""
    return str(file).startswith("<") or any(folder in file.parents for folder in _INSTALLED)


def _original(error: BaseException | None) -> BaseException | None:
    """The error of which gin raised a copy that says where, and hides what it is of."""
    while error is not None and message_of(error) != str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def _tell_failures(error: BaseException | None) -> None:
    """Tells how the run failed; first what came first, if closing it went wrong too."""
    error = _original(error)
    if error is None:
        return
    _tell_failures(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
    if isinstance(error, RunFailure):
        print(f"error: {error}", file=sys.stderr)
