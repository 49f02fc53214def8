"""Bound axes, and the axes over which a value varies (JAX's "varying manual axes").

With `check_vma=True`, the default of `jax.shard_map`, the type of each value says over which mesh
axes it may differ between devices. Autodiff then sums the gradient of a replicated value over the
axes, which its numbers do not show. With `check_vma=False`, under `pmap` and under
`vmap(axis_name=...)`, nothing is tracked and nothing is summed. The types show which it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core as extend_core

from research_dp.errors import UsageError


def varying_axes(x: Any) -> frozenset[str]:
    """Names of the axes over which the type of `x` says that it varies, or is a partial sum.

    Empty where replication is not tracked. The type has the axes at `.mat` in JAX 0.10.2, at `.vma`
    in other versions, and NotImplementedError is raised if at neither.
    """
    x_type = jax.typeof(x)
    for name in ("mat", "manual_axis_type"):
        manual = getattr(x_type, name, None)
        if manual is not None:
            return frozenset(manual.varying) | frozenset(manual.unreduced)
    try:
        return frozenset(x_type.vma) | frozenset(getattr(x_type, "unreduced", ()))
    except AttributeError:
        raise NotImplementedError(
            f"jax {jax.__version__} does not say over which axes a value varies, so whether a "
            "gradient has been summed is unknown; research_dp is tested with jax 0.10.2."
        ) from None


def is_tracked(axis: str) -> bool:
    """Whether JAX tracks replication over a bound axis: `shard_map` with `check_vma=True`.

    The type of an index along the axis varies over it if anything is tracked. Raises NameError if
    the axis is not bound.
    """
    return axis in varying_axes(lax.axis_index(axis))


def is_replicated(x: Any, axis: str) -> bool:
    """Whether the type of `x` says that it is replicated along a bound axis; False if untracked."""
    return is_tracked(axis) and axis not in varying_axes(x)


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` typed as varying over bound axes; its value, and an untracked type, do not change.

    Autodiff sums the gradient once here, not at each use of the result.
    """
    missing = tuple(axis for axis in axes if is_replicated(x, axis))
    return lax.pcast(x, missing, to="varying") if missing else x


def bound_axes() -> tuple[str, ...]:
    """Names of the bound axes, the outermost first; () outside any map.

    JAX's abstract mesh names the axes of `shard_map` and `pmap`, in the mesh's order. Axes of
    `vmap(axis_name=...)` are known to `jax.extend` only, under a name that may disappear. JAX
    caches sets of axes, so `jax.extend` may return the order of another map of the same axes.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = getattr(extend_core, "unsafe_get_axis_names_DO_NOT_USE", lambda: manual)()
    in_order = iter(axis for axis in manual if axis in names)
    return tuple(next(in_order) if axis in manual else axis for axis in names)


def refuse_mapped(name: str) -> None:
    """Raises UsageError if axes are bound, for a function that must be called outside any map."""
    axes = bound_axes()
    if axes:
        raise UsageError(
            f"{name} takes global arrays; inside a map over {axes} nothing would average its "
            "gradients. Call it outside, or use reduce_gradients_across_devices in the map."
        )
