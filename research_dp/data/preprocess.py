"""Preprocessing and augmentation in numpy: from a data set's features to a model's inputs.

The reader seeds each generator with the run's seed and the position in the training stream, so
that augmentation is the same on any number of processes.
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

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.errors import UsageError, check_count
from research_dp.types import Arrays


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How examples of a data set become model inputs.

    Attributes:
        spec: Shape and dtype of each model input.
        info: Facts for the model, e.g. `num_classes`.
        example: Decodes and resizes: (raw example, generator or None) -> arrays of fixed shapes.
            The reader adds the example's position to a `UsageError` raised here.
        batch: Augments and normalises: (stacked examples, rows, global batch size, generator or
            None) -> model inputs. It draws for the global batch and uses the draws of `rows`.
        example_is_random: Whether `example` draws while training, which rules out caching.
    """

    spec: Mapping[str, jax.ShapeDtypeStruct]
    info: Mapping[str, Any]
    example: Callable[[Mapping[str, Any], np.random.Generator | None], Arrays]
    batch: Callable[[Arrays, np.ndarray, int, np.random.Generator | None], Arrays]
    example_is_random: bool = False


Features = Any  # name -> TFDS feature, a dict or `tfds.features.FeaturesDict`
MakePreprocess = Callable[[Features], Preprocess]

_MAX_VALUE = {"bool": 1.0, "uint8": 255.0, "uint16": 65535.0}
_INT32 = np.iinfo(np.int32)


@gin.register(module="data")
@checked
def image_classification(
    features: Features,
    *,
    size: Count | None = None,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
    pad_crop: CountOrZero = 0,
    flip: bool = False,
    random_resized_crop: bool = False,
) -> Preprocess:
    """Images as float32, normalised by mean and standard deviation, with their labels.

    Images of uint8 and uint16 are scaled to [0, 1] first; floating-point images are not.

    Args:
        features: The data set's features. `image` (height, width, channels), uint8, uint16 or
            floating-point, and `label` (), integer, are used.
        size: Height and width of the model's input; None: those of the images.
        mean: Subtracted, for each channel (or one for all).
        std: Divided by, for each channel (or one for all).
        pad_crop: While training, pad by this many zero pixels and crop at random.
        flip: While training, mirror half of the images left to right.
        random_resized_crop: While training, resize a random area of 8 to 100 % of the image
            (Szegedy et al., arXiv 1409.4842); otherwise the central square is resized.

    Raises:
        UsageError: The data set lacks a feature or has it in another shape or dtype, or its images
            differ in size and `size` is None.
    """
    expected = "(height, width, channels) of uint8, uint16 or floats"
    dtype = _check_feature(features, "image", "image_classification", _is_image, expected)
    _check_feature(features, "label", "image_classification", _is_label, "one integer")
    max_value = np.float32(_MAX_VALUE.get(dtype.name, 1.0))
    channels = features["image"].shape[-1]
    shape = (size, size, channels) if size else tuple(features["image"].shape)
    if None in shape:
        raise UsageError(
            f"image_classification.size is not bound, and images of shape {shape} differ in size. "
            "Bind it, e.g. to 224.",
            binding="image_classification.size",
        )
    # None for labels that are not a ClassLabel, or whose classes are unknown before preparation.
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
        normalised = (image.astype(np.float32) / max_value - shift) / scale
        return {"image": normalised, "label": arrays["label"]}

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
@checked
def byte_text(
    features: Features,
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
        crop_from: While training, crop `length` bytes at random out of the first `crop_from`;
            None: always take the first bytes.

    Raises:
        UsageError: The data set has no such feature, or it is neither text nor bytes, or
            `crop_from` is below `length`.
    """
    if crop_from is not None:
        check_count("byte_text.crop_from", crop_from, length)
    num_bytes = crop_from or length
    _check_feature(features, key, "byte_text", _is_text, "one text or a vector of uint8")

    def example(raw: Mapping[str, Any], rng: np.random.Generator | None) -> Arrays:
        del rng  # `batch` draws the crop
        value = raw[key]
        value = value.encode() if isinstance(value, str) else value
        data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        tokens, weights = np.zeros(num_bytes, np.int32), np.zeros(num_bytes, np.float32)
        used = min(len(data), num_bytes)
        tokens[:used], weights[:used] = data[:used], 1.0
        return {"tokens": tokens, "weights": weights}

    def batch(
        arrays: Arrays, rows: np.ndarray, total: int, rng: np.random.Generator | None
    ) -> Arrays:
        starts = np.zeros(len(rows), np.int64)
        if rng and crop_from:
            spare = np.maximum(arrays["weights"].sum(axis=1) - length, 0)
            starts = (rng.random(total)[rows] * (spare + 1)).astype(np.int64)
        indices = starts[:, None] + np.arange(length)
        return {name: np.take_along_axis(x, indices, axis=1) for name, x in arrays.items()}

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
    supported = dtype.name in _MAX_VALUE or jnp.issubdtype(dtype, jnp.floating)
    return len(shape) == 3 and supported


def _is_label(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    return not shape and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))


def _is_text(shape: Sequence[int | None], dtype: np.dtype) -> bool:
    return (len(shape), dtype) in ((0, np.object_), (1, np.uint8))


def _check_feature(
    features: Features,
    name: str,
    function: str,
    accepts: Callable[[Sequence[int | None], np.dtype], bool],
    expected: str,
) -> np.dtype:
    """The dtype of a feature; refuses one whose shape or dtype `function` does not accept."""
    if name not in features:
        problem = f"; this data set has {sorted(features)}"
    else:
        shape, dtype = features[name].shape, features[name].np_dtype
        nested = isinstance(dtype, Mapping)  # then the shape is a dict too
        if not nested and accepts(shape, np.dtype(dtype)):
            return np.dtype(dtype)
        here = f"features {sorted(dtype)}" if nested else f"{shape} of {np.dtype(dtype)}"
        problem = f" as {expected}; here it is {here}"
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
    # Pillow resizes floats and grayscale one channel at a time.
    return np.stack([resized(plane) for plane in np.moveaxis(image, -1, 0)], axis=-1)


def _crop(image: np.ndarray, pad: int, offsets: np.ndarray) -> np.ndarray:
    """Crops each zero-padded image of (B, H, W, C) at offsets (B, 2) in [0, 2 * pad]."""
    size, height, width, channels = image.shape
    # np.pad takes four times as long for small images.
    padded = np.zeros((size, height + 2 * pad, width + 2 * pad, channels), image.dtype)
    padded[:, pad : pad + height, pad : pad + width] = image
    ys = offsets[:, 0, None] + np.arange(height)
    xs = offsets[:, 1, None] + np.arange(width)
    return padded[np.arange(size)[:, None, None], ys[:, :, None], xs[:, None, :]]
