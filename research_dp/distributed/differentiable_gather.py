"""Gathers for compute, whose gradients come back as shards of the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import jax
from jax.ad_checkpoint import checkpoint_name

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, AxisName, Dtype
from research_dp.distributed.buckets import gather_tree, scatter_mean_tree
from research_dp.distributed.collectives import (
    PLAIN,
    Axes,
    Reduction,
    axes_size,
    cast_dtype,
    flat_axes,
    scatter_mean,
)
from research_dp.distributed.linear import with_gradient
from research_dp.distributed.remat import GATHERED
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError

PyTree = Any


class GatherOptions(NamedTuple):
    """How an array is gathered, and how its gradient comes back.

    Attributes:
        dim: The sharded dim.
        axis: The mesh axis that it is sharded over, or several as one.
        gather_dtype: dtype of the gathered array; None: its own. See `cast_dtype`.
        grad_scatter_dtype: dtype in which gradients are summed; None: its own. See `cast_dtype`.
        reduction: The collectives.
        pre_divide: Whether gradients are divided before they are summed, for float16.
    """

    dim: int
    axis: str | Axes
    gather_dtype: Any = None
    grad_scatter_dtype: Any = None
    reduction: Reduction = PLAIN
    pre_divide: bool = False

    def differentiable(self, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        """The gather of a shard of this dtype; its gradient is this device's shard of the mean.

        Over other axes than `axis` nothing is averaged. Derivatives of any order are exact.
        """
        dim, axis, reduction = self.dim, flat_axes(self.axis), self.reduction

        def forward(x: jax.Array) -> jax.Array:
            full = x.astype(cast_dtype(dtype, self.gather_dtype))
            for name in reversed(axis):
                full = reduction.all_gather(full, name, dim, "varying")
            return checkpoint_name(full, GATHERED)

        def backward(g: jax.Array) -> jax.Array:
            wire = g.astype(cast_dtype(dtype, self.grad_scatter_dtype))
            # `scatter_mean` sums over `axis` and divides by its size; nobody else does.
            mean = scatter_mean(wire, dim, axis, reduction, pre_divide=self.pre_divide)
            return mean.astype(dtype)

        return with_gradient(forward, backward)


@gin.register(module="distributed")
@checked
def gather_array_with_mean_grads(
    x: Array,
    axis: int,
    axis_name: AxisName,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
) -> jax.Array:
    """Gathers an array over a mesh axis; its gradient comes back as shards of the mean.

    As in xlstm-jax. Inside mapped axes; right with `check_vma` on and off, for a loss of this
    device's own (docs/api.md, "Linen and shard_map").

    Args:
        x: This device's shard, floating-point if it is differentiated.
        axis: The sharded dim; negative ones count from the end.
        axis_name: The mesh axis it is sharded over, or several as one.
        gather_dtype: dtype on the wire and of the result; None: x's. Complex arrays and integers
            keep their dtype, here and in the sum.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's, not `gather_dtype`.
        pre_divide: Divide gradients before they are summed: in float16, eight times 10000 is inf.
        reduction: The collectives.

    Returns:
        The full array, dim `axis` multiplied by the axis size. Exact in reverse mode of any order;
        forward mode (jvp, jacfwd, hessian) is refused.

    Raises:
        UsageError: x has no such dim, or a dtype is not a floating-point dtype.
        NameError: The axis is not bound.
    """
    axes = flat_axes(axis_name)
    axes_size(axes)  # names an axis that is not bound
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"gather over {axes}: an array of shape {x.shape} has no dim {axis}.")
    # A type that says that x is the same on each device is no reason to refuse it: `nn.scan` traces
    # its body once for shapes alone, with types that have lost where values vary.
    options = GatherOptions(
        axis % x.ndim, axes, gather_dtype, grad_scatter_dtype, reduction, pre_divide
    )
    return options.differentiable(x.dtype)(x)


def gather_by_compiler(
    x: jax.Array, sharded: jax.sharding.NamedSharding, replicated: jax.sharding.NamedSharding
) -> jax.Array:
    """Tells the compiler to gather `x` for compute and to scatter its gradient.

    Under `jit`, outside mapped axes. Without it the compiler may split activations over the dims
    that parameters are sharded on, and move those instead.
    """

    def full(x: jax.Array) -> jax.Array:
        return checkpoint_name(jax.lax.with_sharding_constraint(x, replicated), GATHERED)

    return with_gradient(full, lambda g: jax.lax.with_sharding_constraint(g, sharded))(x)


def gather_tree_with_mean_grads(
    tree: PyTree, layout: PyTree, options: GatherOptions, *, bucket_bytes: int
) -> PyTree:
    """`GatherOptions.differentiable` of all leaves that are sharded, in buckets.

    Args:
        tree: This device's shards, and full leaves, which are returned as they are.
        layout: Their shardings.
        options: As there; its `dim` is not used.
        bucket_bytes: Bytes of one collective.

    Returns:
        Full arrays. Buckets are packed and unpacked by copies, which a compiler that combines
        collectives by itself does without.
    """
    dtypes = jax.tree.map(lambda x: x.dtype, tree)

    def full(tree: PyTree) -> PyTree:
        def sent(x: jax.Array, p: LeafSharding) -> jax.Array:
            return x if p.dim is None else x.astype(cast_dtype(x.dtype, options.gather_dtype))

        wire = jax.tree.map(sent, tree, layout)
        gathered = gather_tree(
            wire,
            layout,
            options.reduction,
            axis=options.axis,
            bucket_bytes=bucket_bytes,
            replicated=False,
        )
        return jax.tree.map(lambda x: checkpoint_name(x, GATHERED), gathered)

    def blocks(grads: PyTree) -> PyTree:
        def sent(g: jax.Array, p: LeafSharding, dtype: Any) -> jax.Array:
            return g if p.dim is None else g.astype(cast_dtype(dtype, options.grad_scatter_dtype))

        wire = jax.tree.map(sent, grads, layout, dtypes)
        blocks = scatter_mean_tree(
            wire,
            layout,
            options.reduction,
            axis=options.axis,
            pre_divide=options.pre_divide,
            bucket_bytes=bucket_bytes,
        )
        return jax.tree.map(lambda x, dtype: x.astype(dtype), blocks, dtypes)

    return with_gradient(full, blocks)(tree)
