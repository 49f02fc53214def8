"""Global norms of gradients that are sharded over devices, and clipping by them.

`optax.global_norm` inside mapped axes is the norm of this device's shards. Here squares of shards
are summed over the axes that split them, and replicated gradients are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import gin
import jax
import jax.numpy as jnp
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisNames, Leaves, TracedNorm, is_abstract_array
from research_dp.distributed.boxed import leaves_with_paths, split_over, value_of
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, flat_axes
from research_dp.distributed.sharding import LeafSharding, shardings_like
from research_dp.distributed.vma import is_replicated, is_tracked
from research_dp.errors import UsageError
from research_dp.types import PyTree

Blocks = Iterable[tuple[jax.Array, Axes]]  # arrays of this device, with the axes that split them
Layout = Annotated[
    PyTree,
    Leaves(
        lambda x: isinstance(x, LeafSharding) or is_abstract_array(x),
        "LeafShardings, or boxes such as the parameters",
        "grads",
    ),
]


@checked
def global_norm(
    tree: Arrays, layout: Annotated[PyTree, shardings_like("tree")], reduction: Reduction = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """L2 norm of a tree that is sharded as `layout` says, and its nonfinite leaves.

    Returns:
        The norm, a 0-d float32; and float32 (leaves,), above 0 for a leaf whose sum of squares is
        not finite. Both are the same on every device, and need no more collectives than the norm.
    """
    blocks = list(zip(jax.tree.leaves(tree), map(_axes_of, jax.tree.leaves(layout)), strict=True))
    total = jnp.zeros((), jnp.float32)
    nonfinite = [jnp.zeros((), jnp.float32)] * len(blocks)
    for axes, squares in _squares_by_axes(blocks).items():
        local = sum(squares.values(), start=jnp.zeros((), jnp.float32))
        flags = [(~jnp.isfinite(square)).astype(jnp.float32) for square in squares.values()]
        sums = jnp.stack([local, *flags])
        sums = reduction.all_reduce(sums, axes) if axes else sums  # as in `norm_of_blocks`
        total += sums[0]
        for position, flag in zip(squares, sums[1:], strict=True):
            nonfinite[position] = flag
    return jnp.sqrt(total), jnp.stack(nonfinite) if nonfinite else jnp.zeros((0,), jnp.float32)


def norm_of_blocks(blocks: Blocks, reduction: Reduction = PLAIN) -> jax.Array:
    """L2 norm of arrays that are split over devices: a 0-d float32, the same on every device."""
    total = jnp.zeros((), jnp.float32)
    for axes, squares in _squares_by_axes(blocks).items():
        local = sum(squares.values(), start=jnp.zeros((), jnp.float32))
        # Summed over the axes that split the blocks alone: along others they are replicated, and
        # count once. Nothing is divided.
        total += reduction.all_reduce(local, axes) if axes else local
    return jnp.sqrt(total)


def clip_factor(norm: jax.Array, max_norm: TracedNorm | None) -> jax.Array:
    """The factor that scales gradients to a norm of at most `max_norm`; 1.0 if it is.

    No epsilon, as Optax has none. A norm of NaN makes the factor NaN, and so does a traced
    `max_norm` that is negative or NaN: it would turn gradients around.
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    if isinstance(max_norm, jax.Array):
        max_norm = jnp.where(max_norm >= 0, max_norm, jnp.nan)
    else:
        max_norm = float(max_norm)  # a large integer fits no array
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)


def _squares_by_axes(blocks: Blocks) -> dict[Axes, dict[int, jax.Array]]:
    """Position -> sum of squares of each block, by the axes that split its array."""

    def sum_of_squares(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            return sum_of_squares(x.real) + sum_of_squares(x.imag)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    squares: dict[Axes, dict[int, jax.Array]] = {}
    for position, (x, axes) in enumerate(blocks):
        squares.setdefault(axes, {})[position] = sum_of_squares(x)
    return squares


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
        UsageError: A leaf varies between devices (known under `check_vma=True`) although it counts
            as replicated. Or `layout` has other leaves than `grads`.
        NameError: An axis is not bound.
    """
    return norm_of_blocks(_blocks(grads, flat_axes(axis_names), layout), reduction)


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

    Other arguments, and errors, are those of `sharded_global_norm`.

    Returns:
        (gradients in their dtypes, the norm before). If the norm is NaN, all gradients are NaN.
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

    For `optax.chain`; errors are those of `clip_by_global_norm_sharded`.

    Args:
        max_norm: The largest norm that gradients keep.
        axis_names: The mesh axes that gradients may be sharded over.
        layout: The sharding of each gradient. None: boxes and types of the gradients name it.
        reduction: The collectives that sum the squares.
    """
    options: dict[str, Any] = {"axis_names": axis_names, "layout": layout, "reduction": reduction}
    return optax.stateless(lambda g, _: clip_by_global_norm_sharded(g, max_norm, **options)[0])


def _blocks(grads: PyTree, axes: Axes, layout: PyTree) -> Iterator[tuple[jax.Array, Axes]]:
    """Each array with those of `axes` that it is split over."""
    tracked = [axis for axis in axes if is_tracked(axis)]
    leaves = leaves_with_paths(grads)
    shardings = leaves if layout is None else leaves_with_paths(layout)
    for (path, leaf), (_, p) in zip(leaves, shardings, strict=True):
        x, split = value_of(leaf), split_over(leaf) or _axes_of(p)
        varying = [a for a in tracked if a not in split and not is_replicated(x, a)]
        if varying:
            raise UsageError(
                f"norm of gradients: {path} {x.shape} counts as replicated, but varies over "
                f"{varying}. Average it first (sync_gradients), or mark it as a shard, by "
                "nn.Partitioned or `layout`."
            )
        yield x, tuple(axis for axis in axes if axis in split)


def _axes_of(p: Any) -> Axes:
    """The axes of a `LeafSharding`, or of a box."""
    if not isinstance(p, LeafSharding):
        return split_over(p)
    return () if p.dim is None else p.axes
