"""Clipping gradients that are sharded over devices by their global norm.

`optax.global_norm` inside mapped axes computes the norm of this device's shards: it is too small,
differs between devices, and lets parameters drift apart. Here squares of shards are summed over the
axes that split them, and replicated gradients are counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import gin
import jax
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisNames, Leaves, TracedNorm, is_abstract_array
from research_dp.distributed.boxed import leaves_with_paths, split_over, value_of
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, flat_axes
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.norms import clip_factor, norm_of_blocks
from research_dp.distributed.sharding import LeafSharding
from research_dp.distributed.vma import is_replicated, is_tracked
from research_dp.errors import UsageError

PyTree = Any
Layout = Annotated[
    PyTree,
    Leaves(
        lambda x: isinstance(x, LeafSharding) or is_abstract_array(x),
        "LeafShardings, or boxes such as the parameters",
        "grads",
    ),
]


@gin.register(module="distributed")
@checked
def sharded_global_norm(
    grads: Arrays,
    axis_names: AxisNames,
    *,
    layout: Layout | None = None,
    reduction: Reduction = PLAIN,
) -> jax.Array:
    """L2 norm of gradients that are sharded over devices.

    Args:
        grads: Averaged gradients: `nn.Partitioned`s are shards as their names say; bare arrays are
            replicated, or sharded as `layout` says.
        axis_names: The bound axes to sum over. Other names of a box are left to the compiler.
        layout: Shardings of bare arrays: a tree like `grads` of `LeafSharding`s, or of boxes such
            as the parameters; None: they are replicated. `nnx.Optimizer` unboxes gradients.
        reduction: How sums of squares are summed.

    Returns:
        A 0-d float32, the same on each device. Inf and NaN of one leaf make it inf or NaN.

    Raises:
        UsageError: A leaf varies between devices although it counts as replicated (known under
            `check_vma=True`): it was not averaged, or is a shard without a box. Or `layout` has
            other leaves than `grads`.
        NameError: An axis is not bound.
    """
    return norm_of_blocks(_blocks(grads, flat_axes(axis_names), layout), reduction)


@gin.register(module="distributed")
@checked
def clip_by_global_norm_sharded(
    grads: Arrays,
    max_norm: TracedNorm,
    axis_names: AxisNames,
    *,
    layout: Layout | None = None,
    reduction: Reduction = PLAIN,
) -> tuple[PyTree, jax.Array]:
    """Scales gradients so that their global norm is at most `max_norm`; no epsilon.

    The other arguments are those of `sharded_global_norm`.

    Returns:
        (gradients in their dtypes, the norm before). If the norm is NaN, all gradients are NaN.

    Raises:
        UsageError: `max_norm` is not a number of at least 0, or as in `sharded_global_norm`.
    """
    norm = sharded_global_norm(grads, axis_names, layout=layout, reduction=reduction)
    factor = clip_factor(norm, max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), norm


@gin.register(module="distributed")
@checked
def clip_by_global_norm(
    max_norm: TracedNorm,
    axis_names: AxisNames,
    *,
    layout: PyTree = None,
    reduction: Reduction = PLAIN,
) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for sharded gradients inside mapped axes.

    For `optax.chain`; arguments and errors are those of `clip_by_global_norm_sharded`.
    """

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        clipped, _ = clip_by_global_norm_sharded(
            updates, max_norm, axis_names, layout=layout, reduction=reduction
        )
        return clipped, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _blocks(grads: PyTree, axes: Axes, layout: PyTree) -> Iterator[tuple[jax.Array, Axes]]:
    """Each array with those of `axes` that it is split over."""
    tracked = [axis for axis in axes if is_tracked(axis)]
    leaves = leaves_with_paths(grads)
    shardings = leaves if layout is None else leaves_with_paths(layout)
    for (path, leaf), (_, sharding) in zip(leaves, shardings, strict=True):
        x = value_of(leaf)
        split = split_over(leaf) or _axes_of(sharding)
        varying = [a for a in tracked if a not in split and not is_replicated(x, a)]
        if varying:
            raise UsageError(
                f"norm of gradients: {path} {x.shape} counts as replicated, but varies over "
                f"{varying}. Average it first (sync_gradients), or mark it as a shard, by "
                "nn.Partitioned or `layout`."
            )
        yield x, tuple(axis for axis in axes if axis in split)


def _axes_of(sharding: Any) -> Axes:
    """The axes of a `LeafSharding`, or of a box."""
    if isinstance(sharding, LeafSharding):
        return () if sharding.dim is None else (FSDP_AXIS,)
    return split_over(sharding)
