"""Strategies: a recipe of four functions, the engines that compile it, the functions themselves.

Importing this package registers all of them with gin.
"""

from research_dp.deterministic import sum as _tree
from research_dp.distributed import mesh as _mesh
from research_dp.distributed import sharding as _layout
from research_dp.distributed.transports import tpu_torus as _torus
from research_dp.strategies.engines import compiled, mapped, pmapped
from research_dp.strategies.slots import (
    average_gradients,
    gather_shards,
    scatter_gradients,
    update_local,
    update_slices,
)
from research_dp.strategies.strategy import (
    NONFINITE,
    SKIPPED,
    PlacedBatch,
    StateShardings,
    Strategy,
    StrategyConfig,
    TrainSpec,
    TrainState,
    data_parallel,
)

largest_dim = _layout.largest_dim
make_mesh = _mesh.make_mesh
one_device_mesh = _mesh.one_device_mesh
torus_reduction = _torus.torus_reduction
tree_reduction = _tree.tree_reduction

__all__ = [
    "NONFINITE",
    "SKIPPED",
    "PlacedBatch",
    "StateShardings",
    "Strategy",
    "StrategyConfig",
    "TrainSpec",
    "TrainState",
    "average_gradients",
    "compiled",
    "data_parallel",
    "gather_shards",
    "largest_dim",
    "make_mesh",
    "mapped",
    "one_device_mesh",
    "pmapped",
    "scatter_gradients",
    "torus_reduction",
    "tree_reduction",
    "update_local",
    "update_slices",
]
