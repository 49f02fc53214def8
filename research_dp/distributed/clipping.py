"""Clipping gradients by their true global norm where each device holds shards of some.

`optax.global_norm` inside mapped axes sees this device's shards alone: another norm on each device,
too small, and parameters that drift apart. Here squares of shards are summed over the axes that
split them, and whole gradients are counted once.
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


def _says_where(x: Any) -> bool:
    return isinstance(x, LeafSharding) or is_abstract_array(x)


Layout = Annotated[
    PyTree, Leaves(_says_where, "Placements, or boxes such as the parameters", "grads")
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
    """L2 norm of gradients of which this device holds shards.

    Args:
        grads: Averaged gradients: `nn.Partitioned`s are shards as their names say, bare arrays are
            whole, or lie as `layout` says.
        axis_names: The bound axes to sum over. Other names of a box are left to the compiler.
        layout: Shardings of bare arrays: a tree like `grads` of `LeafSharding`s, or of boxes such
            as the parameters; None: they are replicated. `nnx.Optimizer` takes boxes off gradients.
        reduction: How sums of squares are summed.

    Returns:
        A 0-d float32, the same on each device. Inf and NaN of one leaf show in it.

    Raises:
        UsageError: A leaf varies from device to device though it counts as whole, which is known
            under `check_vma=True`: it was not averaged, or is a shard without a box. Or `layout`
            has other leaves than `grads`.
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

    Args:
        grads: As in `sharded_global_norm`.
        max_norm: The largest norm.
        axis_names: As in `sharded_global_norm`.
        layout: As in `sharded_global_norm`.
        reduction: As in `sharded_global_norm`.

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
    """`optax.clip_by_global_norm`, right inside mapped axes where gradients are sharded.

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
    lying = leaves if layout is None else leaves_with_paths(layout)
    for (path, leaf), (_, lies) in zip(leaves, lying, strict=True):
        held = split_over(leaf) or _placed_on(lies)
        varying = [a for a in tracked if a not in held and not is_replicated(value_of(leaf), a)]
        if varying:
            raise UsageError(
                f"norm of gradients: {path} {value_of(leaf).shape} counts as whole, but "
                f"varies over {varying}. Average it first (sync_gradients), or say that it is a "
                "shard, by nn.Partitioned or `layout`."
            )
        yield value_of(leaf), tuple(axis for axis in axes if axis in held)


def _placed_on(lies: Any) -> Axes:
    """The axes that a `LeafSharding`, or a box, splits its array over."""
    if isinstance(lies, LeafSharding):
        return () if lies.dim is None else (FSDP_AXIS,)
    return split_over(lies)
