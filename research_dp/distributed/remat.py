"""Rematerialisation policies: what a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

# Names gathered parameters, so that a policy can drop just them.
GATHERED = "gathered_params"

_CHEAP = frozenset(
    ("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev")
)


def drop_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves everything but gathered parameters.

    Nor what is as cheap to make again as it is big to keep: casts and changes of shape. A cast of
    a gathered parameter would stay in its place otherwise. A name inside a custom_vjp is invisible
    to the library's own policies, so this one looks into the call.
    """
    return prim.name not in _CHEAP and not is_gathered(prim, **params)


def is_gathered(prim: Any, **params: Any) -> bool:
    """Whether a traced operation makes parameters whole."""
    if prim.name != "custom_vjp_call":
        return False
    equations = params["call_jaxpr"].jaxpr.eqns
    return any(e.primitive.name == "name" and e.params["name"] == GATHERED for e in equations)


def _dots(prim: Any, *args: Any, **params: Any) -> bool:
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *args, **params)


Remat = Literal["full", "dots", "none"]

# What the forward pass of a unit keeps for the backward pass, besides its inputs. Gathered
# parameters are never kept.
REMAT: Mapping[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
    "none": drop_gathered,
}


def keep_gathered(policy: Callable[..., bool], prim: Any, *args: Any, **params: Any) -> bool:
    """What a policy keeps, and gathered parameters."""
    return is_gathered(prim, **params) or policy(prim, *args, **params)
