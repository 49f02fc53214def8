"""research_dp: data-parallel training in JAX, the strategy chosen by a gin file.

The functions that strategies are made of; the training command is `python -m research_dp.train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from research_dp.distributed.buckets import all_mean_tree, gather_tree, scatter_mean_tree
from research_dp.distributed.collectives import PLAIN, Reduction, all_mean, scatter_mean
from research_dp.distributed.errors import UsageError
from research_dp.distributed.fsdp_update import fsdp_apply_gradients, fsdp_update
from research_dp.distributed.layout import Choice, Placement, choose_dim, largest_dim, lay_out
from research_dp.distributed.linen import linen_functions
from research_dp.distributed.mesh import make_mesh, one_device_mesh
from research_dp.distributed.optimizer_state import (
    OptaxAdapter,
    slice_specs,
    slice_state,
    whole_state,
)
from research_dp.distributed.padding import pad_to_multiple, unpad
from research_dp.distributed.trainable import LossOutput, TrainableModel
from research_dp.distributed.updates import global_norm
from research_dp.strategies import (
    Strategy,
    TrainSpec,
    TrainState,
    average_gradients,
    compiled,
    data_parallel,
    gather_shards,
    mapped,
    pmapped,
    scatter_gradients,
    update_local,
    update_slices,
)

if TYPE_CHECKING:
    from research_dp.distributed.nnx import nnx_functions

# Imported when they are used: Flax NNX takes long to import.
_LATE = {"nnx_functions": "research_dp.distributed.nnx"}

__all__ = [
    "PLAIN",
    "Choice",
    "LossOutput",
    "OptaxAdapter",
    "Placement",
    "Reduction",
    "Strategy",
    "TrainSpec",
    "TrainState",
    "TrainableModel",
    "UsageError",
    "all_mean",
    "all_mean_tree",
    "average_gradients",
    "choose_dim",
    "compiled",
    "data_parallel",
    "fsdp_apply_gradients",
    "fsdp_update",
    "gather_shards",
    "gather_tree",
    "global_norm",
    "largest_dim",
    "lay_out",
    "linen_functions",
    "make_mesh",
    "mapped",
    "nnx_functions",
    "one_device_mesh",
    "pad_to_multiple",
    "pmapped",
    "scatter_gradients",
    "scatter_mean",
    "scatter_mean_tree",
    "slice_specs",
    "slice_state",
    "unpad",
    "update_local",
    "update_slices",
    "whole_state",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
