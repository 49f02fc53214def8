"""Parameters initialised, sharded, gathered and reported, by the axis names in their boxes.

Trees are of arrays and of `nn.Partitioned`s (Linen) or `nnx.Variable`s. Names, arguments and
behaviour are those of xlstm-jax; what is added is keyword-only.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import gin
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.distributed import boxed, collectives, sharding
from research_dp.distributed.boxed import names_of, value_of
from research_dp.distributed.codecs import Encoding
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes, takes
from research_dp.distributed.differentiable_gather import (
    GatherOptions,
    gather_by_compiler,
    gather_tree_with_mean_grads,
)
from research_dp.distributed.sharding import LeafSharding, Rule, ShardDecision
from research_dp.distributed.units import exchange_rows
from research_dp.errors import UsageError, binding_error
from research_dp.types import PyTree


def _choose_shard(
    path: str,
    leaf: Any,
    axis_name: str | Axes,
    axis_size: int,
    thresholds: Any,
    rule: Rule | None,
    pads: bool = False,
) -> tuple[ShardDecision, bool]:
    """What `shard_params` does with one leaf, maybe abstract: (the decision, whether to warn)."""
    shape, taken = tuple(np.shape(value_of(leaf))), boxed.split_over(leaf)
    if set(taken) & set(flat_axes(axis_name)):
        return ShardDecision(None, f"already sharded over {taken}"), True
    free = tuple(name is None for name in names_of(leaf)[: len(shape)])
    if rule is not None:
        decision = sharding.apply_rule(rule, path, shape, axis_size, axis=axis_name, name="rule")
        if decision.dim is not None and not free[decision.dim]:
            where = f"dim {decision.dim} of {path} {shape}"
            raise UsageError(f"rule chose {where}, which {taken} splits.")
        used = sharding.padding_or_none(decision, shape, axis_size, pads=pads)
        return used, used.dim != decision.dim
    least, least_bytes = thresholds
    if least_bytes is not None:
        least = least_bytes // jax.dtypes.result_type(value_of(leaf)).itemsize
    decision = sharding.choose_dim(shape, axis_size, least, free, pads=pads)
    decision = sharding.padding_or_none(decision, shape, axis_size, pads=pads)
    decision = decision._replace(movable=all(free))
    return decision, decision.dim is None and np.prod(shape, dtype=int) > least


@gin.register(module="distributed", denylist=["units", "on_decision", "pads"])
@takes("units", "on_decision", "pads")
@checked
@jax.named_scope("shard_params")
def shard_params(
    params: types.Placeable,
    axis_name: types.AxisName,
    min_weight_size: types.CountOrZero = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: types.CountOrZero | None = None,
    units: Mapping[str, str] | None = None,
    on_decision: Callable[[str, ShardDecision], None] | None = None,
    pads: bool = False,
) -> PyTree:
    """Shards parameters over a mesh axis: each device keeps its shard, in a box.

    Sharded leaves are `nn.Partitioned` (a `Variable` stays one), with `axis_name` at their dim, for
    an axis of size 1 too; the other leaves are the same objects. The dim is, as in xlstm-jax, the
    largest that the axis size divides and that no axis splits yet, ties to the higher index (at any
    rank; upstream's choice among equals of rank 4 depends on the CPU).
    A leaf that no dim suits stays as it is, and one warning a call names them all. Raises
    UsageError if the rule chose a dim that is taken or does not exist, there are both a rule and
    `min_weight_bytes`, or a leaf that would be sharded has random keys.

    Args:
        params: Arrays and boxes, as this device sees them. Random keys are returned as they are.
        axis_name: The mesh axis, or several as one; NameError if it is not bound.
        min_weight_size: Parameters of at most this many elements stay replicated.
        rule: Chooses each dim instead: (path, shape, axis size) -> `ShardDecision`.
        min_weight_bytes: A threshold in bytes, instead of `min_weight_size`.
        units: Kinds of a model's units (`TrainableModel.units`), of which one layer of a stack is
            given. Where any dim will do, the one that suits the unit is sharded.
        on_decision: Called with each leaf's path and decision, instead of the warning.
        pads: Whether a dim that the devices do not divide is padded with zeros. A strategy does,
            and cuts what it gathers; `gather_params` by itself does not know the length.
    """
    if rule is not None and min_weight_bytes is not None:
        raise UsageError("shard_params: rule and min_weight_bytes both decide; give one of them.")
    axis_name = boxed.as_name(axis_name)
    devices = axes_size(flat_axes(axis_name))
    thresholds = min_weight_size, min_weight_bytes
    replicated: list[str] = []

    def one(keys: Any, leaf: Any) -> Any:
        path, x = types.path_name(keys), value_of(leaf)
        decision, warn = _choose_shard(path, leaf, axis_name, devices, thresholds, rule, pads)
        kind = sharding.unit_kind(path, units)
        decision = sharding.decision_in_use(decision, kind, np.shape(x), devices)
        if on_decision is not None:
            on_decision(path, decision)
        if warn:
            replicated.append(f"{path} {np.shape(x)} ({decision.reason})")
        if (dim := decision.dim) is None:
            return leaf
        if not types.is_array_or_number(x):
            problem = f"{path} {np.shape(x)} are random keys, which cannot be gathered."
            advice = "Keep them out of params, or raise min_weight_size."
            raise UsageError(f"shard_params: {problem} {advice}")
        if pads:
            p = LeafSharding(path, np.shape(x), x.dtype, dim, "", devices, parts=decision.parts)
            x = sharding.fitted(jax.numpy.asarray(x), p.split_shape)
        return boxed.with_name(leaf, collectives.shard(x, dim, axis_name), dim, axis_name)

    sharded = jax.tree_util.tree_map_with_path(one, params, is_leaf=boxed.is_box)
    if replicated and on_decision is None:
        message = "not sharded over %r of size %d: %s; sharding_report lists all"
        logging.getLogger(__name__).warning(message, axis_name, devices, ", ".join(replicated))
    return sharded


@checked
def init_sharded(init: Callable[..., PyTree], mesh: Mesh | AbstractMesh, *args: Any) -> PyTree:
    """Runs an initialiser of sharded parameters such that each device computes its shards.

    For modules of `shard_module_params` classes, whose `init` inside mapped axes makes the full
    parameters on each device. Returns global arrays, boxed as `init` boxes them under `shard_map`;
    their values are the bits of the unsharded module's `jit(init)`.

    Args:
        init: (*args) -> tree of arrays and boxes, e.g. `module.init`. Random keys may not depend
            on the device.
        mesh: The mesh whose axes the boxes name.
        *args: Arrays, such as a key and an example batch.
    """
    spec = PartitionSpec()
    on_mesh = jax.shard_map(init, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    boxes = jax.eval_shape(on_mesh, *args)  # for the shardings

    def unsharded(*args: Any) -> PyTree:
        function = init  # over axes of size 1, where a shard is the full array
        for axis in mesh.axis_names:
            function = jax.vmap(function, None, axis_name=axis, axis_size=1)
        values = boxed.unboxed(function(*args))
        return jax.tree.map(lambda x: x.reshape(x.shape[len(mesh.axis_names) :]), values)

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*names_of(leaf) if boxed.split_over(leaf) else ()))

    shardings = jax.tree.map(sharding, boxes, is_leaf=boxed.is_box)
    values = jax.jit(unsharded, out_shardings=shardings)(*args)
    return jax.tree.map(boxed.with_value, boxes, values, is_leaf=boxed.is_box)


def gather_shards(
    shards: Sequence[tuple[jax.Array, int]], options: GatherOptions, rows: jax.Array | None
) -> Sequence[jax.Array]:
    """The full arrays of shards, each given with the dim that is cut, for `gather_params`."""
    if rows is not None:
        return [exchange_rows(x, rows, options._replace(dim=dim)) for x, dim in shards]
    if options.wire.bucket_bytes <= 0:
        full = []
        for x, dim in shards:
            full.append(options._replace(dim=dim).differentiable(x.dtype)(x))
        return full
    size, shardings = axes_size(flat_axes(options.axis)), []
    for x, dim in shards:
        shape = (*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :])
        shardings.append(LeafSharding("", shape, np.dtype(x.dtype), dim, "", size))
    arrays = [x for x, _ in shards]
    return gather_tree_with_mean_grads(arrays, shardings, options)


@gin.register(module="distributed", denylist=["rows", "mesh", "encoding"])
@takes("reduction", "rows", "mesh", "encoding")
@checked
@jax.named_scope("gather_params")
def gather_params(
    params: types.Placeable,
    axis_name: types.AxisName,
    gather_dtype: types.Dtype | None = None,
    grad_scatter_dtype: types.Dtype | None = None,
    *,
    pre_divide: bool = False,
    bucket_bytes: int | None = None,
    reduction: Reduction = PLAIN,
    rows: types.Indices | None = None,
    mesh: Mesh | None = None,
    encoding: Encoding | None = None,
) -> PyTree:
    """Gathers the parameters that are sharded over a mesh axis; gradients come back as shards.

    Each gradient is this device's shard of the mean over the axis; over further axes that the batch
    is split over, `sync_gradients` averages it. A gathered leaf is a bare array, or a
    `nn.Partitioned` if another axis still splits it; the other leaves are the same objects.
    Raises UsageError for a box that names the axis at a dim that its array lacks.

    Args:
        params: Arrays and boxes, as this device sees them. Random keys are returned as they are.
        axis_name: The axis, or several as one, as in the boxes; NameError if it is not bound.
        gather_dtype: On the wire and for compute; None: the parameter's. Leaves that are not
            sharded over the axis keep theirs, as do complex ones and integers.
        grad_scatter_dtype: In which gradients are summed; None: the parameter's.
        pre_divide: Divide gradients before they are summed, for float16.
        bucket_bytes: Arrays are gathered together in buckets of so many bytes; <= 0: each alone,
            for the compiler to combine. None: 32 MiB between processes on CPUs, for whose gathers
            no compiler does that; 0 elsewhere.
        reduction: The collectives.
        rows: Row indices: only these rows of feature-sharded tables are returned.
        mesh: Of global arrays, under `jit`: the compiler gathers over this mesh. It forms buckets
            by itself, and sums gradients in the gathered dtype, of losses that are divided before.
        encoding: Codecs of what is sent, and the parameters that they take, replicated ones too.
    """
    axis_name = boxed.as_name(axis_name)
    if mesh is None:
        axes_size(flat_axes(axis_name))  # names an axis that is not bound
    elif bucket_bytes or rows is not None or grad_scatter_dtype not in (None, gather_dtype):
        given = "bucket_bytes" if bucket_bytes else "grad_scatter_dtype"
        problem = ": the compiler forms buckets, and sums gradients in gather_dtype. Bind None."
        raise binding_error(f"gather_params.{given}", problem)
    if bucket_bytes is None:
        bucket_bytes = collectives.DEFAULT_BUCKET_BYTES if collectives.over_gloo() else 0
    wire = collectives.Wire(reduction, grad_scatter_dtype, pre_divide, bucket_bytes)
    options = GatherOptions(0, axis_name, gather_dtype, wire)
    leaves, shards = boxed.leaves_with_paths(params), {}
    by_codec = _encoded_gathers(encoding, options, len(leaves))
    result = [leaf for _, leaf in leaves]
    for i, (path, leaf) in enumerate(leaves):
        if axis_name in names_of(leaf):
            x, dim = value_of(leaf), names_of(leaf).index(axis_name)
            if dim >= np.ndim(x):
                problem = f"an array of shape {np.shape(x)} has no dim {dim}."
                raise UsageError(f"{path}: gather over {axis_name!r}: {problem}")
            shards[i] = x, dim
        elif (here := by_codec[i]) and here.codec:
            here = here._replace(axis=(), gather_dtype=None, wire=collectives.Wire())
            result[i] = here.differentiable(leaf.dtype)(leaf)
    if mesh is None:
        plain = [i for i in shards if by_codec[i] is None]
        gathered = gather_shards([shards[i] for i in plain], options, rows)
        full = dict(zip(plain, gathered, strict=True))
        for i in shards.keys() - full.keys():
            (full[i],) = gather_shards([shards[i]], by_codec[i] or options, rows)
    else:
        full = {
            i: gather_by_compiler(x, options._replace(dim=dim), mesh)
            for i, (x, dim) in shards.items()
        }
    for i, (_, dim) in shards.items():
        result[i] = boxed.with_name(result[i], full[i], dim, None)
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=boxed.is_box), result)


def _encoded_gathers(
    encoding: Encoding | None, options: GatherOptions, count: int
) -> list[GatherOptions | None]:
    """How each parameter is gathered, and its gradient scattered, by codecs; None: by none."""
    if encoding is None:
        return [None] * count
    codecs, found = encoding.compression, list[GatherOptions | None]()
    wire = dataclasses.replace(encoding.on(options.wire), bucket_bytes=0)
    for p in jax.tree.leaves(encoding.shardings):
        takes = codecs.takes(p)
        # Slices that are cut in parts have another shape, and so other blocks.
        shape = p.layer_shape if p.parts == 1 else p.split_shape[p.stacked :]
        own = options._replace(wire=wire, codec=codecs.gather, shape=shape)
        found.append(own if takes and (codecs.gather or codecs.sync) else None)
    return found


class ShardingRow(NamedTuple):
    """One array of a tree."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None  # that is split over the axis; None: the array is replicated
    reason: str  # why it is replicated, or padded

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        how = "replicated" if self.dim is None else f"sharded along dim {self.dim}"
        why = f": {self.reason}" if self.reason else ""
        return f"{self.path} {self.shape} {self.dtype}: {how}{why}"


def _is_reported(x: Any) -> bool:
    return isinstance(x, LeafSharding) or types.is_array_or_number(x) or types.is_abstract_array(x)


@checked
def sharding_report(
    params: Annotated[PyTree, types.Leaves(_is_reported, "arrays, or LeafShardings")],
    axis_name: types.AxisName | None = None,
    axis_size: types.Count | None = None,
    min_weight_size: types.CountOrZero = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: types.CountOrZero | None = None,
) -> list[ShardingRow]:
    """Lists for each parameter the dim on which it is sharded, or why it is replicated.

    Accepts parameters before and after `shard_params`, optimizer states of either, and trees of
    `LeafSharding`s, which need no further argument; arrays may be abstract. Arguments are those of
    `shard_params`, but the axis need not be bound. To assert that little is replicated:

        rows = sharding_report(params, 'fsdp', 8)
        assert sum(r.nbytes for r in rows if r.dim is None) < 0.02 * sum(r.nbytes for r in rows)

    Raises UsageError if the tree has arrays, and axis_name or axis_size is missing.
    """

    def row(path: str, leaf: Any) -> ShardingRow:
        if isinstance(leaf, LeafSharding):
            return ShardingRow(leaf.path, leaf.shape, leaf.dtype, leaf.dim, leaf.reason)
        if axis_name is None or axis_size is None:
            raise UsageError(f"sharding_report: {path} is an array; give axis_name and axis_size.")
        shape, dtype = tuple(np.shape(value_of(leaf))), jax.dtypes.result_type(value_of(leaf))
        for dim, name in enumerate(names_of(leaf)):
            if set(flat_axes(axis_name)) & set(flat_axes(name)):
                return ShardingRow(path, shape, dtype, dim, "")
        thresholds, axis = (min_weight_size, min_weight_bytes), boxed.as_name(axis_name)
        decision, _ = _choose_shard(path, leaf, axis, axis_size, thresholds, rule)
        return ShardingRow(path, shape, dtype, decision.dim, decision.reason)

    return [row(path, leaf) for path, leaf in boxed.leaves_with_paths(params)]
