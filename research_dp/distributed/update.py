"""The optimizer step, replicated or sharded (ZeRO): the functions of slot `update`.

`fsdp_apply_gradients` has the interface of MLX's (0.31.1 to 0.32.0). Gradients are
reduce-scattered, each shard is updated, and parameters are gathered. docs/api_updates.md lists
what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, cast

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisNames,
    Dtype,
    Number,
    Numbers,
    Placeable,
    TracedNorm,
    Transform,
)
from research_dp.distributed import buckets, gradient_means, sharding
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes, takes
from research_dp.distributed.gradient_sync import mean_shards
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.norms import clip_factor, norm_of_blocks
from research_dp.distributed.optimizer import AnOptimizer, Optimizer
from research_dp.distributed.optimizer_checks import check_elementwise
from research_dp.distributed.optimizer_state import OptaxAdapter, check_slice_axes
from research_dp.distributed.sharding import LeafSharding, by_path, path_name
from research_dp.distributed.vma import bound_axes, is_replicated, is_tracked
from research_dp.errors import UsageError

PyTree = Any
Group = AxisNames | None


@gin.register(module="distributed", denylist=["shardings", "averaged"])
@takes("reduction", "shardings", "averaged")
@checked
def fsdp_apply_gradients(
    gradients: Numbers,
    parameters: Placeable,
    optimizer: AnOptimizer,
    fsdp_group: Group = None,
    dp_group: Group = None,
    communication_size: int = buckets.DEFAULT_BUCKET_BYTES,
    communication_stream: Annotated[None, "None: XLA schedules collectives itself"] = None,
    max_norm: TracedNorm | None = None,
    *,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    loss: Number | None = None,
    reduction: Reduction = PLAIN,
    shardings: Annotated[PyTree, sharding.shardings_like("gradients")] | None = None,
    averaged: bool = False,
) -> PyTree:
    """One optimizer step whose gradients and optimizer state are sharded over devices.

    Gradients are reduce-scattered to their mean, clipped by its global norm, applied to this
    device's shards of the parameters, and these gathered. Called where axes are bound
    (`shard_map`, `pmap`, `vmap(axis_name=...)`); outside of any map there is a world of one.

    Without `shardings` a shard is a part of a flat, padded array, (1, ..., 1, k) of its parameter's
    rank. The optimizer must be elementwise; an `OptaxAdapter` of another is refused. It sees a tree
    of the gradients' structure, by parameter path, never buckets.

    Args:
        gradients: Gradients of this device's own loss, floating point. Parameters without one are
            returned as they are. Under `check_vma=True` those of replicated parameters are sums
            already (`local_gradient`), and are divided.
        parameters: Replicated parameters.
        optimizer: Has `apply_gradients(gradients, parameters) -> parameters`; it is given each
            gradient in its parameter's dtype.
        fsdp_group: Axis, or axes, that the update is sharded over; None: all bound ones but
            `dp_group`. Shards are numbered by the axes' names: several axes are given in that
            order.
        dp_group: Axis, or axes, along which shards are replicated and averaged. None: there are
            none; () too, and axes in neither group (tensor parallel) are meant so.
        communication_size: Arrays of one dtype are communicated together in buckets of so many
            bytes; <= 0: each alone.
        communication_stream: None: XLA schedules collectives itself.
        max_norm: Gradients are scaled down to this global L2 norm. A norm that is not a number
            makes every updated parameter NaN: no step is skipped.
        dtype: dtype in which gradients are summed; None: each gradient's own.
        pre_divide: Divide before the sum: in float16, eight times 10000 is inf.
        loss: The loss that was differentiated. Under `check_vma=True` its type says whether it was
            averaged over an axis before, or not split over it. Needed there as in `sync_gradients`.
        reduction: The collectives.
        shardings: A strategy's own `LeafSharding`s over axis `fsdp`, instead of flat shards.
        averaged: Whether `gradients` are this device's shards of the mean already, as
            `scatter_gradients` returns them.

    Returns:
        The parameters, dtypes and structure kept; with `max_norm` a pair of them and the mean
        gradient's norm before clipping, 0-d float32.

    Raises:
        UsageError: A group is not bound, leaves an axis out or has another order; a gradient does
            not fit its parameter or `loss`, or needs `loss`; the optimizer is not elementwise or
            returns something else; or `dtype` and `pre_divide` come too late, for autodiff has
            summed (`sync_gradients`).
    """
    del communication_stream  # there is none to choose
    params = by_path(parameters)
    sums: dict[str, Any] = {"dtype": dtype, "pre_divide": pre_divide}
    if shardings is None:
        fsdp, dp = _groups(fsdp_group, dp_group)
        axes = fsdp + dp
        grads = _local_gradients(gradients, params, loss, axes, **sums)
        layout = sharding.infer_flat_sharding(grads, axes_size(fsdp))
    else:
        axes = tuple(axis for axis in bound_axes() if axes_size((axis,)) > 1)
        fsdp = tuple(axis for axis in axes if axis == FSDP_AXIS)
        dp = tuple(axis for axis in axes if axis != FSDP_AXIS)
        grads, layout = by_path(gradients), by_path(shardings)
    if not averaged:
        sums |= {"bucket_bytes": communication_size}
        grads = mean_shards(grads, layout, fsdp, dp, axes, reduction, **sums)
    norm = None
    if max_norm is not None:
        over = {name: fsdp if p.dim is not None else () for name, p in layout.items()}
        norm = norm_of_blocks(((g, over[name]) for name, g in grads.items()), reduction)
        scale = clip_factor(norm, max_norm)
        grads = {name: g * scale for name, g in grads.items()}
    if shardings is None:
        grads = {name: g.astype(params[name].dtype) for name, g in grads.items()}
        _check_optimizer(optimizer, gradients, params, layout)
    params = {name: jnp.asarray(params[name]) for name in grads}
    shards = buckets.shard_tree(params, layout, axis=fsdp)
    new = by_path(optimizer.apply_gradients(_like(gradients, grads), _like(gradients, shards)))
    if {n: x.shape for n, x in new.items()} != {n: x.shape for n, x in shards.items()}:
        raise UsageError(
            "optimizer.apply_gradients returns other paths or shapes than the parameters that it "
            f"was given: {sorted(set(new) ^ set(shards)) or 'shapes differ'}."
        )
    new = {name: x.astype(params[name].dtype) for name, x in new.items()}
    full = buckets.gather_tree(
        new, layout, reduction, axis=fsdp, bucket_bytes=communication_size, into=params
    )
    result = jax.tree_util.tree_map_with_path(
        lambda keys, p: full.get(path_name(keys), p), parameters
    )
    return result if norm is None else (result, norm)


def _like(tree: PyTree, leaves: Mapping[str, jax.Array]) -> PyTree:
    """Leaves by path, in the structure of a tree."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[path_name(keys)], tree)


def _check_optimizer(
    optimizer: Optimizer,
    gradients: PyTree,
    params: Mapping[str, jax.Array],
    layout: Mapping[str, LeafSharding],
) -> None:
    """Raises UsageError if an optimizer cannot be applied to flat shards."""
    params = {name: jnp.asarray(params[name]) for name in layout}
    shards = next(iter(layout.values())).axis_size if layout else 1
    if getattr(type(optimizer), "apply_gradients", None) is OptaxAdapter.apply_gradients:
        cast(OptaxAdapter, optimizer).check_slices(_like(gradients, params), shards)
    elif shards > 1:
        local = {
            name: jax.ShapeDtypeStruct(p.local_shape, params[name].dtype)
            for name, p in layout.items()
        }
        check_elementwise(optimizer, local, layout, functools.partial(_like, gradients))


@gin.register(module="distributed")
@checked
def fsdp_update(
    gradients: Numbers,
    parameters: Placeable,
    transform: Transform,
    opt_state: PyTree,
    *,
    max_norm: TracedNorm | None = None,
    **options: Any,
) -> tuple[PyTree, ...]:
    """`fsdp_apply_gradients` as a pure function of an Optax transform and its state.

    `transform` is elementwise; `opt_state` has this device's slices of its state: what `shard_map`
    makes of `slice_state` by `slice_specs`. Other arguments are as there.

    Returns:
        (parameters, opt_state), and with `max_norm` the norm as a third.
    """
    optimizer = OptaxAdapter(transform, opt_state)
    result = fsdp_apply_gradients(gradients, parameters, optimizer, max_norm=max_norm, **options)
    if max_norm is None:
        return result, optimizer.state
    return result[0], optimizer.state, result[1]


def _groups(fsdp_group: Group, dp_group: Group) -> tuple[Axes, Axes]:
    """The axes of both groups, checked against those that are bound here."""
    bound = bound_axes()
    dp = flat_axes(dp_group)
    if fsdp_group is None:
        fsdp = tuple(axis for axis in bound if axis not in dp)
        check_slice_axes("fsdp_group = None, all axes", [a for a in fsdp if axes_size((a,)) > 1])
    else:
        fsdp = check_slice_axes("fsdp_group", fsdp_group)
    for axis in fsdp + dp:
        if axis not in bound:
            group = "fsdp_group" if axis in fsdp else "dp_group"
            raise UsageError(
                f"{group}: axis {axis!r} is not bound here; bound are {list(bound)}. Call "
                "fsdp_apply_gradients inside a map that has it."
            )
        if (fsdp + dp).count(axis) > 1:
            raise UsageError(f"axis {axis!r} is in fsdp_group {fsdp} and dp_group {dp}: once only.")
    left_out = tuple(a for a in bound if a not in fsdp + dp and axes_size((a,)) > 1)
    if left_out and dp_group is None:
        raise UsageError(
            f"fsdp_group {fsdp} leaves out axis {left_out[0]!r} of size {axes_size(left_out[:1])}: "
            "devices along it would each follow gradients of their own. Name it in dp_group to "
            "average over it, or give dp_group=() if it carries no batch."
        )
    return fsdp, dp


def _local_gradients(
    gradients: PyTree,
    params: Mapping[str, jax.Array],
    loss: jax.Array | None,
    axes: Axes,
    **sums: Any,
) -> dict[str, jax.Array]:
    """Gradients by path, checked, such that their mean over `axes` is the right one."""
    done = gradient_means.averaged_axes(loss, axes)
    left = tuple(axis for axis in axes if axis not in done and is_tracked(axis))
    local = {}
    for name, g in by_path(gradients).items():
        g = jnp.asarray(g)
        if name not in params:
            raise UsageError(
                f"gradient {name!r} has no parameter of that path; there are {list(params)[:5]}"
                f"{' and more' if len(params) > 5 else ''}."
            )
        if g.shape != (shape := jnp.shape(params[name])):
            raise UsageError(f"gradient {name!r} has shape {g.shape}, its parameter {shape}.")
        if not jnp.issubdtype(g.dtype, jnp.floating):
            raise UsageError(
                f"gradient {name!r} has dtype {g.dtype}; leave out what is not trained: parameters "
                "without a gradient are returned as they are."
            )
        divided = [axis for axis in done if not is_replicated(g, axis)]
        gradient_means.refuse_divided_twice(name, g.shape, divided)
        local[name], _ = gradient_means.local_gradient(
            g, left, path=name, fresh=loss is not None, **sums
        )
    return local
