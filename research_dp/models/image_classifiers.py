"""Image classifiers: a perceptron, a convolutional and a residual network, and their loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import BelowOne, Count, Dtype
from research_dp.models.layers import Api, Layers, Norm, dropout, network_functions
from research_dp.models.supervised import supervised
from research_dp.types import Functions, TrainableModel


@gin.register(module="models")
@checked
def convnet(
    *,
    api: Api = "linen",
    features: Sequence[Count] = (32, 64),
    hidden: Count = 128,
    num_classes: Count = gin.REQUIRED,
    norm: Norm = "group",
    dropout_rate: BelowOne = 0.0,
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


@gin.register(module="models")
@checked
def mlp(
    *,
    api: Api = "linen",
    widths: Sequence[Count] = (256, 256),
    num_classes: Count = gin.REQUIRED,
    dropout_rate: BelowOne = 0.0,
    dtype: Dtype | None = None,
) -> TrainableModel:
    """A perceptron with ReLU layers.

    Args:
        api: 'linen' or 'nnx'; they have the same parameters.
        widths: Width of each hidden layer.
        num_classes: Number of classes.
        dropout_rate: Dropout after each hidden layer.
        dtype: Compute dtype; None: float32.
    """

    def network(layers: Layers, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(widths):
            x = jax.nn.relu(layers.dense(f"hidden_{i}", width)(x))
            x = dropout(x, dropout_rate, layers.keys, layer=i)
        return layers.dense("head", num_classes)(x)

    return image_classifier(network_functions(api, network, dtype), num_classes)


@gin.register(module="models")
@checked
def resnet(
    *,
    api: Api = "linen",
    stages: Sequence[Count] = (2, 2, 2),
    width: Count = 16,
    num_classes: Count = gin.REQUIRED,
    norm: Norm = "batch",
    dropout_rate: BelowOne = 0.0,
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
                block = functools.partial(_residual_block, width * 2**stage, stride, norm)
                x = layers.submodule(f"block_{stage}_{index}", block)(x)
        x = dropout(jnp.mean(x, axis=(1, 2)), dropout_rate, layers.keys, layer=0)
        return layers.dense("head", num_classes)(x)

    return image_classifier(network_functions(api, network, dtype), num_classes)


def _residual_block(
    channels: int, stride: int, norm: Norm, layers: Layers, x: jax.Array
) -> jax.Array:
    def conv_norm(x: jax.Array, name: str, size: int, stride: int) -> jax.Array:
        x = layers.conv(f"conv_{name}", channels, size, stride)(x)
        return layers.norm(f"norm_{name}", norm)(x)

    y = jax.nn.relu(conv_norm(x, "0", 3, stride))
    y = conv_norm(y, "1", 3, 1)
    if x.shape != y.shape:
        x = conv_norm(x, "skip", 1, stride)
    return jax.nn.relu(x + y)


def image_classifier(functions: Functions, num_classes: int) -> TrainableModel:
    """A model that classifies `image` (B, H, W, C) float32 into `label` (B,) int32.

    `functions` compute logits (B, num_classes), for softmax cross-entropy. Batches may have `mask`
    (B,), the weight of each example: 0 for padding.
    """

    def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    def correct(logits: jax.Array, label: jax.Array) -> jax.Array:
        return jnp.argmax(logits.astype(jnp.float32), axis=-1) == label

    return supervised(
        functions,
        cross_entropy,
        inputs="image",
        targets="label",
        metrics={"accuracy": correct},
        config={"num_classes": num_classes},
        bounds={"label": "num_classes"},
    )
