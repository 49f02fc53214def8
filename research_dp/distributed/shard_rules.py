"""Which dim of a parameter is sharded, or none, and why: one rule for all that must agree."""

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
    """What a rule decides about one array."""

    dim: int | None  # to shard; None: the array stays replicated
    reason: str = ""  # why it does
    movable: bool = False  # another dim will do that suits better how the array is used


# (path such as 'Dense_0/kernel', shape, axis size) -> ShardDecision.
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
    `min_weight_size` elements stay replicated. `free` says for each dim whether it may be taken.
    """
    free = (True,) * len(shape) if free is None else free
    if len(free) != len(shape):
        raise UsageError(f"choose_dim.free = {free}: give one True or False a dim of {shape}.")
    size = math.prod(shape)
    if size <= min_weight_size:
        return ShardDecision(None, f"{size} elements, at most min_weight_size {min_weight_size}")
    candidates = [(n, dim) for dim, n in enumerate(shape) if n % axis_size == 0 and free[dim]]
    if not candidates:
        return ShardDecision(None, f"no free dim of {shape} is divisible by {axis_size}")
    return ShardDecision(max(candidates)[1])


@gin.register(module="distributed")
@checked
def largest_dim(
    path: str, shape: Shape, axis_size: Count, *, min_weight_size: CountOrZero = 2**18
) -> ShardDecision:
    """Shards the largest dim that the axis size divides; ties go to the higher index.

    For a model's stacks and tables another dim is taken if it suits their use better. A rule for
    `shard_params.rule`.

    Args:
        path: The parameter's path, e.g. 'dense/kernel'.
        shape: The parameter's shape.
        axis_size: The number of devices that the parameter is split over.
        min_weight_size: Parameters of at most this many elements stay replicated.
    """
    return choose_dim(shape, axis_size, min_weight_size)._replace(movable=True)


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
    if dim is not None and not (0 <= dim < len(shape) and shape[dim] % axis_size == 0):
        raise UsageError(
            f"{name} chose dim {dim} of {path} {shape}, which {axis_size} devices on axis {axis!r} "
            "do not divide. Return ShardDecision(None, reason) for it.",
            binding=name,
        )
    return ShardDecision(*result)
