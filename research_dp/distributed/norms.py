"""The global norm of arrays that are sharded over devices, and the factor that clips it."""

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
Blocks = Iterable[tuple[jax.Array, Axes]]  # arrays of this device, with the axes that split them


@checked
def global_norm(
    tree: Arrays, layout: Annotated[PyTree, shardings_like("tree")], reduction: Reduction = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """L2 norm of a tree that is sharded as `layout` says, and its nonfinite leaves.

    Args:
        tree: This device's shards.
        layout: Their `LeafSharding`s.
        reduction: How sums of squares are summed over devices.

    Returns:
        The norm, a 0-d float32; and float32 (leaves,), above 0 for a leaf whose sum of squares is
        not finite. Both are the same on every device, and need no more collectives than the norm.
    """
    split = ((FSDP_AXIS,) if p.dim is not None else () for p in jax.tree.leaves(layout))
    blocks = list(zip(jax.tree.leaves(tree), split, strict=True))
    total = jnp.zeros((), jnp.float32)
    nonfinite = [jnp.zeros((), jnp.float32)] * len(blocks)
    for axes, squares in _squares_by_axes(blocks).items():
        local = _sum(squares)
        flags = [(~jnp.isfinite(square)).astype(jnp.float32) for square in squares.values()]
        sums = _all_reduced(jnp.stack([local, *flags]), axes, reduction)
        total += sums[0]
        for position, flag in zip(squares, sums[1:], strict=True):
            nonfinite[position] = flag
    return jnp.sqrt(total), jnp.stack(nonfinite) if nonfinite else jnp.zeros((0,), jnp.float32)


def norm_of_blocks(blocks: Blocks, reduction: Reduction = PLAIN) -> jax.Array:
    """L2 norm of arrays that are split over devices: a 0-d float32, the same on every device."""
    total = jnp.zeros((), jnp.float32)
    for axes, squares in _squares_by_axes(blocks).items():
        total += _all_reduced(_sum(squares), axes, reduction)
    return jnp.sqrt(total)


def clip_factor(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """The factor that scales gradients to a norm of at most `max_norm`; 1.0 if it is.

    No epsilon, as Optax has none. A norm of NaN makes the factor NaN, and so every gradient.
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)


def _squares_by_axes(blocks: Blocks) -> dict[Axes, dict[int, jax.Array]]:
    """Position -> sum of squares of each block, by the axes that split its array."""
    squares: dict[Axes, dict[int, jax.Array]] = {}
    for position, (x, axes) in enumerate(blocks):
        squares.setdefault(axes, {})[position] = _sum_of_squares(x)
    return squares


def _sum_of_squares(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _sum_of_squares(x.real) + _sum_of_squares(x.imag)
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _sum(squares: dict[int, jax.Array]) -> jax.Array:
    return sum(squares.values(), start=jnp.zeros((), jnp.float32))


def _all_reduced(x: jax.Array, axes: Axes, reduction: Reduction) -> jax.Array:
    # Summed over the axes that split the blocks, and those alone: along others the blocks are
    # replicated, and count once. Nothing is divided.
    return reduction.all_reduce(x, axes) if axes else x
