"""What reads a data set's files, as seen by `tfds_data`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from research_dp.data.preprocess import Preprocess
from research_dp.distributed.data_set import Arrays, EvalOrder, TrainOrder
from research_dp.distributed.errors import UsageError


class Splits(NamedTuple):
    """What a reader makes of a data set's splits; fields as in `DataSet`.

    Attributes:
        train: As there.
        evaluate: As there.
        order: What the order of training examples depends on besides data set and split.
        rereads: As there.
    """

    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    order: str = "by index"
    rereads: bool = False


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
