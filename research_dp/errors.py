"""The exceptions whose message is all that a user needs, and checks that raise `UsageError`."""

from __future__ import annotations

import contextlib
import re
import site
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ALSO = "also: "  # begins a note of an error: what failed after it
_INSTALLED = {
    Path(site.getusersitepackages()),
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
}


class UsageError(ValueError):
    """A mistake in configuration, flags, data or a checkpoint; commands exit with status 2.

    The message says in one or two lines what is wrong, with the numbers, and what to do. `binding`
    is the gin name to blame, e.g. `make_mesh.axes`: commands add the file and line that bound it.
    """

    def __init__(self, message: str, *, binding: str | None = None):
        super().__init__(message)
        self.binding = binding


class RunFailure(RuntimeError):
    """A run failed although its input is correct; commands exit with status 1.

    The message says what, where (process, step, parameter), and what to do.
    """


def binding_error(binding: str, problem: str) -> UsageError:
    """An error whose message starts with the gin name to blame."""
    return UsageError(binding + problem, binding=binding)


@contextlib.contextmanager
def at_end(close: Callable[[], Any]) -> Iterator[None]:
    """Calls `close` after a block; its error becomes a note of one that ended the block."""
    try:
        yield
    except BaseException as first:
        try:
            close()
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, UsageError | RunFailure) else f"{type(error).__name__}: "
            for note in (f"{ALSO}{kind}{message_of(error)}", *getattr(error, "__notes__", ())):
                first.add_note(note)
        raise
    close()


def message_of(error: BaseException) -> str:
    """The message of an error, without the calls and addresses that gin appends to it."""
    return str(error).split("\n  In call")[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class, if it has none."""
    return str(error).split("\n")[0] or type(error).__name__


def printable(text: str, most: int = 200) -> str:
    """A text that a file has, as messages show it: cut, in one line, no control characters."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
    return shown + "..." * (len(text) > most)


def owner(file: str) -> str:
    """Whose code is in a file: 'package', 'library' (what is installed) or 'user'."""
    folders = Path(file).parents
    if Path(__file__).parent in folders:
        return "package"
    is_library = file.startswith("<") or not _INSTALLED.isdisjoint(folders)
    return "library" if is_library else "user"


def users_line(frames: Iterable[Any]) -> str:
    """FILE:LINE of the innermost frame of a user's code, or ''."""
    places = [f"{x.filename}:{x.lineno}" for x in frames if owner(x.filename) == "user"]
    return "".join(places[-1:])


def some_of(names: Sequence[str], most: int) -> str:
    """The first few of several names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def check_patterns(
    binding: str, patterns: Iterable[str], replacements: Mapping[str, str] | None = None
) -> None:
    """UsageError, about a binding, for what is no regular expression, or no replacement of one."""
    for pattern in patterns:
        replacement = replacements[pattern] if replacements else ""
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError) as error:
            what = f" that {replacement!r} replaces" if replacement else ""
            problem = f": {pattern!r} is no regular expression{what}: {error}."
            raise binding_error(binding, problem) from error


def check_methods(function: str, target: Any, methods: Sequence[str]) -> None:
    """Raises UsageError if a class lacks one of a function's `methods`."""
    for name in methods:
        if not hasattr(target, name):
            raise UsageError(f"{function}.methods: {target.__name__} has no method {name!r}.")
