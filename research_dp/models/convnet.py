"""A small convolutional network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import gin
import jax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.layers import Api, Layers, Norm, module_constructors, network_functions
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
    network = ConvNet(tuple(features), hidden, num_classes, norm, dropout_rate, dtype)
    return image_classifier(network_functions(api, network), num_classes)


@dataclasses.dataclass(frozen=True)
class ConvNet:
    """The network; fields as in `convnet`."""

    features: tuple[int, ...]
    hidden: int
    num_classes: int
    norm: Norm
    dropout_rate: float
    dtype: Dtype | None = None

    def __call__(self, layers: Layers, x: jax.Array) -> jax.Array:
        use_bias = self.norm == "none"  # norms have their own bias
        for i, channels in enumerate(self.features):
            x = layers.conv(f"conv_{i}", channels, 3, use_bias=use_bias)(x)
            x = layers.norm(f"norm_{i}", self.norm)(x)
            x = mean_pool(jax.nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(layers.dense("hidden", self.hidden)(x))
        x = dropout(x, self.dropout_rate, layers.keys, layer=0)
        return layers.dense("head", self.num_classes)(x)


LinenConvNet, NnxConvNet = module_constructors(ConvNet)


def mean_pool(x: jax.Array) -> jax.Array:
    """2x2 mean pooling of (B, H, W, C); odd sizes are padded."""
    return nn.avg_pool(x, (2, 2), strides=(2, 2), padding="SAME")
