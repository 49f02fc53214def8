"""The optimizer step, replicated or sharded (ZeRO): the functions of slot `update`.

`fsdp_apply_gradients` has the interface of MLX's (0.31.1 to 0.32.0); docs/api_updates.md lists what
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import gin
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from research_dp import argument_types
from research_dp.argument_checks import checked
from research_dp.argument_types import AxisNames, Number, Numbers, Placeable, TracedNorm, path_name
from research_dp.distributed import buckets, encoded, placement, sharded_optimizer, sharding
from research_dp.distributed.codecs import Codec, Encoding
from research_dp.distributed.collectives import (
    DEFAULT_BUCKET_BYTES,
    PLAIN,
    Axes,
    Reduction,
    Wire,
    axes_size,
    cast_dtype,
    flat_axes,
    takes,
)
from research_dp.distributed.gradient_sync import averaged_axes, local_gradient, mean_shards
from research_dp.distributed.norms import clip_factor, norm_of_blocks
from research_dp.distributed.optimizer import AnOptimizer
from research_dp.distributed.sharded_optimizer import OptaxAdapter
from research_dp.distributed.sharding import LeafSharding, by_path, of_one, shardings_like
from research_dp.distributed.vma import bound_axes, is_tracked
from research_dp.errors import UsageError, binding_error
from research_dp.types import PyTree

Group = AxisNames | None
Arrays = dict[str, jax.Array]  # by path


def step_on_shards(
    grads: Arrays,
    params: Arrays,
    layout: Mapping[str, LeafSharding],
    apply: Callable[[Arrays, Arrays], Arrays],
    fsdp: Axes,
    max_norm: jax.Array | float | None,
    wire: Wire,
) -> tuple[Arrays, jax.Array | None]:
    """ZeRO's step by path: clips, applies the optimizer to this device's shards, gathers them.

    `grads` are this device's shards of the mean, by `layout` over axes `fsdp`, `params` are
    replicated, and `apply` is (shards of gradients, of parameters) -> new shards of parameters.
    Returns new replicated parameters, and with `max_norm` the norm before clipping.
    """
    norm = None
    if max_norm is not None:
        split = {name: fsdp if p.dim is not None else () for name, p in layout.items()}
        norm = norm_of_blocks(((g, split[name]) for name, g in grads.items()), wire.reduction)
        scale = clip_factor(norm, max_norm)
        grads = {name: g * scale for name, g in grads.items()}
    shards = buckets.shard_tree(params, layout, axis=fsdp)
    new = apply(grads, shards)
    if {n: x.shape for n, x in new.items()} != {n: x.shape for n, x in shards.items()}:
        raise UsageError(
            "optimizer.apply_gradients returns other paths or shapes than the parameters that it "
            f"was given: {sorted(set(new) ^ set(shards)) or 'shapes differ'}."
        )
    new = {name: x.astype(params[name].dtype) for name, x in new.items()}
    return buckets.gathered(new, layout, fsdp, wire, params), norm


@gin.register(module="distributed", denylist=["shardings", "stored", "mesh", "encoding"])
@takes("reduction", "shardings", "stored", "mesh", "encoding")
@checked
def fsdp_apply_gradients(
    gradients: Numbers,
    parameters: Placeable,
    optimizer: AnOptimizer,
    fsdp_group: Group = None,
    dp_group: Group = None,
    communication_size: int = DEFAULT_BUCKET_BYTES,
    communication_stream: Annotated[None, "None: XLA schedules collectives itself"] = None,
    max_norm: TracedNorm | None = None,
    *,
    dtype: argument_types.Dtype | None = None,
    pre_divide: bool = False,
    loss: Number | None = None,
    reduction: Reduction = PLAIN,
    gather_dtype: argument_types.Dtype | None = None,
    shardings: Annotated[PyTree, shardings_like("gradients")] | None = None,
    stored: Annotated[PyTree, shardings_like("gradients")] | None = None,
    mesh: Mesh | None = None,
    encoding: Encoding | None = None,
) -> PyTree:
    """One optimizer step whose gradients and optimizer state are sharded over devices.

    Gradients are reduce-scattered to their mean, clipped by its global norm, applied to this
    device's shards of the parameters, and these gathered. Called where axes are bound
    (`shard_map`, `pmap`, `vmap(axis_name=...)`); outside of any map there is a world of one.

    Without `shardings` a shard is a part of a flat, padded array, (1, ..., 1, k) of its parameter's
    rank. The optimizer sees a tree of the gradients' structure, by parameter path, never buckets.

    Args:
        gradients: Those of this device's own loss, floating point. Under `check_vma=True` those of
            replicated parameters are sums already, and are divided.
        parameters: Replicated; those without a gradient are returned as they are.
        optimizer: Has `apply_gradients(gradients, parameters) -> parameters`; it is given each
            gradient in its parameter's dtype, and is elementwise.
        fsdp_group: Axis, or axes in the order of their names, that the update is sharded over;
            None: all bound ones but `dp_group`.
        dp_group: Axis, or axes, along which shards are replicated and averaged. None: no such axis;
            every bound axis must be in `fsdp_group`. (): no such axis, and axes in neither group
            carry no batch (tensor parallel).
        communication_size: Bytes of a bucket of arrays; <= 0: each array alone.
        communication_stream: None: XLA schedules collectives itself.
        max_norm: Gradients are scaled down to this global L2 norm. A norm that is not a number
            makes every updated parameter NaN: no step is skipped.
        dtype: dtype in which gradients are summed; None: each gradient's own.
        pre_divide: Divide before the sum: in float16, eight times 10000 is inf.
        loss: The loss that was differentiated; needed as in `sync_gradients`.
        reduction: The collectives.
        gather_dtype: In a strategy, dtype in which parameters are gathered. Between steps they have
            this dtype (the strategy's `param_dtype`); the shards that are updated stay wide.
        shardings: As slot `update` of a strategy, outside of any map: the `LeafSharding`s of
            `gradients`, global arrays, which are averages already. The optimizer is any; the
            strategy also decides `max_norm`, `loss`, `dtype`, `pre_divide` and the groups.
        stored: The `LeafSharding`s that the new parameters get; None: they are replicated.
        mesh: That of `shardings`.
        encoding: In a strategy, the codec of changes of parameters, and the parameters that it
            takes. Those that are updated are then the optimizer's own, which it keeps.

    Returns:
        The parameters, dtypes and structure kept; with `max_norm` a pair of them and the mean
        gradient's norm before clipping, 0-d float32.

    Raises:
        UsageError: A group is not bound, leaves an axis out or has another order; a gradient does
            not fit its parameter or `loss`, or needs `loss`; the optimizer is not elementwise or
            returns something else; or `dtype` and `pre_divide` come too late (`sync_gradients`).
    """
    del communication_stream  # there is none to choose
    wire = Wire(reduction, dtype, pre_divide, communication_size)
    by_name = by_path(parameters)

    def tree(leaves: Mapping[str, Any]) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], gradients)

    if shardings is not None:
        groups = {"fsdp_group": fsdp_group, "dp_group": dp_group, "loss": loss}
        _refuse(groups, "a strategy knows its axes and its loss; leave it None")
        _refuse({"max_norm": max_norm}, "a strategy clips by its own max_grad_norm; leave it None")
        sums = {"dtype": dtype, "pre_divide": pre_divide}
        _refuse(sums, "gradients are averages already; bind it to the function of `sync`")
        if mesh is None:
            raise UsageError("fsdp_apply_gradients: give `mesh` with `shardings`.")
        if any(x.dtype != cast_dtype(x.dtype, gather_dtype) for x in by_name.values()):
            why = "parameters have another dtype; bind the strategy's param_dtype to it"
            _refuse({"gather_dtype": gather_dtype}, why)
        stored = sharding.replicated(shardings) if stored is None else stored
        both = shardings, stored
        return _on_slices(gradients, parameters, optimizer, both, mesh, wire, encoding)
    _refuse({"gather_dtype": gather_dtype}, "without a strategy nothing keeps wide parameters")
    fsdp, axes = _groups(fsdp_group, dp_group)
    grads = _local_gradients(gradients, by_name, loss, axes, wire)
    params = {name: jnp.asarray(by_name[name]) for name in grads}
    layout = sharding.infer_flat_sharding(params, axes_size(fsdp))
    _check_optimizer(optimizer, layout, params, tree, axes_size(fsdp))

    def apply(grads: Arrays, shards: Arrays) -> Arrays:
        grads = {name: g.astype(params[name].dtype) for name, g in grads.items()}
        return by_path(optimizer.apply_gradients(tree(grads), tree(shards)))

    grads = mean_shards(grads, layout, fsdp, axes, wire)
    full, norm = step_on_shards(grads, params, layout, apply, fsdp, max_norm, wire)
    result = jax.tree_util.tree_map_with_path(
        lambda path, p: full.get(path_name(path), p), parameters
    )
    return result if norm is None else (result, norm)


def _on_slices(
    gradients: PyTree,
    parameters: PyTree,
    optimizer: AnOptimizer,
    shardings: tuple[PyTree, PyTree],
    mesh: Mesh,
    wire: Wire,
    encoding: Encoding | None,
) -> PyTree:
    """The update of global arrays, each device's own part of it, and the gathered parameters.

    `shardings` are those of the parts, and of the parameters.
    """
    if not sharding.is_sharded(shardings[0]):
        return optimizer.apply_gradients(gradients, parameters)
    specs, full = (jax.tree.map(lambda p: p.spec, tree) for tree in shardings)

    def within(p: LeafSharding, of: LeafSharding) -> LeafSharding:
        axes, shards = (of.axes, of.axis_size) if of.dim is not None else ((), 1)
        return p.within(of.local_shape, axes, shards)

    parts = jax.tree.map(within, *shardings)
    over = next((p.axes for p in jax.tree.leaves(parts) if p.dim is not None), ())

    def placed(x: jax.Array, p: LeafSharding, place: Any) -> jax.Array:
        stored = sharding.fitted(x, p.split_shape)
        return sharding.fitted(jax.lax.with_sharding_constraint(stored, place), x.shape)

    places = placement.shardings(mesh, specs)
    slices = jax.tree.map(placed, parameters, shardings[0], places)

    def gathered(new: PyTree, old: PyTree) -> PyTree:
        if encoding is None or (codecs := encoding.compression).update is None:
            return buckets.gathered(new, parts, over, wire, old)
        leaves, treedef = jax.tree.flatten(new)
        flat, before = jax.tree.leaves(parts), jax.tree.leaves(old)
        whole_arrays = jax.tree.leaves(encoding.shardings)
        taken = [
            codecs.takes(a) and p.dim is not None for a, p in zip(whole_arrays, flat, strict=True)
        ]
        plain = [i for i, one in enumerate(taken) if not one]
        some, layout, old_ones = ([x[i] for i in plain] for x in (leaves, flat, before))
        whole = buckets.gathered(some, layout, over, wire, old_ones)
        full = dict(zip(plain, whole, strict=True))
        for i, p in enumerate(flat):
            if taken[i]:
                full[i] = _changed(leaves[i], before[i], p, over, codecs.update, wire)
        return jax.tree.unflatten(treedef, [full[i] for i in range(len(flat))])

    # Gathered as written: a compiler joins the gathers, and has memory for all at once.
    gather = jax.shard_map(
        gathered, mesh=mesh, in_specs=(specs, full), out_specs=full, check_vma=False
    )

    def padded(tree: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda x, p: sharding.fitted(x, p.split_shape), tree, like)

    new = padded(optimizer.apply_gradients(gradients, slices), shardings[0])
    return sharding.fitted_tree(gather(new, padded(parameters, shardings[1])), shardings[1])


def _changed(
    new: jax.Array, old: jax.Array, p: LeafSharding, over: Axes, codec: Codec, wire: Wire
) -> jax.Array:
    """Full parameters, to which the changes of all shards are added as the codec decodes them.

    `new` is a shard, `old` in full; a stack's layers are taken one after the other.
    """
    assert p.dim is not None
    if p.stacked and p.dim > 0:
        one = of_one(p)

        def layer(stack: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            own, before = (lax.dynamic_index_in_dim(x, number, 0, False) for x in (new, stack))
            after = _changed(own, before, one, over, codec, wire)
            return lax.dynamic_update_index_in_dim(stack, after, number, 0), None

        return lax.scan(layer, old, jnp.arange(old.shape[0]))[0]
    change = new.astype(jnp.float32) - buckets.shard_tree(old, p, axis=over).astype(jnp.float32)
    full = encoded.gather(change, p.dim, over, codec, p.layer_shape, wire.reduction)
    return (old + sharding.fitted(full, old.shape)).astype(old.dtype)


@checked
def fsdp_update(
    gradients: Numbers,
    parameters: Placeable,
    transform: argument_types.Transform,
    opt_state: PyTree,
    *,
    max_norm: TracedNorm | None = None,
    **options: Any,
) -> tuple[PyTree, ...]:
    """`fsdp_apply_gradients` as a pure function of an Optax transform and its state.

    `opt_state` has this device's slices: what `shard_map` makes of `slice_state` by `slice_specs`.

    Returns:
        (parameters, opt_state), and with `max_norm` the norm as a third.
    """
    optimizer = OptaxAdapter(transform, opt_state)
    result = fsdp_apply_gradients(gradients, parameters, optimizer, max_norm=max_norm, **options)
    new, *norm = (result,) if max_norm is None else result
    return new, optimizer.state, *norm


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raises UsageError for an option that is given."""
    for name, value in options.items():
        if value is not None and value is not False:
            shown = argument_types.described(value)
            raise binding_error(f"fsdp_apply_gradients.{name}", f" = {shown}: {why}.")


def _check_optimizer(
    optimizer: Any, layout: Any, params: Arrays, tree: Callable[..., PyTree], devices: int
) -> None:
    """Raises UsageError if an optimizer cannot be applied to flat shards."""
    if getattr(type(optimizer), "apply_gradients", None) is OptaxAdapter.apply_gradients:
        cast(OptaxAdapter, optimizer).check_slices(tree(params), devices)
    elif devices > 1 and layout:
        slices = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.local_shape, p.dtype), layout)
        sharded_optimizer.check_elementwise(optimizer, tree(slices), devices)


def _groups(fsdp_group: Group, dp_group: Group) -> tuple[Axes, Axes]:
    """(axes of fsdp_group, axes of both groups), checked against those that are bound here."""
    bound, dp = bound_axes(), flat_axes(dp_group)
    if fsdp_group is None:
        fsdp = tuple(axis for axis in bound if axis not in dp)
        several = [axis for axis in fsdp if axes_size((axis,)) > 1]
        sharded_optimizer.check_slice_axes("fsdp_group = None, all axes", several)
    else:
        fsdp = sharded_optimizer.check_slice_axes("fsdp_group", fsdp_group)
    axes = fsdp + dp
    for axis in axes:
        if axis not in bound:
            group = "fsdp_group" if axis in fsdp else "dp_group"
            raise UsageError(
                f"{group}: axis {axis!r} is not bound here; bound are {list(bound)}. Call "
                "fsdp_apply_gradients inside a map that has it."
            )
        if axes.count(axis) > 1:
            raise UsageError(f"axis {axis!r} is in fsdp_group {fsdp} and dp_group {dp}: once only.")
    left_out = tuple(a for a in bound if a not in axes and axes_size((a,)) > 1)
    if left_out and dp_group is None:
        raise UsageError(
            f"fsdp_group {fsdp} leaves out axis {left_out[0]!r} of size {axes_size(left_out[:1])}: "
            "devices along it would each follow gradients of their own. Name it in dp_group to "
            "average over it, or give dp_group=() if it carries no batch."
        )
    return fsdp, axes


def _local_gradients(
    gradients: PyTree, params: Mapping[str, Any], loss: jax.Array | None, axes: Axes, wire: Wire
) -> dict[str, jax.Array]:
    """Gradients by path, checked, such that their mean over `axes` is the right one."""
    loss_axes = averaged_axes(loss, axes)
    left = tuple(a for a in axes if a not in (loss_axes or ()) and is_tracked(a))
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
        local[name], _ = local_gradient(name, g, left, loss_axes, wire)
    return local
