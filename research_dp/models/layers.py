"""Layers of Flax Linen and NNX under one interface, so that a forward pass is written once.

A network is a hashable callable (layers, x) -> y that asks `layers` for each layer by name. In
Linen the layer is a submodule of that name; in NNX it is an attribute, created when the module is
constructed. Parameters have the same paths in both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from research_dp.distributed.mesh import target_platform
from research_dp.models.flax.linen import linen_functions
from research_dp.models.flax.module_calls import example_dropout
from research_dp.models.flax.nnx import nnx_functions
from research_dp.types import Functions

Api = Literal["linen", "nnx"]
Norm = Literal["batch", "group", "none"]
SequenceNorm = Literal["rms", "rms_plus_1", "layer"]
Network = Callable[["Layers", Any], jax.Array]
_GROUPS = 8


@dataclasses.dataclass
class Layers:
    """What a network builds its forward pass from; input sizes are inferred.

    `train`: batch statistics are taken from the batch. `keys` are random keys for `dropout`. Layers
    are attributes of the NNX `module`, created at their first call if there are `rngs`, or else
    submodules of the Linen module that is called.
    """

    dtype: Any  # of compute
    train: bool = False
    keys: jax.Array | None = None
    module: NnxModule | None = None
    rngs: nnx.Rngs | None = None

    def dense(self, name: str, features: int, *, use_bias: bool = True) -> Callable:
        layer = self.layer(name, nn.Dense, nnx.Linear, features, use_bias=use_bias)

        def on_rows(x: jax.Array) -> jax.Array:
            if x.ndim < 3 or target_platform() != "cpu":
                return layer(x)
            # XLA:CPU transposes both operands of the weight's gradient if there are more dims.
            return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

        return on_rows

    def conv(
        self, name: str, features: int, size: int, stride: int = 1, *, use_bias: bool = False
    ) -> Callable:
        window = (size, size), (stride, stride)
        return self.layer(name, nn.Conv, nnx.Conv, features, *window, use_bias=use_bias)

    def sequence_norm(self, name: str, norm: SequenceNorm, epsilon: float) -> Callable:
        """A norm of each token's features."""
        if norm == "layer":
            options = {"epsilon": epsilon, "use_fast_variance": False}
            return self.layer(name, nn.LayerNorm, nnx.LayerNorm, **options)
        if norm == "rms":
            return self.layer(name, nn.RMSNorm, nnx.RMSNorm, epsilon=epsilon)
        wide = dataclasses.replace(self, dtype=jnp.float32)
        scaled = wide.layer(name, nn.RMSNorm, nnx.RMSNorm, epsilon=epsilon)

        def plus_1(x: jax.Array) -> jax.Array:
            # The library's norm has no other scale than its parameter.
            y = x.astype(jnp.float32)
            return (scaled(y) + unit_rms(y, epsilon)).astype(x.dtype)

        return plus_1

    def norm(self, name: str, norm: Norm) -> Callable:
        """BatchNorm over the global micro-batch, GroupNorm, or the identity."""
        return self.submodule(name, functools.partial(_norm, norm))

    def submodule(self, name: str, network: Network) -> Callable:
        """Another network, whose parameters are below `name`."""
        options: dict[str, Any] = {"train": self.train, "keys": self.keys}
        if self.module is None:
            return functools.partial(LinenModule(network, self.dtype, name=name), **options)

        def call(x: jax.Array) -> jax.Array:
            if self.rngs is not None:
                setattr(self.module, name, NnxModule(network, self.dtype))
            return getattr(self.module, name)(x, **options, rngs=self.rngs)

        return call

    def layer(self, name: str, linen: Any, for_nnx: Any, *args: Any, **options: Any) -> Callable:
        """A layer of the library's class, which takes these arguments."""
        if self.module is None:
            return linen(*args, **options, dtype=self.dtype, name=name)

        def call(x: jax.Array, **call_options: Any) -> jax.Array:
            if self.rngs is not None:
                layer = for_nnx(x.shape[-1], *args, **options, dtype=self.dtype, rngs=self.rngs)
                setattr(self.module, name, layer)
            return getattr(self.module, name)(x, **call_options)

        return call


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Scales the last dim to a root mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def _norm(norm: Norm, layers: Layers, x: jax.Array) -> jax.Array:
    match norm:
        case "group":
            groups = math.gcd(_GROUPS, x.shape[-1])
            return layers.layer("group", nn.GroupNorm, nnx.GroupNorm, num_groups=groups)(x)
        case "batch":
            layer = layers.layer("batch", nn.BatchNorm, nnx.BatchNorm, momentum=0.9)
            return layer(x, use_running_average=not layers.train)
    return x


class LinenModule(nn.Module):
    """A network as a Linen module."""

    network: Network
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, *, train: bool, keys: jax.Array | None = None) -> jax.Array:
        return self.network(Layers(self.dtype, train, keys), x)


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
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        return self.network(Layers(self.dtype, train, keys, module=self, rngs=rngs), x)


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


def fold_in_each(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    """Folds a number into each of the keys (B,)."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, layer: int) -> jax.Array:
    """Sets a fraction of each example's features to zero and scales up the rest.

    `keys` has one random key an example, (B,), so that masks are the same on any mesh; None
    (evaluation) returns `x`. `layer` is the number of the dropout layer in the model: each layer
    draws another mask.
    """
    if keys is None or rate == 0.0:
        return x
    return example_dropout(x, rate, fold_in_each(keys, layer))
