"""The primitives that communicate: sum, scatter, gather, of one array.

Every function here runs where mesh axes are bound (`shard_map`, `pmap`, `vmap(axis_name=...)`), on
one device's view of the arrays. How partial sums become one is a value, `Reduction`, that callers
hand down: a strategy may replace it without replacing anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, AxisName, AxisNames, Dtype
from research_dp.distributed.linear import with_gradient
from research_dp.distributed.remat import GATHERED
from research_dp.distributed.transports import all_to_all
from research_dp.distributed.vma import as_varying, is_tracked
from research_dp.errors import UsageError

Axes = tuple[str, ...]


def _all_gather(x: jax.Array, axis: str, dim: int, to: str) -> jax.Array:
    # A result that is typed as the same on each device (`check_vma`) only all_gather can give.
    if to == "varying" and all_to_all.over_gloo():
        return all_to_all.all_gather(x, axis, dim)
    return lax.all_gather(x, axis, axis=dim, tiled=True, to=to)


class Reduction(NamedTuple):
    """How partial sums on several devices become one sum, and blocks of it whole again.

    Attributes:
        all_reduce: (array, axis names) -> the sum, on every device.
        reduce_scatter: (array, axis name, dim) -> this device's block, along dim, of the sum.
        logical_shards: In how many parts, whatever the number of devices, the global batch is cut
            and gradients are added up; None: each device's examples are one part.
        loop: Whether a device's logical shards are a loop of the program, or written out.
        exchanges_rows: Whether rows that are looked up in a table may be exchanged instead of
            gathering it; their gradients are then summed by the exchange.
        all_gather: (array, axis name, dim, to) -> the devices' blocks along dim, in their order;
            `to` as `jax.lax.all_gather` has it.
    """

    all_reduce: Callable[[jax.Array, Axes], jax.Array]
    reduce_scatter: Callable[[jax.Array, str, int], jax.Array]
    logical_shards: int | None = None
    loop: bool = False
    exchanges_rows: bool = False
    all_gather: Callable[[jax.Array, str, int, str], jax.Array] = _all_gather


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    # Only sums: whoever calls divides, once, by the number of partial results.
    return lax.psum(x, axes)


def _psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    # Only sums, see _psum.
    if all_to_all.over_gloo():
        return all_to_all.reduce_scatter(x, axis, dim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


PLAIN = Reduction(_psum, _psum_scatter, exchanges_rows=True)
EXCHANGED = Reduction(all_to_all.all_reduce, all_to_all.reduce_scatter)


def flat_axes(axes: Any) -> Axes:
    """Axis names as one flat tuple: of one name, a sequence, a nested one; None counts as none.

    Raises:
        UsageError: An axis is named twice.
    """
    if axes is None:
        return ()
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        return (axes,)
    flat = tuple(name for part in axes for name in flat_axes(part))
    if len(set(flat)) < len(flat):
        raise UsageError(f"axis names {axes!r}: an axis is named twice. Name each axis once.")
    return flat


def axes_size(axes: Axes) -> int:
    """Number of devices over the bound axes; 1 for no axes.

    Raises:
        NameError: An axis is not bound here; the message names it.
    """
    try:
        return math.prod(lax.axis_size(axis) for axis in axes)
    except NameError as error:
        raise NameError(
            f"{error}. Call this inside shard_map, pmap or vmap(axis_name=...) over that axis."
        ) from None


@checked
def all_mean(
    x: Array,
    axes: AxisNames,
    reduction: Reduction = PLAIN,
    dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
) -> jax.Array:
    """Mean over devices, summed in `dtype` (x's own if None), returned in x's dtype.

    Means of integers are float32, as `jax.lax.pmean` has it; complex arrays are summed in their own
    dtype. For `pre_divide` see `_mean`. Raises UsageError for a `dtype` that is not floating-point.
    """
    axes = flat_axes(axes)
    if not axes:
        return x
    return _mean(x, axes, lambda wire: reduction.all_reduce(wire, axes), dtype, pre_divide)


@checked
def scatter_mean(
    x: Array,
    dim: int,
    axis: AxisName,
    reduction: Reduction = PLAIN,
    dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
) -> jax.Array:
    """This device's block along `dim` of the mean over `axis`; else as `all_mean`.

    Raises:
        UsageError: x has no such dim, or the devices do not divide it.
    """
    axes = flat_axes(axis)
    devices = axes_size(axes)
    if not -x.ndim <= dim < x.ndim or x.shape[dim] % devices:
        raise UsageError(
            f"scatter_mean.dim = {dim}: {devices} devices over {axes} do not divide such a dim of "
            f"an array of shape {x.shape}."
        )
    dim %= x.ndim

    def add(wire: jax.Array) -> jax.Array:
        for name in axes:
            # Sums over one axis after the other, the major one first; `_mean` divides, once.
            wire = reduction.reduce_scatter(wire, name, dim)
        return wire

    return _mean(x, axes, add, dtype, pre_divide)


def cast_dtype(own: Any, dtype: Any) -> Any:
    """The dtype that an array of dtype `own` is cast to where an option names `dtype`.

    It is `dtype` for real floating-point arrays. Complex ones, which would lose their imaginary
    part, integers and keys stay as they are, as does everything if `dtype` is None.
    """
    return dtype if dtype is not None and jnp.issubdtype(own, jnp.floating) else own


def _mean(
    x: jax.Array, axes: Axes, add: Callable[[jax.Array], jax.Array], dtype: Any, pre_divide: bool
) -> jax.Array:
    """`add`, which only sums over `axes`, made a mean: the one place that divides.

    Summed, then divided, as `jax.lax.pmean` does; `pre_divide` divides first, so that a sum in
    float16 stays below 65504, at the price of losing small addends.
    """
    devices = axes_size(axes)
    result = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    wire = x.astype(x.dtype if dtype is None else cast_dtype(result, dtype))
    mean = add(wire / devices) if pre_divide else add(wire) / devices
    return mean.astype(result)


def gather(
    x: jax.Array,
    dim: int,
    axis: str | Axes,
    reduction: Reduction = PLAIN,
    *,
    replicated: bool = False,
) -> jax.Array:
    """Concatenates the devices' blocks along `dim`; several axes one after the other.

    Args:
        x: This device's block.
        dim: The dim that is split.
        axis: The mesh axis that it is split over, or several as one.
        reduction: How they come together.
        replicated: Type the result as the same on each device where `shard_map` tracks that, so
            that it may leave the map whole. Never where it is differentiated: autodiff would sum
            its gradients by itself.
    """
    for name in reversed(flat_axes(axis)):
        to = "invarying" if replicated and is_tracked(name) else "varying"
        x = reduction.all_gather(x, name, dim, to)
    return x


def shard(x: jax.Array, dim: int, axis: str | Axes) -> jax.Array:
    """This device's block of `x`, which is whole on each device, along `dim`."""
    axes = flat_axes(axis)
    devices = axes_size(axes)
    if devices == 1:
        return as_varying(x, axes)  # nothing to cut, nor for the compiler to see through
    block = x.shape[dim] // devices
    # Of a tuple, even of one name, JAX computes the index by arithmetic.
    start = lax.axis_index(axes[0] if len(axes) == 1 else axes) * block
    return lax.dynamic_slice_in_dim(x, start, block, dim, allow_negative_indices=False)


class GatherOptions(NamedTuple):
    """Options of `gather_with_mean_grads`.

    Attributes:
        dim: The dim that is split.
        axis: The mesh axis that it is split over, or several as one.
        gather_dtype: dtype of the gathered array; None: x's own. See `cast_dtype`.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's own. See `cast_dtype`.
        reduction: How gradients are summed.
        pre_divide: Whether gradients are divided before they are summed, for float16.
    """

    dim: int
    axis: str | Axes
    gather_dtype: Any = None
    grad_scatter_dtype: Any = None
    reduction: Reduction = PLAIN
    pre_divide: bool = False


def gather_with_mean_grads(x: jax.Array, options: GatherOptions) -> jax.Array:
    """Gathers a shard for compute; its gradient comes back as this device's block of the mean.

    Args:
        x: This device's block.
        options: dim, axis, and the dtypes on the wire.

    Returns:
        The full array in `gather_dtype`. The cotangent is cast to `grad_scatter_dtype` (x's dtype
        if None), summed, divided by the axis size, and returned in x's dtype. Over other axes
        nothing is summed. Derivatives of higher order are exact (`with_gradient`).
    """
    dim, axis, reduction, dtype = options.dim, options.axis, options.reduction, x.dtype

    def full(x: jax.Array) -> jax.Array:
        wire = x.astype(cast_dtype(dtype, options.gather_dtype))
        return checkpoint_name(gather(wire, dim, axis, reduction), GATHERED)

    def block(g: jax.Array) -> jax.Array:
        wire = g.astype(cast_dtype(dtype, options.grad_scatter_dtype))
        mean = scatter_mean(wire, dim, axis, reduction, pre_divide=options.pre_divide)
        return mean.astype(dtype)

    return with_gradient(full, block)(x)


@gin.register(module="distributed")
@checked
def gather_array_with_mean_grads(
    x: Array,
    axis: int,
    axis_name: AxisName,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
) -> jax.Array:
    """Gathers an array over a mesh axis; its gradient comes back as shards of the mean.

    As in xlstm-jax. Inside mapped axes; right with `check_vma` on and off, for a loss of this
    device's own (docs/api.md, "Linen and shard_map").

    Args:
        x: This device's block, floating-point if it is differentiated.
        axis: The dim that is split; negative ones count from the end.
        axis_name: The mesh axis it is split over, or several as one.
        gather_dtype: dtype on the wire and of the result; None: x's. Complex arrays and integers
            keep their dtype, here and in the sum.
        grad_scatter_dtype: dtype in which gradients are summed; None: x's, not `gather_dtype`.
        pre_divide: Divide gradients before they are summed: in float16, eight times 10000 is inf.
        reduction: How gradients are summed.

    Returns:
        The full array, dim `axis` multiplied by the axis size. Exact in reverse mode of any order;
        forward mode (jvp, jacfwd, hessian) is refused.

    Raises:
        UsageError: x has no such dim, or a dtype is not a floating-point dtype.
        NameError: The axis is not bound.
    """
    axes = flat_axes(axis_name)
    axes_size(axes)  # names an axis that is not bound
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"gather over {axes}: an array of shape {x.shape} has no dim {axis}.")
    # A type that says that x is the same on each device is no reason to refuse it: `nn.scan` traces
    # its body once for shapes alone, with types that have lost where values vary.
    options = GatherOptions(
        axis % x.ndim, axes, gather_dtype, grad_scatter_dtype, reduction, pre_divide
    )
    return gather_with_mean_grads(x, options)


def gather_by_compiler(
    x: jax.Array, sharded: jax.sharding.NamedSharding, whole: jax.sharding.NamedSharding
) -> jax.Array:
    """Tells the compiler to gather `x` for compute and to scatter its gradient.

    Under `jit`, outside mapped axes. Without it the compiler may split activations over the dims
    that parameters are sharded on, and move those instead.
    """

    def full(x: jax.Array) -> jax.Array:
        return checkpoint_name(jax.lax.with_sharding_constraint(x, whole), GATHERED)

    return with_gradient(full, lambda g: jax.lax.with_sharding_constraint(g, sharded))(x)
