"""The primitives that communicate: sum, scatter, gather, of one array.

Every function here runs where mesh axes are bound (`shard_map`, `pmap`, `vmap(axis_name=...)`), on
one device's view of the arrays. How partial sums become one is a value, `Reduction`, that callers
hand down: a strategy may replace it without replacing anything else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as extend_core

Axes = tuple[str, ...]
# One axis, or several that act as one: device (i, j) is number i * size_j + j.
AxisNames = str | Axes

# Names gathered parameters, so that a rematerialisation policy can drop just them.
GATHERED = "gathered_params"


class Reduction(NamedTuple):
    """How partial sums on several devices become one sum.

    Attributes:
        all_sum: (array, axis names) -> the sum, on every device.
        scatter_sum: (array, axis name or names, dim) -> this device's block, along dim, of the
            sum.
    """

    all_sum: Callable[[jax.Array, Axes], jax.Array]
    scatter_sum: Callable[[jax.Array, AxisNames, int], jax.Array]


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    # Only sums: whoever calls divides, once, by the number of partial results.
    return lax.psum(x, axes)


def _psum_scatter(x: jax.Array, axis: AxisNames, dim: int) -> jax.Array:
    # Only sums, see _psum.
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


PLAIN = Reduction(_psum, _psum_scatter)


def as_axes(names: AxisNames | Sequence[str]) -> Axes:
    """One name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def axes_size(axes: AxisNames) -> int:
    """Number of devices over the bound axes; 1 for no axes."""
    return math.prod(lax.axis_size(axis) for axis in as_axes(axes))


def bound_axes() -> Axes:
    """Names of the axes that are bound here, the outermost first; () outside any map.

    JAX's public API names those of `shard_map` and `pmap` alone (the abstract mesh); an axis of
    `vmap(axis_name=...)` is told by `jax.extend` only, under a name that may go away.
    """
    names = getattr(extend_core, "unsafe_get_axis_names_DO_NOT_USE", None)
    return tuple(names() if names else jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes over which the type of `x` says that devices hold different values.

    Only `shard_map(check_vma=True)` keeps such types: elsewhere it is empty, see `tracked_axes`.
    jax 0.10.2 has them in `.mat.varying`, earlier and later versions in `.vma`.
    """
    kind = jax.typeof(x)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def tracked_axes(axes: AxisNames) -> Axes:
    """Those axes whose replication `shard_map` tracks (`check_vma=True`)."""
    return tuple(a for a in as_axes(axes) if a in varying_axes(lax.axis_index(a)))


def same_along(x: jax.Array, axes: AxisNames) -> Axes:
    """Those axes along which the type of `x` promises that all devices hold the same value."""
    return tuple(a for a in tracked_axes(axes) if a not in varying_axes(x))


def own_gradient(g: jax.Array, axes: AxisNames) -> jax.Array:
    """A gradient of this device's loss such that the mean over `axes` is the right one.

    Under `shard_map(check_vma=True)` autodiff itself sums the gradient of a replicated input over
    the devices, and the type of the result says that it is the same on all. Such a gradient is
    divided by their number here, once: the mean of equal values is that value. Any other gradient
    is returned as it is.
    """
    summed = same_along(g, axes)
    # Autodiff summed over these axes; the division makes it the mean.
    return g / axes_size(summed) if summed else g


def all_mean(
    x: jax.Array, axes: Axes, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """Mean over devices, summed in `dtype` (x's own if None), returned in x's dtype."""
    same = same_along(x, axes)
    axes = tuple(a for a in axes if a not in same)  # the mean of equal values is that value
    if not axes:
        return x
    # The reduction sums over `axes`; the mean is taken here and nowhere else.
    total = reduction.all_sum(x.astype(dtype or x.dtype), axes)
    return (total / axes_size(axes)).astype(x.dtype)


def scatter_mean(
    x: jax.Array, dim: int, axis: AxisNames, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """This device's block along `dim` of the mean over `axis`; summed in `dtype`, then divided."""
    if same_along(x, axis) == as_axes(axis):
        return shard(x, dim, axis)  # the mean of equal values is that value
    # The reduction sums over `axis`; the mean is taken here and nowhere else.
    total = reduction.scatter_sum(x.astype(dtype or x.dtype), axis, dim)
    return (total / axes_size(axis)).astype(x.dtype)


def gather(x: jax.Array, dim: int, axis: AxisNames, *, replicated: bool = False) -> jax.Array:
    """Concatenates the devices' blocks along `dim`.

    Args:
        x: This device's block.
        dim: The dim that is split.
        axis: The mesh axis or axes that it is split over.
        replicated: Type the result as the same on each device where `shard_map` tracks that, so
            that it may leave the map whole. Never where it is differentiated: autodiff would sum
            its gradients by itself.
    """
    to = "invarying" if replicated and tracked_axes(axis) == as_axes(axis) else "varying"
    return lax.all_gather(x, axis, axis=dim, tiled=True, to=to)


def shard(x: jax.Array, dim: int, axis: AxisNames) -> jax.Array:
    """This device's block of `x`, which is whole on each device, along `dim`."""
    block = x.shape[dim] // axes_size(axis)
    start = lax.axis_index(axis) * block
    return lax.dynamic_slice_in_dim(x, start, block, dim, allow_negative_indices=False)


class GatherOptions(NamedTuple):
    """Static options of `gather_with_mean_grads`.

    Attributes:
        dim: The dim that is split.
        axis: The mesh axis, or axes, that it is split over.
        gather_dtype: dtype of the gathered array; None: x's own.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's own.
        reduction: How gradients are summed.
    """

    dim: int
    axis: AxisNames
    gather_dtype: Any = None
    grad_scatter_dtype: Any = None
    reduction: Reduction = PLAIN


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_with_mean_grads(x: jax.Array, options: GatherOptions) -> jax.Array:
    """Gathers a shard for compute; its gradient comes back as this device's block of the mean.

    Args:
        x: This device's block.
        options: dim, axis, and the dtypes on the wire.

    Returns:
        The full array in `gather_dtype`. The cotangent is cast to `grad_scatter_dtype` (x's dtype
        if None), summed, divided by the axis size, and returned in x's dtype.
    """
    full = gather(x.astype(options.gather_dtype or x.dtype), options.dim, options.axis)
    return checkpoint_name(full, GATHERED)


def _gather_fwd(x: jax.Array, options: GatherOptions) -> tuple[jax.Array, jax.Array]:
    # The residual is an empty slice: only x's dtype is needed on the way back.
    return gather_with_mean_grads(x, options), jnp.zeros((0,), x.dtype)


def _gather_bwd(options: GatherOptions, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    wire = g.astype(options.grad_scatter_dtype or like.dtype)
    mean = scatter_mean(wire, options.dim, options.axis, options.reduction)
    return (mean.astype(like.dtype),)


gather_with_mean_grads.defvjp(_gather_fwd, _gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_by_compiler(
    x: jax.Array, sharded: jax.sharding.NamedSharding, whole: jax.sharding.NamedSharding
) -> jax.Array:
    """Tells the compiler to gather `x` for compute and to scatter its gradient.

    Under `jit`, outside mapped axes. Without it the compiler may split activations over the dims
    that parameters are sharded on, and move those instead.
    """
    del sharded  # the gradient's
    return checkpoint_name(jax.lax.with_sharding_constraint(x, whole), GATHERED)


def _by_compiler_fwd(x: jax.Array, sharded: Any, whole: Any) -> tuple[jax.Array, None]:
    return gather_by_compiler(x, sharded, whole), None


def _by_compiler_bwd(sharded: Any, whole: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    del whole
    return (jax.lax.with_sharding_constraint(g, sharded),)


gather_by_compiler.defvjp(_by_compiler_fwd, _by_compiler_bwd)


_CHEAP = frozenset(
    ("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev")
)


def drop_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves everything but gathered parameters.

    Nor what is as cheap to make again as it is big to keep: casts and changes of shape. A cast of
    a gathered parameter would stay in its place otherwise. A name inside a custom_vjp is invisible
    to the library's own policies, so this one looks into the call.
    """
    if prim.name in _CHEAP:
        return False
    if prim.name != "custom_vjp_call":
        return True
    equations = params["call_jaxpr"].jaxpr.eqns
    return not any(e.primitive.name == "name" and e.params["name"] == GATHERED for e in equations)
