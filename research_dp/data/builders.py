"""TFDS builders: looking them up, preparing their data, and refusing what cannot be read."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import os
import re
import sys
import textwrap
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import filelock
import numpy as np

from research_dp.errors import UsageError, binding_error

_OFFLINE = ("digits", "pystdlib_text")  # of this package
_INSTALL_TENSORFLOW = "Do: pip install 'research_dp[tf]'"
FileFormat = Literal["array_record", "tfrecord"]


def find_builder(
    name: str, data_dir: str | None = None, file_format: FileFormat = "array_record"
) -> Any:
    """The `tfds.core.DatasetBuilder` of a data set of TFDS or of this package.

    Data that is missing will be prepared in `file_format`, below `data_dir` or TFDS's default.
    """
    import tensorflow_datasets as tfds  # late: it is slow to import

    quieten_tfds()
    data_dir = folder_of_data(data_dir)
    if name.split("/")[0] in _OFFLINE:
        importlib.import_module("research_dp.data.offline")  # registers them
    try:
        builder = tfds.builder(name, data_dir=data_dir)
        if builder.data_path.exists():
            return builder  # in the format in which it was prepared
        return tfds.builder(name, data_dir=data_dir, file_format=file_format)
    except tfds.core.DatasetNotFoundError as error:
        names = [*tfds.list_builders(with_community_datasets=False), *_OFFLINE]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        problem = f" = {name!r}: TFDS has no such data set.{hint}"
        raise binding_error("tfds_data.name", problem) from error
    except (AssertionError, ImportError, OSError, TypeError, ValueError) as error:
        # E.g. an unknown config or version. TFDS prints its own arguments before the reason.
        reason = _one_line(str(error).rpartition('}": ')[2])
        raise binding_error("tfds_data.name", f" = {name!r}: {reason}") from error


def folder_of_data(data_dir: str | None) -> str | None:
    """Where TFDS is to keep data; None: where it does by default."""
    if not data_dir and os.environ.get("TFDS_DATA_DIR") == "":
        # As if it were not set; TFDS would take the current folder.
        return os.path.expanduser("~/tensorflow_datasets")
    return data_dir


def prepare(builder: Any, download: bool) -> None:
    """Prepares a data set that is missing, if it may be downloaded, and loads its metadata."""
    if download:
        download_and_prepare(builder)
    elif not builder.data_path.exists():
        problem = f"{builder.name} is not in {builder.data_path} and tfds_data.download is False."
        advice = "Bind it to True to prepare the data, or bind tfds_data.data_dir to where it is."
        raise UsageError(f"{problem} {advice}", binding="tfds_data.download")
    if not builder.info.splits:  # another process prepared it
        builder.info.read_from_directory(builder.data_path)


def download_and_prepare(builder: Any) -> None:
    """Has TFDS download and write a data set that is missing.

    One process prepares it. Others wait for its lock file and then use the result: processes of
    this run, and other runs on this machine. What a killed preparation left stays: it has another
    folder.
    """
    if builder.data_path.exists():
        return
    root = str(builder.data_dir_root)
    lock: Any = contextlib.nullcontext()
    if "://" not in root:  # object stores have no locks
        lock = filelock.FileLock(Path(root) / f".{builder.name}.lock")
    try:
        with lock:
            if not builder.data_path.exists():
                print(f"Preparing {builder.name} in {builder.data_path} (once)", flush=True)
                began = time.monotonic()
                with _quiet_tfds():
                    builder.download_and_prepare()
                seconds = time.monotonic() - began
                print(f"Prepared {builder.name} in {seconds:.0f} s", flush=True)
    except Exception as error:
        reason = _advice(builder, error)
        if reason is None:
            raise
        problem = f"{builder.name} cannot be prepared: {reason}"
        raise UsageError(problem, binding="tfds_data.name") from error


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Leaves out TFDS's own bars, and its lines on sizes that it does not know."""
    import tensorflow_datasets as tfds
    import termcolor

    tfds.disable_progress_bar()
    try:
        with unittest.mock.patch.object(termcolor, "cprint"):
            yield
    finally:
        tfds.enable_progress_bar()


def _advice(builder: Any, error: Exception) -> str | None:
    """The reason of a failed preparation and what to do; None for a defect of the builder."""
    import tensorflow_datasets as tfds

    tensorflow = sys.modules.get("tensorflow")  # imported by TFDS, if it needed it
    absent = (tensorflow.errors.NotFoundError,) if tensorflow else ()
    manual = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if manual and isinstance(error, (AssertionError, FileNotFoundError, *absent)):
        folder = builder.data_dir_root / "downloads" / "manual"
        return f"archives are missing in manual_dir = {folder}. {_one_line(manual)}"
    if isinstance(error, AssertionError) and "No examples were yielded" in str(error):
        return f"{_one_line(error)}. Its builder must yield examples for each split it names."
    if isinstance(error, ImportError):
        name = error.name or (re.findall(r"No module named '([\w.]+)'", str(error)) or [""])[0]
        package = name.split(".")[0].replace("_", "-")
        if package == "tensorflow":
            return f"TFDS encodes its examples with TensorFlow. {_INSTALL_TENSORFLOW}"
        return f"{_one_line(error)}. " + (f"Do: pip install {package}" if package else "")
    checksum = tfds.download.download_manager.NonMatchingChecksumError
    if isinstance(error, (OSError, tfds.download.DownloadError, checksum)):
        advice = "Prepare it where there is a network and space, and bind tfds_data.data_dir to it."
        return f"{_one_line(error)}. {advice}"
    return None


def check_splits(builder: Any, **splits: str) -> None:
    """Refuses splits that do not exist or are empty, if known, by parameter of `tfds_data`."""
    for parameter, split in splits.items() if builder.info.splits else ():
        binding = f"tfds_data.{parameter}"
        try:
            size = builder.info.splits[split].num_examples
        except (AttributeError, KeyError, ValueError) as error:
            problem = f" = {split!r}: {builder.name} has splits {sorted(builder.info.splits)}."
            raise binding_error(binding, problem) from error
        if size < 1:
            raise binding_error(binding, f" = {split!r} has no examples.")


def check_format(builder: Any, readable: str, advice: str) -> None:
    """Refuses a data set that is, or would be prepared, in another format than the reader's.

    `advice` says what to do about prepared data.
    """
    actual = builder.info.file_format.value
    if actual != readable and builder.data_path.exists():
        problem = f"{builder.name} in {builder.data_path} is {actual}, and tfds_data.reader reads"
        raise UsageError(f"{problem} {readable}. {advice}", binding="tfds_data.reader")
    if actual != readable:
        problem = f"would be prepared as {actual}, which tfds_data.reader cannot read."
        advice = f"Bind tfds_data.file_format = '{readable}'."
        raise UsageError(f"{builder.name} {problem} {advice}", binding="tfds_data.file_format")


def check_tensorflow() -> None:
    """Refuses to read TFRecord without TensorFlow."""
    if not importlib.util.find_spec("tensorflow"):
        problem = " = @tf_data reads with TensorFlow, which is not installed."
        raise binding_error("tfds_data.reader", f"{problem} {_INSTALL_TENSORFLOW}")


def quieten_tfds() -> None:
    """Leaves out TFDS's advice to install OpenCV, which reads no faster here, and its own names."""
    logging.getLogger("absl").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    unwanted = "OpenCV is not installed", "Using custom data configuration"
    return not any(text in str(record.msg) for text in unwanted)


def check_decodable(builder: Any) -> None:
    """Refuses images of uint16, which TFDS decodes with OpenCV, if OpenCV is not installed."""
    import tensorflow_datasets as tfds

    images = [
        name
        for name, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint16
    ]
    if images and not importlib.util.find_spec("cv2"):
        names = ", ".join(images)
        problem = f"{builder.name} has images of uint16 ({names}), which Pillow cannot decode."
        advice = "Do: pip install opencv-python-headless; or prepare it as TFRecord and add"
        option = "--gin_file=options/tf_data.gin."
        raise UsageError(f"{problem} {advice} {option}", binding="tfds_data.reader")


def read_error(error: Exception, folder: Any, name: str) -> UsageError:
    """The error for data that cannot be read, e.g. 'example 7 of digits train'.

    `folder` is where TFDS prepared it; None: it is the user's own.
    """
    reason = _one_line(str(error) or type(error).__name__, 250)
    if folder is None:
        return UsageError(f"{name} cannot be read: {type(error).__name__}: {reason}.")
    return UsageError(
        f"{name} cannot be read: {reason}. Move {folder} away, and the next run "
        "prepares it again; what this run saved is untouched."
    )


def _one_line(text: Any, width: int = 400) -> str:
    return textwrap.shorten(str(text), width, placeholder=" ...").rstrip(".")
