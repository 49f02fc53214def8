"""Ends commands with an exit status, and with one or two lines on what went wrong."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import jax

from research_dp.commands import configured, jax_setup, streams
from research_dp.commands.entries import INTERRUPTED, INTERRUPTION
from research_dp.config.load import as_mistake
from research_dp.errors import ALSO, RunFailure, first_line, message_of
from research_dp.errors import owner as _owner
from research_dp.training import preemption

FAILED, MISTAKEN = 1, 2
_PACKAGE = Path(__file__).parents[1]
_FILTERING = "JAX_TRACEBACK_FILTERING"
# What gin and JAX append to the message of an error.
_REMARKS = re.compile(rf"\n  In call to configurable '.*|\n-{{10,}}\n.*{_FILTERING}=off.*")


@streams.usable()
@preemption.exit_on_signals()
def run_command(body: Callable[[], int]) -> int:
    """Runs the body of a command; returns the exit status.

    A user's mistake is printed without a traceback, and so is a failure that says what to do. All
    other errors have one: see `traceback_of`.
    """
    jax_setup.quieten_tensorflow()
    try:
        with streams.dispensable(but_results=True), configured.speaking_flags():
            return body()
    except streams.Unwritten as error:
        return jax_setup.leave(error.report())
    except KeyboardInterrupt as error:
        _print_failures(error, INTERRUPTION)
        return jax_setup.leave(INTERRUPTED)
    except SystemExit as error:
        if not is_of_users_code(error):
            raise
        print(traceback_of(error), file=sys.stderr)
        return jax_setup.leave(FAILED)
    except RunFailure as error:
        _print_failures(error)
        return jax_setup.leave(FAILED)
    except Exception as error:
        mistake = as_mistake(error, None)
        _print_failures(error, mistake or _out_of_memory(error) or traceback_of(error))
        return jax_setup.leave(MISTAKEN if mistake else FAILED)


def _out_of_memory(error: Exception) -> str:
    """What to do about an allocation that failed on a device; '' for another error."""
    cause: BaseException | None = error
    while cause and not re.match("RESOURCE_EXHAUSTED: .*memory", first_line(cause)):
        cause = _cause(cause)
    if cause is None or jax.config.values["jax_traceback_filtering"] == "off":
        return ""
    return (
        f"error: {first_line(cause)}\nA device has too little memory. `python -m research_dp.plan "
        "--topology=here --strategies=all` with the same flags says what each strategy needs. On a "
        "GPU JAX takes 75% of it; XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 gives a run more. "
        f"{_FILTERING}=off shows where it was."
    )


def traceback_of(error: BaseException) -> str:
    """The traceback of an error; of a user's code only that code's frames, if it raised it.

    Frames of libraries between others are left out, and so is what gin and JAX add to messages.
    JAX_TRACEBACK_FILTERING=off leaves all in.
    """
    original = _original(error)
    if jax.config.values["jax_traceback_filtering"] == "off" or original is None:
        return "".join(traceback.format_exception(error))
    if said := _wrong_call(original):
        return f"error: {said}"
    if user_traceback := _user_traceback(original):
        head = f"error: code outside research_dp failed ({_FILTERING}=off shows all frames):"
        return f"{head}\n{user_traceback.rstrip()}"
    shown = traceback.TracebackException.from_exception(original)
    _leave_out_libraries(shown)
    return _REMARKS.sub("", "".join(shown.format())).rstrip()


def is_of_users_code(error: BaseException) -> bool:
    """Whether code outside this package, and not installed, raised an error."""
    return bool(_user_traceback(_original(error)))


def _print_failures(error: BaseException | None, said: str = "") -> None:
    """Prints the causes of an error, what is `said` of it, and after each what failed later."""
    if error is None:
        return
    original = _original(error) or error
    _print_failures(_cause(original))
    said = said or (f"error: {original}" if isinstance(original, RunFailure) else "")
    notes = (x for x in getattr(error, "__notes__", ()) if x.startswith(ALSO) and x not in said)
    for line in filter(None, (said, *notes)):
        print(line, file=sys.stderr)


def _user_traceback(error: BaseException | None) -> str:
    """The frames outside this package and installed ones; '' if it is not a user's error."""
    if error is None:
        return ""
    frames = list(traceback.walk_tb(error.__traceback__))
    owners = [_owner(frame.f_code.co_filename) for frame, _ in frames]
    if [owner for owner in owners if owner != "library"][-1:] != ["user"]:
        return ""
    before = _user_traceback(_cause(error))
    in_users = (owner == "user" for owner in owners)
    shown = traceback.StackSummary.extract(itertools.compress(frames, in_users))
    lines = ["Traceback (most recent call last):\n", *shown.format()]
    # JAX adds a note about the frames that it left out.
    last = traceback.format_exception_only(error)
    lines += [line for line in last if _FILTERING not in line and line.strip("-\n")]
    return (f"{before}\nwhich led to:\n\n" if before else "") + "".join(lines)


def _leave_out_libraries(shown: traceback.TracebackException | None) -> None:
    """Drops the frames of libraries, but those at the end, of an error and its causes."""
    while shown is not None:
        owners = [_owner(frame.filename) for frame in shown.stack]
        last = max((i for i, owner in enumerate(owners) if owner != "library"), default=-1)
        kept = [f for i, f in enumerate(shown.stack) if i > last or owners[i] != "library"]
        shown.stack = traceback.StackSummary.from_list(kept)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def _wrong_call(error: BaseException) -> str:
    """What is wrong where this package calls a user's function with arguments it does not take."""
    called = re.match(r"([\w.<>]+)\(\) (?:got|missing|takes) ", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame for frame in frames if _owner(frame.filename) != "library"]
    if not isinstance(error, TypeError) or not called or not calls:
        return ""
    call = calls[-1]
    # The function itself is in no frame: the call failed before it had one.
    functions = (x for x in gc.get_objects() if isinstance(x, types.FunctionType))
    codes = [f.__code__ for f in functions if f.__qualname__ == called[1]]
    places = {(code.co_filename, code.co_firstlineno) for code in codes}
    if not any(_owner(file) == "user" for file, _ in places) or _owner(call.filename) != "package":
        return ""
    file = Path(call.filename).relative_to(_PACKAGE.parent)
    where = "{}:{}: ".format(*places.pop()) if len(places) == 1 else ""
    return f"{where}{error}. research_dp calls `{call.line}` ({file}:{call.lineno})."


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _original(error: BaseException | None) -> BaseException | None:
    """The error that gin re-raised as a copy with the place added, which hides its class."""
    while error is not None and message_of(error) != str(error) and error.__context__ is not None:
        error = error.__context__
    return error
