"""What JAX knows inside a map: bound axes, replication, and what autodiff has summed by it.

With `check_vma=True`, the default of `jax.shard_map`, the type of each value says over which mesh
axes it may differ from device to device ("varying"). The gradient of a value that is the same on
each device is then summed over the axes by autodiff itself, and nothing in the numbers tells. With
`check_vma=False`, under `pmap` and under `vmap(axis_name=...)`, nothing is tracked and nothing is
summed. The types tell which of the two it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core as extend_core

from research_dp.errors import UsageError


def varying_axes(x: Any) -> frozenset[str]:
    """Names of the axes over which the type of `x` says that it varies, or is a partial sum.

    Empty where replication is not tracked. Reads `jax.typeof(x)`: the axes are at `.mat` in JAX
    0.10.2, at `.vma` in others.

    Raises:
        NotImplementedError: This version of JAX keeps them at neither place.
    """
    kind = jax.typeof(x)
    for name in ("mat", "manual_axis_type"):
        manual = getattr(kind, name, None)
        if manual is not None:
            return frozenset(manual.varying) | frozenset(manual.unreduced)
    try:
        return frozenset(kind.vma) | frozenset(getattr(kind, "unreduced", ()))
    except AttributeError:
        raise NotImplementedError(
            f"jax {jax.__version__} does not say where a value varies, so whether a gradient has "
            "been summed cannot be known; research_dp is tested with jax 0.10.2."
        ) from None


def is_tracked(axis: str) -> bool:
    """Whether JAX tracks replication over a bound axis: `shard_map` with `check_vma=True`.

    An index along the axis differs on each device, so its type says so where anything is tracked.

    Raises:
        NameError: The axis is not bound.
    """
    return axis in varying_axes(lax.axis_index(axis))


def is_replicated(x: Any, axis: str) -> bool:
    """Whether the type of `x` says that it is the same on each device along a bound axis.

    False where replication is not tracked: there nothing is known.
    """
    return is_tracked(axis) and axis not in varying_axes(x)


def as_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` typed as varying over bound axes; no change of values, none where nothing is tracked.

    Autodiff sums the gradient here, where it passes, and not at each use of the result.
    """
    missing = tuple(axis for axis in axes if is_replicated(x, axis))
    return lax.pcast(x, missing, to="varying") if missing else x


def bound_axes() -> tuple[str, ...]:
    """Names of the axes that are bound here, the outermost first; () outside any map.

    JAX's public API names those of `shard_map` and `pmap` alone (the abstract mesh); an axis of
    `vmap(axis_name=...)` is told by `jax.extend` only, under a name that may go away. Those of a
    mesh are in the mesh's order. JAX caches sets of axes, so `jax.extend` may return the order of
    another map of the same axes.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = getattr(extend_core, "unsafe_get_axis_names_DO_NOT_USE", lambda: manual)()
    in_order = iter(axis for axis in manual if axis in names)
    return tuple(next(in_order) if axis in manual else axis for axis in names)


def refuse_mapped(name: str) -> None:
    """Raises UsageError where axes are bound, for `name`, which is called outside of any map."""
    axes = bound_axes()
    if axes:
        raise UsageError(
            f"{name} takes the arrays of all devices; inside a map over {axes} nobody would "
            "average its gradients. Call it outside, or use reduce_gradients_across_devices in the "
            "map."
        )
