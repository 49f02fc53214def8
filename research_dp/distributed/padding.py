"""Arrays whose size does not divide: padded at the end with zeros, in memory only."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, Count, CountOrZero
from research_dp.errors import UsageError


@checked
def pad_to_multiple(x: Array, multiple: Count, dim: int = 0) -> jax.Array:
    """Appends zeros along `dim` until its length is a multiple; `x` itself if it is one.

    Raises:
        UsageError: x has no such dim.
    """
    dim = _dim_of(x, dim)
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    widths = [(0, missing if d == dim % x.ndim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


@checked
def unpad(x: Array, length: CountOrZero, dim: int = 0) -> jax.Array:
    """The first `length` elements along `dim`; `x` itself if it has no more.

    Raises:
        UsageError: x has no such dim, or fewer elements along it.
    """
    dim = _dim_of(x, dim)
    if length > x.shape[dim]:
        raise UsageError(f"unpad.length = {length} is more than dim {dim} of {x.shape} has.")
    return x if x.shape[dim] == length else lax.slice_in_dim(x, 0, length, axis=dim)


def _dim_of(x: jax.Array, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"dim = {dim}: an array of shape {x.shape} has no such dim.")
    return dim % x.ndim


def flatten_padded(x: jax.Array, multiple: int) -> jax.Array:
    """An array of any shape as a flat one, in row-major order, padded to a multiple."""
    return pad_to_multiple(lax.reshape(x, (x.size,)), multiple)


def unflatten(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that `flatten_padded` made flat; `x` may have any shape itself."""
    return lax.reshape(unpad(lax.reshape(x, (x.size,)), math.prod(shape)), shape)
