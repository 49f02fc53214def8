"""Normalisation of image features by choice of name, in Linen and in NNX."""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax
from flax import nnx

_GROUPS = 8
Norm = Literal["batch", "group", "none"]


class LinenNorm(nn.Module):
    """BatchNorm over the whole global micro-batch, GroupNorm, or nothing."""

    norm: str
    dtype: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, batch_axes: tuple[str, ...]) -> jax.Array:
        if self.norm == "group":
            groups = math.gcd(_GROUPS, x.shape[-1])
            return nn.GroupNorm(num_groups=groups, dtype=self.dtype, name="group")(x)
        if self.norm == "batch":
            # While training the mean and variance are averaged over `batch_axes` by the layer, so
            # they are those of the global micro-batch, and the same on every device.
            over: Any = (batch_axes or None) if train else None
            return nn.BatchNorm(
                use_running_average=not train,
                momentum=0.9,
                axis_name=over,
                dtype=self.dtype,
                name="batch",
            )(x)
        return x


class NnxNorm(nnx.Module):
    """The NNX module, with the parameters of `LinenNorm`."""

    def __init__(self, norm: str, features: int, dtype: str | None, rngs: nnx.Rngs):
        self.norm = norm
        if norm == "group":
            groups = math.gcd(_GROUPS, features)
            self.group = nnx.GroupNorm(features, num_groups=groups, dtype=dtype, rngs=rngs)
        if norm == "batch":
            self.batch = nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool, batch_axes: tuple[str, ...]) -> jax.Array:
        if self.norm == "group":
            return self.group(x)
        if self.norm == "batch":
            over: Any = (batch_axes or None) if train else None  # as in LinenNorm
            self.batch.axis_name = over
            return self.batch(x, use_running_average=not train)
        return x
