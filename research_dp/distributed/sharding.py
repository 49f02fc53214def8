"""How each array of a tree is sharded: `LeafSharding`, trees of them, and padding.

Arrays whose size does not divide are padded at the end with zeros, in memory only.
"""

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
from research_dp.argument_types import (
    Array,
    Count,
    CountOrZero,
    Leaves,
    Shapes,
    Units,
    path_name,
)
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.shard_rules import Rule, ShardDecision, apply_rule
from research_dp.errors import UsageError

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """How one array is sharded. A leaf (not a pytree) of trees of shardings.

    Attributes:
        path: Names joined by '/'.
        shape: Global shape.
        dtype: Element type.
        dim: The dim that is sharded over mesh axis `fsdp`; None: the array is replicated.
        reason: Why it is replicated; empty if it is sharded.
        axis_size: Number of shards.
        flat: Whether it is sharded as a flat array, padded with zeros, so that any shape can be:
            `split_shape` is then sharded along its last dim.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None
    reason: str
    axis_size: int
    flat: bool = False

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec() if self.dim is None else dim_spec(self.dim)

    @property
    def split_shape(self) -> tuple[int, ...]:
        """Shape of what is sharded: `shape`, or flat and padded, (1, ..., 1, n), of the same rank.

        The rank stays for optimizers that depend on it (weight decay of matrices alone). A scalar
        becomes (n,).
        """
        if not self.flat:
            return self.shape
        padded = -(-math.prod(self.shape) // self.axis_size) * self.axis_size
        return (*(1,) * (len(self.shape) - 1), padded)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local shard."""
        return tuple(
            length // self.axis_size if dim == self.dim else length
            for dim, length in enumerate(self.split_shape)
        )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes_per_device(self) -> int:
        return math.prod(self.local_shape) * self.dtype.itemsize


def shardings_like(parameter: str) -> Leaves:
    """The kind of a tree of `LeafSharding`s at the paths of the tree given as `parameter`."""
    return Leaves(
        lambda x: isinstance(x, LeafSharding), "LeafShardings of infer_sharding", parameter
    )


def dim_spec(dim: int, axis: str | tuple[str, ...] = FSDP_AXIS) -> PartitionSpec:
    """The spec of an array whose dim is sharded over a mesh axis, or over several."""
    return PartitionSpec(*(None,) * dim, axis)


# Kinds of units: a part of a model; layers of one shape, stacked along dim 0; a table whose rows
# are looked up, or multiplied in pieces.
PART, STACK, TABLE = "part", "stack", "table"


def unit_kind(path: str, units: Mapping[str, str] | None) -> str:
    """The kind of unit that a parameter belongs to, by the first name of its path."""
    return (units or {}).get(path.split("/")[0], PART)


def dim_in_use(kind: str, shape: tuple[int, ...], axis_size: int, dim: int) -> int:
    """The dim that suits how a unit is used, among those that the axis size divides.

    Tables are sharded by feature, their last dim, so that rows can be taken piece by piece. Layers
    of a stack are sharded along their first dim: shards are contiguous, and the gathered weight
    already has the matmul's layout. Along other dims XLA transposes it, and its gradient (0.05 GB
    of 0.66 for lm_1b on 64 H100s).
    """
    if kind == TABLE and shape[-1] % axis_size == 0:
        return len(shape) - 1
    if kind == STACK:
        return next(i for i, length in enumerate(shape) if length % axis_size == 0)
    return dim


@checked
def infer_sharding(
    tree: Shapes, rule: Rule | None, axis_size: Count, units: Units | None = None
) -> PyTree:
    """Asks a rule about each array of a tree.

    Args:
        tree: Arrays, or anything with `shape` and `dtype`.
        rule: The rule, or None: everything is replicated.
        axis_size: Size of mesh axis `fsdp`. With 1 everything is replicated.
        units: Kinds of the units at keys at the top of the tree; others are a `PART`. The rule is
            asked about one layer of a `STACK`, whose dim 0 is not sharded. If a decision is
            `movable`, the dim is that of `dim_in_use`.

    Returns:
        A tree of the same structure with a `LeafSharding` at each leaf.

    Raises:
        UsageError: The rule chose a dim that does not exist or that does not divide.
    """

    def decide(path: str, shape: tuple[int, ...]) -> ShardDecision:
        if rule is None:
            return ShardDecision(None, "the strategy shards nothing")
        if axis_size == 1:
            return ShardDecision(None, f"axis {FSDP_AXIS!r} has size 1")
        decision = apply_rule(rule, path, shape, axis_size, name="rule")
        if decision.dim is None or not decision.movable:
            return decision
        return ShardDecision(dim_in_use(unit_kind(path, units), shape, axis_size, decision.dim))

    def one(keys: Any, leaf: Any) -> LeafSharding:
        path, shape = path_name(keys), tuple(leaf.shape)
        stacked = int(unit_kind(path, units) == STACK)
        decision = decide(path, shape[stacked:])
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


def sharding_of_shard(x: Any, dim: int, axis_size: int) -> LeafSharding:
    """The sharding of an array of which `x` is the local shard along `dim`."""
    shape = (*x.shape[:dim], x.shape[dim] * axis_size, *x.shape[dim + 1 :])
    return LeafSharding("", shape, np.dtype(x.dtype), dim, "", axis_size)


def replicated(shardings: PyTree) -> PyTree:
    """The same tree with nothing sharded: how `zero1` keeps its parameters."""
    changes = {"dim": None, "reason": "the strategy keeps parameters replicated", "flat": False}
    return jax.tree.map(lambda p: dataclasses.replace(p, **changes), shardings)


def specs(shardings: PyTree) -> PyTree:
    """The `PartitionSpec` of each leaf."""
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


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
    """Appends zeros along `dim` until its length is a multiple; `x` itself if it is one."""
    dim = _dim_of(x, dim)
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    widths = [(0, missing if d == dim % x.ndim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


@checked
def unpad(x: Array, length: CountOrZero, dim: int = 0) -> jax.Array:
    """The first `length` elements along `dim`; `x` itself if it has no more."""
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
