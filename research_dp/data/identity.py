"""The identity of prepared data, which a resumed run and the processes of a run compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.data.reader import read_error
from research_dp.types import DataIdentity, SplitIdentity

_NUM_HASHED = 8  # examples of a split


def identity_of(builder: Any, splits: Sequence[str]) -> DataIdentity:
    """The identity of prepared data, the same for each file format, reader and process.

    Args:
        builder: A TFDS builder whose data is prepared.
        splits: The splits that are read, e.g. 'train[:90%]'.

    Raises:
        UsageError: An example cannot be read.
    """
    path = PurePosixPath(builder.info.full_name)  # name, perhaps a configuration, version
    return DataIdentity(
        name=str(path.parent),
        version=path.name,
        splits={split: _split_identity(builder, split) for split in splits},
    )


def _split_identity(builder: Any, split: str) -> SplitIdentity:
    """Hashes evenly spaced examples; images as encoded, because decoders differ."""
    import tensorflow_datasets as tfds  # late: it is slow to import

    size = builder.info.splits[split].num_examples
    digest = hashlib.sha256()
    decoders = _skip_images(builder.info.features)
    for part in tfds.even_splits(split, min(_NUM_HASHED, size)):
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
        _update(digest, example)
    return SplitIdentity(examples=size, digest=digest.hexdigest()[:16])


def _skip_images(feature: Any) -> Any:
    """TFDS decoders that leave images encoded; None for features without images."""
    import tensorflow_datasets as tfds

    class Skip(tfds.decode.SkipDecoding):
        """Skips images in sequences too."""

        decode_batch_example = decode_batch_example_np = tfds.decode.SkipDecoding.decode_example

    features = tfds.features
    if isinstance(feature, features.Image):
        return Skip()
    if isinstance(feature, features.FeaturesDict):
        decoders = {name: _skip_images(inner) for name, inner in feature.items()}
        return {name: inner for name, inner in decoders.items() if inner} or None
    if isinstance(feature, features.Sequence):
        return _skip_images(feature.feature)
    return None


def _update(digest: Any, value: Any) -> None:
    """Hashes a feature, or a dict of features, independently of the reader's Python types."""
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            digest.update(name.encode())
            _update(digest, inner)
    elif isinstance(value, bytes | str):
        text = value.encode() if isinstance(value, str) else value
        digest.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, list | tuple):
        digest.update(len(value).to_bytes(8, "little"))
        for inner in value:
            _update(digest, inner)
    elif (array := np.asarray(value)).dtype != np.object_:  # not a nested data set
        # Readers differ in dtypes: all integers are hashed as int64, all floats as float64.
        wide = np.float64 if jnp.issubdtype(array.dtype, jnp.floating) else np.int64
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array, wide).tobytes())
