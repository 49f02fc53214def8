"""The folder of a run's results: made, held by one run at a time, and told when it is full."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

from research_dp.distributed.multihost import first_problem
from research_dp.errors import RunFailure, UsageError
from research_dp.training import files
from research_dp.training.checkpoint_files import reason, steps_in
from research_dp.training.shared_folder import check_shared

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
    workdir = os.path.expanduser(workdir)
    folder = Path(workdir)
    lock = filelock.FileLock(folder / files.LOCK, fallback_to_soft=False)
    problem = _name_problem(workdir)
    if not problem and jax.process_index() == 0:
        problem = _take(folder, lock)
    problem = first_problem(problem)
    if problem:
        raise UsageError(problem)
    try:
        check_shared(folder)
        yield folder
    except OSError as error:
        if error.errno not in _DISK and not _is_below(error.filename, folder):
            raise
        raise RunFailure(
            f"the results in {folder} cannot be read or written: {reason(error)}. {_left(folder)}"
        ) from error
    finally:
        lock.release()


def check_new(folder: Path, began: bool, config: str) -> None:
    """Refuses to begin a run where there are records of another one whose checkpoints are lost.

    A run that was killed before its first save begins again.

    Args:
        folder: Folder of the run.
        began: Whether the run that is in it ended before its first save.
        config: The configuration of this run.

    Raises:
        UsageError: There are such records; in every process.
    """
    problem = None
    if jax.process_index() == 0:
        names = [
            name for name in (files.RECORDS, files.SUMMARY) if files.has_content(folder / name)
        ]
        before = folder / files.CONFIG
        same = before.exists() and before.read_bytes() == config.encode(errors="surrogateescape")
        records = f"{folder} has records of a run ({' and '.join(names)})"
        if names and began and not same:
            problem = (
                f"{records} that saved nothing and had another configuration "
                f"({files.CONFIG}). Use that configuration, or another --workdir, or move the "
                "records away."
            )
        elif names and not began:
            problem = (
                f"{records}, and no checkpoint in "
                f"{folder / files.CHECKPOINTS}. Put back or mount the checkpoints to continue it; "
                "to begin anew use another --workdir, or move the records away."
            )
    problem = first_problem(problem)
    if problem:
        raise UsageError(problem)


def _name_problem(folder: str) -> str | None:
    """Why a folder's name cannot be used; None if it can."""
    if folder.startswith("~"):  # `expanduser` left it
        return f"--workdir={folder}: {folder.split('/')[0]} is no user's home. Give its path."
    if "\0" in folder:
        return f"--workdir={ascii(folder)[1:-1]} has a null character. Use another name."
    for path in map(os.path.realpath, (folder, os.path.join(folder, files.CHECKPOINTS))):
        if not files.is_utf8(path):
            name = ascii(path)[1:-1]
            return f"--workdir={name} is not UTF-8, which checkpoints need. Use another name."
        if "\\" in path:
            return (
                f"--workdir={path} has a backslash, which TensorStore takes for a separator. Use "
                "another name."
            )
    return None


def _left(folder: Path) -> str:
    """What is saved in a folder, and what to do."""
    try:
        saved = steps_in(folder / files.CHECKPOINTS)
    except OSError:
        return "Nothing that was saved is lost: the same command continues once it can be."
    if not saved:
        return "No step was saved."
    return f"Step {saved[-1]} is saved; the same command continues from there."


def _is_below(name: object, folder: Path) -> bool:
    """Whether an error's file name is in a folder."""
    return isinstance(name, str | os.PathLike) and Path(name).is_relative_to(folder)


def _take(folder: Path, lock: filelock.BaseFileLock) -> str | None:
    """Makes and locks the folder; returns what is wrong, if anything is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--workdir={folder} cannot be made: {error.strerror}."
    holder = folder / files.HOLDER
    try:
        problem = files.unexpected(folder)
        if problem:
            return problem
        lock.acquire(timeout=0)
        files.remove_temporary(folder)
        files.replace(holder, f"process {os.getpid()} on {socket.gethostname()}")
    except filelock.Timeout:
        who = f" ({_text(holder)})" if holder.exists() else ""
        return f"another run{who} is using {folder}. Wait until it ends, or use another --workdir."
    except OSError as error:
        if error.errno == errno.ENOSYS:  # a file in its stead would outlive a run that is killed
            return (
                f"--workdir={folder}: its file system has no locks, which keep two runs apart. "
                "Mount it with them (Lustre: -o flock), or use another --workdir."
            )
        return f"--workdir={folder} cannot be written: {error.strerror}."
    return None


def _text(holder: Path) -> str:
    return textwrap.shorten(holder.read_bytes()[:200].decode(errors="replace"), 100)
