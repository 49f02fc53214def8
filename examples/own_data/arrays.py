"""Arrays in memory as a data set: handwritten digits of scikit-learn."""

import gin
from sklearn.datasets import load_digits

import research_dp


@gin.register
def digit_arrays():
    """1,797 digits as vectors of 64 gray levels from 0 to 1; a fifth is evaluated on."""
    digits = load_digits()
    return research_dp.from_arrays(
        digits.data / 16,
        digits.target,
        eval=0.2,
        info={"num_classes": 10},
        name="digit_arrays",
    )
