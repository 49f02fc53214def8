"""The folder of a run's results: created, locked, shared by all processes; explains disk errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

from research_dp.distributed.mesh import first_problem, texts_of_all
from research_dp.errors import RunFailure, UsageError, printable
from research_dp.runs import files
from research_dp.runs.checkpoint_files import reason, steps_in

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_HELD = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
_SECONDS_TO_READ = 0.1  # for which `in_use` of other processes may hold the lock at the very most
_SECONDS_TO_APPEAR = 10.0  # within which a network file system shows a new file to other machines


@contextlib.contextmanager
def locked_workdir(workdir: str | None) -> Iterator[Path]:
    """Creates the folder of the results, and keeps other runs out of it while the process lives.

    UsageError, in all processes: they do not share it, cannot write it, or another run uses it.
    RunFailure: the disk failed or became full during the run.
    """
    if not workdir:
        raise UsageError("train needs a workdir: results and checkpoints go there.")
    if "://" in workdir:
        raise UsageError(f"--workdir={workdir}: give a folder of this machine, or a mounted one.")
    workdir = files.absolute(workdir)
    folder = Path(workdir)
    lock = filelock.FileLock(folder / files.LOCK, fallback_to_soft=False)
    problem = _name_problem(workdir)
    if not problem and jax.process_index() == 0:
        problem = _create_and_lock(folder, lock)
    _raise_first(problem)
    try:
        check_shared(folder)
        yield folder
    except OSError as error:
        name = error.filename
        is_inside = isinstance(name, str | os.PathLike) and Path(name).is_relative_to(folder)
        if error.errno not in _DISK_ERRORS and not is_inside:
            raise
        try:
            saved = steps_in(folder / files.CHECKPOINTS)
            left = "No step was saved."
            if not folder.is_dir():
                left = "It was moved or removed: put it back, and the same command continues."
            elif saved:
                left = f"Step {saved[-1]} is saved; the same command continues from there."
        except OSError:
            left = "Nothing that was saved is lost: the same command continues once it can be."
        raise RunFailure(
            f"the results in {files.shown(folder)} cannot be read or written: {reason(error)}. "
            f"{left}"
        ) from error
    finally:
        lock.release()


def in_use(folder: Path) -> str | None:
    """Process and host of the run that is using a folder; None if there is none.

    It writes nothing, and shares the lock with others that ask for the moment that it takes.
    """
    try:
        lock = os.open(folder / files.LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None  # the run itself reports what is wrong with its folder
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return None
    else:
        return None
    finally:
        os.close(lock)
    holder = folder / files.HOLDER
    known = holder.is_file()  # reading a FIFO would block
    return printable(holder.read_text(errors="replace")) if known else "unknown process"


def config_of(workdir: Path) -> Path:
    """The configuration file of a run; UsageError if the folder has none."""
    if not workdir.is_dir():
        raise UsageError(f"--workdir={workdir}: there is no such folder.")
    path = workdir / files.CONFIG
    if not path.is_file():
        raise UsageError(f"--workdir={workdir} has no {files.CONFIG}: give the folder of a run.")
    return path


def check_shared(folder: Path) -> None:
    """Refuses a folder that the processes do not share; a collective.

    Process 0 creates a file with a random name, and the others look it up: no cache of a network
    file system has an entry for a name that was never looked up.
    """
    if jax.process_count() == 1:
        return
    writes, host = jax.process_index() == 0, socket.gethostname()
    name, where = texts_of_all(f"{files.PROBE}{secrets.token_hex(16)} {host}")[0].split(" ", 1)
    probe = folder / name
    problem = None
    try:
        if writes:
            probe.touch(exist_ok=False)
    except OSError as error:
        problem = f"{files.shown(folder)} cannot be written: {error.strerror}."
    _raise_first(problem)
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while (failure := _lookup_error(probe)) and time.monotonic() <= deadline:
        time.sleep(0.1)
    if isinstance(failure, FileNotFoundError | NotADirectoryError):
        problem = (
            f"--workdir={files.shown(folder)} on {host} is not the folder that process 0 has on "
            f"{where}. Give all processes one folder of a file system that they share."
        )
    elif failure:
        problem = f"--workdir={files.shown(folder)} on {host} cannot be read: {failure.strerror}."
    try:
        _raise_first(problem)
    finally:
        if writes:
            with contextlib.suppress(OSError):  # the next run removes it
                probe.unlink(missing_ok=True)


def _raise_first(problem: str | None) -> None:
    """Raises the problem of the first process that has one as a UsageError, in all of them."""
    if problem := first_problem(problem):
        raise UsageError(problem)


def _lookup_error(file: Path) -> OSError | None:
    try:
        file.stat()
    except OSError as error:
        return error
    return None


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


def _create_and_lock(folder: Path, lock: filelock.BaseFileLock) -> str | None:
    """Creates and locks the folder; returns the problem, if there is one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--workdir={files.shown(folder)} cannot be made: {error.strerror}."
    holder, shown = folder / files.HOLDER, files.shown(folder)
    try:
        if problem := files.unexpected_kind(folder):
            return problem
        lock.acquire(timeout=_SECONDS_TO_READ, poll_interval=0.01)
        files.remove_temporary(folder)
        files.replace(holder, f"process {os.getpid()} on {socket.gethostname()}")
    except filelock.Timeout:
        start = holder.read_bytes()[:200].decode(errors="replace") if holder.exists() else ""
        who = start and f" ({printable(start)})"
        return f"another run{who} is using {shown}. Wait until it ends, or use another --workdir."
    except OSError as error:
        if error.errno == errno.ENOSYS:  # a lock file would outlive a run that is killed
            return (
                f"--workdir={shown}: its file system has no locks, which keep two runs apart. "
                "Mount it with them (Lustre: -o flock), or use another --workdir."
            )
        return f"--workdir={shown} cannot be written: {error.strerror}."
    return None
