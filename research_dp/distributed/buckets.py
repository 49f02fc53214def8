"""The primitives on trees: few collectives for many arrays, which travel together in buckets.

As in `collectives`: inside mapped axes, on one device's view of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.distributed.collectives import (
    PLAIN,
    Axes,
    Reduction,
    all_mean,
    gather,
    scatter_mean,
    shard,
)
from research_dp.distributed.layout import Placement
from research_dp.distributed.mesh import FSDP_AXIS

PyTree = Any

DEFAULT_BUCKET_BYTES = 32 * 2**20


def make_buckets(sizes: Sequence[tuple[Any, int]], bucket_bytes: int) -> list[list[int]]:
    """Groups arrays that travel together: same dtype, in order, up to about `bucket_bytes`.

    A bucket is closed as soon as it holds at least `bucket_bytes`, as MLX does.

    Args:
        sizes: For each array its dtype and number of bytes.
        bucket_bytes: Size at which a bucket is full; <= 0: each array travels alone.

    Returns:
        Indices into `sizes`, each once.
    """
    done: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, (dtype, nbytes) in enumerate(sizes):
        members, held = filling.pop(dtype, ([], 0))
        members.append(index)
        if held + nbytes >= bucket_bytes:
            done.append(members)
        else:
            filling[dtype] = (members, held + nbytes)
    return sorted(done + [members for members, _ in filling.values()])


def _in_buckets(
    rows: Sequence[jax.Array], bucket_bytes: int, move: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Applies `move` to arrays (r, k_i) concatenated along dim 1, and cuts the result apart."""
    moved: list[Any] = [None] * len(rows)
    for bucket in make_buckets([(x.dtype, x.nbytes) for x in rows], bucket_bytes):
        joined = move(jnp.concatenate([rows[i] for i in bucket], axis=1))
        start = 0
        for i in bucket:
            width = rows[i].shape[1]
            moved[i] = joined[:, start : start + width]
            start += width
    return moved


def all_mean_tree(
    tree: PyTree,
    axes: Axes,
    reduction: Reduction = PLAIN,
    *,
    dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """Mean over devices of each leaf, few collectives for many leaves; leaves keep their dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    rows = [x.reshape(1, -1) for x in leaves]
    moved = _in_buckets(rows, bucket_bytes, lambda x: all_mean(x, axes, reduction, dtype))
    means = [m.reshape(x.shape) for m, x in zip(moved, leaves, strict=True)]
    return jax.tree.unflatten(treedef, means)


def scatter_mean_tree(
    tree: PyTree,
    layout: PyTree,
    reduction: Reduction = PLAIN,
    *,
    dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """This device's blocks of the mean over `fsdp` of each leaf that the layout shards.

    Leaves that the layout keeps whole are returned as they are.
    """

    def move(rows: jax.Array) -> jax.Array:
        return scatter_mean(rows, 0, FSDP_AXIS, reduction, dtype)

    def to_rows(x: jax.Array, p: Placement) -> jax.Array:
        return jnp.moveaxis(x, _dim(p), 0).reshape(p.axis_size, -1)

    def from_rows(rows: jax.Array, p: Placement) -> jax.Array:
        return _from_rows(rows, p, p.shape[_dim(p)] // p.axis_size)

    return _sharded_leaves(tree, layout, bucket_bytes, to_rows, move, from_rows)


def gather_tree(
    tree: PyTree, layout: PyTree, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> PyTree:
    """Makes each leaf whole that the layout shards; the others are returned as they are."""

    def move(rows: jax.Array) -> jax.Array:
        return gather(rows, 0, FSDP_AXIS)

    def to_rows(x: jax.Array, p: Placement) -> jax.Array:
        return jnp.moveaxis(x, _dim(p), 0).reshape(1, -1)

    def from_rows(rows: jax.Array, p: Placement) -> jax.Array:
        return _from_rows(rows, p, p.shape[_dim(p)])

    return _sharded_leaves(tree, layout, bucket_bytes, to_rows, move, from_rows)


def shard_tree(tree: PyTree, layout: PyTree) -> PyTree:
    """This device's block of each leaf that the layout shards; no communication."""
    return jax.tree.map(
        lambda x, p: x if p.dim is None else shard(x, p.dim, FSDP_AXIS), tree, layout
    )


def _sharded_leaves(
    tree: PyTree,
    layout: PyTree,
    bucket_bytes: int,
    to_rows: Callable[[jax.Array, Placement], jax.Array],
    move: Callable[[jax.Array], jax.Array],
    from_rows: Callable[[jax.Array, Placement], jax.Array],
) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    placements = jax.tree.leaves(layout)
    chosen = [i for i, p in enumerate(placements) if p.dim is not None]
    rows = [to_rows(leaves[i], placements[i]) for i in chosen]
    for i, moved in zip(chosen, _in_buckets(rows, bucket_bytes, move), strict=True):
        leaves[i] = from_rows(moved, placements[i])
    return jax.tree.unflatten(treedef, leaves)


def _from_rows(rows: jax.Array, placement: Placement, length: int) -> jax.Array:
    dim = _dim(placement)
    others = placement.shape[:dim] + placement.shape[dim + 1 :]
    return jnp.moveaxis(rows.reshape(length, *others), 0, dim)


def _dim(placement: Placement) -> int:
    assert placement.dim is not None
    return placement.dim
