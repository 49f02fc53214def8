"""A small residual network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.layers import Api, Layers, Norm, module_constructors, network_functions
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
    network = ResNet(tuple(stages), width, num_classes, norm, dropout_rate, dtype)
    return image_classifier(network_functions(api, network), num_classes)


@dataclasses.dataclass(frozen=True)
class ResNet:
    """The network; fields as in `resnet`."""

    stages: tuple[int, ...]
    width: int
    num_classes: int
    norm: Norm
    dropout_rate: float
    dtype: Dtype | None = None

    def __call__(self, layers: Layers, x: jax.Array) -> jax.Array:
        x = layers.conv("conv", self.width, 3)(x)
        x = jax.nn.relu(layers.norm("norm", self.norm)(x))
        for stage, count in enumerate(self.stages):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                block = ResNetBlock(self.width * 2**stage, stride, self.norm)
                x = layers.submodule(f"block_{stage}_{index}", block)(x)
        x = dropout(jnp.mean(x, axis=(1, 2)), self.dropout_rate, layers.keys, layer=0)
        return layers.dense("head", self.num_classes)(x)


@dataclasses.dataclass(frozen=True)
class ResNetBlock:
    """Two 3x3 convolutions around a shortcut."""

    channels: int
    stride: int
    norm: Norm

    def __call__(self, layers: Layers, x: jax.Array) -> jax.Array:
        def conv_norm(x: jax.Array, name: str, size: int, stride: int) -> jax.Array:
            x = layers.conv(f"conv_{name}", self.channels, size, stride)(x)
            return layers.norm(f"norm_{name}", self.norm)(x)

        y = jax.nn.relu(conv_norm(x, "0", 3, self.stride))
        y = conv_norm(y, "1", 3, 1)
        if x.shape != y.shape:
            x = conv_norm(x, "skip", 1, self.stride)
        return jax.nn.relu(x + y)


LinenResNet, NnxResNet = module_constructors(ResNet)
