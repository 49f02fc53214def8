"""Preprocessing and augmentation in numpy: from a data set's features to a model's inputs.

The reader seeds each generator with the run's seed and the position in the training stream, so
that augmentation is the same on any number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.errors import UsageError, binding_error
from research_dp.types import Arrays

Rng = np.random.Generator | None


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How examples of a data set become model inputs."""

    spec: Mapping[str, jax.ShapeDtypeStruct]  # shape and dtype of each model input
    info: Mapping[str, Any]  # facts for the model, e.g. `num_classes`
    # Decodes and resizes: (raw example, generator or None) -> arrays of fixed shapes. The reader
    # adds the example's position to a `UsageError` raised here.
    example: Callable[[Mapping[str, Any], Rng], Arrays]
    # Augments and normalises: (stacked examples, rows, global batch size, generator or None) ->
    # model inputs. It draws for the global batch and uses the draws of `rows`.
    batch: Callable[[Arrays, np.ndarray, int, Rng], Arrays]
    example_is_random: bool = False  # while training, which rules out caching


Features = Any  # name -> TFDS feature, a dict or `tfds.features.FeaturesDict`
MakePreprocess = Callable[[Features], Preprocess]

_MAX_VALUE = {"bool": 1.0, "uint8": 255.0, "uint16": 65535.0}
_INT32 = np.iinfo(np.int32)
# Kind of feature -> (what it must be, whether a shape s and dtype t are so).
_KINDS: dict[str, tuple[str, Callable[[Sequence[int | None], np.dtype], bool]]] = {
    "image": (
        "(height, width, channels) of uint8, uint16 or floats",
        lambda s, t: len(s) == 3 and (t.name in _MAX_VALUE or jnp.issubdtype(t, jnp.floating)),
    ),
    "label": (
        "one integer",
        lambda s, t: not s and (t == np.bool_ or jnp.issubdtype(t, jnp.integer)),
    ),
    "text": (
        "one text or a vector of uint8",
        lambda s, t: (len(s), t) in ((0, np.object_), (1, np.uint8)),
    ),
}


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

    uint8 is divided by 255 and uint16 by 65535. Floating-point images are not scaled: `mean` and
    `std` are in their units; the defaults fit [0, 1].

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
    dtype = _check_feature(features, "image", "image", "image_classification")
    _check_feature(features, "label", "label", "image_classification")
    max_value = np.float32(_MAX_VALUE.get(dtype.name, 1.0))
    channels = features["image"].shape[-1]
    shape = (size, size, channels) if size else tuple(features["image"].shape)
    if None in shape:
        problem = f" is not bound, and images of shape {shape} differ in size."
        raise binding_error("image_classification.size", f"{problem} Bind it, e.g. to 224.")
    # None for labels that are not a ClassLabel, or whose classes are unknown before preparation.
    num_classes = getattr(features["label"], "num_classes", None)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            expected = f"give one number, or one for each of the {channels} channels."
            raise binding_error(f"image_classification.{name}", f" = {values}: {expected}")
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def example(raw: Mapping[str, Any], rng: Rng) -> Arrays:
        image, label = np.asarray(raw["image"]), int(raw["label"])
        if image.dtype != np.uint8:
            image = image.astype(np.float32)
        if size:
            image = _resize(image, size, rng if random_resized_crop else None)
        if not _INT32.min <= label <= _INT32.max:
            raise UsageError(f"its label is {label}, beyond int32. Number classes from 0.")
        return {"image": image, "label": np.asarray(label, np.int32)}

    def batch(arrays: Arrays, rows: np.ndarray, total: int, rng: Rng) -> Arrays:
        image = arrays["image"]
        if rng and pad_crop:
            offsets = rng.integers(0, 2 * pad_crop + 1, (total, 2))[rows]
            image = _crop(image, pad_crop, offsets)
        if rng and flip:
            mirrored = rng.random(total)[rows] < 0.5
            image = np.where(mirrored[:, None, None, None], image[:, :, ::-1], image)
        normalised = (image.astype(np.float32) / max_value - shift) / scale
        return {"image": normalised, "label": arrays["label"]}

    spec = {
        "image": jax.ShapeDtypeStruct(shape, np.float32),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    info = {} if num_classes is None else {"num_classes": num_classes}
    return Preprocess(spec, info, example, batch, example_is_random=random_resized_crop)


@gin.register(module="data")
@checked
def byte_text(
    features: Features, *, length: Count = 256, key: str = "text", crop_from: Count | None = None
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
    if crop_from and crop_from < length:
        problem = f" = {crop_from}: give an integer of at least {length}."
        raise binding_error("byte_text.crop_from", problem)
    num_bytes = crop_from or length
    _check_feature(features, key, "text", "byte_text")

    def example(raw: Mapping[str, Any], rng: Rng) -> Arrays:
        del rng  # `batch` draws the crop
        value = raw[key]
        value = value.encode() if isinstance(value, str) else value
        data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        tokens, weights = np.zeros(num_bytes, np.int32), np.zeros(num_bytes, np.float32)
        used = min(len(data), num_bytes)
        tokens[:used], weights[:used] = data[:used], 1.0
        return {"tokens": tokens, "weights": weights}

    def batch(arrays: Arrays, rows: np.ndarray, total: int, rng: Rng) -> Arrays:
        starts = np.zeros(len(rows), np.int64)
        if rng and crop_from:
            spare = np.maximum(arrays["weights"].sum(axis=1) - length, 0)
            starts = (rng.random(total)[rows] * (spare + 1)).astype(np.int64)
        indices = starts[:, None] + np.arange(length)
        return {name: np.take_along_axis(x, indices, axis=1) for name, x in arrays.items()}

    spec = {
        "tokens": jax.ShapeDtypeStruct((length,), np.int32),
        "weights": jax.ShapeDtypeStruct((length,), np.float32),
    }
    return Preprocess(spec, {"vocab_size": 256}, example, batch)


def stack(examples: Iterable[Arrays], count: int) -> Arrays:
    """So many examples as one batch; each is copied before the next is read.

    A source, or a function of a user, may write its next example into the same memory.
    """
    batch: dict[str, np.ndarray] = {}
    for row, example in enumerate(examples):
        arrays = {name: np.asarray(x) for name, x in example.items()}
        batch = batch or {k: np.empty((count, *x.shape), x.dtype) for k, x in arrays.items()}
        kinds = [{k: (x.shape, x.dtype) for k, x in arrays.items()}]
        kinds += [{name: (x.shape[1:], x.dtype) for name, x in batch.items()}]
        if kinds[0] != kinds[1]:
            raise UsageError(f"an example has {kinds[0]}, and others have {kinds[1]}.")
        for name, x in arrays.items():
            batch[name][row] = x
    return batch


def preprocess_example(
    preprocess: Preprocess, raw: Any, rng: Rng, locate: Callable[..., str], *where: Any
) -> Arrays:
    """Calls `preprocess.example`; its errors get the example's name, which is `locate(*where)`."""
    try:
        return preprocess.example(raw, rng)
    except UsageError as error:
        raise UsageError(f"{locate(*where)}: {error}", binding=error.binding) from error


def _check_feature(features: Features, name: str, kind: str, function: str) -> np.dtype:
    """The dtype of a feature; refuses one that is not of the kind that `function` needs."""
    expected, accepts = _KINDS[kind]
    if name not in features:
        problem = f"; this data set has {sorted(features)}"
    else:
        shape, dtype = features[name].shape, features[name].np_dtype
        nested = isinstance(dtype, Mapping)  # then the shape is a dict too
        if not nested and accepts(shape, np.dtype(dtype)):
            return np.dtype(dtype)
        here = f"features {sorted(dtype)}" if nested else f"{shape} of {np.dtype(dtype)}"
        problem = f" as {expected}; here it is {here}"
    binding = "tfds_data.preprocess"
    advice = f"Prepare the data set so, or bind {binding} to a function that fits it."
    raise UsageError(f"{function} needs feature {name!r}{problem}. {advice}", binding=binding)


def _resize(image: np.ndarray, size: int, rng: Rng) -> np.ndarray:
    """Resizes the central square of an image (H, W, C), or a random area, to (size, size, C).

    The image is uint8 or float32.
    """
    height, width = image.shape[:2]
    w = h = min(height, width)
    left, top = (width - w) // 2, (height - h) // 2
    if rng:
        area, ratio = rng.uniform(0.08, 1.0) * height * width, np.exp(rng.uniform(-0.288, 0.288))
        w = int(np.clip(round((area * ratio) ** 0.5), 1, width))
        h = int(np.clip(round((area / ratio) ** 0.5), 1, height))
        left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    box = (left, top, left + w, top + h)

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
