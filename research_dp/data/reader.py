"""What reads a data set's files, as seen by `tfds_data`."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from research_dp.data.preprocess import Preprocess
from research_dp.errors import UsageError
from research_dp.types import Arrays, EvalOrder, TrainOrder


class Splits(NamedTuple):
    """What a reader makes of a data set's splits; fields as in `DataSet`.

    Attributes:
        train: As there.
        evaluate: As there.
        order: What the order of training examples depends on besides data set and split.
        rereads: As there.
        locate: As there.
    """

    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    order: str = "by index"
    rereads: bool = False
    locate: Callable[[TrainOrder | EvalOrder, int], str] | None = None


# (TFDS builder, training split, evaluation split, preprocess) -> Splits. The builder's data may not
# be there yet when the reader is called; it is when `train` or `evaluate` are.
Reader = Callable[[Any, str, str, Preprocess], Splits]


def unreadable(error: Exception, folder: Any, what: str) -> UsageError:
    """What to tell of data that cannot be read.

    Args:
        error: What was raised.
        folder: Where the data lies.
        what: What could not be read, e.g. 'example 7 of digits train'.
    """
    why = textwrap.shorten(str(error) or type(error).__name__, 250, placeholder=" ...").rstrip(".")
    return UsageError(
        f"{what} cannot be read: {why}. Move {folder} away, and the next run prepares it again; "
        "what this one saved is untouched."
    )


def treated(
    preprocess: Preprocess,
    raw: Any,
    rng: np.random.Generator | None,
    where: Callable[[], str],
) -> Arrays:
    """What `preprocess.example` makes of a raw example.

    Args:
        preprocess: Its `example` is called.
        raw: The raw example.
        rng: Its random numbers; None: nothing is drawn.
        where: () -> which example it is, e.g. 'example 7 of digits train'.

    Raises:
        UsageError: `preprocess.example` refused the example; the message names it.
    """
    try:
        return preprocess.example(raw, rng)
    except UsageError as error:
        raise UsageError(f"{where()}: {error}", binding=error.binding) from error


def check_format(builder: Any, readable: str, advice: str) -> None:
    """Refuses a data set whose files a reader cannot read.

    Args:
        builder: A TFDS builder.
        readable: The format that the reader reads.
        advice: What the user can do with data that is there.

    Raises:
        UsageError: The data is in another format, or would be prepared in it.
    """
    found = builder.info.file_format.value
    if found == readable:
        return
    if not builder.data_path.exists():
        raise UsageError(
            f"{builder.name} would be prepared as {found}, which tfds_data.reader cannot read. "
            f"Bind tfds_data.file_format = '{readable}'.",
            binding="tfds_data.file_format",
        )
    raise UsageError(
        f"{builder.name} in {builder.data_path} is {found}, and tfds_data.reader reads {readable}. "
        f"{advice}",
        binding="tfds_data.reader",
    )


def check_decodable(builder: Any) -> None:
    """Refuses images that TFDS decodes to numpy arrays by OpenCV alone, where it is not installed.

    Raises:
        UsageError: The data set has such images.
    """
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
