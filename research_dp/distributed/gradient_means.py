"""Means over devices that are easy to get wrong: of gradients, and of uneven numbers of items."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import AxisNames, Number
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes
from research_dp.distributed.vma import is_replicated, varying_axes
from research_dp.errors import UsageError

# The axes that a value was averaged over, by the value's id. The type of an average is that of a
# sum by autodiff, and an array takes no attributes, so the fact needs a table beside the values.
# Entries go by identity and go with the value (weak references): no result depends on what was
# traced before, and no tracer is kept alive.
_AVERAGED: dict[int, tuple[weakref.ref[Any], Axes]] = {}


def local_gradient(
    gradient: jax.Array,
    axes: Axes,
    dtype: Any = None,
    *,
    pre_divide: bool = False,
    path: str = "",
    fresh: bool,
) -> tuple[jax.Array, Axes]:
    """A gradient whose mean over devices is that of their own losses, whoever has summed them.

    Under `shard_map(check_vma=True)` autodiff has summed the gradient of a parameter that is the
    same along an axis: the type of the gradient then no longer varies along it. Averaging such a
    gradient would leave the sum, so it is divided here. An average has the same type, and dividing
    it would be wrong: so the caller says that a gradient is `fresh`, as autodiff returned it. A
    gradient that `mark_averaged` knows is returned unchanged.

    `dtype` and `pre_divide` are those of the sum that follows; `path` is for messages. Returns the
    gradient, and those of the bound `axes` over which it is still to be averaged. Raises UsageError
    if it is summed already, so that `dtype` or `pre_divide` come too late; or if it is the same
    along an axis, and not known to be fresh.
    """
    done = _averaged_over(gradient)
    axes = tuple(axis for axis in axes if axis not in done)
    if not axes:
        return gradient, ()
    gradient = jnp.asarray(gradient)
    # `is_replicated` adds an equation to the program, so each axis is checked once.
    summed = tuple(axis for axis in axes if is_replicated(gradient, axis))
    if not fresh and axes_size(summed) > 1:
        raise UsageError(
            f"{path or 'a gradient'} {gradient.shape} is the same along {summed} (check_vma=True): "
            "autodiff has summed it, or it is an average already; its type does not say which. "
            "Pass loss=, as jax.value_and_grad returned it with the gradients; leave averages out."
        )
    if summed and (pre_divide or (dtype and jnp.dtype(dtype) != gradient.dtype)):
        raise UsageError(
            f"the gradient {path} {gradient.shape} was summed over {summed} in {gradient.dtype} by "
            "autodiff already (check_vma=True), so dtype and pre_divide come too late. Use "
            "check_vma=False, or differentiate with respect to "
            f"jax.lax.pcast(params, {summed}, to='varying')."
        )
    # Autodiff summed over `summed`: divided here, these equal values are their own mean.
    local = gradient / axes_size(summed) if summed else gradient
    return local, tuple(axis for axis in axes if axis not in summed)


def mark_averaged(mean: jax.Array, axes: Axes, left: Axes, gradient: jax.Array) -> jax.Array:
    """The same mean over `axes`, which `local_gradient` returns unchanged from then on.

    `local_gradient`, given `gradient`, said that it was still to be averaged over `left`.
    """
    if len(left) < len(axes) or varying_axes(gradient):  # replication is tracked
        key = id(mean)
        known = (*_averaged_over(gradient), *axes)
        _AVERAGED[key] = weakref.ref(mean, lambda _: _AVERAGED.pop(key, None)), known
    return mean


def _averaged_over(gradient: jax.Array) -> Axes:
    """The axes over which `mark_averaged` knows a value to be a mean."""
    value, axes = _AVERAGED.get(id(gradient), (None, ()))
    return axes if value is not None and value() is gradient else ()


def sum_gradient(gradient: jax.Array, axes: Axes, reduction: Reduction = PLAIN) -> jax.Array:
    """Sum over devices of the gradients of each device's own loss, whoever sums."""
    axes_size(axes)  # names an axis that is not bound
    # Where the type says that it is the same on each device autodiff has summed; nobody divides.
    left = tuple(axis for axis in axes if not is_replicated(gradient, axis))
    return reduction.all_reduce(jnp.asarray(gradient), left) if left else gradient


def averaged_axes(loss: jax.Array | None, axes: Axes) -> Axes:
    """The bound axes along which a loss is known to be replicated before it is differentiated.

    It was averaged over them, or the batch is not split over them. No loss: nothing is known.
    """
    return () if loss is None else tuple(axis for axis in axes if is_replicated(loss, axis))


def check_own_loss(loss: jax.Array | None, axes: Axes) -> None:
    """Raises UsageError if a loss, whose gradients are to be summed, was averaged over devices."""
    averaged = averaged_axes(loss, axes)
    if averaged:
        raise UsageError(
            f"the loss is the same along axes {list(averaged)}, so it was summed or averaged over "
            "them before it was differentiated, and the sum of each device's own gradients is not "
            "known. Differentiate each device's own loss, and average its value afterwards."
        )


def refuse_divided_twice(path: str, shape: tuple[int, ...], axes: Sequence[str]) -> None:
    """Raises UsageError if there are axes that a loss was averaged over but its gradient varies."""
    if axes:
        raise UsageError(
            f"the loss was averaged over {list(axes)} before it was differentiated, so the "
            f"gradient {path} {shape}, which varies along them, would be divided twice. "
            "Differentiate each device's own loss, and average its value afterwards."
        )


@gin.register(module="distributed")
@checked
def weighted_mean(
    total: Number, weight: Number, axis_names: AxisNames, *, reduction: Reduction = PLAIN
) -> jax.Array:
    """Mean over the items of all devices, where devices have uneven numbers of valid items.

    In the mean of the devices' means a device with one valid item would count as much as one with a
    hundred. So the sums are summed, and divided once. To differentiate, use `weighted_loss`.

    Args:
        total: Sum over this device's valid items, any shape, e.g. of losses or correct answers.
        weight: Number of this device's valid items (or the sum of their weights), 0-d.
        axis_names: The mesh axes that items are split over.
        reduction: How sums are summed.

    Returns:
        The same on each device, in the dtype of `total` (float32 for integers); 0 if no device has
        a valid item.
    """
    axes = flat_axes(axis_names)
    # Both are summed over `axes`; `_divided` is the only division.
    global_total = reduction.all_reduce(jnp.asarray(total), axes)
    return _divided(global_total, reduction.all_reduce(jnp.asarray(weight), axes))


@gin.register(module="distributed")
@checked
def weighted_loss(
    total: Number, weight: Number, axis_names: AxisNames, *, reduction: Reduction = PLAIN
) -> jax.Array:
    """This device's part of `weighted_mean`, to be differentiated.

    Its mean over devices is `weighted_mean(total, weight)`, whose arguments it takes, both 0-d.
    `sync_gradients` and gathered parameters average gradients over devices, which gives the
    gradient of that mean. Gradients of `weighted_mean` itself would be divided twice under
    `check_vma=True`. The weight is not differentiated.

    Returns:
        `total` times the number of devices, divided by the weight of all; 0 if that is 0.
    """
    axes = flat_axes(axis_names)
    # Only weights are summed over `axes`. Whoever takes the gradients of `total` averages them, so
    # divides by the number of devices; the factor compensates for that.
    count = reduction.all_reduce(jax.lax.stop_gradient(jnp.asarray(weight)), axes)
    return _divided(jnp.asarray(total) * axes_size(axes), count)


def _divided(total: jax.Array, count: jax.Array) -> jax.Array:
    """The quotient, or 0; in float32 at least, for bfloat16 does not count beyond 256."""
    wide = jnp.promote_types(total.dtype, jnp.float32)
    count = count.astype(wide)
    quotient = total.astype(wide) / jnp.where(count > 0, count, 1)
    result = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else wide
    return jnp.where(count > 0, quotient, 0).astype(result)
