"""A second task on handwritten digits: whether a digit is odd."""

import gin
import numpy as np
from sklearn.datasets import load_digits

import research_dp


@gin.register
def odd_digits():
    """1,797 digits, scaled as `gin/data/digits.gin` does; a fifth is evaluated on."""
    digits = load_digits()
    return research_dp.from_arrays(
        (digits.images[..., np.newaxis] / 16 - 0.5) / 0.5,
        digits.target % 2,
        eval=0.2,
        names=("image", "label"),
        info={"num_classes": 2},
        name="odd_digits",
    )
