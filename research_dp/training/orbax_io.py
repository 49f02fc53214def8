"""Orbax and TensorStore: literal paths, quiet logs, awaited reads and writes, clear errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from research_dp.training.manifest import Damaged

PyTree = Any

MANIFEST = Path("manifest", "manifest.json")  # in a checkpoint's folder
STATE = "state"
_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
# Errors of this machine or its network, which say nothing about the files.
_MACHINE_ERRORS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.EIO, errno.ETIMEDOUT, errno.EINTR),
}


def checkpointer() -> Any:
    """An asynchronous checkpointer of a state and a manifest."""
    import orbax.checkpoint as ocp

    _quieten_orbax()
    handlers = {
        # Weights hardly get smaller, and compression takes the loop's cores.
        STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
        "manifest": ocp.JsonCheckpointHandler(filename=MANIFEST.name),
    }
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))


def read_state(folder: Path, abstract_state: PyTree, restore_args: PyTree = None) -> PyTree:
    """Reads the arrays of a checkpoint, as `abstract_state` or Orbax's `restore_args` say."""
    import orbax.checkpoint as ocp

    if restore_args is None:
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract_state)
    args = ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args)
    with _reading():
        return ocp.PyTreeCheckpointHandler().restore(literal(folder / STATE), args=args)


def read_metadata(folder: Path) -> PyTree:
    """The tree of a checkpoint's arrays, with Orbax's metadata for leaves."""
    import orbax.checkpoint as ocp

    with _reading():
        return ocp.PyTreeCheckpointHandler().metadata(literal(folder / STATE)).tree


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turns errors of reading into Damaged, or into those of this machine."""
    _quieten_orbax()
    try:
        with awaited_io():
            yield
    except jax.errors.JaxRuntimeError:  # of the devices, such as no memory left
        raise
    except Exception as error:  # of any kind that Orbax and TensorStore raise
        raise _machine_error(error) or Damaged(reason(error)) from error


def reason(error: BaseException) -> str:
    """Why something could not be read or written, in a line."""
    *_, error = _causes(error)
    if code := _ERROR_CODE.search(str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 200, placeholder=" ...").rstrip(".")


def _machine_error(error: BaseException) -> OSError | MemoryError | None:
    """The cause if it is this machine and the files may be good; None if it is the files."""
    for cause in _causes(error):
        match = _ERROR_CODE.search(str(cause))
        code = int(match[1]) if match else getattr(cause, "errno", None)
        if code in _MACHINE_ERRORS:
            return OSError(code, os.strerror(code))
        if isinstance(cause, MemoryError):
            return cause
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _causes(cause)


def literal(folder: Path) -> Any:
    """A path for Orbax that is not a pattern."""
    return _literal_class()(os.path.realpath(folder))  # TensorStore takes no `..`


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
        logger = logging.getLogger(name)
        if _not_of_orbax not in logger.filters:
            logger.addFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


class _DrainingPolicy(asyncio.DefaultEventLoopPolicy):
    """Event loops that end their tasks before they close.

    Orbax closes its loop when one read or write fails; TensorStore then calls back for the
    others, and each of them would print a traceback.
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
def awaited_io() -> Iterator[None]:
    """Waits for all reads and writes within it, also after one has failed."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_DrainingPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
