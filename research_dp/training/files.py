"""Files of a work folder: of the right kind, created exclusively, replaced atomically."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

LOCK, HOLDER = ".run.lock", ".run.holder"
CONFIG, OPERATIVE_CONFIG = "config.gin", "operative_config.gin"
RECORDS, SUMMARY = "metrics.jsonl", "summary.json"
CHECKPOINTS, FLIGHT, TENSORBOARD = "checkpoints", "flight", "tensorboard"
SPLITS = ("train", "eval")

NOTHING_SAVED = "nothing_saved_yet"  # in the folder of the checkpoints

_FILES = (LOCK, HOLDER, CONFIG, OPERATIVE_CONFIG, RECORDS, SUMMARY)
_EVENTS = tuple(f"{TENSORBOARD}/{split}" for split in SPLITS)
_FOLDERS = (CHECKPOINTS, FLIGHT, TENSORBOARD, *_EVENTS, "profile")
PROBE = ".run."  # and 32 hexadecimal digits: see `shared_folder`
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|" + re.escape(PROBE) + "[0-9a-f]{32}")
_NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # some FUSE and SMB mounts


def create(path: Path) -> int:
    """Creates a file that did not exist and follows no link; returns its descriptor.

    Raises:
        FileExistsError: Something has this name.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def append(path: Path) -> int:
    """Opens a file to be written at its end; returns its descriptor.

    Raises:
        OSError: It is a link, or a FIFO that nobody reads.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file; a reader sees all of the former content or all of the new one.

    The temporary file has a name that nobody can predict. A link is replaced, not followed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with open(create(temporary), "wb") as file:
        file.write(
            content.encode(errors="surrogateescape") if isinstance(content, str) else content
        )
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def has_content(path: Path) -> bool:
    """Whether a file is there and not empty."""
    return path.exists() and path.stat().st_size > 0


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded: JSON and file names may have lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def free_name(path: Path) -> Path:
    """A name beside a path, `NAME.damaged` or `NAME.damagedN`, that nothing has yet."""
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.damaged{number if number > 1 else ''}")
        if not os.path.lexists(aside):
            return aside
    raise OSError(errno.EEXIST, "too many damaged ones", str(path))


def sync(path: Path) -> None:
    """Writes a file, or the names in a folder, to the disk: they survive a power failure.

    Names do not on a file system that cannot sync folders.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS or not stat.S_ISDIR(os.fstat(number).st_mode):
            raise
    finally:
        os.close(number)


def remove_temporary(folder: Path) -> None:
    """Removes temporary files that killed processes left in a work folder."""
    for path in (*_inside(folder, ".*"), *_inside(folder / CHECKPOINTS, ".*")):
        if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def unexpected(folder: Path) -> str | None:
    """The first name in a work folder that is of another kind than the run writes; None: none.

    Files must be files: a link would be replaced, and a FIFO waits for ever. Folders may be links
    to folders.
    """
    notes = [f"{FLIGHT}/{path.name}" for path in _inside(folder / FLIGHT, "process_*.txt")]
    for name in (*_FILES, f"{CHECKPOINTS}/{NOTHING_SAVED}", *notes):
        path = folder / name
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            return f"{path} is {kind_of(path)}, and the run writes a file there. Move it away."
    for name in _FOLDERS:
        path = folder / name
        if os.path.lexists(path) and not path.is_dir():
            return (
                f"{path} is {kind_of(path)}, and the run needs a folder there. Mount or put back "
                "what belongs there, or move it away."
            )
    return None


def kind_of(path: Path) -> str:
    """What a name in a folder stands for, in words."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}" + ("" if path.exists() else ", which is not there")
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISREG: "a file", stat.S_ISFIFO: "a FIFO"}
    return next((name for test, name in kinds.items() if test(mode)), "a device or socket")


def unreadable(folder: Path) -> str | None:
    """The first entry below a folder that is neither file nor folder, nor a link to one.

    To open a FIFO would wait for ever.
    """
    for path in (folder, *_inside(folder, "**/*")):
        if not (path.is_file() or path.is_dir()):
            where = path.relative_to(folder.parent)
            return f"{where} is {kind_of(path) if os.path.lexists(path) else 'gone'}"
    return None


def _inside(folder: Path, pattern: str) -> Iterator[Path]:
    return iter(sorted(folder.glob(pattern))) if folder.is_dir() else iter(())
