"""TFDS builders of data that needs no download: digits, text of Python itself, text of yours."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

_TEST_EACH = 5
_CHUNK = 1024
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}


class _Offline(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A builder of two splits, whose `_generate_examples` takes whether it is the test split."""

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict]]]:
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(split == "test") for split in ("train", "test")}


class Digits(_Offline):
    """1,797 images of 8x8 pixels in 16 levels of gray; every fifth is in the test split.

    Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI, 1998), its test part.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        image = tfds.features.Image(shape=(8, 8, 1))
        label = tfds.features.ClassLabel(num_classes=10)
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"image": image, "label": label}),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            disable_shuffling=True,
        )

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict]]:
        from sklearn.datasets import load_digits

        data = load_digits()
        for index, (levels, label) in enumerate(zip(data.images, data.target, strict=True)):
            if (index % _TEST_EACH == 0) == test:
                # Levels 0 to 16 become 0 to 255.
                image = np.round(levels * (255 / 16)).astype(np.uint8)
                # TFDS encodes Pillow's images with Pillow, but arrays with TensorFlow.
                yield index, {"image": Image.fromarray(image), "label": int(label)}


class PystdlibText(_Offline):
    """Bytes of the standard library's modules in chunks of up to 1,024, split by file.

    A tenth of the files, chosen by a hash of their path, are the test split, so that no file is in
    both. Tests and tools are left out. Each version of Python has its own text.
    """

    VERSION = tfds.core.Version(".".join(map(str, sys.version_info[:3])))

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "path": tfds.features.Text(),
            "offset": tfds.features.Scalar(np.int64),
            "text": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(features),
            homepage="https://docs.python.org/3/library/",
            disable_shuffling=True,
        )

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        key = 0
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if _SKIPPED & set(Path(name).parts) or is_held_out(name) != test:
                continue
            data = np.frombuffer(file.read_bytes(), np.uint8)
            for offset in range(0, len(data), _CHUNK):
                text = data[offset : offset + _CHUNK]
                yield key, {"path": name, "offset": offset, "text": text}
                key += 1


class PackedTextConfig(tfds.core.BuilderConfig):
    """Rows of `text_data`; the name is a hash of what they depend on."""

    def __init__(self, name: str, length: int, rows: Callable[[bool], Iterator[dict]]):
        super().__init__(name=name, version=PackedText.VERSION)
        self.length, self.rows = length, rows


class PackedText(_Offline, skip_registration=True):  # type: ignore[call-arg]
    """Documents of text as rows of tokens and segments."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        row = tfds.features.Tensor(shape=(self.builder_config.length,), dtype=np.int32)
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"tokens": row, "segments": row}),
            disable_shuffling=True,
        )

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict]]:
        yield from enumerate(self.builder_config.rows(test))


def is_held_out(path: str) -> bool:
    """Whether a file, by its path below the library's folder, is in the test split."""
    return hashlib.sha256(path.encode()).digest()[0] < 26
