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
        return self._layer(name, nn.Dense, nnx.Linear, features, use_bias=use_bias)

    def conv(
        self, name: str, features: int, size: int, stride: int = 1, *, use_bias: bool = False
    ) -> Callable:
        window = (size, size), (stride, stride)
        return self._layer(name, nn.Conv, nnx.Conv, features, *window, use_bias=use_bias)

    def rms_norm(self, name: str) -> Callable:
        return self._layer(name, nn.RMSNorm, nnx.RMSNorm)

    def norm(self, name: str, norm: Norm) -> Callable:
        """BatchNorm over the global micro-batch, GroupNorm, or the identity."""
        return self.submodule(name, functools.partial(_norm, norm))

    def group_norm(self, name: str, groups: int) -> Callable:
        return self._layer(name, nn.GroupNorm, nnx.GroupNorm, num_groups=groups)

    def batch_norm(self, name: str) -> Callable:
        # The layer averages mean and variance over `batch_axes` while training: they are those of
        # the global micro-batch, and equal on every device.
        axes = (self.batch_axes or None) if self.train else None
        layer = self._layer(name, nn.BatchNorm, nnx.BatchNorm, momentum=0.9, axis_name=axes)
        return functools.partial(layer, use_running_average=not self.train)

    @abc.abstractmethod
    def submodule(self, name: str, network: Network) -> Callable:
        """Another network, whose parameters are below `name`."""

    @abc.abstractmethod
    def _layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        """A layer of the library's class, which takes these arguments."""


def _norm(norm: Norm, layers: Layers, x: jax.Array) -> jax.Array:
    if norm == "group":
        return layers.group_norm("group", math.gcd(_GROUPS, x.shape[-1]))(x)
    return layers.batch_norm("batch")(x) if norm == "batch" else x


class LinenLayers(Layers):
    """Submodules of the Linen module that is being called."""

    def submodule(self, name: str, network: Network) -> Callable:
        module = LinenModule(network, self.dtype, name=name)
        return functools.partial(module, train=self.train, batch_axes=self.batch_axes)

    def _layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
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
    """Attributes of an NNX module.

    Attributes:
        module: The module.
        rngs: Given while the module is constructed: each layer is created at its first call.
    """

    module: Any = None
    rngs: nnx.Rngs | None = None

    def submodule(self, name: str, network: Network) -> Callable:
        def create(x: jax.Array) -> nnx.Module:
            return NnxModule(network, self.dtype, x.shape[1:], self.rngs)

        layer = self._get(name, create)
        return functools.partial(layer, train=self.train, batch_axes=self.batch_axes)

    def _layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        def create(x: jax.Array) -> nnx.Module:
            return for_nnx(x.shape[-1], *args, **options, dtype=self.dtype, rngs=self.rngs)

        layer = self._get(name, create)
        if "axis_name" in options and self.rngs is None:
            layer.axis_name = options["axis_name"]  # differs from call to call
        return layer

    def _get(self, name: str, create: Callable[[jax.Array], nnx.Module]) -> Any:
        if self.rngs is None:
            return getattr(self.module, name)

        def create_and_call(x: jax.Array, **options: Any) -> jax.Array:
            layer: Any = create(x)
            setattr(self.module, name, layer)
            return layer(x, **options)

        return create_and_call


class NnxModule(nnx.Module):
    """A network as an NNX module, for examples of one shape (or a dict of shapes)."""

    def __init__(self, network: Network, dtype: Any, shape: Any, rngs: nnx.Rngs | None):
        self.network, self.dtype = network, dtype
        x = jax.tree.map(lambda s: jnp.zeros((1, *s)), shape, is_leaf=lambda s: type(s) is tuple)
        network(NnxLayers(dtype, module=self, rngs=rngs), x)  # creates the layers

    def __call__(
        self,
        x: Any,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        return self.network(NnxLayers(self.dtype, train, keys, batch_axes, module=self), x)


def network_functions(api: Api, network: Any) -> Functions:
    """Pure `init` and `apply` of a network, computed by Linen or NNX layers of its dtype."""
    if api == "linen":
        return linen_functions(LinenModule(network, network.dtype))
    return nnx_functions(functools.partial(NnxModule, network, network.dtype))


def module_constructors(network: type) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions (fields) -> Linen module and (input shape, fields, rngs=) -> NNX module."""

    def linen(*fields: Any, **named: Any) -> LinenModule:
        made: Any = network(*fields, **named)
        return LinenModule(made, made.dtype)

    def for_nnx(shape: Any, *fields: Any, rngs: nnx.Rngs, **named: Any) -> NnxModule:
        made: Any = network(*fields, **named)
        return NnxModule(made, made.dtype, shape, rngs)

    return linen, for_nnx
