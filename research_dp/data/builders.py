"""TFDS builders: looking them up, preparing their data, and the errors of both."""

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
from typing import Any, Literal

import filelock

from research_dp.errors import UsageError

_MODULES = ("digits", "pystdlib_text")  # of this package; importing them registers builders
_HOURS_IN_USE = 6  # a preparation that wrote nothing for this long is dead
FileFormat = Literal["array_record", "tfrecord"]


def find_builder(
    name: str, data_dir: str | None = None, file_format: FileFormat = "array_record"
) -> Any:
    """The `tfds.core.DatasetBuilder` of a data set of TFDS or of this package.

    Data that is missing will be prepared in `file_format`, below `data_dir` or TFDS's default.
    """
    import tensorflow_datasets as tfds  # late: it is slow to import

    if (module := name.split("/")[0]) in _MODULES:
        importlib.import_module(f"research_dp.data.{module}")
    try:
        builder = tfds.builder(name, data_dir=data_dir)
        if builder.data_path.exists():
            return builder  # in the format in which it was prepared
        return tfds.builder(name, data_dir=data_dir, file_format=file_format)
    except tfds.core.DatasetNotFoundError as error:
        names = [*tfds.list_builders(with_community_datasets=False), *_MODULES]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        cause, reason = error, f"TFDS has no such data set.{hint}"
    except (AssertionError, ImportError, OSError, TypeError, ValueError) as error:
        # E.g. an unknown config or version. TFDS prints its own arguments before the reason.
        cause, reason = error, _one_line(str(error).rpartition('}": ')[2])
    raise UsageError(f"tfds_data.name = {name!r}: {reason}", binding="tfds_data.name") from cause


def prepare(builder: Any, download: bool) -> None:
    """Prepares a data set that is missing, if it may be downloaded, and loads its metadata."""
    if download:
        download_and_prepare(builder)
    elif not builder.data_path.exists():
        raise UsageError(
            f"{builder.name} is not in {builder.data_path} and tfds_data.download is False. "
            "Prepare it with tools/prepare_data.py, or bind tfds_data.data_dir to where it is.",
            binding="tfds_data.download",
        )
    if not builder.info.splits:  # another process prepared it
        builder.info.read_from_directory(builder.data_path)


def download_and_prepare(builder: Any) -> None:
    """Has TFDS download and write a data set that is missing.

    One process prepares it. Others wait for its lock file and then use the result: processes of
    this run, and other runs on this machine.
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
        reason = _advice(builder, error)
        if reason is None:
            raise
        raise UsageError(
            f"{builder.name} cannot be prepared: {reason}", binding="tfds_data.name"
        ) from error


def _remove_incomplete(data_path: Any) -> None:
    """Removes folders of killed preparations of a data set; the caller has its lock.

    `tfds build`, and hosts whose file system shares no locks, prepare without it. So folders with
    recent changes are not removed.
    """
    if "://" in str(data_path):
        return  # there is no lock, so others may be writing
    incomplete = re.compile(rf"incomplete\.[0-9A-Za-z]+_{re.escape(data_path.name)}")
    for path in map(Path, data_path.parent.iterdir()) if data_path.parent.exists() else ():
        if not incomplete.fullmatch(path.name) or path.is_symlink():
            continue
        if time.time() - _last_change(path) < _HOURS_IN_USE * 3600:
            when = f"in the last {_HOURS_IN_USE} hours"
            message = f"Leaving {path}, which changed {when}: another program may be preparing it"
            print(message, flush=True)
        else:
            print(f"Removing {path}, the rest of a preparation that was killed", flush=True)
            shutil.rmtree(path)


def _last_change(folder: Path) -> float:
    """Time of the last change in a folder, in seconds since the epoch; inf: just now."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # renamed or removed meanwhile
        return math.inf


def _lock(builder: Any) -> Any:
    """The lock of a data set's preparation. Object stores have no locks."""
    root = str(builder.data_dir_root)
    if "://" in root:
        return contextlib.nullcontext()
    Path(root).mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(Path(root) / f".{builder.name}.lock")


def _advice(builder: Any, error: Exception) -> str | None:
    """The reason of a failed preparation and what to do; None for a defect of the builder."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    manual = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if manual and isinstance(error, (AssertionError, FileNotFoundError, tf.errors.NotFoundError)):
        folder = builder.data_dir_root / "downloads" / "manual"
        return f"archives are missing in manual_dir = {folder}. {_one_line(manual)}"
    if isinstance(error, AssertionError) and "No examples were yielded" in str(error):
        return f"{_one_line(error)}. Its builder must yield examples for each split it names."
    if isinstance(error, ImportError):
        package = (error.name or "").split(".")[0].replace("_", "-")
        return f"{_one_line(error)}. " + (f"Do: pip install {package}" if package else "")
    checksum = tfds.download.download_manager.NonMatchingChecksumError
    if isinstance(error, (OSError, tfds.download.DownloadError, checksum)):
        advice = "Prepare it where there is a network and space, and bind tfds_data.data_dir to it."
        return f"{_one_line(error)}. {advice}"
    return None


def check_split(builder: Any, split: str, binding: str) -> None:
    """Refuses a split that does not exist or is empty, if the splits are known."""
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
