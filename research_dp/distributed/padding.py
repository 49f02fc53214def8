"""Arrays whose size does not divide: padded at the end with zeros, in memory only."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed.errors import UsageError, check_count


def pad_to_multiple(x: jax.Array, multiple: int, dim: int = 0) -> jax.Array:
    """Appends zeros along `dim` until its length is a multiple; `x` itself if it is one.

    Args:
        x: An array of at least one dim.
        multiple: At least 1.
        dim: From the end, if negative.

    Raises:
        UsageError: `multiple` is no count, or `x` has no such dim.
    """
    check_count("multiple", multiple, 1)
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"dim = {dim}: the array has shape {x.shape}.")
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    widths = [(0, missing if d == dim % x.ndim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def unpad(x: jax.Array, length: int, dim: int = 0) -> jax.Array:
    """The first `length` elements along `dim`; `x` itself if it has no more."""
    return x if x.shape[dim] == length else lax.slice_in_dim(x, 0, length, axis=dim)


def flatten_padded(x: jax.Array, multiple: int) -> jax.Array:
    """An array of any shape as a flat one, in row-major order, padded to a multiple."""
    return pad_to_multiple(lax.reshape(x, (x.size,)), multiple)


def unflatten(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that `flatten_padded` made flat; `x` may have any shape itself."""
    return lax.reshape(unpad(lax.reshape(x, (x.size,)), math.prod(shape)), shape)
