"""The optimizer step of ZeRO: gradients reduce-scattered, each slice updated, parameters gathered.

An adapter, with the interface of MLX's `fsdp_apply_gradients` (0.31.1 to 0.32.0), over the same
primitives as the slots `scatter_gradients` and `update_slices`. What differs from MLX is written
in docs/api_updates.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, cast

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisNames,
    Dtype,
    Has,
    Number,
    Numbers,
    Placeable,
    TracedNorm,
    Transform,
)
from research_dp.distributed import buckets
from research_dp.distributed.collectives import (
    PLAIN,
    Axes,
    Reduction,
    axes_size,
    flat_axes,
)
from research_dp.distributed.gradient_means import averaged_axes, own_gradient, refuse_divided_twice
from research_dp.distributed.optimizer import clip_factor, norm_of_blocks
from research_dp.distributed.optimizer_state import (
    OptaxAdapter,
    check_elementwise,
    check_slice_axes,
)
from research_dp.distributed.sharding import LeafSharding, by_path, infer_flat_sharding, path_name
from research_dp.distributed.vma import bound_axes, is_replicated, is_tracked
from research_dp.errors import UsageError

PyTree = Any
Group = AxisNames | None


class Optimizer(Protocol):
    """What `fsdp_apply_gradients` needs of an optimizer.

    It is traced, in a copy, to show that each element is updated by itself. A class whose objects
    cannot be copied and traced may say so itself, by an attribute `elementwise = True`.
    """

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree: ...


@gin.register(module="distributed")
@checked
def fsdp_apply_gradients(
    gradients: Numbers,
    parameters: Placeable,
    optimizer: Annotated[Optimizer, Has(("apply_gradients",), "OptaxAdapter(transform, state)")],
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
) -> PyTree:
    """One optimizer step whose gradients and optimizer state are split over devices.

    Gradients are reduce-scattered to their mean, clipped by its global norm, applied to this
    device's slices, and these gathered. Called where axes are bound (`shard_map`, `pmap`,
    `vmap(axis_name=...)`); outside of any map there is a world of one.

    A slice is a part of a flat, padded array, (1, ..., 1, k) of its parameter's rank, so the
    optimizer must be elementwise; an `OptaxAdapter` of another is refused. It sees a tree of the
    gradients' structure, by parameter path, never buckets.

    Args:
        gradients: Gradients of this device's own loss, floating point. Parameters without one are
            returned as they are. Under `check_vma=True` those of replicated parameters are sums
            already (`mean_gradient`), and are divided.
        parameters: Whole parameters.
        optimizer: Has `apply_gradients(gradients, parameters) -> parameters`; it is given each
            gradient in its parameter's dtype.
        fsdp_group: Axis, or axes, that the update is split over; None: all bound ones but
            `dp_group`. Slices are numbered by the axes' names: several axes are given in that
            order.
        dp_group: Axis, or axes, along which slices are repeated and averaged. None: there are
            none; () too, and axes in neither group (tensor parallel) are meant so.
        communication_size: Arrays of one dtype travel together until they are so many bytes;
            <= 0: each alone.
        communication_stream: None: XLA schedules collectives itself.
        max_norm: Gradients are scaled down to this global L2 norm. A norm that is not a number
            makes every updated parameter NaN: no step is skipped.
        dtype: dtype in which gradients are summed; None: each gradient's own.
        pre_divide: Divide before the sum: in float16, eight times 10000 is inf.
        loss: The loss that was differentiated. Under `check_vma=True` its type says whether it was
            averaged over an axis before, or not split over it. Needed there as in `sync_gradients`.
        reduction: How partial sums are summed.

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
    fsdp, dp = _groups(fsdp_group, dp_group)
    params = by_path(parameters)
    sums = {"dtype": dtype, "pre_divide": pre_divide}
    own = _own_gradients(gradients, params, loss, fsdp + dp, **sums)
    sums |= {"reduction": reduction, "bucket_bytes": communication_size}
    layout, slices = _mean_slices(own, fsdp, dp, **sums)
    norm = None
    if max_norm is not None:
        split_over = fsdp if axes_size(fsdp) > 1 else ()
        norm = norm_of_blocks(((g, split_over) for g in slices.values()), reduction)
        scale = clip_factor(norm, max_norm)
        slices = {name: g * scale for name, g in slices.items()}
    new = _update(gradients, slices, params, layout, optimizer, fsdp, reduction, communication_size)
    result = jax.tree_util.tree_map_with_path(
        lambda path, p: new.get(path_name(path), p), parameters
    )
    return result if norm is None else (result, norm)


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

    Args:
        gradients: As there.
        parameters: As there.
        transform: An elementwise Optax transform.
        opt_state: This device's slices of its state: what `shard_map` makes of `slice_state` by
            `slice_specs`.
        max_norm: As there.
        **options: The others, as there.

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


def _own_gradients(
    gradients: PyTree,
    params: Mapping[str, jax.Array],
    loss: jax.Array | None,
    axes: Axes,
    **sums: Any,
) -> dict[str, jax.Array]:
    """Gradients by path, checked, such that their mean over `axes` is the right one."""
    done = averaged_axes(loss, axes)
    left = tuple(axis for axis in axes if axis not in done and is_tracked(axis))
    own = {}
    for name, g in by_path(gradients).items():
        g = jnp.asarray(g)
        _check_gradient(name, g, params)
        refuse_divided_twice(name, g.shape, [a for a in done if not is_replicated(g, a)])
        own[name] = own_gradient(g, left, path=name, fresh=loss is not None, **sums)
    return own


def _mean_slices(
    own: Mapping[str, jax.Array], fsdp: Axes, dp: Axes, **sums: Any
) -> tuple[dict[str, LeafSharding], dict[str, jax.Array]]:
    """Which slices this device updates, and its slices of the mean gradients, both by path."""
    layout = infer_flat_sharding(own, axes_size(fsdp))
    if axes_size(fsdp) == 1:  # everything stays whole
        return layout, buckets.all_mean_tree(own, fsdp + dp, **sums)
    return layout, buckets.scatter_mean_tree(own, layout, axis=fsdp, replica_axes=dp, **sums)


def _check_gradient(name: str, g: jax.Array, params: Mapping[str, jax.Array]) -> None:
    if name not in params:
        raise UsageError(
            f"gradient {name!r} has no parameter of that path; there are {list(params)[:5]}"
            f"{' and more' if len(params) > 5 else ''}."
        )
    shape = jnp.shape(params[name])
    if g.shape != shape:
        raise UsageError(f"gradient {name!r} has shape {g.shape}, its parameter {shape}.")
    if not jnp.issubdtype(g.dtype, jnp.floating):
        raise UsageError(
            f"gradient {name!r} has dtype {g.dtype}; leave out what is not trained: parameters "
            "without a gradient are returned as they are."
        )


def _update(
    like: PyTree,
    slices: Mapping[str, jax.Array],
    params: Mapping[str, jax.Array],
    layout: Mapping[str, LeafSharding],
    optimizer: Optimizer,
    axis: Axes,
    reduction: Reduction,
    bucket_bytes: int,
) -> dict[str, jax.Array]:
    """New whole parameters by path, of those that have gradients.

    The optimizer sees trees of the structure of `like`.
    """
    params = {name: jnp.asarray(params[name]) for name in slices}

    def tree(leaves: Mapping[str, jax.Array]) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], like)

    mine = buckets.shard_tree(params, layout, axis=axis)
    given = {name: g.astype(params[name].dtype) for name, g in slices.items()}
    if getattr(type(optimizer), "apply_gradients", None) is OptaxAdapter.apply_gradients:
        cast(OptaxAdapter, optimizer).check_slices(tree(params), axes_size(axis))
    elif axes_size(axis) > 1:
        check_elementwise(optimizer, mine, layout, tree)
    new = by_path(optimizer.apply_gradients(tree(given), tree(mine)))
    if {n: x.shape for n, x in new.items()} != {n: x.shape for n, x in mine.items()}:
        raise UsageError(
            "optimizer.apply_gradients returns other paths or shapes than the parameters that it "
            f"was given: {sorted(set(new) ^ set(mine)) or 'shapes differ'}."
        )
    new = {name: x.astype(params[name].dtype) for name, x in new.items()}
    return buckets.gather_tree(new, layout, reduction, axis=axis, bucket_bytes=bucket_bytes)
