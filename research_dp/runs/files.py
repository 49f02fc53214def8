"""Files of a run's folder: their names, exclusive creation, atomic replacement, fsync, JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCK, HOLDER = ".run.lock", ".run.holder"
CONFIG, OPERATIVE_CONFIG = "config.gin", "operative_config.gin"
RECORDS, SUMMARY = "metrics.jsonl", "summary.json"
FACTS, PROGRAM = "run.json", "train_step.hlo.gz"
TRACKERS = "trackers.json"  # tracker -> what it calls the run
CHECKPOINTS, FLIGHT, TENSORBOARD = "checkpoints", "flight", "tensorboard"
PROFILE = "profile"
SPLITS = ("train", "eval")
NOTHING_SAVED = "nothing_saved_yet"  # in the folder of the checkpoints
PROBE = ".run."  # and 32 hexadecimal digits: see `workdir`

_FILES = (LOCK, HOLDER, CONFIG, OPERATIVE_CONFIG, RECORDS, SUMMARY, FACTS, PROGRAM, TRACKERS)
_FOLDERS = (CHECKPOINTS, FLIGHT, *(f"{TENSORBOARD}/{x}" for x in ("", *SPLITS)), PROFILE)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|" + re.escape(PROBE) + "[0-9a-f]{32}")
_NO_FSYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # some FUSE and SMB mounts
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a FIFO"}


def absolute(path: str | os.PathLike[str]) -> str:
    """A path of today's current folder, which code of a user's may change; `~` is expanded."""
    name = os.path.expanduser(os.fspath(path))
    is_place = name and not name.startswith("~") and "://" not in name and "\0" not in name
    return str(Path(name).absolute()) if is_place else name


def shown(path: Path) -> Path:
    """A path as messages have it: without the current folder, where it is below that."""
    try:
        return path.relative_to(Path.cwd())
    except (OSError, ValueError):
        return path


def create(path: Path) -> int:
    """Creates a new file, following no link, and returns its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def append(path: Path) -> int:
    """Opens a file, but no link and no FIFO without a reader; returns its descriptor.

    What was written can be read by it too.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file atomically and durably; a link is replaced, not followed."""
    if isinstance(content, str):
        content = content.encode(errors="surrogateescape")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(create(temporary), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Writes a file, or the names in a folder, to the disk; some file systems lack the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def has_content(path: Path) -> bool:
    """Whether a file exists and is not empty."""
    return path.exists() and path.stat().st_size > 0


def is_same(path: Path, before: os.stat_result) -> bool:
    """Whether a path still leads to the file or folder that it led to."""
    try:
        return os.path.samestat(path.stat(), before)
    except FileNotFoundError:
        return False


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded: JSON and file names may have lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def as_json(value: Any) -> Any:
    """Replaces numbers that JSON lacks (NaN, infinities) by null."""
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    """JSON as all of a run's files and all commands write it: null for numbers that it lacks."""
    return json.dumps(as_json(value), indent=2, allow_nan=False)


def read_json(content: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8; empty if the content is not one."""
    try:
        value = json.loads(content.decode())  # json guesses the encoding of bytes, also UTF-32
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def free_name(path: Path) -> Path:
    """An unused name beside a path: `NAME.damaged` or `NAME.damagedN`."""
    for number in ("", *range(2, 1000)):
        aside = path.with_name(f"{path.name}.damaged{number}")
        if not os.path.lexists(aside):
            return aside
    raise OSError(errno.EEXIST, "too many damaged ones", str(path))


def remove_temporary(folder: Path) -> None:
    """Removes the temporary files that killed processes left in a run's folder."""
    for path in (*folder.glob(".*"), *(folder / CHECKPOINTS).glob(".*")):
        if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def unexpected_kind(folder: Path) -> str | None:
    """Reports the first name in a run's folder that is not the kind of file the run needs."""
    # A link would be replaced, and a FIFO blocks.
    names = (*_FILES, f"{CHECKPOINTS}/{NOTHING_SAVED}")
    notes = sorted((folder / FLIGHT).glob("process_*.txt"))
    for path in (*(folder / name for name in names), *notes):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            return f"{path} is {_kind_of(path)}, and the run writes a file there. Move it away."
    for path in (folder / name for name in _FOLDERS):
        if os.path.lexists(path) and not path.is_dir():
            return (
                f"{path} is {_kind_of(path)}, and the run needs a folder there. Mount or put back "
                "what belongs there, or move it away."
            )
    return None


def unreadable_entry(folder: Path) -> str | None:
    """Reports the first entry of a tree that is neither file nor folder: a FIFO would block."""
    for path in (folder, *sorted(folder.glob("**/*"))):
        if not (path.is_file() or path.is_dir()):
            where = path.relative_to(folder.parent)
            return f"{where} is {_kind_of(path) if os.path.lexists(path) else 'gone'}"
    return None


def _kind_of(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}" + ("" if path.exists() else ", which is not there")
    return _KINDS.get(stat.S_IFMT(mode), "a device or socket")
