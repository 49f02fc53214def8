"""Bound axes, and the axes over which a value varies (JAX's "varying manual axes").

With `check_vma=True`, the default of `jax.shard_map`, the type of each value says over which mesh
axes it may differ between devices, and autodiff sums the gradient of a replicated value over them.
Without it, under `pmap` and under `vmap(axis_name=...)`, nothing is tracked and nothing is summed.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core as extend_core

from research_dp.errors import UsageError


def varying_axes(x: Any) -> frozenset[str]:
    """The axes over which the type of `x` varies or is a partial sum; none if not tracked."""
    x_type = jax.typeof(x)  # has the axes at `.mat` in JAX 0.10.2, at `.vma` in other versions
    for name in ("mat", "manual_axis_type"):
        if (manual := getattr(x_type, name, None)) is not None:
            return frozenset(manual.varying) | frozenset(manual.unreduced)
    if not hasattr(x_type, "vma"):
        raise NotImplementedError(
            f"jax {jax.__version__} does not say over which axes a value varies, so whether a "
            "gradient has been summed is unknown; research_dp is tested with jax 0.10.2."
        )
    return frozenset(x_type.vma) | frozenset(getattr(x_type, "unreduced", ()))


def is_tracked(axis: str) -> bool:
    """Whether JAX tracks replication over an axis; NameError if it is not bound."""
    return axis in varying_axes(lax.axis_index(axis))  # which varies if anything is tracked


def is_replicated(x: Any, axis: str) -> bool:
    """Whether the type of `x` says that it is replicated along a bound axis; False if untracked."""
    return is_tracked(axis) and axis not in varying_axes(x)


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, typed as varying where types are tracked: autodiff sums the gradient once, here."""
    missing = tuple(axis for axis in axes if is_replicated(x, axis))
    return lax.pcast(x, missing, to="varying") if missing else x


def bound_axes() -> tuple[str, ...]:
    """Names of the bound axes, the outermost first; () outside any map."""
    # The abstract mesh has the axes of `shard_map` and `pmap`, in order. `jax.extend` alone knows
    # those of `vmap(axis_name=...)`, maybe in the order of another map of the same axes.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = getattr(extend_core, "unsafe_get_axis_names_DO_NOT_USE", lambda: manual)()
    in_order = iter(axis for axis in manual if axis in names)
    return tuple(next(in_order) if axis in manual else axis for axis in names)


def refuse_mapped(name: str) -> None:
    """Raises UsageError if axes are bound, for a function that must be called outside any map."""
    if axes := bound_axes():
        raise UsageError(
            f"{name} takes global arrays; inside a map over {axes} nothing would average its "
            "gradients. Call it outside, or use reduce_gradients_across_devices in the map."
        )
