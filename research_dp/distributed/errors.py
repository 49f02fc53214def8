"""The one exception that means "the user's input is wrong", told without a traceback."""

from __future__ import annotations


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
