"""The exceptions whose message is all that a user needs, and checks that raise the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from research_dp.argument_types import AtLeast, Limit


class UsageError(ValueError):
    """A mistake in configuration, flags, data or a checkpoint; commands exit with status 2.

    Args:
        message: One or two lines: what is wrong, with the numbers, and what to do.
        binding: The gin name to blame, e.g. `make_mesh.axes`; the commands add the file and line
            that bound it.
    """

    def __init__(self, message: str, *, binding: str | None = None):
        super().__init__(message)
        self.binding = binding


class RunFailure(RuntimeError):
    """A run went wrong through no mistake in its input; commands exit with status 1.

    The message says what, where (process, step, parameter), and what to do.
    """


IN_CALL = "\n  In call"  # how what gin adds to a message begins


def message_of(error: BaseException) -> str:
    """What an error says, without the calls and addresses that gin adds to it."""
    return str(error).split(IN_CALL)[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).split("\n")[0]


def some_of(names: Sequence[str], most: int) -> str:
    """The first of several names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_methods(function: str, target: Any, methods: Sequence[str]) -> None:
    """Raises UsageError for a name in a function's `methods` that a class lacks."""
    for name in methods:
        if not hasattr(target, name):
            raise UsageError(f"{function}.methods: {target.__name__} has no method {name!r}.")


def check_kind(name: str, value: Any, kind: Any, example: str) -> None:
    """Checks that a parameter is an object of some class.

    Args:
        name: Its gin name, e.g. `train.model`.
        value: What it was given.
        kind: The class, or several.
        example: What would be right, as it stands in a gin file.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(value, kind):
        return
    function = getattr(value, "__name__", None)
    if callable(value) and function:
        problem = f"{name} = @{function} is the function itself; @{function}() is what it returns."
    else:
        problem = f"{name} = {value!r}: give e.g. {example}."
    raise UsageError(problem, binding=name)


def check_count(name: str, value: Any, least: int) -> None:
    """Checks a whole number.

    Args:
        name: Its gin name, e.g. `train.num_steps`.
        value: What was bound.
        least: The smallest that makes sense.

    Raises:
        UsageError: It is not a whole number, or smaller.
    """
    check_limit(name, value, AtLeast(least))


def check_limit(name: str, value: Any, limit: Limit) -> None:
    """Raises UsageError unless a limit of `kinds` accepts a parameter."""
    if not limit.accepts(value):
        raise UsageError(f"{name} = {value!r}: give {limit}.", binding=name)
