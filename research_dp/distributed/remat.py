"""Rematerialisation policies: what a forward pass saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

# The checkpoint name of gathered parameters, by which a policy recognises them.
GATHERED = "gathered_params"

_CHEAP = frozenset(
    ("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev")
)


def drop_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves everything but gathered parameters."""
    # A saved cast or reshaped copy of a gathered parameter would take its place.
    return prim.name not in _CHEAP and not _is_gathered(prim, params)


def keep_gathered(policy: Callable[..., bool], prim: Any, *args: Any, **params: Any) -> bool:
    """A policy that also saves gathered parameters."""
    return _is_gathered(prim, params) or policy(prim, *args, **params)


def _is_gathered(prim: Any, params: Mapping[str, Any]) -> bool:
    # JAX's own policies do not see a name inside a custom_vjp, so this inspects the call.
    if prim.name != "custom_vjp_call":
        return False
    equations = params["call_jaxpr"].jaxpr.eqns
    return any(e.primitive.name == "name" and e.params["name"] == GATHERED for e in equations)


def _dots(prim: Any, *args: Any, **params: Any) -> bool:
    # JAX differentiates products otherwise where it recognises this policy, which changes programs.
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *args, **params)


Remat = Literal["full", "dots", "none"]

# What the forward pass of a unit saves, besides its inputs; never gathered parameters.
REMAT: Mapping[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
    "none": drop_gathered,
}
