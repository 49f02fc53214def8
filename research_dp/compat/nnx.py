"""Flax NNX module classes whose parameters are sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from flax import nnx

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.fsdp import gather_params, shard_params
from research_dp.distributed.sharding import Rule
from research_dp.errors import check_methods


@checked
def shard_nnx_module_params(
    target: Annotated[type[nnx.Module], "a class of nnx.Module"],
    axis_name: types.AxisName,
    min_weight_size: types.CountOrZero = 2**18,
    gather_dtype: types.Dtype | None = None,
    grad_scatter_dtype: types.Dtype | None = None,
    *,
    rule: Rule | None = None,
    min_weight_bytes: types.CountOrZero | None = None,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
    methods: Sequence[str] = ("__call__",),
) -> Any:
    """An NNX module class whose parameters are sharded, and gathered when it is called.

    The counterpart of `shard_module_params`, which describes the options, and why to wrap the parts
    of a model, and to call them under `nnx.remat`. An instance, made inside mapped axes (or by
    `init_sharded`), has shards in its `nnx.Param`s, and the axis in their `out_sharding`, so that
    `nnx.get_partition_spec` works. Their gradients are shards of the mean; `sync_gradients` takes
    them as they are.

    `methods` run on a copy with full parameters: changes of other variables are kept, changes of
    parameters and attributes are not. Other methods see shards. Under `nnx.scan` and `nnx.vmap`
    with a partition name, give `transform_metadata={nnx.PARTITION_NAME: None}`.
    """
    check_methods("shard_nnx_module_params", target, methods)
    thresholds: dict[str, Any] = {"rule": rule, "min_weight_bytes": min_weight_bytes}
    dtypes = gather_dtype, grad_scatter_dtype

    class Sharded(target):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            params = nnx.state(self, nnx.Param)
            nnx.update(self, shard_params(params, axis_name, min_weight_size, **thresholds))

    def with_gathered_params(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            graphdef, shards, others = nnx.split(self, nnx.Param, ...)  # type: ignore[misc]
            params = gather_params(
                shards, axis_name, *dtypes, pre_divide=pre_divide, reduction=reduction
            )
            module = nnx.merge(graphdef, params, others)
            result = getattr(super(Sharded, module), name)(*args, **kwargs)
            nnx.update(self, changed(others, nnx.state(module, nnx.Not(nnx.Param))))
            return result

        return functools.wraps(getattr(target, name))(method)

    for name in methods:
        setattr(Sharded, name, with_gathered_params(name))
    Sharded.__name__, Sharded.__qualname__ = target.__name__, target.__qualname__
    Sharded.__module__, Sharded.__doc__ = target.__module__, target.__doc__
    return Sharded


def changed(before: nnx.State, after: nnx.State) -> nnx.State:
    """The variables of `after` that are new or contain another array than before."""
    old = dict(nnx.to_flat_state(before))
    return nnx.from_flat_state(
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if path not in old or old[path].get_value() is not variable.get_value()
    )
