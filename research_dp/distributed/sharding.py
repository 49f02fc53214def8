"""Which dim of an array is sharded (rules), and trees of these decisions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from research_dp import argument_types
from research_dp.argument_checks import checked, fits
from research_dp.argument_types import Count, CountOrZero, Shape, Shapes, described, path_name
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.errors import UsageError
from research_dp.types import PyTree

# Implementations of random keys, by the dtypes that manifests have.
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


class ShardDecision(NamedTuple):
    """What a rule decides about one array."""

    # To shard; None: the array stays replicated. Strategies pad what the devices do not divide.
    dim: int | None
    reason: str = ""  # why it is replicated, or padded
    movable: bool = False  # another dim will do that suits better how the array is used
    parts: int = 1  # of the next dim, in which each slice along `dim` is cut further


# An array that grows by at most so much may be padded for another reason than need.
_MOST_PADDING = 17 / 16

# (path such as 'Dense_0/kernel', shape, axis size) -> ShardDecision.
Rule = Callable[[str, tuple[int, ...], int], ShardDecision]


@checked
def choose_dim(
    shape: Shape,
    axis_size: Count,
    min_weight_size: CountOrZero = 2**18,
    free: tuple[bool, ...] | None = None,
    *,
    pads: bool = False,
) -> ShardDecision:
    """Chooses the largest free dim that the axis size divides; ties go to the higher index.

    The rule of big_vision and xlstm-jax, made stable at any rank. Arrays of at most
    `min_weight_size` elements stay replicated. `free` says for each dim whether it may be taken.
    With `pads`, where the axis size divides none, it is the free dim with the least padding; or, if
    that is much, one whose slices are cut in parts along the next dim, exactly.
    """
    free = (True,) * len(shape) if free is None else free
    if len(free) != len(shape):
        raise UsageError(f"choose_dim.free = {free}: give one True or False a dim of {shape}.")
    size = math.prod(shape)
    if size <= min_weight_size:
        return ShardDecision(None, f"{size} elements, at most min_weight_size {min_weight_size}")
    candidates = [(n, dim) for dim, n in enumerate(shape) if n % axis_size == 0 and free[dim]]
    if candidates:
        return ShardDecision(max(candidates)[1])
    reason = f"no free dim of {shape} is divisible by {axis_size}"
    lengths = [(padded(n, axis_size) / n, -n, -dim) for dim, n in enumerate(shape) if free[dim]]
    if not pads or all(n >= -1 for _, n, _ in lengths):
        return ShardDecision(None, reason)
    least, _, dim = min(lengths)
    if least > _MOST_PADDING:
        for n, i in sorted(((n, i) for i, n in enumerate(shape[:-1])), reverse=True):
            parts = axis_size // max(n, 1)
            if free[i] and free[i + 1] and axis_size == n * parts and shape[i + 1] % parts == 0:
                return ShardDecision(i, reason, parts=parts)
    return ShardDecision(-dim, reason)


def padded(length: int, axis_size: int) -> int:
    """The least multiple of the axis size that is at least `length`."""
    return -(-length // axis_size) * axis_size


@gin.register(module="distributed")
@checked
def largest_dim(
    path: str, shape: Shape, axis_size: Count, *, min_weight_size: CountOrZero = 2**18
) -> ShardDecision:
    """Shards the largest dim that the axis size divides; ties go to the higher index.

    If it divides none, the dim with the least padding. For a model's stacks and tables another dim
    is taken if it suits their use better. A rule for `shard_params.rule`.

    Args:
        path: The parameter's path, e.g. 'dense/kernel'.
        shape: The parameter's shape.
        axis_size: The number of devices that the parameter is split over.
        min_weight_size: Parameters of at most this many elements stay replicated.
    """
    return choose_dim(shape, axis_size, min_weight_size, pads=True)._replace(movable=True)


@gin.register(module="distributed")
@checked
def dim_by_path(
    path: str,
    shape: Shape,
    axis_size: Count,
    *,
    dims: Mapping[str, int | None],
    otherwise: Rule = largest_dim,
) -> ShardDecision:
    """A rule that is given the dim of some parameters, and asks another rule about the rest.

    Args:
        path: The parameter's path, e.g. 'dense/kernel'.
        shape: The parameter's shape.
        axis_size: The number of devices that the parameter is split over.
        dims: Regular expressions that match a full path, each with a dim, counted from the end if
            negative, or None: replicated. The first that matches decides, whatever the size.
        otherwise: The rule for paths that no expression matches.
    """
    for pattern, dim in dims.items():
        if re.fullmatch(pattern, path):
            if dim is None:
                return ShardDecision(None, f"dim_by_path.dims says so for {pattern!r}")
            return ShardDecision(dim + len(shape) if dim < 0 else dim)
    return apply_rule(otherwise, path, shape, axis_size, name="dim_by_path.otherwise")


def apply_rule(
    rule: Rule, path: str, shape: Shape, axis_size: int, *, name: str, axis: Any = FSDP_AXIS
) -> ShardDecision:
    """What a rule decides about one array, checked; messages call the rule `name`."""
    result = rule(path, shape, axis_size)
    if not fits(result, ShardDecision | tuple[int | None] | tuple[int | None, str]):
        raise UsageError(
            f"{name} returned {described(result)} for {path} {shape}: return ShardDecision(dim), "
            "or ShardDecision(None, reason).",
            binding=name,
        )
    dim = result[0]
    if dim is not None and not (0 <= dim < len(shape) and shape[dim] > 0):
        raise UsageError(
            f"{name} chose dim {dim} of {path} {shape}, which {axis_size} devices on axis {axis!r} "
            "cannot share. Return ShardDecision(None, reason) for it.",
            binding=name,
        )
    return ShardDecision(*result)


def padding_or_none(
    decision: ShardDecision, shape: Shape, axis_size: int, *, pads: bool
) -> ShardDecision:
    """The same decision; of a dim that the devices do not divide, why it is padded, or None."""
    dim = decision.dim
    if dim is None or shape[dim] % axis_size == 0:
        return decision
    reason = decision.reason or f"{axis_size} devices do not divide dim {dim} of {shape}"
    if not pads:
        return ShardDecision(None, reason)
    how = f"padded to {padded(shape[dim], axis_size)}"
    if decision.parts > 1:
        how = f"dim {dim + 1} cut in {decision.parts} too"
    return decision._replace(reason=f"{how}: {reason}")


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """How one array is sharded. A leaf (not a pytree) of trees of shardings."""

    path: str  # names joined by '/'
    shape: tuple[int, ...]  # of the unsharded array
    dtype: np.dtype
    dim: int | None  # that is sharded over `axes`; None: the array is replicated
    reason: str  # why it is replicated, or padded; else empty
    axis_size: int  # number of shards
    # Whether it is sharded as a flat array, padded with zeros, so that any shape can be:
    # `split_shape` is then sharded along its last dim.
    flat: bool = False
    axes: tuple[str, ...] = (FSDP_AXIS,)  # mesh axes that dim is sharded over
    multiple: int = 1  # the padded length is a multiple of this too
    parts: int = 1  # as in `ShardDecision`: `split_shape` has them along `dim`
    stacked: bool = False  # whether dim 0 counts the layers of a stack
    table: tuple[int, ...] | None = None  # shape of the table of which these are some rows
    frozen: bool = False  # whether it has no gradient

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of a layer of a stack, or of the unsharded array."""
        return (self.table or self.shape)[self.stacked :]

    @property
    def spec(self) -> PartitionSpec:
        names = self.axes if len(self.axes) > 1 else self.axes[0]
        return PartitionSpec(*() if self.dim is None else (*(None,) * self.dim, names))

    def within(self, shape: tuple[int, ...], axes: tuple[str, ...], shards: int) -> LeafSharding:
        """How a shard of this `shape` is sharded further: one of the array's over these axes."""
        left, size = tuple(a for a in self.axes if a not in axes), self.axis_size // shards
        dim = self.dim if left else None
        parts = 1 if axes else self.parts
        return dataclasses.replace(
            self, shape=shape, dim=dim, axis_size=size, axes=left, parts=parts
        )

    @property
    def split_shape(self) -> tuple[int, ...]:
        """Shape of what is sharded: `shape`, its dim padded with zeros to divide over the devices.

        If each slice along the dim is cut in parts, (..., n * parts, m / parts, ...) of (n, m).
        If it is flat, (1, ..., 1, n); of a scalar (n,). The rank stays for optimizers that depend
        on it (weight decay of matrices alone).
        """
        if self.flat:
            return (*(1,) * (len(self.shape) - 1), padded(math.prod(self.shape), self.axis_size))
        if self.dim is None:
            return self.shape
        shape, multiple = list(self.shape), math.lcm(self.axis_size, self.multiple)
        shape[self.dim] = padded(shape[self.dim] * self.parts, multiple)
        if self.parts > 1:
            shape[self.dim + 1] //= self.parts
        return tuple(shape)

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


def of_one(stacked: LeafSharding) -> LeafSharding:
    """The sharding of one layer of a stack."""
    dim = None if stacked.dim is None else stacked.dim - 1
    return dataclasses.replace(stacked, shape=stacked.shape[1:], dim=dim, stacked=False)


def fitted(x: Any, shape: tuple[int, ...]) -> Any:
    """An array cut, or padded with zeros, to a shape: what is stored to what it means, or back.

    To a shape of as many elements it is reshaped: slices were cut in parts.
    """
    if x.shape == shape:
        return x
    if x.size == math.prod(shape):
        return x.reshape(shape)
    kept = tuple(map(min, x.shape, shape))
    missing = [n - m for n, m in zip(shape, kept, strict=True)]
    if isinstance(x, np.ndarray):
        return np.pad(np.ascontiguousarray(x[tuple(map(slice, kept))]), [(0, n) for n in missing])
    if kept != x.shape:  # in one operation, which policies of remat know
        x = lax.slice(x, (0,) * x.ndim, kept)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, n, 0) for n in missing]) if any(missing) else x


def fitted_tree(tree: PyTree, like: PyTree) -> PyTree:
    """`fitted` for each array of a tree, to the shapes of another's."""
    return jax.tree.map(lambda x, to: fitted(x, to.shape), tree, like)


def cut_shapes(stored: PyTree, logical: PyTree) -> dict[str, tuple[int, ...]]:
    """Shapes without padding, by path, of a tree's arrays that are stored with some."""
    shapes = by_path(logical)
    paths = by_path(stored).items()
    return {path: shapes[path].shape for path, x in paths if x.shape != shapes[path].shape}


def is_sharded(shardings: PyTree) -> bool:
    """Whether an array of a tree of `LeafSharding`s is sharded."""
    return any(p.dim is not None for p in jax.tree.leaves(shardings))


def shardings_like(parameter: str) -> argument_types.Leaves:
    """The kind of a tree of `LeafSharding`s at the paths of the tree given as `parameter`."""
    description = "LeafShardings of infer_sharding"
    return argument_types.Leaves(lambda x: isinstance(x, LeafSharding), description, parameter)


# Kinds of units: a part of a model; one that is used several times; stacked layers of one shape; a
# table whose rows are looked up.
PART, SHARED, STACK, TABLE = "part", "shared", "stack", "table"


def unit_of(path: str, units: Collection[str]) -> str | None:
    """The unit that a parameter belongs to: the longest of the paths that its own begins with."""
    names = path.split("/")
    prefixes = ("/".join(names[:i]) for i in range(len(names), 0, -1))
    return next((prefix for prefix in prefixes if prefix in units), None)


def unit_kind(path: str, units: Mapping[str, str] | None) -> str:
    """The kind of unit that a parameter belongs to."""
    unit = unit_of(path, units or {})
    return PART if unit is None else (units or {})[unit]


def decision_in_use(
    decision: ShardDecision, kind: str, shape: tuple[int, ...], axis_size: int
) -> ShardDecision:
    """The same decision; if it is movable, with the dim that suits how the unit is used.

    Tables are sharded by feature, their last dim, so that rows can be taken piece by piece. Layers
    of a stack are sharded along their first dim: shards are contiguous, and the gathered weight
    already has the matmul's layout. Along other dims XLA transposes it, and its gradient. Where a
    dim must be padded, so is one that suits, if that adds at most a sixteenth.
    """
    if decision.dim is None or not decision.movable:
        return decision
    dims = {TABLE: range(len(shape))[-1:], STACK: range(len(shape))}.get(kind, range(0))
    most = 1.0 if shape[decision.dim] % axis_size == 0 else _MOST_PADDING
    for dim in dims:
        if dim == decision.dim:
            break
        if (length := padded(shape[dim], axis_size)) <= most * shape[dim]:
            return ShardDecision(dim, f"padded to {length}" if length > shape[dim] else "")
    return decision


@checked
def infer_sharding(
    tree: Shapes, rule: Rule | None, axis_size: Count, units: argument_types.Units | None = None
) -> PyTree:
    """Asks a rule about each array of a tree; returns a tree of `LeafSharding`s.

    An array whose dim the devices do not divide is replicated: strategies alone pad. Raises
    UsageError if the rule chose a dim that does not exist.

    Args:
        tree: Arrays, or anything with `shape` and `dtype`.
        rule: None: everything is replicated.
        axis_size: Size of mesh axis `fsdp`. With 1 everything is replicated.
        units: Kinds of the units at paths of the tree; others are a `PART`. The rule is asked about
            one layer of a `STACK`, whose dim 0 is not sharded.
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
            decision = padding_or_none(decision, shape[stacked:], axis_size, pads=False)
        decision = decision_in_use(decision, kind, shape[stacked:], axis_size)
        dim = None if decision.dim is None else decision.dim + stacked
        dtype = np.dtype(leaf.dtype)
        return LeafSharding(
            path, shape, dtype, dim, decision.reason, axis_size, stacked=bool(stacked)
        )

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


class Parted(NamedTuple):
    """A tree in two, each with None in place of what the other has."""

    trained: PyTree
    frozen: PyTree


def parted(tree: PyTree, shardings: PyTree) -> Parted:
    """The arrays that have gradients, and the frozen ones; `tree` may be `shardings` itself."""
    trained = jax.tree.map(lambda p, x: None if p.frozen else x, shardings, tree)
    frozen = jax.tree.map(lambda p, x: x if p.frozen else None, shardings, tree)
    return Parted(trained, frozen)


def of_parts(parts: Parted, shardings: PyTree) -> PyTree:
    """The tree again."""
    return jax.tree.map(lambda p, *pair: pair[p.frozen], shardings, *parts)


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path name, sorted; UsageError if two have the same name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name in named:
            raise UsageError(f"two arrays of one tree have the path {name!r}; rename one.")
        named[name] = leaf
    return dict(sorted(named.items()))


def is_key(x: Any) -> bool:
    """Whether it is an array of random keys of one of JAX's implementations, or an abstract one."""
    return str(getattr(x, "dtype", "")) in _KEYS


def key_data(tree: PyTree) -> PyTree:
    """The tree with random keys as arrays of uint32."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def as_stored(tree: PyTree) -> PyTree:
    """The arrays that stand for those of a tree in a file: keys as their data, none empty."""
    return jax.tree.map(
        lambda x: x if x.size else jnp.pad(x, [(0, not n) for n in x.shape]), key_data(tree)
    )


def from_stored(x: Any, like: Any) -> Any:
    """The array for which `x` stands; `like` has its shape, dtype and perhaps sharding."""
    x = jax.random.wrap_key_data(x, impl=_KEYS[str(like.dtype)]) if is_key(like) else x
    sharding = getattr(like, "sharding", None)
    return jnp.empty(like.shape, x.dtype, device=sharding) if 0 in like.shape else x
