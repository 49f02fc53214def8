"""A stream of Grain as training data: handwritten digits of scikit-learn, mixed as they come."""

import dataclasses

import gin
import grain
import numpy as np
from sklearn.datasets import load_digits

import research_dp


@gin.register
def digit_stream():
    """1,437 digits to train on, as a stream, and 360 to evaluate on, as arrays."""
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    examples = [{"x": x[i], "y": y[i]} for i in range(1437)]

    def train(order):
        stream = grain.MapDataset.source(examples).seed(order.seed).repeat().to_iter_dataset()
        stream = grain.experimental.WindowShuffleIterDataset(stream, window_size=256, seed=1)
        batches = stream.batch(order.batch_size)
        return iter(batches.map(lambda batch: {k: x[order.rows] for k, x in batch.items()}))

    named = {"info": {"num_classes": 10}, "name": "digit_stream"}
    data = research_dp.from_arrays(x, y, eval=(x[1437:], y[1437:]), **named)
    return dataclasses.replace(data, train=train, order="a stream", locate=None)
