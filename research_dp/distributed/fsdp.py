"""Parameters initialised, sharded and gathered, by the axis names in their boxes.

For code inside mapped axes (`shard_map`, `pmap`, `vmap(axis_name=...)`), on trees of arrays and
`nn.Partitioned`s (Linen) or of `nnx.Variable`s. The functions have the names, arguments and
behaviour of xlstm-jax's; what they add is keyword-only. They fill the slots `shard` and `gather` of
a strategy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import gin
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisName,
    CountOrZero,
    Dtype,
    Indices,
    Placeable,
    is_array_or_number,
)
from research_dp.distributed import boxed, buckets, collectives
from research_dp.distributed.boxed import names_of, value_of
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes, takes
from research_dp.distributed.differentiable_gather import GatherOptions, gather_tree_with_mean_grads
from research_dp.distributed.embedding import exchange_rows
from research_dp.distributed.shard_rules import Rule, ShardDecision, apply_rule, choose_dim
from research_dp.distributed.sharding import dim_in_use, sharding_of_shard, unit_kind
from research_dp.distributed.transports.all_to_all import over_gloo
from research_dp.errors import UsageError

PyTree = Any

_log = logging.getLogger(__name__)


def choose_shard(
    path: str,
    leaf: Any,
    axis_name: str | Axes,
    axis_size: int,
    min_weight_size: int = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: int | None = None,
) -> tuple[ShardDecision, bool]:
    """What `shard_params` does with one leaf, maybe abstract: (the decision, whether to warn).

    Raises:
        UsageError: The rule chose a dim that does not exist, does not divide or is taken.
    """
    names, shape = names_of(leaf), tuple(np.shape(value_of(leaf)))
    taken = boxed.split_over(leaf)
    if set(taken) & set(flat_axes(axis_name)):
        return ShardDecision(None, f"already sharded over {taken}"), True
    free = tuple(name is None for name in names[: len(shape)])
    if rule is not None:
        decision = apply_rule(rule, path, shape, axis_size, axis=axis_name, name="rule")
        if decision.dim is not None and not free[decision.dim]:
            raise UsageError(
                f"rule chose dim {decision.dim} of {path} {shape}, which {taken} splits."
            )
        return decision, False
    limit = min_weight_size
    if min_weight_bytes is not None:
        limit = min_weight_bytes // jax.dtypes.result_type(value_of(leaf)).itemsize
    decision = choose_dim(shape, axis_size, limit, free)
    return decision, decision.dim is None and np.prod(shape, dtype=int) > limit


@gin.register(module="distributed", denylist=["units", "on_decision"])
@takes("units", "on_decision")
@checked
@jax.named_scope("shard_params")
def shard_params(
    params: Placeable,
    axis_name: AxisName,
    min_weight_size: CountOrZero = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: CountOrZero | None = None,
    units: Mapping[str, str] | None = None,
    on_decision: Callable[[str, ShardDecision], None] | None = None,
) -> PyTree:
    """Shards parameters over a mesh axis: each device keeps its shard, in a box.

    As in xlstm-jax: the largest dim that the axis size divides and that no axis splits yet, ties
    to the higher index (at any rank; upstream's choice among equals of rank 4 depends on the CPU).
    A leaf that no dim suits stays as it is, and one warning a call names them all.

    Args:
        params: Arrays and boxes, as this device sees them. Random keys are returned as they are.
        axis_name: The mesh axis, bound here, or several as one.
        min_weight_size: Parameters of at most this many elements stay replicated.
        rule: Chooses each dim instead: (path, shape, axis size) -> `ShardDecision`; thresholds are
            then its own.
        min_weight_bytes: A threshold in bytes, instead of `min_weight_size`.
        units: Kinds of a model's units (`TrainableModel.units`), of which one layer of a stack is
            given. Where any dim will do, the one that suits the unit is sharded.
        on_decision: Called with each leaf's path and decision, instead of the warning.

    Returns:
        The same tree. Sharded leaves are `nn.Partitioned` (a `Variable` stays one), with
        `axis_name` at their dim, for an axis of size 1 too; the others are the same objects as
        before.

    Raises:
        UsageError: The rule chose a dim that is taken or does not divide, there are both a
            rule and `min_weight_bytes`, an axis is named twice, or a leaf that would be sharded
            has random keys.
        NameError: The axis is not bound.
    """
    if rule is not None and min_weight_bytes is not None:
        raise UsageError("shard_params: rule and min_weight_bytes both decide; give one of them.")
    axis_name = boxed.as_name(axis_name)
    devices = axes_size(flat_axes(axis_name))
    thresholds: dict[str, Any] = {"rule": rule, "min_weight_bytes": min_weight_bytes}
    replicated: list[str] = []

    def one(path: str, leaf: Any) -> Any:
        decision, warn = choose_shard(path, leaf, axis_name, devices, min_weight_size, **thresholds)
        names, x = names_of(leaf), value_of(leaf)
        dim = decision.dim
        if on_decision is not None:
            on_decision(path, decision)
        if dim is None:
            if warn:
                replicated.append(f"{path} {np.shape(x)} ({decision.reason})")
            return leaf
        if not is_array_or_number(x):
            raise UsageError(
                f"shard_params: {path} {np.shape(x)} are random keys, which cannot be gathered. "
                "Keep them out of params, or raise min_weight_size."
            )
        if units and decision.movable:
            dim = dim_in_use(unit_kind(path, units), np.shape(x), devices, dim)
        shard = collectives.shard(x, dim, axis_name)
        return boxed.renamed(leaf, shard, _with_name(names, dim, axis_name))

    sharded = boxed.map_leaves(one, params)
    if replicated and on_decision is None:
        _log.warning(
            "not sharded over %r of size %d: %s; sharding_report lists all",
            axis_name,
            devices,
            ", ".join(replicated),
        )
    return sharded


@gin.register(module="distributed")
@checked
def init_sharded(init: Callable[..., PyTree], mesh: Mesh | AbstractMesh, *args: Any) -> PyTree:
    """Runs an initialiser of sharded parameters such that each device computes its shards.

    For modules of `shard_module_params` classes, whose `init` inside mapped axes makes the full
    parameters on each device. Here that is only traced, for the shardings. The values come from
    axes of size 1, where a shard is the full array; `jit` computes them as global arrays with those
    shardings. They are the bits of the unsharded module's `jit(init)`.

    Args:
        init: (*args) -> tree of arrays and boxes, e.g. `module.init` or
            `lambda key: nnx.state(Model(rngs=nnx.Rngs(key)))`. Random keys may not depend on the
            device.
        mesh: The mesh whose axes the boxes name.
        *args: Arrays, such as a key and an example batch.

    Returns:
        Global arrays, boxed as `init` boxes them under `shard_map`.
    """
    on_mesh = jax.shard_map(
        init, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    boxes = jax.eval_shape(on_mesh, *args)

    def unsharded(*args: Any) -> PyTree:
        function = init
        for axis in mesh.axis_names:
            function = jax.vmap(function, None, axis_name=axis, axis_size=1)
        values = boxed.unboxed(function(*args))
        return jax.tree.map(lambda x: x.reshape(x.shape[len(mesh.axis_names) :]), values)

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*names_of(leaf) if boxed.split_over(leaf) else ()))

    shardings = jax.tree.map(sharding, boxes, is_leaf=boxed.is_box)
    values = jax.jit(unsharded, out_shardings=shardings)(*args)
    return jax.tree.map(boxed.with_value, boxes, values, is_leaf=boxed.is_box)


@gin.register(module="distributed", denylist=["rows"])
@takes("reduction", "rows")
@checked
@jax.named_scope("gather_params")
def gather_params(
    params: Placeable,
    axis_name: AxisName,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
    bucket_bytes: int | None = None,
    reduction: Reduction = PLAIN,
    rows: Indices | None = None,
) -> PyTree:
    """Gathers the parameters that are sharded over a mesh axis; gradients come back as shards.

    As in xlstm-jax. Each gradient is this device's shard of the mean over the axis; over further
    axes that the batch is split over, `sync_gradients` averages it.

    Args:
        params: Arrays and boxes, as this device sees them. Random keys are returned as they are.
        axis_name: The mesh axis, bound here, or several as one; as it stands in the boxes.
        gather_dtype: dtype on the wire and for compute; None: the parameter's. Leaves that are not
            sharded over the axis keep theirs, as do complex ones and integers.
        grad_scatter_dtype: dtype in which gradients are summed; None: the parameter's.
        pre_divide: Divide gradients before they are summed, for float16.
        bucket_bytes: Arrays are gathered together in buckets of so many bytes; <= 0: each alone,
            for the compiler to combine. None: 32 MiB between processes on CPUs, for whose gathers
            no compiler does that; 0 elsewhere. Tables are not put in buckets.
        reduction: The collectives.
        rows: `params` are tables, sharded by feature; only these rows are returned. See
            `embedding.exchange_rows`.

    Returns:
        The same tree. A gathered leaf is a bare array, or a `nn.Partitioned` if another axis still
        splits it; the others are the same objects as before.

    Raises:
        UsageError: A dtype is not a floating-point dtype, or an axis is named twice.
        NameError: The axis is not bound.
    """
    axis_name = boxed.as_name(axis_name)
    axes_size(flat_axes(axis_name))  # names an axis that is not bound
    options = GatherOptions(0, axis_name, gather_dtype, grad_scatter_dtype, reduction, pre_divide)
    if bucket_bytes is None:
        bucket_bytes = buckets.DEFAULT_BUCKET_BYTES if over_gloo() else 0
    leaves, treedef = jax.tree.flatten(params, is_leaf=boxed.is_box)
    sharded = [i for i, leaf in enumerate(leaves) if axis_name in names_of(leaf)]
    dims = [names_of(leaves[i]).index(axis_name) for i in sharded]
    shards = [value_of(leaves[i]) for i in sharded]
    for i, dim in zip(sharded, dims, strict=True):
        if dim >= np.ndim(value_of(leaves[i])):
            path, shape = boxed.leaves_with_paths(params)[i][0], np.shape(value_of(leaves[i]))
            raise UsageError(
                f"{path}: gather over {axis_name!r}: an array of shape {shape} has no dim {dim}."
            )
    if bucket_bytes > 0 and rows is None:
        size = axes_size(flat_axes(axis_name))
        shardings = [sharding_of_shard(x, dim, size) for x, dim in zip(shards, dims, strict=True)]
        full = gather_tree_with_mean_grads(shards, shardings, options, bucket_bytes=bucket_bytes)
    else:
        full = []
        for x, dim in zip(shards, dims, strict=True):
            local = options._replace(dim=dim)
            full.append(
                local.differentiable(x.dtype)(x) if rows is None else exchange_rows(x, rows, local)
            )
    for i, dim, x in zip(sharded, dims, full, strict=True):
        leaves[i] = boxed.renamed(leaves[i], x, _with_name(names_of(leaves[i]), dim, None))
    return jax.tree.unflatten(treedef, leaves)


def _with_name(names: tuple[Any, ...], dim: int, name: Any) -> tuple[Any, ...]:
    return (*names[:dim], name, *names[dim + 1 :])
