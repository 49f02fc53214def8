"""A Flax Linen module as a model: BatchNorm and dropout as anybody writes them."""

import flax.linen as nn
import gin
import optax

import research_dp


class Net(nn.Module):
    """Two hidden layers."""

    width: int

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Dense(self.width, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


def accuracy(logits, label):
    """Whether each example is classified correctly, (B,)."""
    return logits.argmax(-1) == label


@gin.register
def linen_net(width=64):
    """The module with its loss."""
    return research_dp.from_linen(
        Net(width),
        loss=optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": accuracy},
        config={"num_classes": 10},
        bounds={"y": "num_classes"},
    )
