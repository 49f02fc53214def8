"""Flax Linen module classes whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import flax.linen as nn

from research_dp.argument_checks import checked
from research_dp.argument_types import AxisName, CountOrZero, Dtype, Limit
from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.fsdp import gather_params, shard_params
from research_dp.distributed.sharding import Rule
from research_dp.errors import check_methods
from research_dp.types import PyTree

_TARGET = "a Linen module class, or a function of a module"
Target = Annotated[Any, Limit(lambda x: callable(x) and not isinstance(x, nn.Module), _TARGET)]


@checked
def shard_module_params(
    target: Target,
    axis_name: AxisName,
    min_weight_size: CountOrZero = 2**18,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    rule: Rule | None = None,
    min_weight_bytes: CountOrZero | None = None,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
    methods: Sequence[str] = ("__call__",),
) -> Any:
    """A module class whose parameters are sharded by `init`, and gathered when it is called.

    As in xlstm-jax, except that the class keeps the name of `target` (there: `Map_variables...`),
    so that paths and initial values are those of `target`. Other collections are not sharded.

    Every call gathers. To save memory, wrap the parts of a model (its blocks), and put `nn.remat`
    around the result, so that the backward pass gathers again. `nn.scan` needs
    `metadata_params={nn.PARTITION_NAME: None}`. `init` inside mapped axes makes the full parameters
    on each device before it shards them; `init_sharded` does not.

    `target` is a class, or a function of (module, ...). `axis_name` is bound where the module is
    used. `min_weight_size`, `rule` (its paths start at the wrapped module) and `min_weight_bytes`
    are those of `shard_params`; the dtypes, `pre_divide` and `reduction` are those of
    `gather_params`. `methods` names the methods that see full parameters, e.g. also `attend` of
    `nn.Embed`; UsageError if a class lacks one.
    """
    thresholds: dict[str, Any] = {"rule": rule, "min_weight_bytes": min_weight_bytes}
    sums: dict[str, Any] = {"pre_divide": pre_divide, "reduction": reduction}

    def gather(shards: PyTree) -> PyTree:
        return gather_params(shards, axis_name, gather_dtype, grad_scatter_dtype, **sums)

    def shard(params: PyTree) -> PyTree:
        return shard_params(params, axis_name, min_weight_size, **thresholds)

    transforms: dict[str, Any] = {"trans_in_fn": gather, "trans_out_fn": shard, "mutable": True}
    if not isinstance(target, type):
        return nn.map_variables(target, "params", **transforms, methods=None)
    check_methods("shard_module_params", target, methods)
    sharded = nn.map_variables(target, "params", **transforms, methods=list(methods))
    # Linen names modules after their class, and the initial values depend on the name.
    sharded.__name__, sharded.__qualname__ = target.__name__, target.__qualname__
    return sharded
