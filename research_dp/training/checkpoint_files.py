"""Checkpoints on disk: which there are, what is in them, and whether they are whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from research_dp.distributed.checksum import array_checksum
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.sharding import by_path
from research_dp.training import files
from research_dp.training.manifest import Damaged, Manifest, told_changes

PyTree = Any

MANIFEST = Path("manifest", "manifest.json")  # in a checkpoint's folder
STATE = "state"
_STEP = r"(0|[1-9][0-9]{0,17})"  # as a step is written: no other digits, no leading zeros
COMPLETE = re.compile(_STEP)
HALF_WRITTEN = re.compile(_STEP + r"\.orbax-checkpoint-tmp.*")
SET_ASIDE = re.compile(_STEP + r"\.damaged[0-9]*")
_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
_NOT_THE_FILES = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.EIO, errno.ETIMEDOUT, errno.EINTR),
}


def steps_in(folder: Path, named: re.Pattern[str] = COMPLETE) -> Sequence[int]:
    """Steps whose checkpoints are complete: Orbax renames a folder once all is in it."""
    if not folder.is_dir():
        return []
    names = [named.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(int(name[1]) for name in names if name)


def reason(error: BaseException) -> str:
    """Why something could not be read or written, in a line."""
    *_, error = _chain(error)
    found = _ERROR_CODE.search(str(error))
    if found:
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 200, placeholder=" ...").rstrip(".")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, what caused that, and so on."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)


def _of_this_machine(error: BaseException) -> OSError | MemoryError | None:
    """Why files could not be read that may be whole; None if it is the files."""
    for inner in _chain(error):
        found = _ERROR_CODE.search(str(inner))
        code = int(found[1]) if found else getattr(inner, "errno", None)
        if code in _NOT_THE_FILES:
            return OSError(code, os.strerror(code))
        if isinstance(inner, MemoryError):
            return inner
    return None


def sync(folder: Path) -> None:
    """Writes a checkpoint's own records and names to the disk: they survive a power failure.

    TensorStore does so with the arrays, Orbax not with what says that they are whole.
    """
    for path in (*folder.glob("*"), *folder.glob("*/*"), folder, folder.parent):
        with contextlib.suppress(FileNotFoundError):
            files.sync(path)


def prune(folder: Path, keep: int, keep_period: int | None) -> list[str]:
    """Removes old checkpoints of a run; returns a line for each that cannot be removed.

    One that is a link is not the run's to remove.

    Args:
        folder: Folder of the checkpoints.
        keep: How many of the newest stay.
        keep_period: Those of steps that it divides stay too; None: no others.
    """
    problems = []
    for step in steps_in(folder)[:-keep]:
        path = folder / str(step)
        if (keep_period and step % keep_period == 0) or path.is_symlink() or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            problems.append(f"The checkpoint {path} cannot be removed: {reason(error)}")
    return problems


def clear_temporary(folder: Path, step: int) -> None:
    """Removes links and files with the names under which Orbax writes a step's folder.

    It would wait for a FIFO, and not pass a link. Folders, which a killed save leaves, it removes.
    """
    for path in list(folder.iterdir()):
        named = HALF_WRITTEN.fullmatch(path.name)
        if named and int(named[1]) == step and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def read_state(folder: Path, abstract_state: PyTree) -> PyTree:
    """The arrays of a checkpoint, on the shardings of `abstract_state`.

    Raises:
        Damaged: They cannot be read.
    """
    import orbax.checkpoint as ocp

    return _read(
        folder, abstract_state, ocp.checkpoint_utils.construct_restore_args(abstract_state)
    )


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        Damaged: It is not there, not as it was written, or something in the folder is no file.
        UsageError: A newer version wrote it.
        OSError: It cannot be read here and now.
    """
    problem = files.unreadable(folder)
    if problem:
        raise Damaged(problem)
    return Manifest.read(folder / MANIFEST)


def verify(folder: Path) -> Manifest:
    """Reads a checkpoint, array by array and without devices, and returns its manifest.

    Raises:
        Damaged: Something cannot be read, or is not what was written.
    """
    import orbax.checkpoint as ocp

    manifest = read_manifest(folder)
    with _reading():
        tree = ocp.PyTreeCheckpointHandler().metadata(literal(folder / STATE)).tree
    paths = by_path(tree)
    if paths.keys() != manifest.leaves.keys():
        odd = sorted(paths.keys() ^ manifest.leaves.keys())[0]
        raise Damaged(f"{odd} is not both in its manifest and in its arrays")
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    changed = []
    for path, leaf in manifest.leaves.items():
        one = jax.tree.map(
            lambda x, wanted=paths[path]: x if x is wanted else ocp.PLACEHOLDER, tree
        )
        read = _read(folder, one, plain)
        (x,) = (x for x in jax.tree.leaves(read) if x is not ocp.PLACEHOLDER)
        if array_checksum(x) != leaf.checksum:
            changed.append(path)
    problem = told_changes(changed)
    if problem:
        raise Damaged(problem)
    return manifest


class Row(NamedTuple):
    """One checkpoint, for people.

    Attributes:
        step: Its step.
        examples: Examples seen.
        saved: When it was written.
        size: Bytes of its files.
        made: Strategy and mesh that wrote it.
        told: Whether it is whole, or what is wrong.
        damaged: Whether it is complete but cannot be used, or looked at.
    """

    step: int
    examples: str
    saved: str
    size: int
    made: tuple[str, str]
    told: str
    damaged: bool


def overview(folder: Path, *, verified: bool) -> Iterator[Row]:
    """The checkpoints in a folder, complete or not, by step.

    Args:
        folder: The folder of a run's checkpoints.
        verified: Whether to read all arrays, or only what the checkpoints say of themselves.
    """
    others = {HALF_WRITTEN: "not complete", SET_ASIDE: "damaged, was moved aside"}
    found = [
        (int(name[1]), path, others.get(named))
        for path in (folder.iterdir() if folder.is_dir() else ())
        for named in (COMPLETE, *others)
        if (name := named.fullmatch(path.name))
    ]
    for step, path, told in sorted(found, key=lambda row: (row[0], row[1].name)):
        size = _size(path)
        if told:
            yield Row(step, "", "", size, ("", ""), told, False)
            continue
        try:
            manifest = verify(path) if verified else read_manifest(path)
        except Damaged as error:
            if not os.path.lexists(path):
                continue  # a run deleted it meanwhile
            yield Row(step, "", "", size, ("", ""), f"damaged: {error}", True)
            continue
        except (OSError, MemoryError) as error:
            yield Row(step, "", "", size, ("", ""), f"cannot be read: {reason(error)}", True)
            continue
        by = manifest.origin
        mesh = sizes_text(by.get("mesh", {}))
        told = f"whole: {len(manifest.leaves)} arrays" if verified else "not verified"
        made = (by.get("strategy", ""), mesh)
        yield Row(step, f"{manifest.examples_seen:,}", by["time"], size, made, told, False)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, which a run may be about to delete."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _read(folder: Path, wanted: PyTree, restore_args: PyTree) -> PyTree:
    """Without Orbax's manager, whose processes would wait for one that fails."""
    import orbax.checkpoint as ocp

    args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args)
    with _reading():
        return ocp.PyTreeCheckpointHandler().restore(literal(folder / STATE), args=args)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Within it, Orbax reads a checkpoint; errors become Damaged or those of this machine."""
    quieten_orbax()
    try:
        with drained():
            yield
    except jax.errors.JaxRuntimeError:  # the devices', such as no memory left; not the file's
        raise
    except Exception as error:  # whatever Orbax and TensorStore make of the files
        raise _of_this_machine(error) or Damaged(reason(error)) from error


def literal(folder: Path) -> Any:
    """A path for Orbax that stays a path where Orbax looks for names in it.

    `etils.epath.Path.glob` takes the folder itself for a part of the pattern: `a[1]` would be `a1`.
    """
    return _literal_class()(os.path.realpath(folder))  # TensorStore takes no `..`


@functools.cache
def _literal_class() -> Any:
    """Made at the first use, as etils is slow to import; a class is never freed."""
    from etils import epath

    class Literal(type(epath.Path())):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Any]:
            return (type(self)(path) for path in Path(self).glob(pattern))

    return Literal


def move_aside(folder: Path) -> Path:
    """Renames a checkpoint to a name that is none of a checkpoint."""
    return folder.rename(files.free_name(folder))


def quieten_orbax() -> None:
    """What goes wrong is told once, not by each of Orbax's threads with a traceback as well."""
    for name in ("absl", "concurrent.futures"):
        logger = logging.getLogger(name)
        if _not_of_orbax not in logger.filters:
            logger.addFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


class _Draining(asyncio.DefaultEventLoopPolicy):
    """Event loops that end their tasks before they close.

    Orbax closes its loop when a read or write fails. TensorStore calls back for the others, which
    are under way, and each of them would print a traceback.
    """

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        close = loop.close

        def drain() -> None:
            while tasks := asyncio.all_tasks(loop):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            close()

        loop.close = drain  # type: ignore[method-assign]
        return loop


@contextlib.contextmanager
def drained() -> Iterator[None]:
    """Within it, reads and writes that fail are waited for."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Draining())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
