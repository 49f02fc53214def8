"""Tables of which rows are looked up, such as embeddings: whole, or split by feature."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed.collectives import GatherOptions, axes_size, flat_axes, gather


@jax.custom_vjp
def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a whole table; gradients are added up in float32, however often a row is taken.

    Args:
        table: (rows, features).
        indices: (...) integers.

    Returns:
        (..., features) in the table's dtype.
    """
    return table[indices]


def _take_fwd(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, Any]:
    return table[indices], (indices, table[:, :0])  # of the table, rows and dtype are needed


def _take_bwd(kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    indices, like = kept
    zeros = jnp.zeros((like.shape[0], g.shape[-1]), jnp.float32)
    return zeros.at[indices].add(g.astype(jnp.float32)).astype(like.dtype), None


take_rows.defvjp(_take_fwd, _take_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def exchange_rows(block: jax.Array, indices: jax.Array, options: GatherOptions) -> jax.Array:
    """Rows of a table that is split by feature, without making it whole.

    Each device looks its columns up for all devices, and an all-to-all puts rows together. Worth
    it where a device takes fewer rows than the table has.

    Args:
        block: This device's columns, (rows, features / devices).
        indices: (batch, ...) integers, this device's own.
        options: Axis, and the dtypes on the wire; `dim` is 1.

    Returns:
        (batch, ..., features) in `gather_dtype`. The gradient, sent back in `grad_scatter_dtype`,
        is that of the mean over the axis, added up in float32, whatever `reduction` says.
    """
    return _exchange_fwd(block, indices, options)[0]


def _exchange_fwd(
    block: jax.Array, indices: jax.Array, options: GatherOptions
) -> tuple[jax.Array, Any]:
    everyone = gather(indices, 0, options.axis, options.reduction)
    mine = block[everyone].astype(options.gather_dtype or block.dtype)
    rows = lax.all_to_all(mine, options.axis, split_axis=0, concat_axis=mine.ndim - 1, tiled=True)
    return rows, (everyone, block[:, :0])


def _exchange_bwd(options: GatherOptions, kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    everyone, like = kept
    wire = g.astype(options.grad_scatter_dtype or like.dtype)
    mine = lax.all_to_all(wire, options.axis, split_axis=g.ndim - 1, concat_axis=0, tiled=True)
    # Summed here over all devices' examples, and divided, once: the mean over the axis.
    (total, _) = _take_bwd((everyone, like.astype(jnp.float32)), mine)
    return (total / axes_size(flat_axes(options.axis))).astype(like.dtype), None


exchange_rows.defvjp(_exchange_fwd, _exchange_bwd)
