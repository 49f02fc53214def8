"""The global norm of gradients, the same bits however they are sharded."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.deterministic.sum import add_pairs, fence, pairwise
from research_dp.distributed.collectives import gather
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import LeafSharding, flatten_padded, pad_to_multiple

PyTree = Any


def norm_by_blocks(
    tree: PyTree, shardings: PyTree, blocks: int, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The L2 norm and float32 flags of nonfinite leaves: the same bits however arrays are sharded.

    Every dim of an array is cut into as many equal pieces as `blocks`, a power of two, allows.
    Devices, whose number divides `blocks`, exchange the sums of squares of these blocks, and all
    are added in one order. `zero` is `unknown_zero`. Results are the same on every device.
    """
    places = jax.tree.leaves(shardings)
    sums = []
    for x, place in zip(jax.tree.leaves(tree), places, strict=True):
        order = _order(place.shape, blocks)
        one = jnp.transpose(_squares(x.astype(jnp.float32), place, blocks, zero), order)
        # Along the dims before the one that is split, and along this device's part of that.
        here = len(order) if place.dim is None else order.index(place.dim) + 1
        for _ in range(here):
            one = add_pairs(one)
        sums.append(one)
    split = [i for i, place in enumerate(places) if place.dim is not None]
    if split:
        local = jnp.concatenate([sums[i].reshape(1, -1) for i in split], axis=1)
        total = add_pairs(gather(local, 0, FSDP_AXIS, replicated=True))
        for i, part in zip(split, lax.split(total, [sums[i].size for i in split]), strict=True):
            sums[i] = part.reshape(sums[i].shape)
    for i, one in enumerate(sums):
        while one.ndim:
            one = add_pairs(one)
        sums[i] = one
    length = 2 ** math.ceil(math.log2(len(sums)))
    each = jnp.stack(sums)
    total = fence(add_pairs(flatten_padded(each, length)), zero)
    return jnp.sqrt(total), (~jnp.isfinite(each)).astype(jnp.float32)


def _order(shape: tuple[int, ...], blocks: int) -> list[int]:
    """The dims, in the order in which blocks are added along them.

    The dim that is most likely sharded comes last: sums along the others need no communication.
    """
    last = max(
        range(len(shape)), key=lambda d: (math.gcd(shape[d], blocks), shape[d], d), default=0
    )
    return [dim for dim in range(len(shape)) if dim != last] + [last][: len(shape)]


def _squares(x: jax.Array, place: LeafSharding, blocks: int, zero: jax.Array) -> jax.Array:
    """Sums of squares of this device's blocks of one array."""
    shape: list[int] = []
    for dim, length in enumerate(place.shape):
        pieces = math.gcd(length, blocks)
        local = pieces // place.axis_size if dim == place.dim else pieces
        shape += [local, length // pieces]
    squares = fence(jnp.square(x), zero).reshape(shape)
    for dim in range(1, len(shape), 2):
        squares = _add_along(squares, dim)
    return squares.reshape(shape[0::2])


def _add_along(x: jax.Array, dim: int) -> jax.Array:
    """The sum along a dim, which stays, of length 1.

    Written as additions, for the order of a `jnp.sum` depends on the memory layout of its operand.
    Four quarters are added at a time: compilers make one loop over memory of that.
    """
    x = pad_to_multiple(x, 2 ** math.ceil(math.log2(x.shape[dim])), dim)
    while x.shape[dim] > 1:
        x = pairwise(jnp.split(x, min(4, x.shape[dim]), axis=dim))
    return x
