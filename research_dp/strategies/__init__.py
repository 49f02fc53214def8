# ruff: noqa: F401
"""Strategies: a configuration of four slots, the engines that compile it, the functions themselves.

Importing this package registers all of them with gin.
"""

from research_dp.distributed.codecs import compression, fp8, int4, int8, sign, top_k
from research_dp.distributed.fsdp import gather_params, shard_params
from research_dp.distributed.gradient_sync import scatter_gradients, sync_gradients
from research_dp.distributed.mesh import make_mesh, one_device_mesh
from research_dp.distributed.optimizer import apply_gradients, sign_descent
from research_dp.distributed.sharding import dim_by_path, largest_dim
from research_dp.distributed.tpu_torus import torus_reduction
from research_dp.distributed.update import fsdp_apply_gradients
from research_dp.strategies.engines import compiled, mapped
from research_dp.strategies.outer import Outer, average, nesterov_outer
from research_dp.strategies.power_sgd import PowerSGD
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
from research_dp.strategies.tuning import tuning
