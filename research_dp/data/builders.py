"""TFDS builders: finding one, having it prepare its data, and what users get wrong with it."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import re
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any, Literal, get_args

import filelock

from research_dp.errors import UsageError

# Builders of this package: TFDS finds them by name once their module is imported.
_OWN = {
    "digits": "research_dp.data.digits",
    "pystdlib_text": "research_dp.data.pystdlib_text",
}
_HOURS_IN_USE = 6  # a preparation that wrote nothing for so long was ended
FileFormat = Literal["array_record", "tfrecord"]


def find_builder(name: str, data_dir: str | None = None, file_format: str = "array_record") -> Any:
    """The `tfds.core.DatasetBuilder` of a data set, whose data may still have to be prepared.

    Args:
        name: TFDS name, or that of a data set of this package.
        data_dir: Where data sets lie; None: TFDS's default.
        file_format: 'array_record' or 'tfrecord': how the data is prepared if it is not there yet.

    Raises:
        UsageError: There is no such data set, or TFDS cannot make its builder.
    """
    import tensorflow_datasets as tfds  # imported late: it is not needed to import this package

    if file_format not in get_args(FileFormat):
        raise UsageError(
            f"tfds_data.file_format = {file_format!r}: use one of {list(get_args(FileFormat))}.",
            binding="tfds_data.file_format",
        )
    own = _OWN.get(str(name).split("/")[0])
    if own:
        importlib.import_module(own)
    try:
        builder = tfds.builder(name, data_dir=data_dir)
        if builder.data_path.exists():
            return builder  # in the format that it was prepared in
        return tfds.builder(name, data_dir=data_dir, file_format=file_format)
    except tfds.core.DatasetNotFoundError as error:
        known = [*tfds.list_builders(with_community_datasets=False), *_OWN]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UsageError(
            f"tfds_data.name = {name!r}: TFDS has no such data set.{hint}", binding="tfds_data.name"
        ) from error
    except (AssertionError, ImportError, OSError, TypeError, ValueError) as error:
        # A config or version that there is none of, a folder that cannot be read. TFDS puts its
        # own arguments before what is wrong.
        reason = _one_line(str(error).rpartition('}": ')[2])
        raise UsageError(
            f"tfds_data.name = {name!r}: {reason}", binding="tfds_data.name"
        ) from error


def prepare(builder: Any, download: bool) -> None:
    """Makes data ready that is not there yet.

    Whoever comes first prepares it, others wait for a lock beside it and find it there: other
    processes of this run, and other runs on this machine.

    Args:
        builder: Its folder is that of the data set.
        download: Whether data that is not there may be prepared.

    Raises:
        UsageError: The data is not there and could not be had.
    """
    if download:
        download_and_prepare(builder)
    elif not builder.data_path.exists():
        raise UsageError(
            f"{builder.name} is not in {builder.data_path} and tfds_data.download is False. "
            "Prepare it with tools/prepare_data.py, or bind tfds_data.data_dir to where it is.",
            binding="tfds_data.download",
        )
    if not builder.info.splits:  # another process prepared it: what is known of it is in its folder
        builder.info.read_from_directory(builder.data_path)


def download_and_prepare(builder: Any) -> None:
    """Has TFDS download and write a data set, if it is not there; one process at a time.

    Raises:
        UsageError: It cannot be downloaded, or a package or archive is missing.
    """
    if builder.data_path.exists():
        return
    try:
        with _lock(builder):
            if not builder.data_path.exists():
                _remove_incomplete(builder.data_path)
                print(f"Preparing {builder.name} in {builder.data_path} (once)", flush=True)
                builder.download_and_prepare()
    except Exception as error:
        reason = _reason(builder, error)
        if reason is None:
            raise
        raise UsageError(
            f"{builder.name} cannot be prepared: {reason}", binding="tfds_data.name"
        ) from error


def _remove_incomplete(data_path: Any) -> None:
    """Removes what preparations that were killed left beside a data set; for who has its lock.

    Not every preparation takes the lock: `tfds build` does not, nor a host whose file system shares
    no locks. So a folder in which something changed lately stays.
    """
    if "://" in str(data_path):
        return  # without a lock others may be writing there
    named = re.compile(rf"incomplete\.[0-9A-Za-z]+_{re.escape(data_path.name)}")
    for path in map(Path, data_path.parent.iterdir()) if data_path.parent.exists() else ():
        if not named.fullmatch(path.name) or path.is_symlink():
            continue
        if time.time() - _last_change(path) < _HOURS_IN_USE * 3600:
            print(
                f"Leaving {path}, in which something changed in the last {_HOURS_IN_USE} hours: "
                "another program may be preparing it",
                flush=True,
            )
            continue
        print(f"Removing {path}, which a preparation that was ended left", flush=True)
        shutil.rmtree(path)


def _last_change(folder: Path) -> float:
    """When something in a folder was last changed, in seconds since the epoch; inf: just now."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # it was renamed or removed meanwhile
        return math.inf


def _lock(builder: Any) -> Any:
    """Held while a data set is prepared. Object stores have no locks."""
    root = str(builder.data_dir_root)
    if "://" in root:
        return contextlib.nullcontext()
    Path(root).mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(Path(root) / f".{builder.name}.lock")


def _reason(builder: Any, error: Exception) -> str | None:
    """What went wrong and what to do about it; None if that is not up to the user."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    by_hand = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if by_hand and isinstance(error, (AssertionError, FileNotFoundError, tf.errors.NotFoundError)):
        folder = builder.data_dir_root / "downloads" / "manual"
        return f"archives are missing in manual_dir = {folder}. {_one_line(by_hand)}"
    if isinstance(error, AssertionError) and "No examples were yielded" in str(error):
        return f"{_one_line(error)}. Its builder must give each split an example, or not name it."
    if isinstance(error, ImportError):
        package = (error.name or "").split(".")[0].replace("_", "-")
        return f"{_one_line(error)}. " + (f"Do: pip install {package}" if package else "")
    checksum = tfds.download.download_manager.NonMatchingChecksumError
    if isinstance(error, (OSError, tfds.download.DownloadError, checksum)):
        advice = "Prepare it where there is a network and room, and bind tfds_data.data_dir to it."
        return f"{_one_line(error)}. {advice}"
    return None


def check_split(builder: Any, split: str, binding: str) -> None:
    """Refuses a split that does not exist or is empty, if the splits are known already."""
    if not builder.info.splits:
        return
    try:
        size = builder.info.splits[split].num_examples
    except (AttributeError, KeyError, ValueError) as error:
        raise UsageError(
            f"{binding} = {split!r}: {builder.name} has splits {sorted(builder.info.splits)}.",
            binding=binding,
        ) from error
    if size < 1:
        raise UsageError(f"{binding} = {split!r} has no examples.", binding=binding)


def _one_line(text: Any) -> str:
    return textwrap.shorten(str(text), 400, placeholder=" ...").rstrip(".")
