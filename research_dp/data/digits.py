"""TFDS builder of the handwritten digits in scikit-learn: real data without a download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_TEST_EACH = 5


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 images of 8x8 pixels in 16 levels of gray; every fifth is in the test split.

    Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI, 1998), its test part.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict]]]:
        del dl_manager  # nothing is downloaded
        return {
            "train": self._generate_examples(test=False),
            "test": self._generate_examples(test=True),
        }

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict]]:
        from sklearn.datasets import load_digits

        data = load_digits()
        for index, (levels, label) in enumerate(zip(data.images, data.target, strict=True)):
            if (index % _TEST_EACH == 0) == test:
                # Levels 0 to 16 become 0 to 255.
                image = np.round(levels * (255 / 16)).astype(np.uint8)[..., None]
                yield index, {"image": image, "label": int(label)}
