"""Examples by index as a data set, decoded and augmented: handwritten digits of scikit-learn."""

import gin
import numpy as np
from sklearn.datasets import load_digits

import research_dp


class Digits:
    """A source: it has a length, and an example at each index."""

    def __init__(self):
        self._digits = load_digits()

    def __len__(self):
        return len(self._digits.target)

    def __getitem__(self, index):
        return {"image": self._digits.images[index], "label": self._digits.target[index]}


def decode(example):
    """An example of the source as arrays of a batch."""
    return {"x": example["image"].ravel() / 16, "y": example["label"]}


def shift(example, rng):
    """Moves the digit by up to one pixel in each direction."""
    image = np.roll(example["x"].reshape(8, 8), rng.integers(-1, 2, size=2), axis=(0, 1))
    return {**example, "x": image.ravel()}


@gin.register
def digit_source():
    """1,797 digits as vectors of 64 gray levels from 0 to 1; a fifth is evaluated on."""
    return research_dp.from_source(
        Digits(),
        eval=0.2,
        transform=decode,
        augment=shift,
        info={"num_classes": 10},
        name="digit_source",
    )
