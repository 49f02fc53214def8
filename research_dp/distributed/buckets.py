"""The primitives on trees: few collectives for many arrays, communicated together in buckets.

As in `collectives`: inside mapped axes, on one device's view of the arrays. Also their padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.distributed import collectives
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, Wire, axes_size, flat_axes
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import LeafSharding, fitted, shardings_like
from research_dp.distributed.vma import is_replicated, varying_axes
from research_dp.errors import UsageError
from research_dp.types import PyTree

# (rows (r, k), number of the bucket) -> (any, k); with codecs also what is lost, (r, k).
Move = Callable[[jax.Array, int], tuple[jax.Array, ...]]
Reshape = Callable[[jax.Array, LeafSharding], jax.Array]


class Encoded(NamedTuple):
    """What a `Wire` with codecs makes of an array, in place of the mean."""

    mean: jax.Array
    lost: jax.Array  # float32, of this device's own array


def is_encoded(x: Any) -> bool:
    """Whether it is a leaf of a tree of these."""
    return isinstance(x, Encoded)


# In one array: XLA's time grows faster than the number of slices of an array, and it combines
# all-reduces itself. Measured: experiments/plan/leaves.py.
_MOST_ARRAYS = 32


def make_buckets(sizes: Sequence[tuple[Hashable, int]], bucket_bytes: int) -> list[list[int]]:
    """Groups arrays of one kind, in order, into buckets of about `bucket_bytes`.

    `sizes` has for each array its kind (the dtype, say) and number of bytes; the buckets have
    indices into it, each once. As in MLX a bucket is closed as soon as it has at least
    `bucket_bytes`; <= 0: each array alone.
    """
    done: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(sizes):
        members, size = filling.pop(kind, ([], 0))
        members.append(index)
        if size + nbytes >= bucket_bytes:
            done.append(members)
        else:
            filling[kind] = (members, size + nbytes)
    return sorted(done + [members for members, _ in filling.values()])


def _in_buckets(
    rows: Sequence[jax.Array], sizes: Sequence[int], bucket_bytes: int, move: Move
) -> list[tuple[jax.Array, ...]]:
    """Applies `move` to arrays (r, k_i) concatenated along dim 1, and cuts the result apart.

    Those of one bucket have the same dtype, and vary over the same axes. `sizes` has the elements
    of the full arrays, which fill a bucket: so buckets depend on no padding or number of devices.
    """
    moved: list[Any] = [None] * len(rows)
    kinds = [
        ((x.dtype, varying_axes(x)), n * x.dtype.itemsize) for x, n in zip(rows, sizes, strict=True)
    ]
    buckets = [
        bucket[i : i + _MOST_ARRAYS]
        for bucket in make_buckets(kinds, bucket_bytes)
        for i in range(0, len(bucket), _MOST_ARRAYS)
    ]
    for number, bucket in enumerate(buckets):
        widths = [rows[i].shape[1] for i in bucket]
        results = move(jnp.concatenate([rows[i] for i in bucket], axis=1), number)
        parts = zip(*(lax.split(x, widths, axis=1) for x in results), strict=True)
        for i, part in zip(bucket, parts, strict=True):
            moved[i] = part
    return moved


@checked
def all_mean_tree(
    tree: types.Arrays,
    axes: types.AxisNames,
    reduction: Reduction = PLAIN,
    *,
    dtype: types.Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = collectives.DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """Mean over devices of each leaf, few collectives for many leaves; leaves keep their dtype."""
    return mean_tree(tree, flat_axes(axes), Wire(reduction, dtype, pre_divide, bucket_bytes))


def mean_tree(tree: PyTree, axes: Axes, wire: Wire) -> PyTree:
    """As `all_mean_tree`; a `wire` with codecs gives an `Encoded` for each."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = _in_buckets(
        [x.reshape(1, -1) for x in leaves],
        [x.size for x in leaves],
        wire.bucket_bytes,
        lambda rows, number: _mean_where_varying(rows, axes, wire.of_bucket(number)),
    )
    shaped = ([y.reshape(x.shape) for y in m] for m, x in zip(moved, leaves, strict=True))
    return jax.tree.unflatten(treedef, [Encoded(*m) if wire.encodes else m[0] for m in shaped])


def _mean_where_varying(x: jax.Array, axes: Axes, wire: Wire) -> tuple[jax.Array, ...]:
    """The mean, skipping axes along which the value is already replicated."""
    axes = tuple(axis for axis in axes if not is_replicated(x, axis))
    return wire.mean_and_loss(x, axes) if wire.encodes else (wire.all_mean(x, axes),)


@checked
def scatter_mean_tree(
    tree: types.Arrays,
    layout: Annotated[PyTree, shardings_like("tree")],
    reduction: Reduction = PLAIN,
    *,
    axis: types.AxisNames = FSDP_AXIS,
    replica_axes: types.AxisNames = (),
    dtype: types.Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = collectives.DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """This device's shards of the mean over devices of each leaf that is sharded.

    Args:
        tree: Full arrays. Leaves that are not sharded are returned as they are.
        layout: Their shardings.
        reduction: How they are summed.
        axis: The mesh axis, or axes, that leaves are sharded over, by a reduce-scatter.
        replica_axes: Axes along which shards are replicated: the mean over them is taken next.
        dtype: dtype on the wire; None: each leaf's own.
        pre_divide: Divide before each sum, for float16.
        bucket_bytes: Bytes of one collective; <= 0: one collective for each leaf.
    """
    wire = Wire(reduction, dtype, pre_divide, bucket_bytes)
    return shards_of_mean(tree, layout, flat_axes(axis), wire, flat_axes(replica_axes))


def shards_of_mean(
    tree: PyTree, layout: PyTree, axes: Axes, wire: Wire, replica_axes: Axes = ()
) -> PyTree:
    """As `scatter_mean_tree`; a `wire` with codecs gives an `Encoded` for each that is sharded."""

    def move(rows: jax.Array, number: int) -> tuple[jax.Array, ...]:
        # Each mean divides by the size of the axes that it sums over: together, once by each.
        if wire.encodes:
            own_wire = wire.of_bucket(number)
            block, lost = own_wire.shard_and_loss(rows, 0, axes)
            mean, later = own_wire.mean_and_loss(block, replica_axes)
            start, own = lax.axis_index(axes) * block.size, later.reshape(-1) * axes_size(axes)
            return mean, collectives.added_at(lost.reshape(-1), start, own).reshape(rows.shape)
        if all(is_replicated(rows, name) for name in axes):
            block = collectives.shard(rows, 0, axes)  # the mean of equal values is that value
        else:
            block = wire.scatter_mean(rows, 0, axes)
        return _mean_where_varying(block, replica_axes, wire)

    def from_rows(moved: tuple[jax.Array, ...], p: LeafSharding) -> Any:
        mean = moved[0].reshape(p.local_shape)
        return Encoded(mean, _from_rows(moved[1], p)) if wire.encodes else mean

    return _sharded_leaves(tree, layout, axes, wire.bucket_bytes, _to_rows, move, from_rows)


@checked
def gather_tree(
    tree: types.Arrays,
    layout: Annotated[PyTree, shardings_like("tree")],
    reduction: Reduction = PLAIN,
    *,
    axis: types.AxisNames = FSDP_AXIS,
    bucket_bytes: int = collectives.DEFAULT_BUCKET_BYTES,
    into: Annotated[PyTree, types.arrays_like("tree")] | None = None,
    replicated: bool = True,
) -> PyTree:
    """Gathers each leaf that is sharded; the others are returned as they are.

    Not for code that is differentiated; for `replicated` see `collectives.gather`. `into`, a tree
    of full arrays that are not used any more, may be overwritten with the result.
    """
    wire = Wire(reduction, bucket_bytes=bucket_bytes)
    return gathered(tree, layout, flat_axes(axis), wire, into, replicated=replicated)


def gathered(
    tree: PyTree,
    layout: PyTree,
    axes: Axes,
    wire: Wire,
    into: PyTree = None,
    *,
    replicated: bool = True,
) -> PyTree:
    """As `gather_tree`."""
    shardings, old = jax.tree.leaves(layout), jax.tree.leaves(into)
    bucket_bytes = wire.bucket_bytes

    def move(rows: jax.Array, _: int) -> tuple[jax.Array]:
        return (collectives.gather(rows, 0, axes, wire.reduction, replicated=replicated),)

    # Stacks of arrays that are sharded along their first dim; each fills a bucket alone.
    stacks = [
        i
        for i, p in enumerate(shardings)
        if old and p.dim == 1 and len(p.shape) > 2 and not p.flat and p.nbytes >= bucket_bytes > 0
    ]
    full = _sharded_leaves(
        *(tree, layout, axes, bucket_bytes, lambda x, p: x.reshape(1, -1), move),
        lambda moved, p: _from_rows(moved[0], p),
        stacks,
    )
    leaves, treedef = jax.tree.flatten(full)
    for i in stacks:
        leaves[i] = _gather_stack(leaves[i], old[i], axes, wire.reduction)
    return jax.tree.unflatten(treedef, leaves)


def _gather_stack(
    blocks: jax.Array, into: jax.Array, axes: Axes, reduction: Reduction
) -> jax.Array:
    """Gathers the arrays of a stack one at a time, in place.

    A gather of all at once is transposed and needs a copy: 2.5 GB more for lm_1b on 64 H100s.
    """

    def one(stack: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        block = lax.dynamic_index_in_dim(blocks, number, keepdims=False)
        full = collectives.gather(block, 0, axes, reduction, replicated=True)
        full = fitted(full, into.shape[1:])
        return lax.dynamic_update_index_in_dim(stack, full, number, 0), None

    return lax.scan(one, into, jnp.arange(blocks.shape[0]))[0]


def shard_tree(tree: PyTree, layout: PyTree, *, axis: str | Axes = FSDP_AXIS) -> PyTree:
    """This device's shard of each leaf that is sharded; no communication."""

    def one(x: jax.Array, p: LeafSharding) -> jax.Array:
        if p.flat and p.dim is not None:
            return collectives.shard(_to_rows(x, p), 0, axis).reshape(p.local_shape)
        return x if p.dim is None else collectives.shard(fitted(x, p.split_shape), p.dim, axis)

    return jax.tree.map(one, tree, layout)


def _sharded_leaves(
    tree: PyTree,
    layout: PyTree,
    axes: Axes,
    bucket_bytes: int,
    to_rows: Reshape,
    move: Move,
    from_rows: Callable[[tuple[jax.Array, ...], LeafSharding], Any],
    skip: Sequence[int] = (),
) -> PyTree:
    """Applies `move` to the sharded leaves, as rows and in buckets; to none at indices `skip`."""
    leaves, treedef = jax.tree.flatten(tree)
    sharded = [(i, p) for i, p in enumerate(jax.tree.leaves(layout)) if p.dim is not None]
    if sharded and not axes:
        raise UsageError(f"axis = (): the layout shards {sharded[0][1].path!r}; name its axis.")
    sharded = [(i, p) for i, p in sharded if i not in skip]
    rows = [to_rows(leaves[i], p) for i, p in sharded]
    moved = _in_buckets(rows, [math.prod(p.shape) for _, p in sharded], bucket_bytes, move)
    for (i, p), x in zip(sharded, moved, strict=True):
        leaves[i] = from_rows(x, p)
    return jax.tree.unflatten(treedef, leaves)


# A full array as rows (n, k), one for each of n devices; a shard as one row, (1, k), in the order
# of its elements: packing then copies runs of memory, and shards not at all.


def _to_rows(x: jax.Array, p: LeafSharding) -> jax.Array:
    if p.flat:
        blocks = flatten_padded(x, p.axis_size)
    else:
        dim = p.dim or 0
        x = fitted(x, p.split_shape)
        blocks = x.reshape(*p.shape[:dim], p.axis_size, *p.local_shape[dim:])
        blocks = jnp.moveaxis(blocks, dim, 0)
    return blocks.reshape(p.axis_size, math.prod(p.local_shape))


def _from_rows(rows: jax.Array, p: LeafSharding) -> jax.Array:
    if p.flat:
        return unflatten(rows, p.shape)
    blocks = jnp.moveaxis(rows.reshape(p.axis_size, *p.local_shape), 0, p.dim or 0)
    return fitted(blocks.reshape(p.split_shape), p.shape)


@checked
def pad_to_multiple(x: types.Array, multiple: types.Count, dim: int = 0) -> jax.Array:
    """Appends zeros along `dim` until its length is a multiple; `x` itself if it is one.

    Raises UsageError if `x` has no such dim.
    """
    dim = _dim_of(x, dim)
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    widths = [(0, missing if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


@checked
def unpad(x: types.Array, length: types.CountOrZero, dim: int = 0) -> jax.Array:
    """The first `length` elements along `dim`; `x` itself if it has no more.

    Raises UsageError if `x` has no such dim, or fewer elements along it.
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
