"""A TFDS data set as the loop sees it, whatever reads it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gin

from research_dp.data.preprocess import MakePreprocess, Preprocess
from research_dp.distributed.data_set import Arrays, DataSet, EvalOrder, TrainOrder
from research_dp.distributed.errors import UsageError

# Builders of this package: TFDS finds them by name once their module is imported.
_OWN_BUILDERS = {
    "digits": "research_dp.data.digits",
    "pystdlib_text": "research_dp.data.pystdlib_text",
}


class Splits(NamedTuple):
    """What a reader makes of a data set's splits; fields as in `DataSet`."""

    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]


# (builder, training split, evaluation split, preprocess) -> Splits.
Reader = Callable[[Any, str, str, Preprocess], Splits]


@gin.register(module="data")
def tfds_data(
    *,
    name: str = gin.REQUIRED,
    train_split: str = "train",
    eval_split: str = "test",
    preprocess: MakePreprocess = gin.REQUIRED,
    reader: Reader = gin.REQUIRED,
    file_format: str = "array_record",
    data_dir: str | None = None,
    download: bool = True,
) -> DataSet:
    """A data set of TensorFlow Datasets.

    Args:
        name: E.g. 'mnist', 'lm1b', 'c4/en'; or 'digits' and 'pystdlib_text', which need no
            download.
        train_split: E.g. 'train', 'train[:90%]'.
        eval_split: The split to evaluate on.
        preprocess: (features) -> Preprocess: `image_classification`, `byte_text`.
        reader: `random_access`, or `tf_data` for data sets prepared as TFRecord.
        file_format: How a data set is prepared that is not there yet: 'array_record' for
            `random_access`, 'tfrecord' for `tf_data`.
        data_dir: Where data sets lie; None: TFDS's default (environment variable TFDS_DATA_DIR).
        download: Whether to prepare a data set that is not there yet.

    Raises:
        UsageError: The data set or a split does not exist, or cannot be had.
    """
    builder = prepared_builder(name, data_dir, file_format, download)
    _check_split(builder, train_split, "tfds_data.train_split")
    _check_split(builder, eval_split, "tfds_data.eval_split")
    made: Preprocess = preprocess(builder.info.features)
    splits = reader(builder, train_split, eval_split, made)
    return DataSet(
        name=name,
        example=made.spec,
        info=made.info,
        **splits._asdict(),
    )


def prepared_builder(
    name: str, data_dir: str | None = None, file_format: str = "array_record", download: bool = True
) -> Any:
    """A TFDS builder whose data is there; parameters as in `tfds_data`."""
    builder = _builder(name, data_dir, file_format)
    _prepare(builder, download)
    return builder


def _builder(name: str, data_dir: str | None, file_format: str) -> Any:
    import tensorflow_datasets as tfds  # imported late: it is not needed to import this package

    own = _OWN_BUILDERS.get(name.split("/")[0])
    if own:
        importlib.import_module(own)
    try:
        builder = tfds.builder(name, data_dir=data_dir)
        if builder.data_path.exists():
            return builder  # in the format that it was prepared in
        return tfds.builder(name, data_dir=data_dir, file_format=file_format)
    except tfds.core.DatasetNotFoundError as error:
        import difflib

        known = [*tfds.list_builders(with_community_datasets=False), *_OWN_BUILDERS]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UsageError(
            f"tfds_data.name = {name!r}: TFDS has no such data set.{hint}", binding="tfds_data.name"
        ) from error


def _prepare(builder: Any, download: bool) -> None:
    found = builder.data_path.exists()
    if not found and not download:
        raise UsageError(
            f"{builder.name} is not in {builder.data_path} and tfds_data.download is False. "
            "Prepare it with tools/prepare_data.py, or bind tfds_data.data_dir.",
            binding="tfds_data.download",
        )
    if not found:
        print(f"Preparing {builder.name} in {builder.data_path} (once)", flush=True)
        try:
            builder.download_and_prepare()
        except OSError as error:
            raise UsageError(
                f"{builder.name} could not be downloaded: {type(error).__name__}: {error}. "
                "Prepare it where there is a network, and bind tfds_data.data_dir to it.",
                binding="tfds_data.name",
            ) from error


def _check_split(builder: Any, split: str, binding: str) -> None:
    if not builder.info.splits:
        return  # nothing is known of them before they are read
    try:
        builder.info.splits[split]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{binding} = {split!r}: {builder.name} has splits {sorted(builder.info.splits)}.",
            binding=binding,
        ) from error
