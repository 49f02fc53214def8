"""The one exception that means "the user's input is wrong", and a check that raises it."""

from __future__ import annotations

from typing import Any


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


def check_count(name: str, value: Any, least: int) -> None:
    """Checks a whole number.

    Args:
        name: Its gin name, e.g. `train.num_steps`.
        value: What was bound.
        least: The smallest that makes sense.

    Raises:
        UsageError: It is not a whole number, or smaller.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name} = {value!r}: give a whole number of at least {least}.", binding=name
        )
