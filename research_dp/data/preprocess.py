"""From a data set's features to a model's inputs, by numpy alone.

`Preprocess.example` treats one raw example (decode, resize) and `Preprocess.batch` a stack of
them (augment, normalise). Random draws come from a generator that the pipeline seeds with the
run's seed and the place in the training stream, so they are the same on any number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from research_dp.argument_types import Count, CountOrZero
from research_dp.errors import UsageError, check_count
from research_dp.types import Arrays


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """What a task makes of a data set.

    Attributes:
        spec: Shape and dtype of one model input, by name.
        info: Facts for the model, e.g. `num_classes`.
        example: (raw example, generator or None) -> arrays of fixed shapes. A `UsageError` that it
            raises is reported with the example's place.
        batch: (stacked examples, rows, global batch size, generator or None) -> model inputs.
            With a generator: draw for the whole global batch, then take `rows`.
        example_is_random: Whether `example` draws while training, so that it must not be cached.
    """

    spec: Mapping[str, jax.ShapeDtypeStruct]
    info: Mapping[str, Any]
    example: Callable[[Mapping[str, Any], np.random.Generator | None], Arrays]
    batch: Callable[[Arrays, np.ndarray, int, np.random.Generator | None], Arrays]
    example_is_random: bool = False


# Features of a data set (as in `tfds.core.DatasetInfo.features`) -> Preprocess.
MakePreprocess = Callable[[Mapping[str, Any]], Preprocess]

# The value of full brightness, by which images are divided that are no floats.
_BRIGHTEST = {"bool": 1.0, "uint8": 255.0, "uint16": 65535.0}
_INT32 = np.iinfo(np.int32)


@gin.register(module="data")
def image_classification(
    features: Mapping[str, Any],
    *,
    size: Count | None = None,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
    pad_crop: CountOrZero = 0,
    flip: bool = False,
    random_resized_crop: bool = False,
) -> Preprocess:
    """Images as float32, normalised by mean and standard deviation, with their labels.

    Images of uint8 are divided by 255 and images of uint16 by 65535, so that they are in [0, 1].
    Images of floating-point dtypes keep their values: `mean` and `std` are in their units, and the
    defaults fit values in [0, 1].

    Args:
        features: The data set's features. `image` (height, width, channels), uint8, uint16 or
            floating-point, and `label` (), integer, are used.
        size: Height and width of the model's input; None: the images', which then have one shape.
        mean: Subtracted, for each channel (or one for all).
        std: Divided by, for each channel (or one for all).
        pad_crop: While training, pad by so many zero pixels and crop at random.
        flip: While training, mirror half of the images left to right.
        random_resized_crop: While training, resize a random area of 8 to 100 % of the image
            (Szegedy et al., arXiv 1409.4842); otherwise the central square is resized.

    Raises:
        UsageError: The data set lacks a feature or has it in another shape or dtype, or its images
            have no one size, or a count makes no sense.
    """
    check_count("image_classification.pad_crop", pad_crop, 0)
    if size is not None:
        check_count("image_classification.size", size, 1)
    wanted = "(height, width, channels) of uint8, uint16 or floats"
    dtype = _check_feature(features, "image", "image_classification", _is_image, wanted)
    _check_feature(features, "label", "image_classification", _is_label, "one integer")
    brightest = np.float32(_BRIGHTEST.get(dtype.name, 1.0))
    channels = features["image"].shape[-1]
    shape = (size, size, channels) if size else tuple(features["image"].shape)
    if None in shape:
        raise UsageError(
            f"image_classification.size is not bound, and images of shape {shape} have no one "
            "size. Bind it, e.g. to 224.",
            binding="image_classification.size",
        )
    # Labels that are no classes, or classes that are counted when the data is prepared, have none.
    num_classes = getattr(features["label"], "num_classes", None)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise UsageError(
                f"image_classification.{name} = {values}: give one number, or one for each of the "
                f"{channels} channels.",
                binding=f"image_classification.{name}",
            )
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def example(raw: Mapping[str, Any], rng: np.random.Generator | None) -> Arrays:
        image, label = np.asarray(raw["image"]), int(raw["label"])
        if image.dtype != np.uint8:
            image = image.astype(np.float32)
        if size:
            box = _random_box(image, rng) if rng and random_resized_crop else _center_box(image)
            image = _resize(image, box, size)
        if not _INT32.min <= label <= _INT32.max:
            raise UsageError(f"its label is {label}, beyond int32. Number classes from 0.")
        return {"image": image, "label": np.asarray(label, np.int32)}

    def batch(
        arrays: Arrays, rows: np.ndarray, total: int, rng: np.random.Generator | None
    ) -> Arrays:
        image = arrays["image"]
        if rng and pad_crop:
            offsets = rng.integers(0, 2 * pad_crop + 1, (total, 2))[rows]
            image = _crop(image, pad_crop, offsets)
        if rng and flip:
            mirrored = rng.random(total)[rows] < 0.5
            image = np.where(mirrored[:, None, None, None], image[:, :, ::-1], image)
        normal = (image.astype(np.float32) / brightest - shift) / scale
        return {"image": normal, "label": arrays["label"]}

    return Preprocess(
        spec={
            "image": jax.ShapeDtypeStruct(shape, np.float32),
            "label": jax.ShapeDtypeStruct((), np.int32),
        },
        info={} if num_classes is None else {"num_classes": num_classes},
        example=example,
        batch=batch,
        example_is_random=random_resized_crop,
    )


@gin.register(module="data")
def byte_text(
    features: Mapping[str, Any],
    *,
    length: Count = 256,
    key: str = "text",
    crop_from: Count | None = None,
) -> Preprocess:
    """The first bytes of each text as tokens, padded, with a mask over real bytes.

    Args:
        features: The data set's features; `key` is used: text, or a vector of uint8.
        length: Tokens an example. Longer texts are cut.
        key: Name of the feature.
        crop_from: While training, `length` bytes at random out of the first so many; None: always
            the first.

    Raises:
        UsageError: The data set has no such feature, or it is neither text nor bytes, or the length
            makes no sense.
    """
    check_count("byte_text.length", length, 1)
    read = length
    if crop_from is not None:
        check_count("byte_text.crop_from", crop_from, length)
        read = crop_from
    _check_feature(features, key, "byte_text", _is_text, "one text or a vector of uint8")

    def example(raw: Mapping[str, Any], rng: np.random.Generator | None) -> Arrays:
        del rng  # nothing is random
        value = raw[key]
        value = value.encode() if isinstance(value, str) else value
        data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        tokens, weights = np.zeros(read, np.int32), np.zeros(read, np.float32)
        used = min(len(data), read)
        tokens[:used], weights[:used] = data[:used], 1.0
        return {"tokens": tokens, "weights": weights}

    def batch(
        arrays: Arrays, rows: np.ndarray, total: int, rng: np.random.Generator | None
    ) -> Arrays:
        starts = np.zeros(len(rows), np.int64)
        if rng and crop_from:
            spare = np.maximum(arrays["weights"].sum(axis=1) - length, 0)
            starts = (rng.random(total)[rows] * (spare + 1)).astype(np.int64)
        places = starts[:, None] + np.arange(length)
        return {name: np.take_along_axis(x, places, axis=1) for name, x in arrays.items()}

    return Preprocess(
        spec={
            "tokens": jax.ShapeDtypeStruct((length,), np.int32),
            "weights": jax.ShapeDtypeStruct((length,), np.float32),
        },
        info={"vocab_size": 256},
        example=example,
        batch=batch,
    )


def _is_image(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    known = dtype.name in _BRIGHTEST or jnp.issubdtype(dtype, jnp.floating)
    return len(shape) == 3 and known


def _is_label(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    return not shape and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))


def _is_text(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    return (len(shape), dtype) in ((0, np.object_), (1, np.uint8))


def _check_feature(
    features: Mapping[str, Any],
    name: str,
    function: str,
    accepts: Callable[[Sequence[int | None], np.dtype], bool],
    wanted: str,
) -> np.dtype:
    """The dtype of a feature; refuses one whose values a function would cut or misread.

    Args:
        features: The data set's features.
        name: The feature.
        function: The gin name of the function that uses it, for messages.
        accepts: (shape, dtype) -> whether the function can use it.
        wanted: What it can use, in words.

    Raises:
        UsageError: There is no such feature, or it is of another shape or dtype.
    """
    if name not in features:
        problem = f"; this data set has {sorted(features)}"
    else:
        shape, dtype = features[name].shape, features[name].np_dtype
        nested = isinstance(dtype, Mapping)  # then the shape is a dict too
        if not nested and accepts(shape, np.dtype(dtype)):
            return np.dtype(dtype)
        here = f"features {sorted(dtype)}" if nested else f"{shape} of {np.dtype(dtype)}"
        problem = f" as {wanted}; here it is {here}"
    raise UsageError(
        f"{function} needs feature {name!r}{problem}. Prepare the data set so, or bind "
        "tfds_data.preprocess to a function that fits it.",
        binding="tfds_data.preprocess",
    )


def _center_box(image: np.ndarray) -> tuple[int, int, int, int]:
    height, width = image.shape[:2]
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _random_box(image: np.ndarray, rng: np.random.Generator) -> tuple[int, int, int, int]:
    height, width = image.shape[:2]
    area, ratio = rng.uniform(0.08, 1.0) * height * width, np.exp(rng.uniform(-0.288, 0.288))
    w = int(np.clip(round((area * ratio) ** 0.5), 1, width))
    h = int(np.clip(round((area / ratio) ** 0.5), 1, height))
    left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    return left, top, left + w, top + h


def _resize(image: np.ndarray, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    """Resizes a box of an image (H, W, C), uint8 or float32, to (size, size, C)."""

    def resized(plane: np.ndarray) -> np.ndarray:
        picture = Image.fromarray(plane)
        return np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR, box=box))

    if image.dtype == np.uint8 and image.shape[-1] > 1:
        return resized(image)
    # Pillow has floats, and gray, as one channel alone.
    return np.stack([resized(plane) for plane in np.moveaxis(image, -1, 0)], axis=-1)


def _crop(image: np.ndarray, pad: int, offsets: np.ndarray) -> np.ndarray:
    """Shifts each image of (B, H, W, C) by offsets (B, 2) in [0, 2 * pad], zeros moving in."""
    _, height, width, _ = image.shape
    size, channels = len(image), image.shape[-1]
    # np.pad does the same in four times the time, of small images.
    padded = np.zeros((size, height + 2 * pad, width + 2 * pad, channels), image.dtype)
    padded[:, pad : pad + height, pad : pad + width] = image
    ys = offsets[:, 0, None] + np.arange(height)
    xs = offsets[:, 1, None] + np.arange(width)
    return padded[np.arange(len(image))[:, None, None], ys[:, :, None], xs[:, None, :]]
