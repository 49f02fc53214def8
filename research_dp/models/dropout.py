"""Dropout whose mask depends on the example alone, so that it is the same on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def fold_in_each(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    """Folds a number into each of the keys (B,)."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, layer: int) -> jax.Array:
    """Sets a fraction of each example's features to zero and scales up the rest.

    `keys` has one random key an example, (B,); None (evaluation) returns `x`. `layer` is the number
    of the dropout layer in the model: each layer draws another mask.
    """
    if keys is None or rate == 0.0:
        return x
    keep = jax.vmap(
        lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - rate, x.shape[1:])
    )(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
