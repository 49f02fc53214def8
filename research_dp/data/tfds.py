"""A data set of TensorFlow Datasets as a `DataSet`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import gin

from research_dp.argument_checks import checked
from research_dp.data.array_record import random_access
from research_dp.data.builders import FileFormat, check_split, find_builder, prepare
from research_dp.data.identity import identity_of
from research_dp.data.preprocess import MakePreprocess
from research_dp.data.reader import Reader
from research_dp.types import Arrays, DataIdentity, DataSet, EvalOrder, TrainOrder


@gin.register(module="data")
@checked
def tfds_data(
    *,
    name: str = gin.REQUIRED,
    train_split: str = "train",
    eval_split: str = "test",
    preprocess: MakePreprocess = gin.REQUIRED,
    reader: Reader = random_access,
    file_format: FileFormat = "array_record",
    data_dir: str | None = None,
    download: bool = True,
) -> DataSet:
    """A data set of TensorFlow Datasets. It is downloaded when it is first read.

    Args:
        name: E.g. 'mnist', 'lm1b', 'c4/en'; 'digits' and 'pystdlib_text' need no download.
        train_split: E.g. 'train', 'train[:90%]'.
        eval_split: The split to evaluate on.
        preprocess: (features) -> Preprocess: `image_classification`, `byte_text`.
        reader: `random_access`; or `tf_data`, for data sets prepared as TFRecord.
        file_format: Format in which a missing data set is prepared: 'array_record' for
            `random_access`, 'tfrecord' for `tf_data`.
        data_dir: Folder of data sets; None: TFDS's default (environment variable TFDS_DATA_DIR).
        download: Whether to prepare a data set that is missing.

    Raises:
        UsageError: The data set or a split does not exist, or cannot be read. Errors that need the
            prepared data are raised by `DataSet.prepare`.
    """
    builder = find_builder(name, data_dir, file_format)
    inputs = preprocess(builder.info.features)
    splits = reader(builder, train_split, eval_split, inputs)

    def check_splits() -> None:
        check_split(builder, train_split, "tfds_data.train_split")
        check_split(builder, eval_split, "tfds_data.eval_split")

    @functools.cache
    def ready() -> None:
        prepare(builder, download)
        check_splits()

    def train(order: TrainOrder) -> Iterator[Arrays]:
        ready()
        return splits.train(order)

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        ready()
        return splits.evaluate(order)

    @functools.cache
    def identity() -> DataIdentity:
        ready()
        return identity_of(builder, (train_split, eval_split))

    check_splits()  # now, if the splits are known; else after preparation
    return DataSet(
        name=name,
        example=inputs.spec,
        info=inputs.info,
        prepare=ready,
        train=train,
        evaluate=evaluate,
        order=f"{builder.info.full_name} {train_split}, {splits.order}",
        rereads=splits.rereads,
        identity=identity,
        locate=splits.locate,
    )
