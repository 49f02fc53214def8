"""Layers of Flax Linen and NNX under one interface, so that a forward pass is written once.

A network is a hashable callable (layers, x) -> y that asks `layers` for each layer by name. In
Linen the layer is a submodule of that name; in NNX it is an attribute, created when the module is
constructed. Parameters have the same paths in both.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from research_dp.distributed.linen import linen_functions
from research_dp.distributed.nnx import nnx_functions
from research_dp.types import Functions

Api = Literal["linen", "nnx"]
Norm = Literal["batch", "group", "none"]
Network = Callable[["Layers", Any], jax.Array]
_GROUPS = 8


@dataclasses.dataclass
class Layers(abc.ABC):
    """What a network builds its forward pass from; input sizes are inferred.

    Attributes:
        dtype: Compute dtype of the layers.
        train: Whether batch statistics are taken from the batch.
        keys: One random key an example for `dropout`, (B,), or None.
        batch_axes: Mesh axes that the batch is split over.
    """

    dtype: Any
    train: bool = False
    keys: jax.Array | None = None
    batch_axes: tuple[str, ...] = ()

    def dense(self, name: str, features: int, *, use_bias: bool = True) -> Callable:
        return self.layer(name, nn.Dense, nnx.Linear, features, use_bias=use_bias)

    def conv(
        self, name: str, features: int, size: int, stride: int = 1, *, use_bias: bool = False
    ) -> Callable:
        window = (size, size), (stride, stride)
        return self.layer(name, nn.Conv, nnx.Conv, features, *window, use_bias=use_bias)

    def rms_norm(self, name: str) -> Callable:
        return self.layer(name, nn.RMSNorm, nnx.RMSNorm)

    def norm(self, name: str, norm: Norm) -> Callable:
        """BatchNorm over the global micro-batch, GroupNorm, or the identity."""
        return self.submodule(name, functools.partial(_norm, norm))

    @abc.abstractmethod
    def submodule(self, name: str, network: Network) -> Callable:
        """Another network, whose parameters are below `name`."""

    @abc.abstractmethod
    def layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        """A layer of the library's class, which takes these arguments."""


def _norm(norm: Norm, layers: Layers, x: jax.Array) -> jax.Array:
    match norm:
        case "group":
            groups = math.gcd(_GROUPS, x.shape[-1])
            return layers.layer("group", nn.GroupNorm, nnx.GroupNorm, num_groups=groups)(x)
        case "batch":
            # Mean and variance are averaged over `batch_axes` while training: they are those of
            # the global micro-batch, and equal on every device.
            axes = (layers.batch_axes or None) if layers.train else None
            options = {"momentum": 0.9, "axis_name": axes}
            layer = layers.layer("batch", nn.BatchNorm, nnx.BatchNorm, **options)
            return layer(x, use_running_average=not layers.train)
    return x


class LinenLayers(Layers):
    """Submodules of the Linen module that is being called."""

    def submodule(self, name: str, network: Network) -> Callable:
        module = LinenModule(network, self.dtype, name=name)
        return functools.partial(module, train=self.train, batch_axes=self.batch_axes)

    def layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        return linen(*args, **options, dtype=self.dtype, name=name)


class LinenModule(nn.Module):
    """A network as a Linen module."""

    network: Network
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Any,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        return self.network(LinenLayers(self.dtype, train, keys, batch_axes), x)


@dataclasses.dataclass
class NnxLayers(Layers):
    """Attributes of an NNX module; with `rngs`, each layer is created at its first call."""

    module: Any = None
    rngs: nnx.Rngs | None = None

    def submodule(self, name: str, network: Network) -> Callable:
        def call(x: jax.Array) -> jax.Array:
            if self.rngs is not None:
                setattr(self.module, name, NnxModule(network, self.dtype))
            layer = getattr(self.module, name)
            return layer(x, train=self.train, batch_axes=self.batch_axes, rngs=self.rngs)

        return call

    def layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        def call(x: jax.Array, **call_options: Any) -> jax.Array:
            if self.rngs is not None:
                layer = for_nnx(x.shape[-1], *args, **options, dtype=self.dtype, rngs=self.rngs)
                setattr(self.module, name, layer)
            layer = getattr(self.module, name)
            if "axis_name" in options:
                layer.axis_name = options["axis_name"]  # differs from call to call
            return layer(x, **call_options)

        return call


class NnxModule(nnx.Module):
    """A network as an NNX module; its first call, with `rngs`, creates its layers."""

    def __init__(self, network: Network, dtype: Any):
        self.network, self.dtype = network, dtype

    def __call__(
        self,
        x: Any,
        *,
        train: bool = False,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        return self.network(NnxLayers(self.dtype, train, keys, batch_axes, self, rngs), x)


def network_functions(api: Api, network: Network, dtype: Any) -> Functions:
    """Pure `init` and `apply` of a network, computed by Linen or NNX layers of this dtype."""
    if api == "linen":
        return linen_functions(LinenModule(network, dtype))

    def create(shapes: Any, rngs: nnx.Rngs) -> NnxModule:
        module = NnxModule(network, dtype)
        x = jax.tree.map(lambda s: jnp.zeros((1, *s)), shapes, is_leaf=lambda s: type(s) is tuple)
        module(x, rngs=rngs)
        return module

    return nnx_functions(create)
