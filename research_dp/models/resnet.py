"""A small residual network, in Linen and in NNX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import Api, choose_api, image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.norm import LinenNorm, NnxNorm, Norm
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
    config = (tuple(stages), width, num_classes, norm, dropout_rate, dtype)
    functions = choose_api(
        api,
        "resnet.api",
        lambda: LinenResNet(*config),
        lambda shape, rngs: NnxResNet(shape, *config, rngs=rngs),
    )
    return image_classifier(functions, num_classes)


def _blocks(stages: Sequence[int], width: int) -> Iterator[tuple[str, int, int]]:
    """(name, channels, stride) of each block."""
    for stage, count in enumerate(stages):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            yield f"block_{stage}_{index}", width * 2**stage, stride


class LinenBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    channels: int
    stride: int
    norm: str
    dtype: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, batch_axes: tuple[str, ...]) -> jax.Array:
        def conv_norm(x: jax.Array, name: str, size: int, stride: int) -> jax.Array:
            strides = (stride, stride)
            x = nn.Conv(
                self.channels,
                (size, size),
                strides,
                use_bias=False,
                dtype=self.dtype,
                name=f"conv_{name}",
            )(x)
            norm = LinenNorm(self.norm, self.dtype, name=f"norm_{name}")
            return norm(x, train=train, batch_axes=batch_axes)

        y = nn.relu(conv_norm(x, "0", 3, self.stride))
        y = conv_norm(y, "1", 3, 1)
        if x.shape != y.shape:
            x = conv_norm(x, "skip", 1, self.stride)
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """The Linen module; fields as in `resnet`."""

    stages: tuple[int, ...]
    width: int
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
        x = nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype, name="conv")(x)
        norm = LinenNorm(self.norm, self.dtype, name="norm")
        x = nn.relu(norm(x, train=train, batch_axes=batch_axes))
        for name, channels, stride in _blocks(self.stages, self.width):
            block = LinenBlock(channels, stride, self.norm, self.dtype, name=name)
            x = block(x, train=train, batch_axes=batch_axes)
        x = dropout(jnp.mean(x, axis=(1, 2)), self.dropout_rate, keys, layer=0)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)


class NnxBlock(nnx.Module):
    """The NNX module, with the parameters of `LinenBlock`."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        norm: str,
        dtype: str | None,
        rngs: nnx.Rngs,
    ):
        def conv(inputs: int, size: int, stride: int) -> nnx.Conv:
            kernel, strides = (size, size), (stride, stride)
            return nnx.Conv(
                inputs, channels, kernel, strides, use_bias=False, dtype=dtype, rngs=rngs
            )

        self.conv_0 = conv(in_channels, 3, stride)
        self.norm_0 = NnxNorm(norm, channels, dtype, rngs)
        self.conv_1 = conv(channels, 3, 1)
        self.norm_1 = NnxNorm(norm, channels, dtype, rngs)
        self.has_skip = in_channels != channels or stride != 1
        if self.has_skip:
            self.conv_skip = conv(in_channels, 1, stride)
            self.norm_skip = NnxNorm(norm, channels, dtype, rngs)

    def __call__(self, x: jax.Array, *, train: bool, batch_axes: tuple[str, ...]) -> jax.Array:
        def conv_norm(x: jax.Array, name: str) -> jax.Array:
            x = getattr(self, f"conv_{name}")(x)
            return getattr(self, f"norm_{name}")(x, train=train, batch_axes=batch_axes)

        y = conv_norm(nnx.relu(conv_norm(x, "0")), "1")
        return nnx.relu((conv_norm(x, "skip") if self.has_skip else x) + y)


class NnxResNet(nnx.Module):
    """The NNX module, with the parameters of `LinenResNet`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        stages: Sequence[int],
        width: int,
        num_classes: int,
        norm: str,
        dropout_rate: float,
        dtype: str | None,
        *,
        rngs: nnx.Rngs,
    ):
        self.names, self.dropout_rate = tuple(n for n, _, _ in _blocks(stages, width)), dropout_rate
        self.conv = nnx.Conv(shape[-1], width, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = NnxNorm(norm, width, dtype, rngs)
        features = width
        for name, channels, stride in _blocks(stages, width):
            setattr(self, name, NnxBlock(features, channels, stride, norm, dtype, rngs))
            features = channels
        self.head = nnx.Linear(features, num_classes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x), train=train, batch_axes=batch_axes))
        for name in self.names:
            x = getattr(self, name)(x, train=train, batch_axes=batch_axes)
        return self.head(dropout(jnp.mean(x, axis=(1, 2)), self.dropout_rate, keys, layer=0))
