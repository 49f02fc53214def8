"""Gradients averaged over devices, functions of slot `sync`; means of uneven numbers of items."""

from __future__ import annotations

import weakref
from typing import Annotated, Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import AxisNames, Dtype, Number, Numbers
from research_dp.distributed import boxed, buckets
from research_dp.distributed.codecs import Encoding
from research_dp.distributed.collectives import (
    DEFAULT_BUCKET_BYTES,
    PLAIN,
    Axes,
    Reduction,
    Wire,
    axes_size,
    flat_axes,
    takes,
)
from research_dp.distributed.sharding import LeafSharding, shardings_like
from research_dp.distributed.vma import bound_axes, is_replicated, varying_axes
from research_dp.errors import UsageError
from research_dp.types import PyTree

# Values, by their ids and each axis that they were averaged over. An average has the type of a sum
# by autodiff, and no type of JAX tells them apart: what is 'reduced' is added to no replicated
# parameter, and leaves no map. An array takes no attributes. So the fact needs a table beside the
# values. An entry goes with its value, and no result depends on what was traced before.
_AVERAGED: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()


@gin.register(module="distributed", denylist=["encoding"])
@takes("reduction", "encoding")
@checked
@jax.named_scope("sync_gradients")
def sync_gradients(
    grads: Numbers,
    axis_names: AxisNames,
    *,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    loss: Number | None = None,
    reduction: Reduction = PLAIN,
    encoding: Encoding | None = None,
) -> PyTree:
    """Averages gradients over the mesh axes that their parameters are replicated on.

    As in xlstm-jax; and right under `shard_map(check_vma=True)` too, where autodiff has summed the
    gradients of replicated parameters already. What this function returned stays as it is.

    Args:
        grads: Gradients of each device's own loss, a mean over its own examples. Those of sharded
            parameters are shards of the mean over the axes that split them (`gather_params`).
        axis_names: The mesh axes to average over; one name, or several.
        dtype: dtype in which they are summed; None: each gradient's own. Complex ones keep theirs.
        pre_divide: Divide before the sum, for float16.
        bucket_bytes: Gradients are summed together in buckets of so many bytes; <= 0: each alone.
        loss: The loss that was differentiated, as `jax.value_and_grad` returns it with `grads`. Its
            type says, and gradients do not, whether it was averaged over an axis before, or not
            split over it: then autodiff has not summed gradients over that axis, and nothing is
            divided. To be given under `check_vma=True`, unless parameters vary along the axes.
        reduction: The collectives.
        encoding: Codecs of what is sent, and the gradients that they take.

    Returns:
        The same tree, dtypes kept (integers become float32); boxes keep names, type and mesh.

    Raises:
        UsageError: `loss` was averaged before over an axis that splits a parameter; `dtype` and
            `pre_divide` come too late, for autodiff has summed; or a leaf is the same along an
            axis, by its type, and there is no `loss`.
        NameError: An axis is not bound.
    """
    axes = flat_axes(axis_names)
    axes_size(axes)  # names an axis that is not bound
    loss_axes = averaged_axes(loss, axes)
    wire = Wire(reduction, dtype, pre_divide, bucket_bytes)
    leaves = boxed.leaves_with_paths(grads)
    taken = encoding.taken if encoding else [False] * len(leaves)
    synced = [leaf for _, leaf in leaves]
    # (index, gradient, axes it is a mean over in the end), by the axes left to average over, and
    # whether it is encoded.
    pending: dict[tuple[Axes, bool], list[tuple[int, jax.Array, Axes]]] = {}
    for index, (path, leaf) in enumerate(leaves):
        gradient, sharded_over = boxed.value_of(leaf), boxed.split_over(leaf)
        over = tuple(axis for axis in axes if axis not in (*sharded_over, *(loss_axes or ())))
        local, left = local_gradient(path, gradient, over, loss_axes, wire, sharded_over)
        if left:
            pending.setdefault((left, taken[index]), []).append((index, local, over))
        elif over:
            synced[index] = boxed.with_value(leaf, _mark_averaged(local, over, left, gradient))
    for (left, is_taken), group in sorted(pending.items(), key=lambda item: -len(item[0][0])):
        local_ones = [local for _, local, _ in group]
        if encoding and is_taken:
            numbers = [index for index, *_ in group]
            means = encoding.kept(numbers, buckets.mean_tree(local_ones, left, encoding.on(wire)))
        else:  # one all-reduce a bucket sums; `wire` divides, once, by the size of `left`
            means = buckets.mean_tree(local_ones, left, wire)
        for (index, _, over), mean in zip(group, means, strict=True):
            leaf = synced[index]
            _mark_averaged(mean, over, left, boxed.value_of(leaf))
            synced[index] = boxed.with_value(leaf, mean)
    return jax.tree.unflatten(jax.tree.structure(grads, is_leaf=boxed.is_box), synced)


def local_gradient(
    path: str,
    gradient: jax.Array,
    axes: Axes,
    loss_axes: Axes | None,
    wire: Wire,
    sharded_over: Axes = (),
) -> tuple[jax.Array, Axes]:
    """A gradient whose mean over devices is that of their own losses, whoever has summed them.

    Under `shard_map(check_vma=True)` autodiff has summed the gradient of a parameter that is the
    same along an axis, and the gradient's type no longer varies along it. Averaging would leave the
    sum, so it is divided here. An average has the same type, and dividing it would be wrong: so
    without a loss it is refused, and what `sync_gradients` averaged is returned unchanged.

    `loss_axes` are the `averaged_axes` of the loss; `wire` is that of the mean that follows.
    Returns the gradient, and those of `axes` over which it is still to be averaged.
    """
    divided = [a for a in loss_axes or () if a in sharded_over or not is_replicated(gradient, a)]
    if divided:
        raise UsageError(
            f"the loss was averaged over {divided} before it was differentiated, so the "
            f"gradient {path} {np.shape(gradient)}, which varies along them, would be divided "
            "twice. Differentiate each device's own loss, and average its value afterwards."
        )
    axes = tuple(axis for axis in axes if not _is_averaged(gradient, axis))
    if not axes:
        return gradient, ()
    gradient = jnp.asarray(gradient)
    # `is_replicated` adds an equation to the program, so each axis is checked once.
    summed = tuple(axis for axis in axes if is_replicated(gradient, axis))
    if loss_axes is None and axes_size(summed) > 1:
        raise UsageError(
            f"{path or 'a gradient'} {gradient.shape} is the same along {summed} (check_vma=True): "
            "autodiff has summed it, or it is an average already; its type does not say which. "
            "Pass loss=, as jax.value_and_grad returned it with the gradients; leave averages out."
        )
    if summed and (wire.pre_divide or (wire.dtype and jnp.dtype(wire.dtype) != gradient.dtype)):
        raise UsageError(
            f"the gradient {path} {gradient.shape} was summed over {summed} in {gradient.dtype} by "
            "autodiff already (check_vma=True), so dtype and pre_divide come too late. Use "
            "check_vma=False, or differentiate with respect to "
            f"jax.lax.pcast(params, {summed}, to='varying')."
        )
    # Autodiff summed over `summed`: divided here, these equal values are their own mean.
    local = gradient / axes_size(summed) if summed else gradient
    return local, tuple(axis for axis in axes if axis not in summed)


def _mark_averaged(mean: jax.Array, axes: Axes, left: Axes, gradient: jax.Array) -> jax.Array:
    """The same mean over `axes`, of a gradient that was still to be averaged over `left`."""
    if len(left) < len(axes) or varying_axes(gradient):  # replication is tracked
        before = (axis for axis in bound_axes() if _is_averaged(gradient, axis))
        _AVERAGED.update({(id(mean), axis): mean for axis in (*before, *axes)})
    return mean


def _is_averaged(gradient: jax.Array, axis: str) -> bool:
    return _AVERAGED.get((id(gradient), axis)) is gradient


def averaged_axes(loss: jax.Array | None, axes: Axes) -> Axes | None:
    """The axes along which a loss is replicated before it is differentiated; None without one."""
    return None if loss is None else tuple(axis for axis in axes if is_replicated(loss, axis))


def sum_gradients(gradients: PyTree, axes: Axes, loss: jax.Array | None) -> PyTree:
    """Sums over devices of the gradients of each device's own loss, whoever sums."""
    averaged = averaged_axes(loss, axes)
    if averaged:
        raise UsageError(
            f"the loss is the same along axes {list(averaged)}, so it was summed or averaged over "
            "them before it was differentiated, and the sum of each device's own gradients is not "
            "known. Differentiate each device's own loss, and average its value afterwards."
        )

    def one(gradient: jax.Array) -> jax.Array:
        axes_size(axes)  # names an axis that is not bound
        # Autodiff has summed where the type says that it is the same on each device; none divides.
        left = tuple(axis for axis in axes if not is_replicated(gradient, axis))
        return PLAIN.all_reduce(jnp.asarray(gradient), left) if left else gradient

    return jax.tree.map(one, gradients)


@gin.register(module="distributed", denylist=["shardings", "encoding"])
@takes("reduction", "shardings", "encoding")
@checked
def scatter_gradients(
    grads: Numbers,
    axis_names: AxisNames,
    *,
    shardings: Annotated[PyTree, shardings_like("grads")],
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    reduction: Reduction = PLAIN,
    encoding: Encoding | None = None,
) -> PyTree:
    """Reduce-scatters gradients: each device gets its shard of the mean.

    Over the axes of `shardings` first, then over the others, in the same buckets: the first half of
    `fsdp_apply_gradients`. What `shardings` do not shard is averaged over all of them.

    Args:
        grads: This device's gradients, of the parameters' shapes. In boxes those of sharded
            parameters, means over their axes, which are scattered over the axes that are left.
        axis_names: The mesh axes to average over.
        shardings: A `LeafSharding` for each gradient.
        dtype: As in `sync_gradients`: the wire dtype of the sums. None: the gradients' own.
        pre_divide: As in `sync_gradients`: divide before the sum, so that float16 cannot overflow.
        bucket_bytes: As in `sync_gradients`: the size of a collective's buckets, in bytes.
        reduction: The collectives that sum.
        encoding: As in `sync_gradients`.
    """
    axes = flat_axes(axis_names)
    done = next((x for _, g in boxed.leaves_with_paths(grads) if (x := boxed.split_over(g))), ())

    def within(gradient: Any, p: LeafSharding) -> LeafSharding:
        over = boxed.split_over(gradient)
        part = p.within(boxed.value_of(gradient).shape, over, axes_size(over))
        if over and part.dim is None:
            problem = f"the gradient {p.path} is sharded as its optimizer state is"
            raise UsageError(f"scatter_gradients: {problem}. Use @sync_gradients.")
        return part

    parts = jax.tree.map(within, grads, shardings, is_leaf=boxed.is_box)
    # In the order by which shards are numbered.
    over = next((p.axes for p in jax.tree.leaves(parts) if p.dim is not None), ())
    wire = Wire(reduction, dtype, pre_divide, bucket_bytes)
    if encoding is None or not any(taken := encoding.taken):
        return mean_shards(boxed.unboxed(grads), parts, over, axes, wire, done)
    leaves, treedef = jax.tree.flatten(boxed.unboxed(grads))
    flat, result = jax.tree.leaves(parts), list(leaves)
    for is_taken in (True, False):
        numbers = [i for i, one in enumerate(taken) if one is is_taken]
        some, by = [leaves[i] for i in numbers], encoding.on(wire) if is_taken else wire
        means = mean_shards(some, [flat[i] for i in numbers], over, axes, by, done)
        means = encoding.kept(numbers, means) if is_taken else means
        for i, mean in zip(numbers, means, strict=True):
            result[i] = mean
    return jax.tree.unflatten(treedef, result)


def mean_shards(
    grads: PyTree, shardings: PyTree, fsdp: Axes, axes: Axes, wire: Wire, done: Axes = ()
) -> PyTree:
    """Means over `axes`: shards, by axes `fsdp`, of what is sharded; the others in full.

    What is sharded is a mean over axes `done` already. A `wire` that encodes gives with each what
    it lost.
    """
    dp = tuple(axis for axis in axes if axis not in (*fsdp, *done))
    # Each of the two divides its own leaves, once, by the sizes of the axes that it sums over.
    scattered = buckets.shards_of_mean(grads, shardings, fsdp, wire, dp)
    leaves, treedef = jax.tree.flatten(scattered, is_leaf=buckets.is_encoded)
    full = [i for i, p in enumerate(jax.tree.leaves(shardings)) if p.dim is None]
    means = buckets.mean_tree([leaves[i] for i in full], axes, wire)
    for i, mean in zip(full, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


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
    global_total, count = (reduction.all_reduce(_wide(x), axes) for x in (total, weight))
    return _divided(global_total, count, jnp.asarray(total).dtype)


@checked
def weighted_loss(
    total: Number, weight: Number, axis_names: AxisNames, *, reduction: Reduction = PLAIN
) -> jax.Array:
    """This device's part of `weighted_mean`, to be differentiated: their mean over devices is that.

    It is `total` x devices / sum of the weights; 0 if that sum is 0. `sync_gradients` and gathered
    parameters average gradients over devices, which gives the gradient of that mean. Those of
    `weighted_mean` itself would be divided twice under
    `check_vma=True`. `total` and `weight` are 0-d, and the weight is not differentiated.
    """
    axes = flat_axes(axis_names)
    # Only weights are summed over `axes`. Whoever averages the gradients of `total` divides by the
    # number of devices; the factor compensates for that.
    count = reduction.all_reduce(_wide(jax.lax.stop_gradient(weight)), axes)
    return _divided(_wide(total) * axes_size(axes), count, jnp.asarray(total).dtype)


def _wide(x: Any) -> jax.Array:
    """In float32 at least: sums of integers overflow, and bfloat16 does not count beyond 256."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _divided(total: jax.Array, count: jax.Array, dtype: Any) -> jax.Array:
    """The quotient, or 0; in `dtype` if that has fractions."""
    quotient = total / jnp.where(count > 0, count, 1)
    result = dtype if jnp.issubdtype(dtype, jnp.inexact) else total.dtype
    return jnp.where(count > 0, quotient, 0).astype(result)
