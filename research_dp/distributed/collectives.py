"""The primitives that communicate: sum, scatter, gather, of arrays and of trees in buckets.

Every function here runs where mesh axes are bound (`shard_map`, `pmap`, `vmap(axis_name=...)`), on
one device's view of the arrays. How partial sums become one is a value, `Reduction`, that callers
hand down: a strategy may replace it without replacing anything else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from research_dp.distributed.layout import Placement
from research_dp.distributed.mesh import FSDP_AXIS

PyTree = Any
Axes = tuple[str, ...]

DEFAULT_BUCKET_BYTES = 32 * 2**20
# Names gathered parameters, so that a rematerialisation policy can drop just them.
GATHERED = "gathered_params"


class Reduction(NamedTuple):
    """How partial sums on several devices become one sum.

    Attributes:
        all_sum: (array, axis names) -> the sum, on every device.
        scatter_sum: (array, axis name, dim) -> this device's block, along dim, of the sum.
    """

    all_sum: Callable[[jax.Array, Axes], jax.Array]
    scatter_sum: Callable[[jax.Array, str, int], jax.Array]


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    # Only sums: whoever calls divides, once, by the number of partial results.
    return lax.psum(x, axes)


def _psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    # Only sums, see _psum.
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


PLAIN = Reduction(_psum, _psum_scatter)


def axes_size(axes: Axes) -> int:
    """Number of devices over the bound axes; 1 for no axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def all_mean(
    x: jax.Array, axes: Axes, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """Mean over devices, summed in `dtype` (x's own if None), returned in x's dtype."""
    if not axes:
        return x
    # The reduction sums over `axes`; the mean is taken here and nowhere else.
    total = reduction.all_sum(x.astype(dtype or x.dtype), axes)
    return (total / axes_size(axes)).astype(x.dtype)


def scatter_mean(
    x: jax.Array, dim: int, axis: str, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """This device's block along `dim` of the mean over `axis`; summed in `dtype`, then divided."""
    # The reduction sums over `axis`; the mean is taken here and nowhere else.
    total = reduction.scatter_sum(x.astype(dtype or x.dtype), axis, dim)
    return (total / axes_size((axis,))).astype(x.dtype)


def gather(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """Concatenates the devices' blocks along `dim`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def shard(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """This device's block of `x`, which is whole on each device, along `dim`."""
    block = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * block, block, dim)


class GatherOptions(NamedTuple):
    """Static options of `gather_with_mean_grads`.

    Attributes:
        dim: The dim that is split.
        axis: The mesh axis that it is split over.
        gather_dtype: dtype of the gathered array; None: x's own.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's own.
        reduction: How gradients are summed.
        keep: Whether the gathered array may be kept from the forward to the backward pass; if
            not, `drop_gathered` makes `jax.checkpoint` gather it again.
    """

    dim: int
    axis: str
    gather_dtype: Any = None
    grad_scatter_dtype: Any = None
    reduction: Reduction = PLAIN
    keep: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_with_mean_grads(x: jax.Array, options: GatherOptions) -> jax.Array:
    """Gathers a shard for compute; its gradient comes back as this device's block of the mean.

    Args:
        x: This device's block.
        options: dim, axis, and the dtypes on the wire.

    Returns:
        The full array in `gather_dtype`. The cotangent is cast to `grad_scatter_dtype` (x's dtype
        if None), summed, divided by the axis size, and returned in x's dtype.
    """
    full = gather(x.astype(options.gather_dtype or x.dtype), options.dim, options.axis)
    return full if options.keep else checkpoint_name(full, GATHERED)


def _gather_fwd(x: jax.Array, options: GatherOptions) -> tuple[jax.Array, jax.Array]:
    # The residual is an empty slice: only x's dtype is needed on the way back.
    return gather_with_mean_grads(x, options), jnp.zeros((0,), x.dtype)


def _gather_bwd(options: GatherOptions, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    wire = g.astype(options.grad_scatter_dtype or like.dtype)
    mean = scatter_mean(wire, options.dim, options.axis, options.reduction)
    return (mean.astype(like.dtype),)


gather_with_mean_grads.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_by_compiler(
    x: jax.Array, sharded: jax.sharding.NamedSharding, whole: jax.sharding.NamedSharding
) -> jax.Array:
    """Tells the compiler to gather `x` for compute and to scatter its gradient.

    Under `jit`, outside mapped axes. Without it the compiler may split activations over the dims
    that parameters are sharded on, and move those instead.
    """
    del sharded  # the gradient's
    return checkpoint_name(jax.lax.with_sharding_constraint(x, whole), GATHERED)


def _by_compiler_fwd(x: jax.Array, sharded: Any, whole: Any) -> tuple[jax.Array, None]:
    return gather_by_compiler(x, sharded, whole), None


def _by_compiler_bwd(sharded: Any, whole: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    del whole
    return (jax.lax.with_sharding_constraint(g, sharded),)


gather_by_compiler.defvjp(_by_compiler_fwd, _by_compiler_bwd)


def drop_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves everything but gathered parameters.

    A name inside a custom_vjp is invisible to the library's own policies, so this one looks into
    the call.
    """
    if prim.name != "custom_vjp_call":
        return True
    equations = params["call_jaxpr"].jaxpr.eqns
    return not any(e.primitive.name == "name" and e.params["name"] == GATHERED for e in equations)


# ---- Trees, in buckets ----


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


def global_norm(tree: PyTree, layout: PyTree, reduction: Reduction = PLAIN) -> jax.Array:
    """L2 norm of a tree whose leaves lie as `layout` says: a 0-d float32, the same everywhere."""
    sharded: list[jax.Array] = []
    held_whole: list[jax.Array] = []
    for x, p in zip(jax.tree.leaves(tree), jax.tree.leaves(layout), strict=True):
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        (held_whole if p.dim is None else sharded).append(square)
    total = sum(held_whole, start=jnp.zeros((), jnp.float32))
    if sharded:
        # Blocks are summed over `fsdp` alone: replicas along `data` hold the same ones, and whole
        # leaves are counted once.
        total += reduction.all_sum(sum(sharded, start=jnp.zeros((), jnp.float32)), (FSDP_AXIS,))
    return jnp.sqrt(total)


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
