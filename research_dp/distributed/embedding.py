"""Lookups of rows in tables such as embeddings, replicated or sharded by feature."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed.collectives import axes_size, cast_dtype, flat_axes, gather
from research_dp.distributed.differentiable_gather import GatherOptions, with_gradient


@jax.custom_vjp
def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows (..., features) of an unsharded table (rows, features) for integers `indices` (...).

    Gradients are added up in float32, however often a row is used.
    """
    return table[indices]


def _take_fwd(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, Any]:
    return table[indices], (indices, table[:, :0])  # for the number of rows and the dtype


def _take_bwd(kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    indices, like = kept
    return _add_rows(g, indices, like.shape[0]).astype(like.dtype), None


take_rows.defvjp(_take_fwd, _take_bwd)


def exchange_rows(block: jax.Array, indices: jax.Array, options: GatherOptions) -> jax.Array:
    """Rows of a table that is sharded by feature, without gathering it.

    Each device looks up its columns for all devices, and an all-to-all joins them. That sends less
    where a device looks up fewer rows than the table has. `block` has this device's columns,
    `indices` its integers (batch, ...); the result is (batch, ..., features) in `gather_dtype`.

    The gradient, sent back in `grad_scatter_dtype`, is that of the mean over the axis, added up in
    float32, whatever `reduction` says. Derivatives of higher order are exact (`with_gradient`).
    """
    count, dtype = block.shape[0], block.dtype

    def rows(block: jax.Array, everyone: jax.Array) -> jax.Array:
        local = block[everyone].astype(cast_dtype(dtype, options.gather_dtype))
        return lax.all_to_all(local, options.axis, 0, local.ndim - 1, tiled=True)

    def columns(g: jax.Array, everyone: jax.Array) -> jax.Array:
        wire = g.astype(cast_dtype(dtype, options.grad_scatter_dtype))
        wire = lax.all_to_all(wire, options.axis, g.ndim - 1, 0, tiled=True)
        total = _add_rows(wire, everyone, count)
        # Summed over all devices' examples, and divided here, once: the mean over the axis.
        return (total / axes_size(flat_axes(options.axis))).astype(dtype)

    everyone = gather(indices, 0, options.axis, options.reduction)
    return with_gradient(rows, columns)(block, everyone)


def _add_rows(g: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """The gradient of a table of `count` rows, at least float32, from that of the rows taken."""
    wide = jnp.promote_types(g.dtype, jnp.float32)
    zeros = jnp.zeros((count, g.shape[-1]), wide)
    return zeros.at[indices].add(g.astype(wide))
