"""The public names and their modules: for type checkers, and for `lazy_loader`."""

from .commands.certify import certify
from .commands.compare import compare
from .commands.dry_run import DryRun, dry_run
from .commands.evaluate import evaluate
from .commands.plan import plan
from .commands.saved_run import LoadedModel, export, load, load_hf
from .commands.strategy import strategy
from .commands.train import run
from .compat.artifex import (
    DataParallel,
    place_nnx_state_on_shards,
    spmd_train_step,
)
from .compat.datarax import (
    create_data_parallel_sharding,
    data_parallel_train_step,
    place_batch_on_shards,
    place_model_state_on_shards,
    reduce_gradient_tree,
    reduce_gradients_across_devices,
)
from .compat.device_mesh import DeviceMeshManager, MeshRules, data_parallel_rules
from .compat.linen import shard_module_params
from .compat.nnx import shard_nnx_module_params
from .data.own_data import from_arrays, from_source
from .distributed.batch_examples import gather_examples, global_mean
from .distributed.buckets import (
    all_mean_tree,
    gather_tree,
    pad_to_multiple,
    scatter_mean_tree,
    unpad,
)
from .distributed.collectives import PLAIN, Reduction, all_mean, scatter_mean
from .distributed.differentiable_gather import gather_array_with_mean_grads
from .distributed.fsdp import (
    ShardingRow,
    gather_params,
    init_sharded,
    shard_params,
    sharding_report,
)
from .distributed.gradient_sync import (
    scatter_gradients,
    sync_gradients,
    weighted_loss,
    weighted_mean,
)
from .distributed.matrices import on_matrices
from .distributed.mesh import make_mesh, one_device_mesh
from .distributed.microbatch import accumulate_gradients
from .distributed.norms import (
    clip_by_global_norm,
    clip_by_global_norm_sharded,
    global_norm,
    sharded_global_norm,
)
from .distributed.optimizer import apply_gradients
from .distributed.sharded_optimizer import (
    OptaxAdapter,
    slice_specs,
    slice_state,
    unsharded_state,
)
from .distributed.sharding import (
    LeafSharding,
    ShardDecision,
    choose_dim,
    dim_by_path,
    infer_sharding,
    largest_dim,
)
from .distributed.update import fsdp_apply_gradients, fsdp_update
from .errors import UsageError
from .models.flax.linen import linen_functions
from .models.flax.nnx import nnx_functions, nnx_variables, update_nnx
from .models.supervised import from_linen, from_nnx
from .strategies import (
    Strategy,
    StrategyConfig,
    TrainSpec,
    TrainState,
    compiled,
    data_parallel,
    mapped,
)
from .strategies.batch_losses import check_batch_loss
from .training.batches import eval_metrics, metric_means, train_batches
from .types import DataSet, EvalOrder, LossOutput, TrainableModel, TrainOrder

__version__: str

__all__ = [
    "PLAIN", "DataParallel", "DataSet", "DeviceMeshManager", "DryRun", "EvalOrder",
    "LeafSharding", "LoadedModel", "LossOutput", "MeshRules", "OptaxAdapter", "Reduction",
    "ShardDecision", "ShardingRow", "Strategy", "StrategyConfig", "TrainOrder", "TrainSpec",
    "TrainState", "TrainableModel", "UsageError", "accumulate_gradients", "all_mean",
    "all_mean_tree", "apply_gradients", "certify", "check_batch_loss", "choose_dim",
    "clip_by_global_norm", "clip_by_global_norm_sharded", "compare", "compiled",
    "create_data_parallel_sharding", "data_parallel", "data_parallel_rules",
    "data_parallel_train_step", "dim_by_path", "dry_run", "eval_metrics", "evaluate", "export",
    "from_arrays", "from_linen", "from_nnx", "from_source", "fsdp_apply_gradients",
    "fsdp_update", "gather_array_with_mean_grads", "gather_examples", "gather_params",
    "gather_tree", "global_mean", "global_norm", "infer_sharding", "init_sharded",
    "largest_dim", "linen_functions", "load", "load_hf", "make_mesh", "mapped", "metric_means",
    "nnx_functions", "nnx_variables", "on_matrices", "one_device_mesh", "pad_to_multiple",
    "place_batch_on_shards", "place_model_state_on_shards", "place_nnx_state_on_shards", "plan",
    "reduce_gradient_tree", "reduce_gradients_across_devices", "run", "scatter_gradients",
    "scatter_mean", "scatter_mean_tree", "shard_module_params", "shard_nnx_module_params",
    "shard_params", "sharded_global_norm", "sharding_report", "slice_specs", "slice_state",
    "spmd_train_step", "strategy", "sync_gradients", "train_batches", "unpad",
    "unsharded_state", "update_nnx", "weighted_loss", "weighted_mean",
]  # fmt: skip
