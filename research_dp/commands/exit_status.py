"""Ends commands with an exit status, and with one or two lines on what went wrong."""

from __future__ import annotations

import dataclasses
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
from research_dp.config.load import Config, as_mistake, load
from research_dp.errors import RunFailure, message_of

FAILED, MISTAKEN, INTERRUPTED = 1, 2, 130
SIGPIPE = 141  # the status of a program that the signal ended
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = [
    Path(site.getusersitepackages()),
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
]
_FILTERING = "JAX_TRACEBACK_FILTERING"


@dataclasses.dataclass
class Session:
    """The configuration, once it is loaded; a later error names the line that bound a value."""

    config: Config | None = None

    def load(self, options: flags.Options) -> Config:
        """Loads the run that a command line asks for."""
        self.config = load_run(options)
        return self.config


def load_run(
    options: flags.Options,
    files: tuple[str, ...] = (),
    bindings: tuple[str, ...] = (),
    *,
    allow_unused: bool = False,
) -> Config:
    """Loads the run of a command line, with further files and bindings."""
    return load(
        [*options.gin_files, *files],
        [*options.bindings, *bindings],
        imports=options.imports,
        allow_unused=options.allow_unused or allow_unused,
        complete=True,
    )


def run_command(body: Callable[[Session], int]) -> int:
    """Runs the body of a command; returns the exit status.

    A user's mistake is printed without a traceback, and so is a failure that says what to do. All
    other errors have one: see `traceback_of`.
    """
    streams.repair()
    try:
        with streams.dispensable():
            return _status_of(body, Session())
    finally:
        streams.discard_pending()


def traceback_of(error: BaseException) -> str:
    """The traceback of an error; of a user's code only that code's frames, if it raised it.

    JAX_TRACEBACK_FILTERING=off leaves all frames in.
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
        _print_failures(error)
        return processes.leave(FAILED)
    except KeyboardInterrupt:
        print("Interrupted: nothing more was done", file=sys.stderr)
        return processes.leave(INTERRUPTED)
    except Exception as error:
        _print_failures(error)
        mistake = as_mistake(error, session.config)
        print(mistake or traceback_of(error), file=sys.stderr)
        return processes.leave(MISTAKEN if mistake else FAILED)


def _print_failures(error: BaseException | None) -> None:
    """Prints how the run failed; the cause first, if closing the run failed too."""
    error = _original(error)
    if error is None:
        return
    _print_failures(_cause(error))
    if isinstance(error, RunFailure):
        print(f"error: {error}", file=sys.stderr)


def _user_traceback(error: BaseException | None) -> str:
    """The frames outside this package and installed ones; '' if it is not a user's error."""
    if error is None:
        return ""
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [Path(frame.f_code.co_filename) for frame, _ in frames]
    in_package = [_PACKAGE in file.parents for file in files]
    in_users = [
        not ours and not _is_installed(f) for ours, f in zip(in_package, files, strict=True)
    ]
    relevant = [user for user, ours in zip(in_users, in_package, strict=True) if user or ours]
    if not relevant or not relevant[-1]:
        return ""
    before = _user_traceback(_cause(error))
    shown = traceback.StackSummary.extract(itertools.compress(frames, in_users))
    lines = ["Traceback (most recent call last):\n", *shown.format()]
    # JAX adds a note about the frames that it left out.
    last = traceback.format_exception_only(error)
    lines += [line for line in last if _FILTERING not in line and line.strip("-\n")]
    return (f"{before}\nwhich led to:\n\n" if before else "") + "".join(lines)


def _is_installed(file: Path) -> bool:
    """Whether code was installed, comes with Python, or is in no file."""
    return str(file).startswith("<") or any(folder in file.parents for folder in _INSTALLED)


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _original(error: BaseException | None) -> BaseException | None:
    """The error that gin re-raised as a copy with the place added, which hides its class."""
    while error is not None and message_of(error) != str(error) and error.__context__ is not None:
        error = error.__context__
    return error
