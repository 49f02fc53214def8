"""The functions that fill a mapped strategy's slots `gather`, `sync` and `update`.

They run inside the mesh's axes, on one device's view; `shard` rules are in `distributed.layout`.
"""

from __future__ import annotations

from typing import Annotated, Any

import gin
import jax

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisNames, Dtype, Indices, Transform, arrays_like
from research_dp.distributed import buckets, collectives
from research_dp.distributed.collectives import Axes, GatherOptions, Reduction, flat_axes
from research_dp.distributed.embedding import exchange_rows
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.optimizer import apply_optimizer
from research_dp.distributed.sharding import shardings_like
from research_dp.distributed.transports.all_to_all import over_gloo

PyTree = Any


@gin.register(module="strategies", denylist=["rows"])
@checked
def gather_shards(
    held: Arrays,
    layout: Annotated[PyTree, shardings_like("held")],
    *,
    reduction: Reduction,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int | None = None,
    rows: Indices | None = None,
) -> PyTree:
    """Gathers sharded parameters; their gradients come back as shards of the mean.

    Args:
        held: This device's shards, and whole leaves, which are returned as they are.
        layout: Placements.
        reduction: How gradients are summed.
        gather_dtype: dtype on the wire and for compute, e.g. 'bfloat16'; None: the parameter's.
        grad_scatter_dtype: dtype in which gradients are summed; None: the parameter's.
        pre_divide: Divide them before they are summed, for float16.
        bucket_bytes: Bytes of a unit that travel in one collective; <= 0: one collective for each
            array, for the compiler to combine. None: 32 MiB between processes on CPUs, for whose
            gathers no compiler does that; 0 elsewhere. Tables are not packed.
        rows: Of tables, split by feature, only these rows are wanted; see `tables.exchange_rows`.
            A strategy's own function may lack this argument: tables are then gathered.
    """
    if bucket_bytes is None:
        bucket_bytes = buckets.DEFAULT_BUCKET_BYTES if over_gloo() else 0
    if bucket_bytes > 0 and rows is None:
        options = GatherOptions(
            0, FSDP_AXIS, gather_dtype, grad_scatter_dtype, reduction, pre_divide
        )
        return buckets.gather_tree_with_mean_grads(held, layout, options, bucket_bytes=bucket_bytes)

    def one(x: jax.Array, placement: Any) -> jax.Array:
        if placement.dim is None:
            return x
        options = GatherOptions(
            placement.dim, FSDP_AXIS, gather_dtype, grad_scatter_dtype, reduction, pre_divide
        )
        if rows is not None:
            return exchange_rows(x, rows, options)
        return collectives.gather_with_mean_grads(x, options)

    return jax.tree.map(one, held, layout)


@gin.register(module="strategies")
@checked
def average_gradients(
    grads: Arrays,
    layout: Annotated[PyTree, shardings_like("grads")],
    *,
    axes: AxisNames,
    reduction: Reduction,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """All-reduces gradients to their mean, in buckets.

    Gradients of sharded parameters are already the mean over `fsdp`, for `gather_shards` made
    them so; they are averaged over the other axes only.

    Args:
        grads: Gradients, lying as `layout` says.
        layout: Placements.
        axes: The mesh axes that the batch is split over.
        reduction: How they are summed.
        dtype: dtype on the wire; None: each gradient's own.
        pre_divide: Divide them before they are summed, for float16.
        bucket_bytes: Bytes that travel in one collective; <= 0: one collective for each leaf.
    """
    for is_sharded, over in ((False, axes), (True, _replica_axes(axes))):
        grads = _mean_where(
            is_sharded,
            grads,
            layout,
            over,
            reduction,
            dtype=dtype,
            pre_divide=pre_divide,
            bucket_bytes=bucket_bytes,
        )
    return grads


@gin.register(module="strategies")
@checked
def scatter_gradients(
    grads: Arrays,
    layout: Annotated[PyTree, shardings_like("grads")],
    *,
    axes: AxisNames,
    reduction: Reduction,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
) -> PyTree:
    """Reduce-scatters gradients: each device gets its slice of the mean, as `update_slices` needs.

    Over `fsdp` first, then over the other axes, in the same buckets; what the layout keeps whole is
    averaged over all of them. With `update_slices` this is `fsdp_apply_gradients` as two slots.

    Args:
        grads: Whole gradients of this device's examples.
        layout: Which slice of each one a device updates.
        axes: The mesh axes that the batch is split over.
        reduction: How they are summed.
        dtype: dtype on the wire; None: each gradient's own.
        pre_divide: Divide them before they are summed, for float16.
        bucket_bytes: Bytes that travel in one collective; <= 0: one collective for each leaf.
    """
    slices = buckets.scatter_mean_tree(
        grads,
        layout,
        reduction,
        replica_axes=_replica_axes(axes),
        dtype=dtype,
        pre_divide=pre_divide,
        bucket_bytes=bucket_bytes,
    )
    return _mean_where(
        False,
        slices,
        layout,
        axes,
        reduction,
        dtype=dtype,
        pre_divide=pre_divide,
        bucket_bytes=bucket_bytes,
    )


def _replica_axes(axes: AxisNames) -> Axes:
    """The axes along which what is sharded is repeated."""
    return tuple(axis for axis in flat_axes(axes) if axis != FSDP_AXIS)


def _mean_where(
    is_sharded: bool,
    grads: PyTree,
    layout: PyTree,
    axes: AxisNames,
    reduction: Reduction,
    **options: Any,
) -> PyTree:
    """Averages over `axes` the gradients that the layout shards, or those that it keeps whole."""
    leaves, treedef = jax.tree.flatten(grads)
    placements = jax.tree.leaves(layout)
    chosen = [i for i, p in enumerate(placements) if (p.dim is not None) == is_sharded]
    means = buckets.all_mean_tree([leaves[i] for i in chosen], axes, reduction, **options)
    for i, mean in zip(chosen, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


@gin.register(module="strategies")
@checked
def update_local(
    optimizer: Transform,
    grads: Annotated[PyTree, arrays_like("params")],
    opt_state: PyTree,
    params: Arrays,
    layout: Annotated[PyTree, shardings_like("params")],
    *,
    axes: AxisNames,
    reduction: Reduction,
) -> tuple[PyTree, PyTree]:
    """Applies the optimizer to what this device holds: whole parameters, or its shards."""
    del layout, axes, reduction  # nothing is moved
    return apply_optimizer(optimizer, grads, opt_state, params)


@gin.register(module="strategies")
@checked
def update_slices(
    optimizer: Transform,
    grads: Annotated[PyTree, arrays_like("params")],
    opt_state: PyTree,
    params: Arrays,
    layout: Annotated[PyTree, shardings_like("params")],
    *,
    axes: AxisNames,
    reduction: Reduction,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
) -> tuple[PyTree, PyTree]:
    """Applies the optimizer to this device's slice of whole parameters, then gathers them.

    Args:
        optimizer: The optimizer.
        grads: This device's slices of the gradients, as `scatter_gradients` leaves them.
        opt_state: This device's slice of the optimizer state.
        params: Whole parameters.
        layout: Which slice of each one a device updates.
        axes: The mesh axes that the batch is split over; unused, for gradients are averaged.
        reduction: How slices become whole again; nothing is summed.
        bucket_bytes: Bytes that travel in one collective; <= 0: one collective for each leaf.
    """
    del axes
    slices = buckets.shard_tree(params, layout)
    slices, opt_state = apply_optimizer(optimizer, grads, opt_state, slices)
    whole = buckets.gather_tree(slices, layout, reduction, bucket_bytes=bucket_bytes, into=params)
    return whole, opt_state
