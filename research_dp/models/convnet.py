"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import gin
import jax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.layers import Api, Layers, Norm, network_functions
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

    def network(layers: Layers, x: jax.Array) -> jax.Array:
        use_bias = norm == "none"  # norms have their own bias
        for i, channels in enumerate(features):
            x = layers.conv(f"conv_{i}", channels, 3, use_bias=use_bias)(x)
            x = jax.nn.relu(layers.norm(f"norm_{i}", norm)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(layers.dense("hidden", hidden)(x))
        x = dropout(x, dropout_rate, layers.keys, layer=0)
        return layers.dense("head", num_classes)(x)

    return image_classifier(network_functions(api, network, dtype), num_classes)
