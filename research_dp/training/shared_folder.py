"""Whether all processes of a run see one folder of results, before they work for hours."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

import jax

from research_dp.distributed.multihost import first_problem, texts_of_all
from research_dp.errors import UsageError
from research_dp.training import files

_SECONDS = 10.0  # in which a network's file system shows a new file to other machines
_PAUSE = 0.1


def check_shared(folder: Path) -> None:
    """Refuses a folder that is not the same for all processes; a collective.

    Process 0 creates a file with a random name in it, and the others look for the file: a name
    that was never looked up is not in the cache of a network's file system.

    Args:
        folder: The folder, which process 0 has created.

    Raises:
        UsageError: Process 0 cannot create the file, or a process does not see it; in all.
    """
    if jax.process_count() == 1:
        return
    writes, host = jax.process_index() == 0, socket.gethostname()
    name, where = texts_of_all(f"{files.PROBE}{secrets.token_hex(16)} {host}")[0].split(" ", 1)
    file = folder / name
    problem = None
    try:
        if writes:
            file.touch(exist_ok=False)
    except OSError as error:
        problem = f"{folder} cannot be written: {error.strerror}."
    problem = first_problem(problem)
    if problem is None:
        failure = _error_of(file)
        if isinstance(failure, FileNotFoundError | NotADirectoryError):
            problem = (
                f"--workdir={folder} on {host} is not the folder that process 0 has on {where}. "
                "Give all processes one folder of a file system that they share."
            )
        elif failure:
            problem = f"--workdir={folder} on {host} cannot be read: {failure.strerror}."
        problem = first_problem(problem)
    if writes:
        with contextlib.suppress(OSError):  # the next run removes what is left
            file.unlink(missing_ok=True)
    if problem:
        raise UsageError(problem)


def _error_of(file: Path) -> OSError | None:
    """Why a file is not seen, even after a few seconds; None: it is."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            file.stat()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error
        time.sleep(_PAUSE)
