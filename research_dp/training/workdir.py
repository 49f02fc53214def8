"""The folder of a run's results: made, held by one run at a time, and told when it is full."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

from research_dp.distributed.agreement import first_problem
from research_dp.distributed.errors import RunFailure, UsageError
from research_dp.training.shared_folder import check_shared
from research_dp.training.stored import reason

_LOCK, _HOLDER = ".run.lock", ".run.holder"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def held(workdir: str | None) -> Iterator[Path]:
    """Makes the folder of the results, and keeps other runs out of it.

    Process 0 holds a lock of the operating system, which ends with the process, however it ends.

    Raises:
        UsageError: There is no such folder, it cannot be written, another run uses it, or processes
            do not share it; in every process.
        RunFailure: The disk failed, or is full, while the run was under way.
    """
    if workdir is None:
        raise UsageError("train needs a workdir: results and checkpoints go there.")
    if "://" in workdir:
        raise UsageError(f"--workdir={workdir}: give a folder of this machine, or a mounted one.")
    folder = Path(workdir).expanduser()
    lock = filelock.FileLock(folder / _LOCK, fallback_to_soft=False)
    problem = first_problem(_take(folder, lock) if jax.process_index() == 0 else None)
    if problem:
        raise UsageError(problem)
    try:
        check_shared(folder)
        yield folder
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise RunFailure(
            f"the results in {folder} cannot be written: {reason(error)}. Nothing that was saved "
            "is lost: the same command continues from the newest checkpoint."
        ) from error
    finally:
        lock.release()


def _take(folder: Path, lock: filelock.BaseFileLock) -> str | None:
    """Makes and locks the folder; returns what is wrong, if anything is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--workdir={folder} cannot be made: {error.strerror}."
    try:
        lock.acquire(timeout=0)
        (folder / _HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except filelock.Timeout:
        holder = folder / _HOLDER
        who = f" ({holder.read_text()})" if holder.exists() else ""
        return f"another run{who} is using {folder}. Wait until it ends, or use another --workdir."
    except OSError as error:
        if error.errno == errno.ENOSYS:  # a file in its stead would outlive a run that is killed
            return (
                f"--workdir={folder}: its file system has no locks, which keep two runs apart. "
                "Mount it with them (Lustre: -o flock), or use another --workdir."
            )
        return f"--workdir={folder} cannot be written: {error.strerror}."
    return None
