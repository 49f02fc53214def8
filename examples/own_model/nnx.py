"""A Flax NNX module as a model: BatchNorm and dropout as anybody writes them."""

import gin
import optax
from flax import nnx

import research_dp


class Net(nnx.Module):
    """Two hidden layers."""

    def __init__(self, width, rngs):
        self.hidden = nnx.List(
            nnx.Linear(size, width, use_bias=False, rngs=rngs) for size in (64, width)
        )
        self.norms = nnx.List(nnx.BatchNorm(width, momentum=0.9, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        for linear, norm in zip(self.hidden, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(linear(x))))
        return self.head(x)


def accuracy(logits, label):
    """Whether each example is classified correctly, (B,)."""
    return logits.argmax(-1) == label


@gin.register
def nnx_net(width=64):
    """The module with its loss."""
    return research_dp.from_nnx(
        lambda rngs: Net(width, rngs),
        loss=optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": accuracy},
        config={"num_classes": 10},
        bounds={"y": "num_classes"},
    )
