"""The interface of readers, and the checks and messages that they share."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from research_dp.data.preprocess import Preprocess
from research_dp.errors import UsageError
from research_dp.types import Arrays, EvalOrder, TrainOrder


class Splits(NamedTuple):
    """Batches of a data set's splits; fields as in `DataSet`, but `order` omits set and split."""

    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    order: str = "by index"
    rereads: bool = False
    locate: Callable[[TrainOrder | EvalOrder, int], str] | None = None


# (TFDS builder, training split, evaluation split, preprocess) -> Splits. The data may be prepared
# after the reader is called, but before `train` or `evaluate` are.
Reader = Callable[[Any, str, str, Preprocess], Splits]


def stack(examples: Sequence[Arrays]) -> Arrays:
    """Examples with the same arrays as one batch."""
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def read_error(error: Exception, folder: Any, name: str) -> UsageError:
    """The error for data in `folder` that cannot be read, e.g. 'example 7 of digits train'."""
    reason = textwrap.shorten(str(error) or type(error).__name__, 250, placeholder=" ...")
    return UsageError(
        f"{name} cannot be read: {reason.rstrip('.')}. Move {folder} away, and the next run "
        "prepares it again; what this run saved is untouched."
    )


def preprocess_example(
    preprocess: Preprocess, raw: Any, rng: np.random.Generator | None, locate: Callable[[], str]
) -> Arrays:
    """Calls `preprocess.example`; its `UsageError`s get the example's name from `locate`."""
    try:
        return preprocess.example(raw, rng)
    except UsageError as error:
        raise UsageError(f"{locate()}: {error}", binding=error.binding) from error


def check_format(builder: Any, readable: str, advice: str) -> None:
    """Refuses a data set that is, or would be prepared, in another format than the reader's.

    `advice` says what to do about prepared data.
    """
    actual = builder.info.file_format.value
    if actual == readable:
        return
    if not builder.data_path.exists():
        raise UsageError(
            f"{builder.name} would be prepared as {actual}, which tfds_data.reader cannot read. "
            f"Bind tfds_data.file_format = '{readable}'.",
            binding="tfds_data.file_format",
        )
    raise UsageError(
        f"{builder.name} in {builder.data_path} is {actual}, and tfds_data.reader reads "
        f"{readable}. {advice}",
        binding="tfds_data.reader",
    )


def check_decodable(builder: Any) -> None:
    """Refuses images of uint16, which TFDS decodes with OpenCV, if OpenCV is not installed."""
    import tensorflow_datasets as tfds

    images = {
        name: feature
        for name, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Image) and feature.np_dtype == np.uint16
    }
    if images and not importlib.util.find_spec("cv2"):
        raise UsageError(
            f"{builder.name} has images of uint16 ({', '.join(images)}), which Pillow cannot "
            "decode. Do: pip install opencv-python-headless; or prepare it as TFRecord and add "
            "--gin_file=gin/options/tf_data.gin.",
            binding="tfds_data.reader",
        )
