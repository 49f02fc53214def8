"""research_dp: data-parallel training in JAX, the strategy chosen by a gin file.

The functions that strategies are made of; the training command is `python -m research_dp.train`.
"""

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import lazy_loader

__version__ = "0.1.0"

# A name's module, which __init__.pyi says, is imported when it is used: JAX and Flax take long.
_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

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
def _choice() -> type:
    from research_dp.distributed.sharding import ShardDecision

    class Choice(ShardDecision):
        """`ShardDecision` with the old name of its last field."""

        def __new__(
            cls, dim: int | None, reason: str = "", movable: bool = False, *, any_dim: bool = False
        ) -> "Choice":
            return super().__new__(cls, dim, reason, movable or any_dim)

        any_dim = ShardDecision.movable

    return Choice


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        message = f"research_dp.{name} is now research_dp.{new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return _choice() if name == "Choice" else _public(new)
    if name in _REPLACED:
        message = f"research_dp.{name} was removed; use research_dp.{_REPLACED[name]} instead"
        raise AttributeError(message)
    is_public = name in __all__ or name.startswith("_")
    if not is_public and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    return _public(name)
