"""Parameters sharded, gathered, and their gradients averaged, by the names in their boxes.

For code inside mapped axes (`shard_map`, `pmap`, `vmap(axis_name=...)`), on trees of arrays and
`nn.Partitioned`s (Linen) or of `nnx.Variable`s. The functions have the names, arguments and
behaviour of xlstm-jax's; what they add is keyword-only.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import gin
import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisName,
    AxisNames,
    CountOrZero,
    Dtype,
    Number,
    Numbers,
    Placeable,
    is_array_or_number,
)
from research_dp.distributed import collectives
from research_dp.distributed.boxed import (
    as_name,
    map_leaves,
    names_of,
    renamed,
    split_over,
    value_of,
    with_value,
)
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, flat_axes
from research_dp.distributed.gradient_means import (
    averaged_axes,
    mean_gradient,
    refuse_divided_twice,
)
from research_dp.distributed.sharding import Rule, ShardDecision, ask, choose_dim
from research_dp.distributed.vma import is_replicated
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
    """What `shard_params` does with one leaf: (the dim or the reason, whether to warn).

    Arguments are those of `shard_params`; `leaf` may be abstract.

    Raises:
        UsageError: The rule chose a dim that does not exist, does not divide or is taken.
    """
    names, shape = names_of(leaf), tuple(np.shape(value_of(leaf)))
    held = split_over(leaf)
    if set(held) & set(flat_axes(axis_name)):
        return ShardDecision(None, f"already sharded over {held}"), True
    free = tuple(name is None for name in names[: len(shape)])
    if rule is not None:
        choice = ask(rule, path, shape, axis_size, axis=axis_name, chooser="rule")
        if choice.dim is not None and not free[choice.dim]:
            raise UsageError(f"rule chose dim {choice.dim} of {path} {shape}, which {held} splits.")
        return choice, False
    limit = min_weight_size
    if min_weight_bytes is not None:
        limit = min_weight_bytes // jax.dtypes.result_type(value_of(leaf)).itemsize
    choice = choose_dim(shape, axis_size, limit, free)
    return choice, choice.dim is None and np.prod(shape, dtype=int) > limit


@gin.register(module="distributed")
@checked
@jax.named_scope("shard_params")
def shard_params(
    params: Placeable,
    axis_name: AxisName,
    min_weight_size: CountOrZero = 2**18,
    *,
    rule: Rule | None = None,
    min_weight_bytes: CountOrZero | None = None,
) -> PyTree:
    """Shards parameters over a mesh axis: each device keeps its block, in a box.

    As in xlstm-jax: the largest dim that the axis size divides and that no axis splits yet, ties
    to the higher index (at any rank; upstream's choice among equals of rank 4 depends on the CPU).
    A leaf that no dim suits stays as it is, and one warning a call names them all.

    Args:
        params: Arrays and boxes, as this device sees them. Random keys are returned as they are.
        axis_name: The mesh axis, bound here, or several as one.
        min_weight_size: Parameters of at most this many elements stay whole.
        rule: Chooses each dim instead: (path, shape, axis size) -> `ShardDecision`; thresholds are
            then its own.
        min_weight_bytes: A threshold in bytes, instead of `min_weight_size`.

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
    axis_name = as_name(axis_name)
    devices = axes_size(flat_axes(axis_name))
    kept: list[str] = []

    def one(path: str, leaf: Any) -> Any:
        choice, warn = choose_shard(
            path,
            leaf,
            axis_name,
            devices,
            min_weight_size,
            rule=rule,
            min_weight_bytes=min_weight_bytes,
        )
        if choice.dim is None:
            if warn:
                kept.append(f"{path} {np.shape(value_of(leaf))} ({choice.reason})")
            return leaf
        names, x = names_of(leaf), value_of(leaf)
        if not is_array_or_number(x):
            raise UsageError(
                f"shard_params: {path} {np.shape(x)} are random keys, which cannot be gathered. "
                "Keep them out of params, or raise min_weight_size."
            )
        block = collectives.shard(x, choice.dim, axis_name)
        return renamed(leaf, block, _with_name(names, choice.dim, axis_name))

    sharded = map_leaves(one, params)
    if kept:
        _log.warning(
            "not sharded over %r of size %d: %s; sharding_report lists all",
            axis_name,
            devices,
            ", ".join(kept),
        )
    return sharded


@gin.register(module="distributed")
@checked
@jax.named_scope("gather_params")
def gather_params(
    params: Placeable,
    axis_name: AxisName,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
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
        reduction: How gradients are summed.

    Returns:
        The same tree. A gathered leaf is a bare array, or a `nn.Partitioned` if another axis still
        splits it; the others are the same objects as before.

    Raises:
        UsageError: A dtype is not a floating-point dtype, or an axis is named twice.
        NameError: The axis is not bound.
    """
    axis_name = as_name(axis_name)
    gather = functools.partial(
        collectives.gather_array_with_mean_grads,
        axis_name=axis_name,
        gather_dtype=gather_dtype,
        grad_scatter_dtype=grad_scatter_dtype,
        pre_divide=pre_divide,
        reduction=reduction,
    )

    def one(path: str, leaf: Any) -> Any:
        names = names_of(leaf)
        if axis_name not in names:
            return leaf
        dim = names.index(axis_name)
        try:
            whole = gather(value_of(leaf), dim)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        return renamed(leaf, whole, _with_name(names, dim, None))

    return map_leaves(one, params)


@gin.register(module="distributed")
@checked
@jax.named_scope("sync_gradients")
def sync_gradients(
    grads: Numbers,
    axis_names: AxisNames,
    *,
    dtype: Dtype | None = None,
    pre_divide: bool = False,
    loss: Number | None = None,
    reduction: Reduction = PLAIN,
) -> PyTree:
    """Averages gradients over the mesh axes that their parameters are replicated on.

    As in xlstm-jax; and right under `shard_map(check_vma=True)` too, where autodiff has summed the
    gradients of replicated parameters already (`mean_gradient`). Types do not tell such a sum from
    an average, so `loss` is needed there. What this function returned stays as it is.

    Args:
        grads: Gradients of each device's own loss, a mean over its own examples. Those of sharded
            parameters are shards of the mean over the axes that split them (`gather_params`).
        axis_names: The mesh axes to average over; one name, or several.
        dtype: dtype in which they are summed; None: each gradient's own. Complex ones keep theirs.
        pre_divide: Divide before the sum, for float16.
        loss: The loss that was differentiated, as `jax.value_and_grad` returns it with `grads`. Its
            type says, and gradients do not, whether it was averaged over an axis before, or not
            split over it: then autodiff has not summed gradients over that axis, and nothing is
            divided. To be given under `check_vma=True`, unless parameters vary along the axes.
        reduction: How they are summed.

    Returns:
        The same tree, dtypes kept (integers become float32); boxes keep names, type and mesh.

    Raises:
        UsageError: `loss` was averaged before over an axis that splits a parameter, whose gradient
            was divided then; `dtype` and `pre_divide` come too late, for autodiff has summed; or a
            leaf is the same along an axis, by its type, and there is no `loss`.
        NameError: An axis is not bound.
    """
    axes = flat_axes(axis_names)
    axes_size(axes)  # names an axis that is not bound
    done = averaged_axes(loss, axes)

    def one(path: str, leaf: Any) -> Any:
        held = split_over(leaf)
        twice = [a for a in done if a in held or not is_replicated(value_of(leaf), a)]
        refuse_divided_twice(path, np.shape(value_of(leaf)), twice)
        over = tuple(axis for axis in axes if axis not in (*held, *done))
        if not over:
            return leaf
        mean = mean_gradient(
            value_of(leaf),
            over,
            reduction,
            dtype,
            pre_divide=pre_divide,
            path=path,
            fresh=loss is not None,
        )
        return with_value(leaf, mean)

    return map_leaves(one, grads)


def _with_name(names: tuple[Any, ...], dim: int, name: Any) -> tuple[Any, ...]:
    return (*names[:dim], name, *names[dim + 1 :])
