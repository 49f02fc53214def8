"""Gradients averaged over devices, by all-reduce or reduce-scatter: functions of slot `sync`."""

from __future__ import annotations

from typing import Annotated, Any

import gin
import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisNames, Dtype, Number, Numbers
from research_dp.distributed import boxed, buckets, gradient_means
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes, takes
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import shardings_like
from research_dp.distributed.vma import is_replicated

PyTree = Any


@gin.register(module="distributed")
@takes("reduction")
@checked
@jax.named_scope("sync_gradients")
def sync_gradients(
    grads: Numbers,
    axis_names: AxisNames,
    *,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
    loss: Number | None = None,
    reduction: Reduction = PLAIN,
) -> PyTree:
    """Averages gradients over the mesh axes that their parameters are replicated on.

    As in xlstm-jax; and right under `shard_map(check_vma=True)` too, where autodiff has summed the
    gradients of replicated parameters already (`local_gradient`). Types do not tell such a sum from
    an average, so `loss` is needed there. What this function returned stays as it is.

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

    Returns:
        The same tree, dtypes kept (integers become float32); boxes keep names, type and mesh.

    Raises:
        UsageError: `loss` was averaged before over an axis that splits a parameter, whose gradient
            was divided then; `dtype` and `pre_divide` come too late, for autodiff has summed; or a
            leaf is the same along an axis, by its type, and there is no `loss`.
        NameError: An axis is not bound.
    """
    axes = flat_axes(axis_names)
    axes_size(axes)  # names an axis that is not bound
    done = gradient_means.averaged_axes(loss, axes)
    sums: dict[str, Any] = {"dtype": dtype, "pre_divide": pre_divide}
    leaves, means = boxed.leaves_with_paths(grads), {}
    # (index, gradient, axes it is a mean over in the end), by the axes left to average over.
    pending: dict[Axes, list[tuple[int, jax.Array, Axes]]] = {}
    for index, (path, leaf) in enumerate(leaves):
        gradient, sharded_over = boxed.value_of(leaf), boxed.split_over(leaf)
        divided = [a for a in done if a in sharded_over or not is_replicated(gradient, a)]
        gradient_means.refuse_divided_twice(path, np.shape(gradient), divided)
        over = tuple(axis for axis in axes if axis not in (*sharded_over, *done))
        if not over:
            continue
        local, left = gradient_means.local_gradient(
            gradient, over, path=path, fresh=loss is not None, **sums
        )
        if left:
            pending.setdefault(left, []).append((index, local, over))
        else:
            means[index] = gradient_means.mark_averaged(local, over, left, gradient)
    for left in sorted(pending, key=len, reverse=True):
        group = pending[left]
        # One all-reduce a bucket sums; `all_mean_tree` divides, once, by the size of `left`.
        summed = buckets.all_mean_tree(
            [local for _, local, _ in group], left, reduction, bucket_bytes=bucket_bytes, **sums
        )
        for (index, _, over), mean in zip(group, summed, strict=True):
            means[index] = gradient_means.mark_averaged(
                mean, over, left, boxed.value_of(leaves[index][1])
            )
    synced = [
        boxed.with_value(leaf, means[index]) if index in means else leaf
        for index, (_, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads, is_leaf=boxed.is_box), synced)


@gin.register(module="distributed", denylist=["shardings"])
@takes("reduction", "shardings")
@checked
def scatter_gradients(
    grads: Arrays,
    axis_names: AxisNames,
    *,
    shardings: Annotated[PyTree, shardings_like("grads")],
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
    reduction: Reduction = PLAIN,
) -> PyTree:
    """Reduce-scatters gradients: each device gets its shard of the mean.

    Over `fsdp` first, then over the other axes, in the same buckets. What is not sharded is
    averaged over all of them. This is the first half of `fsdp_apply_gradients`. `shardings` say
    which shard of each one this device updates; other arguments are those of `sync_gradients`.

    Returns:
        This device's shards of the mean gradients, and full ones where nothing is sharded.
    """
    axes = flat_axes(axis_names)
    fsdp = tuple(axis for axis in axes if axis == FSDP_AXIS)
    dp = tuple(axis for axis in axes if axis != FSDP_AXIS)
    options = {"dtype": dtype, "pre_divide": pre_divide, "bucket_bytes": bucket_bytes}
    return mean_shards(grads, shardings, fsdp, dp, axes, reduction, **options)


def mean_shards(
    grads: PyTree,
    shardings: PyTree,
    fsdp: Axes,
    dp: Axes,
    axes: Axes,
    reduction: Reduction,
    **options: Any,
) -> PyTree:
    """Shards of the mean over `fsdp` and `dp`; full means over `axes` of what is not sharded."""
    # Each of the two divides its own leaves, once, by the sizes of the axes that it sums over.
    scattered = buckets.scatter_mean_tree(
        grads, shardings, reduction, axis=fsdp, replica_axes=dp, **options
    )
    leaves, treedef = jax.tree.flatten(scattered)
    full = [i for i, p in enumerate(jax.tree.leaves(shardings)) if p.dim is None]
    means = buckets.all_mean_tree([leaves[i] for i in full], axes, reduction, **options)
    for i, mean in zip(full, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)
