"""A data set of TensorFlow Datasets as a `DataSet`, its default reader, and its identity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import gin

from research_dp import types
from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.data.builders import (
    FileFormat,
    check_decodable,
    check_format,
    check_splits,
    find_builder,
    prepare,
    read_error,
)
from research_dp.data.indexed import NUM_HASHED, Examples, indexed_splits, split_identity
from research_dp.data.preprocess import MakePreprocess, Preprocess

# (builder, training split, evaluation split, preprocess) -> Splits. The data may be prepared after
# the reader is called, but before `train` or `evaluate` are.
Reader = Callable[[Any, str, str, Preprocess], types.Splits]


@gin.register(module="data")
@checked
def random_access(
    builder: Any,
    train_split: str,
    eval_split: str,
    preprocess: Preprocess,
    *,
    threads: CountOrZero = 0,
    workers: CountOrZero = 0,
    prefetch: Count = 4,
    cache_bytes: CountOrZero = 2**28,
) -> types.Splits:
    """Reads examples by index.

    Args:
        builder: A TFDS builder whose files are, or will be, ArrayRecord.
        train_split: Split to train on.
        eval_split: Split to evaluate on.
        preprocess: From features to model inputs.
        threads: Threads that prefetch batches; 0: a batch is read when it is requested, which a
            run does while the devices compute.
        workers: Processes that prefetch training batches instead, for data that is slow to decode;
            0: none. Evaluation uses as many threads.
        prefetch: Batches that are prefetched.
        cache_bytes: A split is cached in memory if its preprocessed examples need at most this
            many bytes.

    Raises:
        UsageError: The data set is in a format without random access, or decoding its images needs
            OpenCV, which is not installed.
    """
    advice = "Add --gin_file=options/tf_data.gin, or bind another tfds_data.data_dir."
    check_format(builder, "array_record", advice)
    check_decodable(builder)

    @functools.cache
    def examples_of(split: str) -> Examples:
        source, folder = builder.as_data_source(split=split), str(builder.data_path)
        return Examples(source, preprocess, cache_bytes, f"{builder.name} {split}", folder)

    return indexed_splits(
        functools.partial(examples_of, train_split),
        functools.partial(examples_of, eval_split),
        preprocess,
        threads=threads,
        workers=workers,
        prefetch=prefetch,
    )


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
) -> types.DataSet:
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

    return data_of(builder, name, (train_split, eval_split), inputs, splits, download=download)


def data_of(
    builder: Any,
    name: str,
    names: tuple[str, str],
    inputs: Preprocess,
    splits: types.Splits,
    *,
    download: bool,
) -> types.DataSet:
    """The data set of a builder, whose splits of these names a reader has made `splits` of."""
    train_split, eval_split = names

    @functools.cache
    def ready() -> None:
        prepare(builder, download)
        check_splits(builder, train_split=train_split, eval_split=eval_split)

    def train(order: types.TrainOrder) -> Iterator[types.Arrays]:
        ready()
        return splits.train(order)

    def evaluate(order: types.EvalOrder) -> Iterator[types.Arrays]:
        ready()
        return splits.evaluate(order)

    @functools.cache
    def identity() -> types.DataIdentity:
        ready()
        return identity_of(builder, names)

    # Now, if the splits are known; else after preparation.
    check_splits(builder, train_split=train_split, eval_split=eval_split)
    return types.DataSet(
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


def identity_of(builder: Any, splits: Sequence[str]) -> types.DataIdentity:
    """The identity of prepared data, the same for each file format, reader and process."""
    path = PurePosixPath(builder.info.full_name)  # name, perhaps a configuration, version
    return types.DataIdentity(
        name=str(path.parent),
        version=path.name,
        splits={split: _split_identity(builder, split) for split in splits},
    )


def _split_identity(builder: Any, split: str) -> types.SplitIdentity:
    """Hashes evenly spaced examples; images as encoded, because decoders differ."""
    import tensorflow_datasets as tfds  # late: it is slow to import

    size = builder.info.splits[split].num_examples
    examples_read = []
    decoders = _skip_images(builder.info.features)
    for part in tfds.even_splits(split, min(NUM_HASHED, size)):
        try:
            if builder.info.file_format.value == "array_record":
                example = builder.as_data_source(split=part, decoders=decoders)[0]
            else:  # a configuration imports TensorFlow, which takes seconds
                in_order = tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1)
                examples = builder.as_dataset(split=part, read_config=in_order, decoders=decoders)
                (example,) = examples.take(1).as_numpy_iterator()
        except Exception as error:  # TFDS and the libraries of the formats raise any class
            name = f"an example of {builder.name} {split}"
            raise read_error(error, builder.data_path, name) from error
        examples_read.append(example)
    return split_identity(size, examples_read)


def _skip_images(feature: Any) -> Any:
    """TFDS decoders that leave images encoded; None for features without images."""
    import tensorflow_datasets as tfds

    class Skip(tfds.decode.SkipDecoding):
        """Skips images in sequences too."""

        decode_batch_example = decode_batch_example_np = tfds.decode.SkipDecoding.decode_example

    if isinstance(feature, tfds.features.Sequence):
        return _skip_images(feature.feature)
    if isinstance(feature, tfds.features.FeaturesDict):
        decoders = {name: _skip_images(inner) for name, inner in feature.items()}
        return {name: inner for name, inner in decoders.items() if inner} or None
    return Skip() if isinstance(feature, tfds.features.Image) else None
