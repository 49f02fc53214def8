"""The primitives that communicate: sum, scatter, gather, of one array.

Every function here runs where mesh axes are bound (`shard_map`, `pmap`, `vmap(axis_name=...)`), on
one device's view of the arrays. How partial sums become one is a value, `Reduction`, that callers
hand down: a strategy may replace it without replacing anything else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import path_name

PyTree = Any
Axes = tuple[str, ...]

# Names gathered parameters, so that a rematerialisation policy can drop just them.
GATHERED = "gathered_params"


class Reduction(NamedTuple):
    """How partial sums on several devices become one sum.

    Attributes:
        all_sum: (array, axis names) -> the sum, on every device.
        scatter_sum: (array, axis name, dim) -> this device's block, along dim, of the sum.
    """

    all_sum: Callable[[jax.Array, Axes], jax.Array]
    scatter_sum: Callable[[jax.Array, str, int], jax.Array]


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    # Only sums: whoever calls divides, once, by the number of partial results.
    return lax.psum(x, axes)


def _psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    # Only sums, see _psum.
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


PLAIN = Reduction(_psum, _psum_scatter)


def axes_size(axes: Axes) -> int:
    """Number of devices over the bound axes; 1 for no axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def all_mean(
    x: jax.Array, axes: Axes, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """Mean over devices, summed in `dtype` (x's own if None), returned in x's dtype.

    The mean of whole numbers is a float32, as `lax.pmean`'s is.
    """
    if not axes:
        return x
    # The reduction sums over `axes`; the mean is taken here and nowhere else.
    mean = reduction.all_sum(x.astype(dtype or x.dtype), axes) / axes_size(axes)
    return mean.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else mean


def scatter_mean(
    x: jax.Array, dim: int, axis: str, reduction: Reduction = PLAIN, dtype: Any = None
) -> jax.Array:
    """This device's block along `dim` of the mean over `axis`; summed in `dtype`, then divided."""
    # The reduction sums over `axis`; the mean is taken here and nowhere else.
    total = reduction.scatter_sum(x.astype(dtype or x.dtype), axis, dim)
    return (total / axes_size((axis,))).astype(x.dtype)


def check_bound(axes: Axes) -> None:
    """Raises NameError, saying what to do, for an axis that is not bound here."""
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise NameError(
                f"unbound axis name: {axis}. Call this inside jax.shard_map over a mesh with that "
                f"axis, or give pmap or vmap axis_name={axis!r}. Under jit alone the compiler "
                "reduces gradients; call nothing."
            ) from None


def refuse_invariant(gradients: PyTree, axes: Axes) -> None:
    """Raises UsageError for a gradient that is known to be the same on every device.

    Only where replication is tracked: inside `jax.shard_map` with `check_vma=True`, its default.
    There `jax.grad` with respect to a replicated input returns the sum over devices; whether a
    mean was meant (of each device's own loss) or is there already (of a `pmean`ed loss) cannot be
    told from the value. Under `pmap`, `vmap` and `check_vma=False` nothing is known or refused.
    """
    tracked = {axis for axis in axes if axis in _varying(lax.axis_index(axis))}
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients) if tracked else ():
        for axis in sorted(tracked - _varying(gradient)):
            name = f" {path_name(path)!r}" if path else ""
            raise UsageError(
                f"gradient{name} is the same on all devices of axis {axis!r}: under "
                "check_vma=True jax.grad sums the gradient of a replicated input over them, and "
                "reducing it again would be wrong. Differentiate with respect to "
                f"jax.lax.pcast(params, {axis!r}, to='varying') instead, give shard_map "
                "check_vma=False, or do not reduce."
            )


def _varying(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    manual = getattr(kind, "mat", None)  # jax 0.10.2; `vma` before and after it
    return kind.vma if manual is None else manual.varying


def device_keys(keys: PyTree, axis: str) -> PyTree:
    """Random keys, the same on every device, made different by device: `fold_in(key, index)`.

    Args:
        keys: One key of `jax.random.key` or `jax.random.PRNGKey`, or a tree of them.
        axis: The bound axis.

    Raises:
        UsageError: A leaf is no single key.
    """

    def fold(path: Any, key: Any) -> jax.Array:
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim != (0 if typed else 1):
            raise UsageError(
                f"rngs: leaf {path_name(path)!r} of shape {key.shape} and dtype {key.dtype} is no "
                "single random key. Give jax.random.key(seed), or a dict of such keys."
            )
        return jax.random.fold_in(key, lax.axis_index(axis))

    return jax.tree_util.tree_map_with_path(fold, keys)


def gather(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """Concatenates the devices' blocks along `dim`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def shard(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """This device's block of `x`, which is whole on each device, along `dim`."""
    block = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * block, block, dim)


class GatherOptions(NamedTuple):
    """Static options of `gather_with_mean_grads`.

    Attributes:
        dim: The dim that is split.
        axis: The mesh axis that it is split over.
        gather_dtype: dtype of the gathered array; None: x's own.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's own.
        reduction: How gradients are summed.
    """

    dim: int
    axis: str
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
