"""Checkpoints on disk: listed, verified, pruned; Orbax with literal paths and clear errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.sharding import by_path, fitted, from_stored, is_key, path_name
from research_dp.errors import first_line, printable
from research_dp.runs import files
from research_dp.runs.checksum import tree_checksums
from research_dp.runs.manifest import Damaged, Manifest

MANIFEST = Path("manifest", "manifest.json")  # in a checkpoint's folder
STATE = "state"
_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
# Of this machine or its network
_MACHINE_ERRORS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.EIO, errno.ETIMEDOUT, errno.EINTR),
}
# Orbax measures by the clock on the wall, which jumps where a machine was suspended. The watchdog
# ends what hangs.
_SECONDS_TO_SAVE = 14 * 24 * 3600
# Replicas write slices of an array. Not of small ones: a program is compiled to cut each slice.
_MIN_SLICE_BYTES = 2**20
_SECONDS_TO_END = 10.0  # of a failed save's threads; a hanging disk may hold one for ever
_STEP = r"(0|[1-9][0-9]{0,17})"  # no other digits, no leading zeros
COMPLETE = re.compile(_STEP)  # Orbax renames a folder once all is in it
HALF_WRITTEN = re.compile(_STEP + r"\.orbax-checkpoint-tmp.*")
_SET_ASIDE = re.compile(_STEP + r"\.damaged[0-9]*")
_STATUS_OF = {COMPLETE: "", HALF_WRITTEN: "not complete", _SET_ASIDE: "damaged, was moved aside"}


def _entries(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """The checkpoints whose names match, by step."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = ((pattern.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def steps_in(folder: Path, pattern: re.Pattern[str] = COMPLETE) -> list[int]:
    """The steps of a folder's checkpoints: of complete ones, or of those that a pattern names."""
    return [step for step, _ in _entries(folder, pattern)]


def fsync_checkpoint(folder: Path) -> None:
    """Flushes Orbax's own files and directory entries, which TensorStore does not."""
    for path in (*folder.glob("*"), *folder.glob("*/*"), folder, folder.parent):
        with contextlib.suppress(FileNotFoundError):
            files.fsync(path)


def prune(folder: Path, keep: int, keep_period: int | None) -> list[str]:
    """Removes old checkpoints, but no links, which are not the run's; a line for each failure."""
    problems = []
    for step, path in _entries(folder, COMPLETE)[:-keep]:
        if (keep_period and step % keep_period == 0) or path.is_symlink() or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            problems.append(
                f"The checkpoint {files.shown(path)} cannot be removed: {reason(error)}"
            )
    return problems


def clear_temporary(folder: Path, step: int) -> None:
    """Removes links and FIFOs with the name of a step's temporary folder, which block Orbax."""
    for other, path in _entries(folder, HALF_WRITTEN):
        if other == step and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, by `Manifest.read`; Damaged also if a FIFO is in the folder."""
    if problem := files.unreadable_entry(folder):
        raise Damaged(problem)
    return Manifest.read(folder / MANIFEST)


def verify(folder: Path) -> Manifest:
    """Reads a checkpoint array by array, on the host; raises Damaged, or returns its manifest."""
    return read_fields(folder)[0]


def read_fields(folder: Path, *fields: str) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of a checkpoint, and fields of its state as trees of verified host arrays.

    Without fields all arrays are verified, and none is kept. Raises Damaged.
    """
    import orbax.checkpoint as ocp

    manifest = read_manifest(folder)
    tree = arrays_in(folder / STATE)
    leaves = by_path(tree)
    if unmatched := sorted(leaves.keys() ^ manifest.leaves.keys()):
        raise Damaged(f"{printable(unmatched[0])} is not both in its manifest and in its arrays")
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    checksums = {path: leaf.checksum for path, leaf in manifest.leaves.items()}
    arrays: dict[str, np.ndarray] = {}
    for path, chosen in leaves.items():
        if fields and path.split("/")[0] not in fields:
            continue
        one = jax.tree.map(lambda x, chosen=chosen: x if x is chosen else ocp.PLACEHOLDER, tree)
        restored = jax.tree.leaves(read_arrays(folder / STATE, one, on_host))
        (x,) = (x for x in restored if x is not ocp.PLACEHOLDER)
        x = from_stored(x, manifest.leaves[path])
        x = x if is_key(x) else fitted(x, manifest.leaves[path].shape)
        checksums |= tree_checksums({path: x})
        if fields:
            arrays[path] = x
    if problem := manifest.mismatch(checksums):
        raise Damaged(problem)
    kept = {name: tree.get(name, {}) for name in fields}
    return manifest, jax.tree_util.tree_map_with_path(lambda k, _: arrays[path_name(k)], kept)


def arrays_in(folder: Path) -> Any:
    """The tree of the arrays that Orbax wrote to a folder, with its metadata for leaves."""
    import orbax.checkpoint as ocp

    with _reading():
        return ocp.PyTreeCheckpointHandler().metadata(literal(folder)).tree


class Row(NamedTuple):
    """One checkpoint of a listing."""

    step: int
    nbytes: int
    status: str  # whether it is intact, or what is wrong
    damaged: bool = False  # complete but unusable, or unreadable
    manifest: Manifest | None = None

    def cells(self) -> tuple[str, ...]:
        """Step, examples seen, time, bytes, strategy, mesh and status, as text."""
        step, nbytes = str(self.step), f"{self.nbytes:,}"
        if self.manifest is None:
            return step, "", "", nbytes, "", "", self.status
        origin = self.manifest.origin
        time_, strategy = (printable(str(origin.get(name, ""))) for name in ("time", "strategy"))
        mesh, examples = sizes_text(origin.get("mesh", {})), f"{self.manifest.examples_seen:,}"
        return step, examples, time_, nbytes, strategy, mesh, self.status


def overview(folder: Path, *, verified: bool) -> Iterator[Row]:
    """The checkpoints in a folder, complete or not, by step; arrays are read if `verified`."""
    patterns = _STATUS_OF.items()
    entries = ((*x, status) for pattern, status in patterns for x in _entries(folder, pattern))
    for step, path, incomplete in sorted(entries):
        nbytes = 0
        for file in path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a run may be removing it
                nbytes += file.stat().st_size if file.is_file() else 0
        if incomplete:
            yield Row(step, nbytes, incomplete)
            continue
        try:
            manifest = verify(path) if verified else read_manifest(path)
        except Damaged as error:
            if os.path.lexists(path):  # a run may have removed it meanwhile
                yield Row(step, nbytes, f"damaged: {error}", damaged=True)
        except (OSError, MemoryError) as error:
            yield Row(step, nbytes, f"cannot be read: {reason(error)}", damaged=True)
        else:
            intact = f"intact: {len(manifest.leaves)} arrays"
            yield Row(step, nbytes, intact if verified else "not verified", manifest=manifest)


def checkpointer() -> Any:
    """An asynchronous checkpointer of a state and a manifest."""
    import orbax.checkpoint as ocp

    _quieten_orbax()
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handlers = {
        # Weights hardly get smaller, and compression takes the loop's cores.
        STATE: ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry),
        "manifest": ocp.JsonCheckpointHandler(filename=MANIFEST.name),
    }
    composite = ocp.CompositeCheckpointHandler(**handlers)
    return ocp.AsyncCheckpointer(composite, timeout_secs=_SECONDS_TO_SAVE)


def end_waiting_threads(threads: Iterable[threading.Thread]) -> None:
    """Ends a failed save's threads, some of which wait for a folder that could not be made.

    They are no daemons: Python would wait for them at its exit, five minutes. They write nothing
    more once this returns, unless a disk hangs for longer than it waits.
    """
    from orbax.checkpoint._src.futures import future

    waiting = [thread for thread in threads if isinstance(thread, future._SignalingThread)]
    for thread in waiting:
        thread.cancel()
        future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    deadline = time.monotonic() + _SECONDS_TO_END
    for thread in waiting:
        threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def cut_arrays(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cuts arrays that Orbax wrote with padding, by path: only their metadata is written anew.

    Zeros stay in a chunk of the file, which nobody reads. Until it is done, whoever reads arrays by
    the manifest's shapes reads the same.
    """
    if not shapes:
        return
    import tensorstore as ts

    for path, array in by_path(arrays_in(folder)).items():
        if path in shapes and tuple(array.shape) != shapes[path]:
            base = {"driver": "file", "path": f"{os.path.realpath(folder)}/"}
            store = {"driver": "ocdbt", "base": base, "path": f"{array.name}/"}
            opened = ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
            opened.resize(exclusive_max=shapes[path], resize_metadata_only=True).result()


def read_arrays(folder: Path, abstract: Any, restore_args: Any = None) -> Any:
    """Reads arrays that Orbax wrote, as abstract ones or Orbax's `restore_args` say.

    An abstract array may be longer than what is in the files, for padding: zeros follow.
    """
    import orbax.checkpoint as ocp

    if restore_args is None:
        own = ocp.checkpoint_utils.construct_restore_args(abstract)
        restore_args = jax.tree.map(
            lambda x: dataclasses.replace(x, strict=False) if hasattr(x, "strict") else x, own
        )
    args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)
    with _reading():
        return ocp.PyTreeCheckpointHandler().restore(literal(folder), args=args)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turns errors of reading into Damaged, but for this machine's: the files may be good."""
    _quieten_orbax()
    try:
        with awaited_io():
            yield
    except jax.errors.JaxRuntimeError:  # of the devices, such as no memory left
        raise
    except Exception as error:  # of any kind that Orbax and TensorStore raise
        for cause in _causes(error):
            match = _ERROR_CODE.search(str(cause))
            code = int(match[1]) if match else getattr(cause, "errno", None)
            if code in _MACHINE_ERRORS:
                raise OSError(code, os.strerror(code)) from error
            if isinstance(cause, MemoryError):
                raise cause from None  # with a cause, it could be its own
        raise Damaged(reason(error)) from error


def reason(error: BaseException) -> str:
    """Why something could not be read or written, in a line."""
    *_, error = _causes(error)
    if code := _ERROR_CODE.search(str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return printable(first_line(error)).rstrip(".")


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _causes(cause)


def literal(folder: Path) -> Any:
    """A path for Orbax that is not a pattern, without the `..` that TensorStore refuses."""
    return _literal_class()(os.path.realpath(folder))


@functools.cache  # as classes are never freed
def _literal_class() -> Any:
    """Paths whose `glob` does not make the folder a part of the pattern: `a[1]` matches `a1`."""
    from etils import epath  # slow to import

    class Literal(type(epath.Path())):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Any]:
            return (type(self)(path) for path in Path(self).glob(pattern))

    return Literal


def _quieten_orbax() -> None:
    """Silences the tracebacks of Orbax's threads: a failure is reported once, by its caller."""
    for name in ("absl", "concurrent.futures"):
        logging.getLogger(name).addFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


class _DrainingLoop(asyncio.SelectorEventLoop):
    """An event loop that ends its tasks before it closes.

    Orbax closes its loop when one read or write fails; TensorStore then calls back for the
    others, and each of them would print a traceback.
    """

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


class _DrainingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _DrainingLoop()


@contextlib.contextmanager
def awaited_io() -> Iterator[None]:
    """Waits for all reads and writes within it, also after one has failed."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_DrainingPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
