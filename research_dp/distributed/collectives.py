"""The primitives that communicate: sum, scatter, gather, of one array, also by exchange.

They run where mesh axes are bound (`shard_map`, `pmap`, `vmap(axis_name=...)`), on one device's
view of the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, AxisName, AxisNames, Count, Dtype
from research_dp.distributed.codecs import Codec
from research_dp.distributed.mesh import DATA_AXIS
from research_dp.distributed.vma import as_varying, bound_axes, is_tracked
from research_dp.errors import UsageError

Axes = tuple[str, ...]

DEFAULT_BUCKET_BYTES = 32 * 2**20


def over_gloo() -> bool:
    """Whether collectives go over gloo, whose reduce-scatter and all-gather are not used.

    Its reduce-scatter returns wrong numbers for blocks of 4 MiB and more, now and then: a race in
    its halving-doubling algorithm (https://github.com/jax-ml/jax/issues/40830). Its all-gather
    loses 3 to 4 ms to a thread that polls for a lock where a process has one core
    (experiments/overhead). Once `jax.distributed` is set up, JAX's CPU client uses gloo for the
    devices of one process too.
    """
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


# By all-to-all the transport moves bytes only, and each device adds. As many bytes are sent as by a
# ring, and the order of sums does not depend on the transport.


def reduce_scatter_by_exchange(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's block, along `dim`, of the sum over a bound axis; added in rank order."""
    # Block j goes to device j; received blocks are in the order of their senders. Only a sum:
    # the caller divides.
    received = lax.all_to_all(as_varying(x, (axis,)), axis, dim, dim, tiled=True)
    blocks = received.reshape(*x.shape[:dim], lax.axis_size(axis), -1, *x.shape[dim + 1 :])
    return jnp.sum(blocks, axis=dim, dtype=x.dtype)


def all_gather_by_exchange(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The devices' blocks along `dim`, in rank order; needs memory for as many copies of `x`."""
    dim %= x.ndim
    copies = jnp.concatenate([as_varying(x, (axis,))] * lax.axis_size(axis), axis=dim)
    return lax.all_to_all(copies, axis, dim, dim, tiled=True)


def all_reduce_by_exchange(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over bound axes, on every device: scattered, then gathered, one axis at a time."""
    for axis in axes:
        flat = jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(axis)))
        total = all_gather_by_exchange(reduce_scatter_by_exchange(flat, axis, 0), axis, 0)
        x = total[: x.size].reshape(x.shape)
    return x


def _all_gather(x: jax.Array, axis: str, dim: int, to: str) -> jax.Array:
    # A result that is typed as the same on each device (`check_vma`) only all_gather can give.
    if to == "varying" and over_gloo():
        return all_gather_by_exchange(x, axis, dim)
    return lax.all_gather(x, axis, axis=dim, tiled=True, to=to)


def _all_to_all(x: jax.Array, axis: str) -> jax.Array:
    return lax.all_to_all(as_varying(x, (axis,)), axis, 0, 0, tiled=True)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The collectives of a strategy, which only sum and concatenate: callers divide, once.

    Attributes:
        all_reduce: (array, axis names) -> the sum over the axes, on every device.
        reduce_scatter: (array, axis name, dim) -> this device's block, along dim, of the sum.
        all_gather: (array, axis name, dim, to) -> the devices' blocks along dim, in their order;
            `to` as in `jax.lax.all_gather`.
        all_to_all: (array (devices, ...), axis name) -> the entries for this device, of the same
            shape, in the order of their senders.
        exchanges_rows: Whether rows that are looked up in a sharded table may be exchanged by
            all-to-all, which sends less than gathering the table. Devices then add their gradients
            in an order of their own.
        exact_step: The class of the training step in which sums are exact; None: they are not.
    """

    all_reduce: Callable[[jax.Array, Axes], jax.Array]
    reduce_scatter: Callable[[jax.Array, str, int], jax.Array]
    all_gather: Callable[[jax.Array, str, int, str], jax.Array] = _all_gather
    all_to_all: Callable[[jax.Array, str], jax.Array] = _all_to_all
    exchanges_rows: bool = False
    exact_step: type[Any] | None = None
    # Number of parts into which exact sums cut the global batch; None: sums are not exact.
    logical_shards: ClassVar[int | None] = None


def _psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    if over_gloo():  # whose own reduce-scatter cannot be trusted
        return reduce_scatter_by_exchange(x, axis, dim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)  # sums; the caller divides


# Only sums: whoever calls divides.
PLAIN = Reduction(lax.psum, _psum_scatter, exchanges_rows=True)
EXCHANGED = Reduction(all_reduce_by_exchange, reduce_scatter_by_exchange, exchanges_rows=True)


def takes(*options: str) -> Callable[[Any], Any]:
    """Declares which options of a strategy a slot's function takes, by keyword; others get none."""

    def declare(function: Any) -> Any:
        function.takes = frozenset(options)
        return function

    return declare


# Scopes of the operations of `every`.
_EVERY = re.compile(r"\b(in|but)_every_([1-9]\d*)_steps\b")


@checked
def every(
    steps: Count, step: Any, then: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any
) -> Any:
    """A `lax.cond` that is true every so many steps: bytes of each branch count with its share.

    Args:
        steps: `then` is called in every such step: first where `step` is this less 1.
        step: Number of steps done, 0-d int32, as a slot may take it; the same on all devices.
        then: What is called in these steps.
        otherwise: What is called in the others.
        *operands: What both are called with.

    Raises:
        UsageError: `steps` is no integer above 0, or an argument is of another type.
    """
    then = jax.named_scope(f"in_every_{steps}_steps")(then)
    otherwise = jax.named_scope(f"but_every_{steps}_steps")(otherwise)
    return lax.cond((step + 1) % steps == 0, then, otherwise, *operands)


@functools.cache
def share_of_steps(path: str, branches: int) -> tuple[float, bool]:
    """(the share of steps in which an operation runs, whether it is in another branch too).

    Args:
        path: The names of its scopes.
        branches: The number of `lax.cond`s that it is in.
    """
    found = _EVERY.findall(path)
    terms = {(word == "in", int(steps)) for word, steps in found}
    period = math.lcm(*(steps for _, steps in terms))
    runs = sum(all((i % n == 0) is is_in for is_in, n in terms) for i in range(period))
    return runs / period, branches > len(found)


def flat_axes(axes: Any) -> Axes:
    """Axis names as one flat tuple: of one name, a sequence, a nested one; None counts as none.

    Raises UsageError if an axis is named twice.
    """
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        return () if axes is None else (axes,)
    flat = tuple(name for part in axes for name in flat_axes(part))
    if len(set(flat)) < len(flat):
        raise UsageError(f"axis names {axes!r}: an axis is named twice. Name each axis once.")
    return flat


def axes_size(axes: Axes) -> int:
    """Number of devices over the bound axes; NameError, which names it, if one is not bound."""
    try:
        return math.prod(map(lax.axis_size, axes))
    except NameError as error:
        raise NameError(
            f"{error}. Call this inside shard_map, pmap or vmap(axis_name=...) over that axis."
        ) from None


def cast_dtype(own: Any, dtype: Any) -> Any:
    """The dtype that an array of dtype `own` is cast to where an option names `dtype`, or None.

    Complex arrays, which would lose their imaginary part, integers and keys stay as they are.
    """
    return dtype if dtype is not None and jnp.issubdtype(own, jnp.floating) else own


@dataclasses.dataclass(frozen=True)
class Wire:
    """How means over devices go over the wire; made once, where the options come in.

    Attributes:
        reduction: The collectives, which only sum.
        dtype: In which addends are sent and summed; None: their own (`cast_dtype`).
        pre_divide: Whether they are divided before they are summed, so that a sum in float16 stays
            below 65504, at the price of losing small ones. Otherwise as `jax.lax.pmean` does.
        bucket_bytes: Bytes of several arrays that are sent together; <= 0: each array alone.
        codec: What addends are encoded by; they are added in float32 where they are decoded.
        across: The same, over axis `data` alone, in place of `codec`.
        key: Of what codecs draw; None: they draw nothing.
        feedback: Whether somebody keeps what encoding loses.
    """

    reduction: Reduction = PLAIN
    dtype: Any = None
    pre_divide: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    codec: Codec | None = None
    across: Codec | None = None
    key: jax.Array | None = None
    feedback: bool = False

    @property
    def encodes(self) -> bool:
        """Whether it has codecs."""
        return bool(self.codec or self.across)

    def codec_over(self, axis: str) -> Codec | None:
        """What addends are encoded by that are summed over an axis."""
        return self.across if axis == DATA_AXIS and self.across else self.codec

    def cast(self, x: jax.Array, own: Any) -> jax.Array:
        """`x` as it is sent, where it stands for an array of dtype `own`."""
        return x.astype(cast_dtype(own, self.dtype))

    def all_mean(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The mean over bound axes, on every device, in x's dtype; of integers in float32."""
        if not axes:
            return x
        if self.encodes:
            return self.mean_and_loss(x, axes)[0]
        return self._mean(x, axes, lambda sent: self.reduction.all_reduce(sent, axes))

    def scatter_mean(self, x: jax.Array, dim: int, axes: Axes) -> jax.Array:
        """This device's block, along `dim`, of the mean over bound axes; else as `all_mean`."""
        if any(map(self.codec_over, axes)):
            return self.shard_and_loss(x, dim, axes)[0]

        def add(sent: jax.Array) -> jax.Array:
            for name in axes:  # sums over one axis after the other; `_mean` divides, once
                sent = self.reduction.reduce_scatter(sent, name, dim)
            return sent

        return self._mean(x, axes, add)

    def _mean(self, x: jax.Array, axes: Axes, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """`add`, which only sums over `axes`, made a mean."""
        devices = axes_size(axes)
        result = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
        sent = self.cast(x, result)  # integers too, whose sums would overflow
        mean = add(sent / devices) if self.pre_divide else add(sent) / devices
        return mean.astype(result)

    def of_bucket(self, number: int) -> Wire:
        """The same, for one of several buckets: its draws are its own."""
        if self.key is None:
            return self
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, number))

    # With codecs. What a device's encoding loses is in the unit of its addend: the mean of the
    # addends is the mean that was received and the mean of the losses, over all devices.

    def mean_and_loss(self, x: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
        """(`all_mean`, float32 what encoding loses of this device's `x`).

        Summed over the axes from the last to the first, each device a part; the mean of a part is
        encoded once, by the codec of the last sum that has one, and gathered as bytes.
        """
        axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
        codec = next(filter(None, map(self.codec_over, axes)), None)
        if codec is None:
            plain = dataclasses.replace(self, codec=None, across=None)
            return plain.all_mean(x, axes), jnp.zeros(x.shape, jnp.float32)
        devices = axes_size(axes)
        flat = _padded(x.astype(jnp.float32).reshape(-1), devices * codec.block)
        total, lost, start = self._summed(flat, tuple(reversed(axes)), x.dtype)
        # Of sums over all `axes`, divided once.
        sent, later = self._encoded((total / devices).reshape(1, -1), codec, len(axes))
        for name in axes:
            sent = self.reduction.all_gather(sent, name, 1, "varying")
        lost = added_at(lost, start, later.reshape(-1) * devices)
        cut = [a.reshape(-1)[: x.size].reshape(x.shape) for a in (codec.decode(sent), lost)]
        return cut[0].astype(x.dtype), cut[1]

    def shard_and_loss(self, x: jax.Array, dim: int, axes: Axes) -> tuple[jax.Array, jax.Array]:
        """(`scatter_mean`, float32 what encoding loses of this device's `x`)."""
        devices = axes_size(axes)
        block = (*x.shape[:dim], x.shape[dim] // devices, *x.shape[dim + 1 :])
        split = x.reshape(*x.shape[:dim], devices, *block[dim:])
        rows = jnp.moveaxis(split, dim, 0).astype(jnp.float32)
        total, lost, _ = self._summed(rows.reshape(-1), axes, x.dtype)
        lost = jnp.moveaxis(lost.reshape(devices, *block), 0, dim).reshape(x.shape)
        return (total / devices).reshape(block).astype(x.dtype), lost  # of sums over all `axes`

    def _summed(
        self, x: jax.Array, axes: Axes, dtype: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array | int]:
        """(this device's part of the sum over axes, what is lost of `x`, where the part begins).

        `x` is flat, float32, and stands for an array of `dtype`. One axis after the other.
        """
        lost, start = jnp.zeros_like(x), jnp.int32(0)
        for hop, axis in enumerate(axes):
            rows, codec = x.reshape(lax.axis_size(axis), -1), self.codec_over(axis)
            if codec is None:
                scale = len(rows) if self.pre_divide else 1
                sent = self.cast((rows / scale).astype(dtype), dtype)
                x = self.reduction.reduce_scatter(sent, axis, 0).reshape(-1)
                x = x.astype(jnp.float32) * scale
            else:
                sent, now = self._encoded(rows, codec, hop)
                lost = now.reshape(-1) if hop == 0 else added_at(lost, start, now.reshape(-1))
                # Each device adds what it decodes; whoever calls divides, once.
                received = codec.decode(self.reduction.all_to_all(sent, axis))
                x = _added(received.reshape(len(rows), -1)[:, : rows.shape[1]])
            start += lax.axis_index(axis) * rows.shape[1]
        return x, lost, start

    def _encoded(self, rows: jax.Array, codec: Codec, hop: int) -> tuple[jax.Array, jax.Array]:
        """Rows (n, k), padded: (their bytes (n, blocks, bytes), what is lost of them)."""
        blocks = _padded(rows, codec.block).reshape(len(rows), -1, codec.block)
        draws = None
        if codec.rounding == "stochastic":
            if self.key is None:
                raise UsageError("a codec that rounds stochastically needs a key of the step.")
            # Each device draws its own, anew each time, so that what they lose is not the same.
            key = jax.random.fold_in(self.key, lax.axis_index(bound_axes()))
            key = jax.random.fold_in(jax.random.fold_in(key, hop), rows.size)
            # Not before there are blocks: those of all arrays would be in memory together.
            blocks, key = lax.optimization_barrier((blocks, key))
            draws = jax.random.uniform(key, blocks.shape)
        sent = codec.encode(blocks, draws=draws)
        lost = blocks - codec.decode(sent)
        if self.feedback:  # computed first: `blocks` then take no memory while bytes travel
            sent, lost = lax.optimization_barrier((sent, lost))
        return sent, lost.reshape(len(rows), -1)[:, : rows.shape[1]]


def added_at(x: jax.Array, start: Any, part: jax.Array) -> jax.Array:
    """A flat array, with another one added to its elements from `start` on, in place."""
    own = lax.dynamic_slice_in_dim(x, start, part.size)
    return lax.dynamic_update_slice_in_dim(x, own + part, start, 0)


def _added(rows: jax.Array) -> jax.Array:
    """The sum of rows, in their order where there are few: compilers choose another for `sum`."""
    return functools.reduce(jnp.add, rows) if len(rows) <= 16 else jnp.sum(rows, 0)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """Zeros after the last dim, up to a multiple."""
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


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
    dtype. For `pre_divide` see `Wire`. Raises UsageError for a `dtype` that is not floating-point.
    """
    return Wire(reduction, dtype, pre_divide).all_mean(x, flat_axes(axes))


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

    Raises UsageError if x has no such dim, or the devices do not divide it.
    """
    axes = flat_axes(axis)
    devices = axes_size(axes)
    if not -x.ndim <= dim < x.ndim or x.shape[dim] % devices:
        raise UsageError(
            f"scatter_mean.dim = {dim}: {devices} devices over {axes} do not divide such a dim of "
            f"an array of shape {x.shape}."
        )
    return Wire(reduction, dtype, pre_divide).scatter_mean(x, dim % x.ndim, axes)


def all_max(x: jax.Array, axis: str) -> jax.Array:
    """The maximum over the devices of an axis; NaN if any is, which `pmax` drops on CPUs."""
    largest = lax.pmax(x, axis)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return largest
    is_nan = lax.pmax(jnp.isnan(x).astype(jnp.int32), axis) > 0
    return jnp.where(is_nan, jnp.asarray(jnp.nan, x.dtype), largest)


def gather(
    x: Array, dim: int, axis: str | Axes, reduction: Reduction = PLAIN, *, replicated: bool = False
) -> jax.Array:
    """Concatenates the devices' blocks along `dim`; several axes one after the other.

    `replicated` types the result as the same on each device where `shard_map` tracks that, so that
    it may leave the map; not where it is differentiated, for autodiff would sum its gradients.
    """
    for name in reversed(flat_axes(axis)):
        to = "invarying" if replicated and is_tracked(name) else "varying"
        x = reduction.all_gather(x, name, dim, to)
    return x


def shard(x: jax.Array, dim: int, axis: str | Axes) -> jax.Array:
    """This device's block of `x`, which is replicated, along `dim`."""
    axes = flat_axes(axis)
    devices = axes_size(axes)
    if devices == 1:
        return as_varying(x, axes)  # nothing to cut, nor for the compiler to see through
    block = x.shape[dim] // devices
    # Of a tuple, even of one name, JAX computes the index by arithmetic.
    start = lax.axis_index(axes[0] if len(axes) == 1 else axes) * block
    return lax.dynamic_slice_in_dim(x, start, block, dim, allow_negative_indices=False)
