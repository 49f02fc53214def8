"""A small convolutional network, in Linen and in NNX."""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import gin
import jax
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import Api, choose_api, image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.norm import LinenNorm, NnxNorm, Norm
from research_dp.types import TrainableModel


@gin.register(module="models")
@checked
def convnet(
    *,
    api: Api = "linen",
    features: Sequence[Count] = (32, 64),
    hidden: Count = 128,
    num_classes: Count = gin.REQUIRED,
    norm: Norm = "group",
    dropout_rate: DropoutRate = 0.0,
    dtype: Dtype | None = None,
) -> TrainableModel:
    """3x3 convolutions, each followed by a norm, ReLU and 2x2 mean pooling; one hidden layer.

    Args:
        api: 'linen' or 'nnx'; they have the same parameters.
        features: Channels of each convolution.
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
        norm: 'batch' (statistics of the global micro-batch), 'group' or 'none'.
        dropout_rate: Dropout before the last layer.
        dtype: Compute dtype; None: float32.
    """
    config = (tuple(features), hidden, num_classes, norm, dropout_rate, dtype)
    functions = choose_api(
        api,
        "convnet.api",
        lambda: LinenConvNet(*config),
        lambda shape, rngs: NnxConvNet(shape, *config, rngs=rngs),
    )
    return image_classifier(functions, num_classes)


class LinenConvNet(nn.Module):
    """The Linen module; fields as in `convnet`."""

    features: tuple[int, ...]
    hidden: int
    num_classes: int
    norm: str
    dropout_rate: float
    dtype: str | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        for i, channels in enumerate(self.features):
            # A norm follows with a bias of its own.
            use_bias = self.norm == "none"
            x = nn.Conv(channels, (3, 3), use_bias=use_bias, dtype=self.dtype, name=f"conv_{i}")(x)
            norm = LinenNorm(self.norm, self.dtype, name=f"norm_{i}")
            x = nn.relu(norm(x, train=train, batch_axes=batch_axes))
            x = mean_pool(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name="hidden")(x))
        x = dropout(x, self.dropout_rate, keys, layer=0)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)


class NnxConvNet(nnx.Module):
    """The NNX module, with the parameters of `LinenConvNet`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        features: Sequence[int],
        hidden: int,
        num_classes: int,
        norm: str,
        dropout_rate: float,
        dtype: str | None,
        *,
        rngs: nnx.Rngs,
    ):
        self.depth, self.dropout_rate = len(features), dropout_rate
        height, width, channels = shape
        for i, size in enumerate(features):
            use_bias = norm == "none"
            conv = nnx.Conv(channels, size, (3, 3), use_bias=use_bias, dtype=dtype, rngs=rngs)
            setattr(self, f"conv_{i}", conv)
            setattr(self, f"norm_{i}", NnxNorm(norm, size, dtype, rngs))
            height, width, channels = math.ceil(height / 2), math.ceil(width / 2), size
        self.hidden = nnx.Linear(height * width * channels, hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, num_classes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        for i in range(self.depth):
            x = getattr(self, f"conv_{i}")(x)
            x = nnx.relu(getattr(self, f"norm_{i}")(x, train=train, batch_axes=batch_axes))
            x = mean_pool(x)
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.hidden(x))
        return self.head(dropout(x, self.dropout_rate, keys, layer=0))


def mean_pool(x: jax.Array) -> jax.Array:
    """2x2 mean pooling of (B, H, W, C); odd sizes are padded."""
    return nn.avg_pool(x, (2, 2), strides=(2, 2), padding="SAME")
