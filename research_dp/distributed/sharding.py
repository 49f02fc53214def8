"""How each array of a tree is sharded: `LeafSharding`, trees of them, and padding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, Count, CountOrZero, Leaves, Shapes, Units, path_name
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.shard_rules import Rule, ShardDecision, apply_rule
from research_dp.errors import UsageError
from research_dp.types import PyTree


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """How one array is sharded. A leaf (not a pytree) of trees of shardings."""

    path: str  # names joined by '/'
    shape: tuple[int, ...]  # of the unsharded array
    dtype: np.dtype
    dim: int | None  # that is sharded over mesh axis `fsdp`; None: the array is replicated
    reason: str  # why it is replicated; empty if it is sharded
    axis_size: int  # number of shards
    # Whether it is sharded as a flat array, padded with zeros, so that any shape can be:
    # `split_shape` is then sharded along its last dim.
    flat: bool = False

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*() if self.dim is None else (*(None,) * self.dim, FSDP_AXIS))

    @property
    def split_shape(self) -> tuple[int, ...]:
        """Shape of what is sharded: `shape`, or flat and padded, (1, ..., 1, n); of a scalar (n,).

        The rank stays for optimizers that depend on it (weight decay of matrices alone).
        """
        if not self.flat:
            return self.shape
        padded = -(-math.prod(self.shape) // self.axis_size) * self.axis_size
        return (*(1,) * (len(self.shape) - 1), padded)

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.split_shape)
        if self.dim is not None:
            shape[self.dim] //= self.axis_size
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes_per_device(self) -> int:
        return math.prod(self.local_shape) * self.dtype.itemsize


def shardings_like(parameter: str) -> Leaves:
    """The kind of a tree of `LeafSharding`s at the paths of the tree given as `parameter`."""
    description = "LeafShardings of infer_sharding"
    return Leaves(lambda x: isinstance(x, LeafSharding), description, parameter)


# Kinds of units: a part of a model; stacked layers of one shape; a table whose rows are looked up.
PART, STACK, TABLE = "part", "stack", "table"


def unit_kind(path: str, units: Mapping[str, str] | None) -> str:
    """The kind of unit that a parameter belongs to, by the first name of its path."""
    return (units or {}).get(path.split("/")[0], PART)


def decision_in_use(
    decision: ShardDecision, kind: str, shape: tuple[int, ...], axis_size: int
) -> ShardDecision:
    """The same decision; if it is movable, with the dim that suits how the unit is used.

    Tables are sharded by feature, their last dim, so that rows can be taken piece by piece. Layers
    of a stack are sharded along their first dim: shards are contiguous, and the gathered weight
    already has the matmul's layout. Along other dims XLA transposes it, and its gradient.
    """
    if decision.dim is None or not decision.movable:
        return decision
    if kind == TABLE and shape[-1] % axis_size == 0:
        return ShardDecision(len(shape) - 1)
    dims = (i for i, length in enumerate(shape) if length % axis_size == 0)
    return ShardDecision(next(dims) if kind == STACK else decision.dim)


@checked
def infer_sharding(
    tree: Shapes, rule: Rule | None, axis_size: Count, units: Units | None = None
) -> PyTree:
    """Asks a rule about each array of a tree; returns a tree of `LeafSharding`s.

    Raises UsageError if the rule chose a dim that does not exist, or that does not divide.

    Args:
        tree: Arrays, or anything with `shape` and `dtype`.
        rule: None: everything is replicated.
        axis_size: Size of mesh axis `fsdp`. With 1 everything is replicated.
        units: Kinds of the units at keys at the top of the tree; others are a `PART`. The rule is
            asked about one layer of a `STACK`, whose dim 0 is not sharded.
    """

    def one(keys: Any, leaf: Any) -> LeafSharding:
        path, shape = path_name(keys), tuple(leaf.shape)
        kind = unit_kind(path, units)
        stacked = int(kind == STACK)
        if rule is None:
            decision = ShardDecision(None, "the strategy shards nothing")
        elif axis_size == 1:
            decision = ShardDecision(None, f"axis {FSDP_AXIS!r} has size 1")
        else:
            decision = apply_rule(rule, path, shape[stacked:], axis_size, name="rule")
        decision = decision_in_use(decision, kind, shape[stacked:], axis_size)
        dim = None if decision.dim is None else decision.dim + stacked
        return LeafSharding(path, shape, np.dtype(leaf.dtype), dim, decision.reason, axis_size)

    return jax.tree_util.tree_map_with_path(one, tree)


@checked
def infer_flat_sharding(tree: Shapes, shards: Count) -> PyTree:
    """Shards every array as a flat one, padded, whatever its shape. One shard: replicated."""

    def one(keys: Any, leaf: Any) -> LeafSharding:
        path, shape, dtype = path_name(keys), tuple(leaf.shape), np.dtype(leaf.dtype)
        if shards == 1:
            return LeafSharding(path, shape, dtype, None, "there is one shard", 1)
        return LeafSharding(path, shape, dtype, max(len(shape) - 1, 0), "", shards, flat=True)

    return jax.tree_util.tree_map_with_path(one, tree)


def replicated(shardings: PyTree) -> PyTree:
    """The same tree with nothing sharded: how `zero1` keeps its parameters."""
    changes = {"dim": None, "reason": "the strategy keeps parameters replicated", "flat": False}
    return jax.tree.map(lambda p: dataclasses.replace(p, **changes), shardings)


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path name, sorted; UsageError if two have the same name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name in named:
            raise UsageError(f"two arrays of one tree have the path {name!r}; rename one.")
        named[name] = leaf
    return dict(sorted(named.items()))


@checked
def pad_to_multiple(x: Array, multiple: Count, dim: int = 0) -> jax.Array:
    """Appends zeros along `dim` until its length is a multiple; `x` itself if it is one.

    Raises UsageError if `x` has no such dim.
    """
    dim = _dim_of(x, dim)
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    widths = [(0, missing if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


@checked
def unpad(x: Array, length: CountOrZero, dim: int = 0) -> jax.Array:
    """The first `length` elements along `dim`; `x` itself if it has no more.

    Raises UsageError if `x` has no such dim, or fewer elements along it.
    """
    dim = _dim_of(x, dim)
    if length > x.shape[dim]:
        raise UsageError(f"unpad.length = {length} is more than dim {dim} of {x.shape} has.")
    return x if x.shape[dim] == length else lax.slice_in_dim(x, 0, length, axis=dim)


def _dim_of(x: jax.Array, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"dim = {dim}: an array of shape {x.shape} has no such dim.")
    return dim % x.ndim


def flatten_padded(x: jax.Array, multiple: int) -> jax.Array:
    """An array of any shape as a flat one, in row-major order, padded to a multiple."""
    return pad_to_multiple(lax.reshape(x, (x.size,)), multiple)


def unflatten(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that `flatten_padded` made flat; `x` may have any shape itself."""
    return lax.reshape(unpad(lax.reshape(x, (x.size,)), math.prod(shape)), shape)
