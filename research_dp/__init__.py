"""research_dp: data-parallel training in JAX, the strategy chosen by a gin file.

The functions that strategies are made of; the training command is `python -m research_dp.train`.
"""

import ast
import functools
import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from research_dp.commands.evaluate import evaluate
    from research_dp.commands.functions import DryRun, certify, dry_run, plan, strategy
    from research_dp.commands.run import run
    from research_dp.commands.saved_run import LoadedModel, export, load
    from research_dp.compat.artifex import (
        DataParallel,
        place_nnx_state_on_shards,
        spmd_train_step,
    )
    from research_dp.compat.datarax import (
        create_data_parallel_sharding,
        data_parallel_train_step,
        place_batch_on_shards,
        place_model_state_on_shards,
        reduce_gradient_tree,
        reduce_gradients_across_devices,
    )
    from research_dp.compat.device_mesh import DeviceMeshManager, MeshRules, data_parallel_rules
    from research_dp.compat.linen import shard_module_params
    from research_dp.compat.nnx import shard_nnx_module_params
    from research_dp.data.own_data import from_arrays, from_source
    from research_dp.distributed.buckets import all_mean_tree, gather_tree, scatter_mean_tree
    from research_dp.distributed.collectives import PLAIN, Reduction, all_mean, scatter_mean
    from research_dp.distributed.differentiable_gather import gather_array_with_mean_grads
    from research_dp.distributed.fsdp import (
        ShardingRow,
        gather_params,
        init_sharded,
        shard_params,
        sharding_report,
    )
    from research_dp.distributed.gradient_sync import (
        scatter_gradients,
        sync_gradients,
        weighted_loss,
        weighted_mean,
    )
    from research_dp.distributed.linen import linen_functions
    from research_dp.distributed.mesh import make_mesh, one_device_mesh
    from research_dp.distributed.microbatch import accumulate_gradients
    from research_dp.distributed.nnx import nnx_functions
    from research_dp.distributed.norms import (
        clip_by_global_norm,
        clip_by_global_norm_sharded,
        global_norm,
        sharded_global_norm,
    )
    from research_dp.distributed.optimizer import apply_gradients
    from research_dp.distributed.shard_rules import (
        ShardDecision,
        choose_dim,
        dim_by_path,
        largest_dim,
    )
    from research_dp.distributed.sharded_optimizer import (
        OptaxAdapter,
        slice_specs,
        slice_state,
        unsharded_state,
    )
    from research_dp.distributed.sharding import (
        LeafSharding,
        infer_sharding,
        pad_to_multiple,
        unpad,
    )
    from research_dp.distributed.update import fsdp_apply_gradients, fsdp_update
    from research_dp.errors import UsageError
    from research_dp.models.from_module import from_linen, from_nnx
    from research_dp.models.image_classifiers import image_classifier
    from research_dp.models.layers import dropout
    from research_dp.strategies import (
        Strategy,
        StrategyConfig,
        TrainSpec,
        TrainState,
        compiled,
        data_parallel,
        mapped,
        pmapped,
    )
    from research_dp.training.batches import eval_metrics, metric_means, train_batches
    from research_dp.types import DataSet, EvalOrder, LossOutput, TrainableModel, TrainOrder

__version__ = "0.1.0"

__all__ = [
    "PLAIN", "DataParallel", "DataSet", "DeviceMeshManager", "DryRun", "EvalOrder",
    "LeafSharding", "LoadedModel", "LossOutput", "MeshRules", "OptaxAdapter", "Reduction",
    "ShardDecision", "ShardingRow", "Strategy", "StrategyConfig", "TrainOrder", "TrainSpec",
    "TrainState", "TrainableModel", "UsageError", "accumulate_gradients", "all_mean",
    "all_mean_tree", "apply_gradients", "certify", "choose_dim", "clip_by_global_norm",
    "clip_by_global_norm_sharded", "compiled", "create_data_parallel_sharding", "data_parallel",
    "data_parallel_rules", "data_parallel_train_step", "dim_by_path", "dropout", "dry_run",
    "eval_metrics", "evaluate", "export", "from_arrays", "from_linen", "from_nnx",
    "from_source", "fsdp_apply_gradients", "fsdp_update", "gather_array_with_mean_grads",
    "gather_params", "gather_tree", "global_norm", "image_classifier", "infer_sharding",
    "init_sharded", "largest_dim", "linen_functions", "load", "make_mesh", "mapped",
    "metric_means", "nnx_functions", "one_device_mesh", "pad_to_multiple",
    "place_batch_on_shards", "place_model_state_on_shards", "place_nnx_state_on_shards", "plan",
    "pmapped", "reduce_gradient_tree", "reduce_gradients_across_devices", "run",
    "scatter_gradients", "scatter_mean", "scatter_mean_tree", "shard_module_params",
    "shard_nnx_module_params", "shard_params", "sharded_global_norm", "sharding_report",
    "slice_specs", "slice_state", "spmd_train_step", "strategy", "sync_gradients",
    "train_batches", "unpad", "unsharded_state", "weighted_loss", "weighted_mean",
]  # fmt: skip

# Names until version 0.1, kept for one release.
_RENAMED = {
    "Choice": "ShardDecision",
    "Placement": "LeafSharding",
    "lay_out": "infer_sharding",
    "whole_state": "unsharded_state",
}
# Functions with other arguments stand in their place.
_REPLACED = {
    "average_gradients": "sync_gradients",
    "gather_shards": "gather_params",
    "update_local": "apply_gradients",
    "update_slices": "fsdp_apply_gradients",
}


@functools.cache
def _modules() -> dict[str, str]:
    """The module of each public name, as the imports above say."""
    source = ast.parse(Path(__file__).read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@functools.cache
def _choice() -> type:
    from research_dp.distributed.shard_rules import ShardDecision

    class Choice(ShardDecision):
        """`ShardDecision` with the old name of its last field."""

        def __new__(
            cls, dim: int | None, reason: str = "", movable: bool = False, *, any_dim: bool = False
        ) -> "Choice":
            return super().__new__(cls, dim, reason, movable or any_dim)

        any_dim = ShardDecision.movable

    return Choice


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when it is used: JAX and Flax take long to import
        return getattr(importlib.import_module(_modules()[name]), name)
    if name in _RENAMED:
        new = _RENAMED[name]
        message = f"research_dp.{name} is now research_dp.{new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return _choice() if name == "Choice" else __getattr__(new)
    if name in _REPLACED:
        message = f"research_dp.{name} was removed; use research_dp.{_REPLACED[name]} instead"
        raise AttributeError(message)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
