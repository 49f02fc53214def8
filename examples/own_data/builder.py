"""A data set of TensorFlow Datasets: images of discs and squares, drawn by NumPy.

Importing this module registers it with TFDS as 'discs_and_squares'.
"""

import numpy as np
import tensorflow_datasets as tfds

SIZE = 12


class DiscsAndSquares(tfds.core.GeneratorBasedBuilder):
    """One disc (0) or square (1) per image, of random size and place, with noise."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(SIZE, SIZE, 1)),
            "label": tfds.features.ClassLabel(names=["disc", "square"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 4096), "test": self._generate_examples(1, 512)}

    def _generate_examples(self, seed, count):
        rng = np.random.default_rng(seed)
        for index in range(count):
            yield index, draw(rng)


def draw(rng):
    """An example of the data set."""
    label, radius = rng.integers(2), rng.integers(2, 5)
    distance = np.abs(np.arange(SIZE) - rng.integers(radius, SIZE - radius, size=(2, 1)))
    rows, columns = distance[0][:, None], distance[1][None, :]
    inside = np.maximum(rows, columns) <= radius if label else np.hypot(rows, columns) <= radius
    image = 200 * inside + rng.integers(0, 56, size=inside.shape)
    return {"image": image.astype(np.uint8)[..., None], "label": label}
