"""Which dim of a parameter is sharded, or none, and why.

One rule decides for everything that must agree: the shards that a step gathers, the shardings of
the compiled engine, the optimizer state, and what is read back from a checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gin

from research_dp.argument_checks import checked, fits
from research_dp.argument_types import Count, CountOrZero, Shape, described
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.errors import UsageError


class ShardDecision(NamedTuple):
    """What a rule decides about one array.

    The dim to shard, or None: it stays replicated for a `reason`. `movable`: another dim will do
    that suits better how the array is used.
    """

    dim: int | None
    reason: str = ""
    movable: bool = False


# (path, shape, axis size) -> ShardDecision. `path` is e.g. 'Dense_0/kernel'.
Rule = Callable[[str, tuple[int, ...], int], ShardDecision]


@checked
def choose_dim(
    shape: Shape,
    axis_size: Count,
    min_weight_size: CountOrZero = 2**18,
    free: tuple[bool, ...] | None = None,
) -> ShardDecision:
    """Chooses the largest free dim that the axis size divides; ties go to the higher index.

    The rule of big_vision and xlstm-jax, made stable at any rank. Arrays of at most
    `min_weight_size` elements stay replicated. `free` says for each dim whether it may be taken,
    because no axis splits it yet; None: all may.
    """
    if free is not None and len(free) != len(shape):
        raise UsageError(f"choose_dim.free = {free}: give one True or False a dim of {shape}.")
    size = math.prod(shape)
    if size <= min_weight_size:
        return ShardDecision(None, f"{size} elements, at most min_weight_size {min_weight_size}")
    candidates = [
        dim
        for dim, length in enumerate(shape)
        if length % axis_size == 0 and (free is None or free[dim])
    ]
    if not candidates:
        return ShardDecision(None, f"no free dim of {shape} is divisible by {axis_size}")
    return ShardDecision(max(candidates, key=lambda dim: (shape[dim], dim)), movable=True)


@gin.register(module="distributed")
@checked
def largest_dim(
    path: str, shape: Shape, axis_size: Count, *, min_weight_size: CountOrZero = 2**18
) -> ShardDecision:
    """The rule of `choose_dim`, for `shard_params.rule` and `dim_by_path.otherwise`.

    Parameters of at most `min_weight_size` elements stay replicated.
    """
    del path
    return choose_dim(shape, axis_size, min_weight_size)


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
        path: Path of the parameter.
        shape: Its shape.
        axis_size: Number of shards.
        dims: Regular expressions that match a full path -> dim, counted from the end if negative,
            or None: replicated. The first that matches decides, whatever the size.
        otherwise: The rule for paths that none matches.
    """
    for pattern, dim in dims.items():
        if re.fullmatch(pattern, path):
            if dim is None:
                return ShardDecision(None, f"dim_by_path.dims says so for {pattern!r}")
            return ShardDecision(dim + len(shape) if dim < 0 else dim)
    return apply_rule(otherwise, path, shape, axis_size, name="dim_by_path.otherwise")


def apply_rule(
    rule: Rule,
    path: str,
    shape: tuple[int, ...],
    axis_size: int,
    *,
    name: str,
    axis: Any = FSDP_AXIS,
) -> ShardDecision:
    """What a rule decides about one array, checked; messages call it `name`.

    Raises UsageError, with the path, the shape and the axis size, if it returned no
    `ShardDecision`, or a dim that does not exist or that the devices do not divide.
    """
    result = rule(path, shape, axis_size)
    if not fits(result, ShardDecision | tuple[int | None] | tuple[int | None, str]):
        raise UsageError(
            f"{name} returned {described(result)} for {path} {shape}: return ShardDecision(dim), "
            "or ShardDecision(None, reason).",
            binding=name,
        )
    decision = ShardDecision(*result)
    dim = decision.dim
    if dim is not None and not (0 <= dim < len(shape) and shape[dim] % axis_size == 0):
        raise UsageError(
            f"{name} chose dim {dim} of {path} {shape}, which {axis_size} devices on axis {axis!r} "
            "do not divide. Return ShardDecision(None, reason) for it.",
            binding=name,
        )
    return decision
