"""A multi-layer perceptron on flattened images, in Linen and in NNX."""

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
from research_dp.types import TrainableModel


@gin.register(module="models")
@checked
def mlp(
    *,
    api: Api = "linen",
    widths: Sequence[Count] = (256, 256),
    num_classes: Count = gin.REQUIRED,
    dropout_rate: DropoutRate = 0.0,
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
    functions = choose_api(
        api,
        "mlp.api",
        lambda: LinenMLP(tuple(widths), num_classes, dropout_rate, dtype),
        lambda shape, rngs: NnxMLP(shape, widths, num_classes, dropout_rate, dtype, rngs),
    )
    return image_classifier(functions, num_classes)


class LinenMLP(nn.Module):
    """The Linen module; fields as in `mlp`."""

    widths: tuple[int, ...]
    num_classes: int
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
        del train, batch_axes  # nothing here depends on them
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Dense(width, dtype=self.dtype, name=f"hidden_{i}")(x))
            x = dropout(x, self.dropout_rate, keys, layer=i)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)


class NnxMLP(nnx.Module):
    """The NNX module, with the parameters of `LinenMLP`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        widths: Sequence[int],
        num_classes: int,
        dropout_rate: float,
        dtype: str | None,
        rngs: nnx.Rngs,
    ):
        self.depth, self.dropout_rate = len(widths), dropout_rate
        features = math.prod(shape)
        for i, width in enumerate(widths):
            setattr(self, f"hidden_{i}", nnx.Linear(features, width, dtype=dtype, rngs=rngs))
            features = width
        self.head = nnx.Linear(features, num_classes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        del train, batch_axes  # nothing here depends on them
        x = x.reshape(x.shape[0], -1)
        for i in range(self.depth):
            x = nnx.relu(getattr(self, f"hidden_{i}")(x))
            x = dropout(x, self.dropout_rate, keys, layer=i)
        return self.head(x)
