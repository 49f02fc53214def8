"""Reports which arrays of a tree are sharded, and why the others are not."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import gin
import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisName,
    Count,
    CountOrZero,
    Leaves,
    is_abstract_array,
    is_array_or_number,
)
from research_dp.distributed.boxed import as_name, leaves_with_paths, names_of, value_of
from research_dp.distributed.collectives import flat_axes
from research_dp.distributed.fsdp import choose_shard
from research_dp.distributed.shard_rules import Rule
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError

PyTree = Any
Reported = Annotated[
    PyTree,
    Leaves(
        lambda x: isinstance(x, LeafSharding) or is_array_or_number(x) or is_abstract_array(x),
        "arrays, or LeafShardings",
    ),
]


class ShardingRow(NamedTuple):
    """One array of a tree.

    `dim` is the one that is split over the axis; None: the array is replicated for a `reason`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None
    reason: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        replicated = f"replicated: {self.reason}"
        status = replicated if self.dim is None else f"sharded along dim {self.dim}"
        return f"{self.path} {self.shape} {self.dtype}: {status}"


@gin.register(module="distributed")
@checked
def sharding_report(
    params: Reported,
    axis_name: AxisName | None = None,
    axis_size: Count | None = None,
    min_weight_size: CountOrZero = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: CountOrZero | None = None,
) -> list[ShardingRow]:
    """Lists for each parameter the dim on which it is sharded, or why it is replicated.

    Accepts parameters before and after `shard_params`, optimizer states of either, and trees of
    `LeafSharding`s, which need no further argument; arrays may be abstract. Pure: nothing is logged
    or computed. Arguments are those of `shard_params`, but the axis need not be bound: its size is
    given. To assert that little is replicated:

        rows = sharding_report(params, 'fsdp', 8)
        assert sum(r.nbytes for r in rows if r.dim is None) < 0.02 * sum(r.nbytes for r in rows)

    Returns:
        A row for each leaf, in the tree's order.

    Raises:
        UsageError: The tree has arrays, and axis_name or axis_size is missing.
    """

    def row(path: str, leaf: Any) -> ShardingRow:
        if isinstance(leaf, LeafSharding):
            return ShardingRow(leaf.path, leaf.shape, leaf.dtype, leaf.dim, leaf.reason)
        if axis_name is None or axis_size is None:
            raise UsageError(f"sharding_report: {path} is an array; give axis_name and axis_size.")
        shape, dtype = tuple(np.shape(value_of(leaf))), jax.dtypes.result_type(value_of(leaf))
        axes = set(flat_axes(axis_name))
        for dim, name in enumerate(names_of(leaf)):
            if axes & set(flat_axes(name)):
                return ShardingRow(path, shape, dtype, dim, "")
        thresholds: dict[str, Any] = {"rule": rule, "min_weight_bytes": min_weight_bytes}
        axis = as_name(axis_name)
        decision, _ = choose_shard(path, leaf, axis, axis_size, min_weight_size, **thresholds)
        return ShardingRow(path, shape, dtype, decision.dim, decision.reason)

    return [row(path, leaf) for path, leaf in leaves_with_paths(params)]
