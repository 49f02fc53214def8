"""Dropout with one mask per example, for the dropout layers of Flax.

Flax draws the mask of a batch from one key. Its values for an example would then depend on the
devices that share the batch. Here each example has its own key. Flax's key only says which layer
draws, at which call and in which turn of a loop: it can be split, but nothing can be drawn from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random

from research_dp.errors import UsageError
from research_dp.models.flax.module_calls import GUIDE


def example_dropout(
    x: jax.Array, rate: float, keys: jax.Array, broadcast_dims: Sequence[int] = ()
) -> jax.Array:
    """Sets a fraction of each example's features to zero and scales up the rest.

    `keys` (B,) are the examples' keys for this layer. Masks have length 1 in `broadcast_dims`.
    """
    dims = [dim % x.ndim for dim in broadcast_dims]
    shape = tuple(1 if dim in dims else length for dim, length in enumerate(x.shape))[1:]
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys)
    return jnp.where(jnp.broadcast_to(keep, x.shape), x / (1.0 - rate), jnp.zeros((), x.dtype))


def layer_dropout(
    x: jax.Array,
    rate: float,
    keys: jax.Array | None,
    layer_key: jax.Array,
    broadcast_dims: Sequence[int] = (),
) -> jax.Array:
    """`example_dropout` of a layer that Flax gives this key; `keys` (B,) are the examples' own.

    Raises:
        UsageError: There are no keys (evaluation), or the layer does not see the batch as its
            first dim, or has one mask for all examples.
    """
    if keys is None:
        raise UsageError(
            "a dropout layer draws in evaluation. Give it deterministic=True there, by an argument "
            f"`train` of the model. {GUIDE}"
        )
    shape = jnp.shape(x)
    if not shape or shape[0] != keys.shape[0]:
        raise UsageError(
            f"a dropout layer gets an array {shape} in a batch of {keys.shape[0]} examples. Its "
            f"first dim must be the batch, because each example has its own mask. {GUIDE}"
        )
    if any(dim % len(shape) == 0 for dim in broadcast_dims):
        raise UsageError(
            f"a dropout layer has broadcast_dims = {tuple(broadcast_dims)}: one mask for all "
            "examples, which would depend on the device. Leave dim 0 out."
        )
    numbers = layer_key
    if jnp.issubdtype(layer_key.dtype, jax.dtypes.prng_key):
        numbers = jax.random.key_data(layer_key)
    for number in jnp.ravel(numbers):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return example_dropout(x, rate, keys, broadcast_dims)


def layer_keys(number: int, shape: tuple[int, ...] = ()) -> jax.Array:
    """Keys of this shape that say which layer draws; another number gives others."""
    key = jax.random.key(number, impl=_layers())
    return jax.random.split(key, shape) if shape else key


@functools.cache
def _layers() -> Any:
    """Random keys that can be split and folded, from which nothing can be drawn."""
    plain = random.threefry_prng_impl
    return random.define_prng_impl(
        key_shape=plain.key_shape,
        seed=plain.seed,
        split=plain.split,
        fold_in=plain.fold_in,
        random_bits=_refuse,
        name="layers",
        tag="layer",
    )


def _refuse(*_: Any) -> Any:
    raise UsageError(
        "the model draws random numbers from an RNG stream of Flax other than by a dropout layer, "
        "e.g. in attention or as noise. They would depend on the device. Set dropout_rate = 0 in "
        "attention and use nn.Dropout or nnx.Dropout on its output, or let the model take `keys`, "
        f"one key per example. {GUIDE}"
    )
