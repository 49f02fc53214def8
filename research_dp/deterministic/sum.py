"""Sums in one order, whatever the number of devices: a balanced binary tree over logical shards.

The global batch is cut in logical shards, the same on any mesh. Each gives its gradient by the same
program, and these are added pairwise, neighbours first: those of one device, then those of a group
of devices, then those of the groups. Which device has which shard makes no difference.

Compilers keep the order of additions, but may fuse a multiplication with the addition that follows
it (one rounding less), according to what stands beside it: `fence` keeps them apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from research_dp.distributed.buckets import flatten_padded, unflatten
from research_dp.distributed.collectives import Axes, Reduction, axes_size, gather, over_gloo
from research_dp.distributed.mesh import target_platform
from research_dp.distributed.vma import is_tracked
from research_dp.errors import binding_error
from research_dp.types import PyTree

# From here on halving is faster between 8 CPU devices (experiments/determinism); between hosts it
# saves most of the bytes, whatever the size.
_HALVED_BYTES = 2**20
# Up to here one gather of all addends is quicker than an exchange and a gather of the sum.
_GATHERED_BYTES = 2**6


@dataclasses.dataclass(frozen=True)
class TreeReduction(Reduction):
    """What `tree_reduction` makes."""

    logical_shards: int = 1  # type: ignore[misc]
    loop: bool = False


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`Reduction.reduce_scatter` by additions in pairs."""
    # Only sums: whoever calls divides, once. `sum_over_logical_shards` fences its results: on some
    # meshes a multiplication just before would be fused with the addition here.
    devices = _addends(x, axis)
    blocks = x.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    blocks = jnp.moveaxis(blocks, dim, 0)
    # Either way as many bytes as a ring sends, and the same additions.
    if not _pays_halving(x, (axis,)):
        return add_pairs(lax.all_to_all(blocks, axis, 0, 0, tiled=True))
    return _halved(_bits_reversed(blocks), axis)[0]


def _addends(x: jax.Array, axis: str) -> int:
    """How many devices add along an axis; raises UsageError where they cannot as a tree does."""
    _refuse_narrow(x.dtype)
    devices = axes_size((axis,))
    if devices & (devices - 1):
        raise binding_error(
            "data_parallel.reduction",
            f": @tree_reduction over {devices} devices of axis {axis!r}: take a power of two, for "
            "sums are taken of pairs.",
        )
    return devices


def _pays_halving(x: jax.Array, axes: Axes) -> bool:
    """Whether devices exchange halves in pairs, or blocks all at once.

    A torus has links enough for all at once; between hosts, halving sends what is already the sum
    of a host's devices. Gloo's reduce-scatter cannot be trusted, and `vmap` has no pairs.
    """
    large = x.size * x.dtype.itemsize >= _HALVED_BYTES
    mapped = set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    return large and mapped and target_platform() != "tpu" and not over_gloo()


def _bits_reversed(x: Any) -> Any:
    """The entries along dim 0, in the order of their indices with the bits reversed."""
    levels = len(x).bit_length() - 1
    bits = x.reshape(*[2] * levels, *x.shape[1:])
    return bits.transpose(*reversed(range(levels)), *range(levels, bits.ndim)).reshape(x.shape)


def _halved(x: jax.Array, axis: str) -> jax.Array:
    """A block of the sum over an axis, along dim 0, by recursive halving (Thakur et al., 2005).

    Each time a device gives the other of its pair half of what it has: neighbours first, then those
    two apart, and so on. The block that it is left with is that of its index with the bits
    reversed: so each half is one run of memory.
    """
    devices = lax.axis_size(axis)
    for distance in (2**level for level in range(devices.bit_length() - 1)):
        pairs = [(i, i | distance) for i in range(devices) if not i & distance]
        # Only sums, as above. a + b is b + a, to the bit: each pair adds in whatever order. But
        # backends that start from 0 make 0.0 of -0.0 and -0.0: see `without_negative_zero`.
        x = lax.psum_scatter(x, axis, axis_index_groups=pairs, tiled=True)
    return x


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """`Reduction.all_reduce` by additions in pairs."""
    # Only sums, as above: over the innermost axis first, whose devices have neighbours.
    sizes = [_addends(x, axis) for axis in axes]
    if x.size * x.dtype.itemsize <= _GATHERED_BYTES:
        for axis in reversed(axes):
            x = add_pairs(gather(x[None], 0, axis, replicated=True))
        return x
    block = flatten_padded(x, math.prod(sizes))
    if not _pays_halving(x, axes) or any(is_tracked(axis) for axis in axes):
        for axis in reversed(axes):
            block = reduce_scatter(block, axis, 0)
        for axis in axes:
            block = gather(block, 0, axis, replicated=True)
        return unflatten(block, x.shape)
    for axis in reversed(axes):
        block = _halved(block, axis)
    for axis, devices in zip(axes, sizes, strict=True):
        in_order = [_bits_reversed(np.arange(devices)).tolist()]
        block = lax.all_gather(block, axis, axis_index_groups=in_order, tiled=True)
    return unflatten(block, x.shape)


def add_pairs(x: jax.Array) -> jax.Array:
    """The sum along dim 0, whose length is a power of two, of neighbours, then of their sums."""
    while x.shape[0] > 1:
        # Subtrees of eight: compilers make one loop over memory of each.
        several = min(8, x.shape[0])
        x = x.reshape(x.shape[0] // several, several, *x.shape[1:])
        x = pairwise([x[:, i] for i in range(several)])
    return x[0]


def pairwise(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of a power of two of arrays: of neighbours, then of their sums."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _refuse_narrow(dtype: Any) -> None:
    """Raises UsageError for dtypes in which compilers leave out roundings between additions."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32:
        raise binding_error(
            "data_parallel.reduction",
            f": @tree_reduction adds in float32, not in {jnp.dtype(dtype)}, whose roundings "
            "compilers move. Leave dtypes of gradients and of gathers at None.",
        )


def add_up_pairs(
    leaf: Callable[[Any, jax.Array], PyTree], count: int, zero: jax.Array, *, loop: bool
) -> PyTree:
    """The sum of `leaf(0)` to `leaf(count - 1)`, computed one at a time, by the same tree.

    `leaf` is (index, `unknown_zero`) -> a tree of arrays, and the body of a `loop`, or written out
    `count` times, a power of two. `log2(count) + 1` sums are kept.
    """
    if not loop:
        return _written_out(leaf, 0, count, zero)
    like = jax.eval_shape(leaf, 0, zero)
    for x in jax.tree.leaves(like):
        _refuse_narrow(x.dtype)

    # Only -0.0 leaves every number as it is when it is added, -0.0 too.
    nothing = jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), like)

    def part(first: Any, size: int) -> PyTree:
        if size == 1:
            return leaf(first, unknown_zero(zero + first))  # so that nothing leaves the loop

        def add(number: Any, total: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, total, part(first + number * (size // 2), size // 2))

        return lax.fori_loop(0, 2, add, nothing)

    if count > 1:
        return part(0, count)
    # A loop here too, which the compiler does not know to turn once: it chooses other code for
    # convolutions and products outside of loops.
    return lax.fori_loop(0, 1 + zero, lambda number, _: part(number, 1), nothing)


def _written_out(leaf: Callable[..., PyTree], first: int, size: int, zero: jax.Array) -> PyTree:
    """`add_up_pairs` without a loop: each half after the other, so that one is alive at a time."""
    if size == 1:
        return leaf(first, zero)
    total = _written_out(leaf, first, size // 2, zero)
    # Of all of them: else the compiler could merge what both halves do with the same parameters.
    done = [jnp.isfinite(x.reshape(-1)[0]) for x in jax.tree.leaves(total) if x.size]
    later = unknown_zero(zero + jnp.stack(done).sum())
    second = _written_out(leaf, first + size // 2, size // 2, later)
    return jax.tree.map(jnp.add, total, second)


def unknown_zero(count: jax.Array) -> jax.Array:
    """0, made of a 0-d integer that is never negative, which a compiler does not know."""
    return jnp.minimum(count, 0)


def fence(tree: PyTree, zero: jax.Array) -> PyTree:
    """The same values, across which no compiler fuses or reorders operations.

    XLA removes `jax.lax.optimization_barrier` before it fuses. `zero` is `unknown_zero`. Random
    keys are returned as they are.
    """

    def one(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
            return x ^ zero.astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(one(x.real), one(x.imag))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        same = lax.bitcast_convert_type(x, bits) ^ zero.astype(bits)
        return lax.bitcast_convert_type(same, x.dtype)

    return jax.tree.map(one, tree)


def without_negative_zero(x: jax.Array) -> jax.Array:
    """The same numbers; 0.0 for -0.0, which one way of adding up leaves and another does not."""
    return jnp.where(x == 0, jnp.zeros_like(x), x)
