"""The global norm of sharded gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays
from research_dp.distributed.collectives import PLAIN, Axes, Reduction
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import shardings_like

PyTree = Any


def norm_of_blocks(
    blocks: Iterable[tuple[jax.Array, Axes]], reduction: Reduction = PLAIN
) -> jax.Array:
    """L2 norm of arrays, from this device's blocks of them: a 0-d float32.

    Args:
        blocks: (this device's block, the axes that the array is sharded over; () if replicated).
        reduction: How sums of squares become one over devices.

    Returns:
        The norm of all arrays, the same on every device.
    """
    total = jnp.zeros((), jnp.float32)
    for axes, parts in _squares(blocks).items():
        local = sum((square for _, square in parts), start=jnp.zeros((), jnp.float32))
        # Blocks are summed over the axes that split them, and those alone: along others devices
        # have the same ones, and replicated arrays are counted once. Nothing is divided.
        total += reduction.all_reduce(local, axes) if axes else local
    return jnp.sqrt(total)


@checked
def global_norm(
    tree: Arrays, layout: Annotated[PyTree, shardings_like("tree")], reduction: Reduction = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """L2 norm of a tree of local shards, and which leaves make it nonfinite.

    Args:
        tree: This device's blocks.
        layout: Shardings.
        reduction: How sums of squares become one over devices.

    Returns:
        The norm, a 0-d float32; and float32 (leaves,) above 0 for a leaf whose sum of squares is
        not finite. Both the same on every device, by the collectives that the norm needs alone.
    """
    axes_of = ((FSDP_AXIS,) if p.dim is not None else () for p in jax.tree.leaves(layout))
    blocks = list(zip(jax.tree.leaves(tree), axes_of, strict=True))
    total, nonfinite = jnp.zeros((), jnp.float32), [jnp.zeros((), jnp.float32)] * len(blocks)
    for axes, parts in _squares(blocks).items():
        local = sum((square for _, square in parts), start=jnp.zeros((), jnp.float32))
        flags = [(~jnp.isfinite(square)).astype(jnp.float32) for _, square in parts]
        # Summed as in `norm_of_blocks`; the flags are communicated with them.
        together = jnp.stack([local, *flags])
        together = reduction.all_reduce(together, axes) if axes else together
        total += together[0]
        for (position, _), flag in zip(parts, together[1:], strict=True):
            nonfinite[position] = flag
    return jnp.sqrt(total), jnp.stack(nonfinite) if nonfinite else jnp.zeros((0,), jnp.float32)


def clip_factor(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """What to multiply gradients by so that their norm is at most `max_norm`; 1.0 if it is.

    No epsilon, as Optax has none. A norm that is not a number makes the factor NaN, and so every
    gradient: nothing is skipped.
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)


def _squares(
    blocks: Iterable[tuple[jax.Array, Axes]],
) -> dict[Axes, list[tuple[int, jax.Array]]]:
    """(position, sum of squares) of each block, by the axes that its array is split over."""
    squares: dict[Axes, list[tuple[int, jax.Array]]] = {}
    for position, (x, axes) in enumerate(blocks):
        squares.setdefault(axes, []).append((position, _sum_of_squares(x)))
    return squares


def _sum_of_squares(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _sum_of_squares(x.real) + _sum_of_squares(x.imag)
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
