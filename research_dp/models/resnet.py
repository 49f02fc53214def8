"""A small residual network."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.layers import Api, Layers, Norm, network_functions
from research_dp.types import TrainableModel


@gin.register(module="models")
@checked
def resnet(
    *,
    api: Api = "linen",
    stages: Sequence[Count] = (2, 2, 2),
    width: Count = 16,
    num_classes: Count = gin.REQUIRED,
    norm: Norm = "batch",
    dropout_rate: DropoutRate = 0.0,
    dtype: Dtype | None = None,
) -> TrainableModel:
    """Basic residual blocks in stages; each stage but the first halves the image.

    He et al., Deep Residual Learning for Image Recognition (arXiv 1512.03385), section 4.2.

    Args:
        api: 'linen' or 'nnx'; they have the same parameters.
        stages: Number of blocks of each stage.
        width: Channels of the first stage; doubled at each further one.
        num_classes: Number of classes.
        norm: 'batch' (statistics of the global micro-batch), 'group' or 'none'.
        dropout_rate: Dropout before the last layer.
        dtype: Compute dtype; None: float32.
    """

    def network(layers: Layers, x: jax.Array) -> jax.Array:
        x = layers.conv("conv", width, 3)(x)
        x = jax.nn.relu(layers.norm("norm", norm)(x))
        for stage, count in enumerate(stages):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                block = functools.partial(_block, width * 2**stage, stride, norm)
                x = layers.submodule(f"block_{stage}_{index}", block)(x)
        x = dropout(jnp.mean(x, axis=(1, 2)), dropout_rate, layers.keys, layer=0)
        return layers.dense("head", num_classes)(x)

    return image_classifier(network_functions(api, network, dtype), num_classes)


def _block(channels: int, stride: int, norm: Norm, layers: Layers, x: jax.Array) -> jax.Array:
    """Two 3x3 convolutions around a shortcut."""

    def conv_norm(x: jax.Array, name: str, size: int, stride: int) -> jax.Array:
        x = layers.conv(f"conv_{name}", channels, size, stride)(x)
        return layers.norm(f"norm_{name}", norm)(x)

    y = jax.nn.relu(conv_norm(x, "0", 3, stride))
    y = conv_norm(y, "1", 3, 1)
    if x.shape != y.shape:
        x = conv_norm(x, "skip", 1, stride)
    return jax.nn.relu(x + y)
