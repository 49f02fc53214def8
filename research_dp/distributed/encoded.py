"""Parameters gathered as bytes, in blocks that lie where they do on any number of devices.

A block is a tile of an array's last two dims, chosen by its shape alone. Devices that share one
take its scale from the largest magnitude in all of it. So what is decoded has the same bits,
however the array is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed import collectives
from research_dp.distributed.codecs import Codec
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size
from research_dp.distributed.sharding import padded


def tile(shape: Sequence[int], block: int) -> tuple[int, int]:
    """Rows and columns of a block in the last two dims of an array: with the least padding.

    Where several have it, the most square: shards along either dim then have whole ones.
    """
    rows, columns = (1, 1, *shape)[-2:]
    sizes = [(n, block // n) for n in (2**i for i in range(block.bit_length())) if block % n == 0]
    return min(sizes, key=lambda t: (padded(rows, t[0]) * padded(columns, t[1]), abs(t[0] - t[1])))


def gather(
    x: jax.Array,
    dim: int | None,
    axes: Axes,
    codec: Codec,
    shape: Sequence[int],
    reduction: Reduction = PLAIN,
    *,
    moves: bool = True,
) -> jax.Array:
    """All devices' blocks along `dim`, in float32, as the codec decodes them.

    Args:
        x: This device's shard, maybe padded.
        dim: That is sharded over bound `axes`; None: each device has all.
        axes: Mesh axes.
        codec: One that `shares`.
        shape: Of the array without padding, all devices' shards together; of a stack's layer.
        reduction: The collectives.
        moves: Whether anything is gathered: else it is what the others decode of this shard.
    """
    x, dim = x.astype(jnp.float32), dim if axes else None
    if len(shape) < 2:  # a row
        dim = None if dim is None else dim + (dim == x.ndim - 1)
        rows = x.reshape(*x.shape[:-1], 1, *x.shape[-1:])
        found = gather(rows, dim, axes, codec, (1, *shape), reduction, moves=moves)
        return found.reshape(*found.shape[:-2], *found.shape[-1:])
    sizes, most = tile(shape, codec.block), None
    if dim is None or dim < x.ndim - 2 or x.shape[dim] % sizes[dim - x.ndim] == 0:
        blocks = _in_tiles(x, sizes)
    else:  # a device has parts of tiles
        whole = sizes[dim - x.ndim]
        part = math.gcd(x.shape[dim], whole)
        sizes = (part, sizes[1]) if dim == x.ndim - 2 else (sizes[0], part)
        blocks = _in_tiles(x, sizes)
        most = _most_of_all(blocks, dim, axes, parts=whole // part)
    sent = codec.encode(blocks, most)
    lengths = list(x.shape)
    if moves and dim is not None:
        sent = collectives.gather(sent, dim, axes, reduction)
        lengths[dim] *= axes_size(axes)
    full = _from_tiles(codec.decode(sent)[..., : math.prod(sizes)], sizes)
    return full[tuple(map(slice, lengths))]


def alone(x: jax.Array, codec: Codec, *, stacked: bool = False) -> tuple[jax.Array, float]:
    """(what one device decodes of a whole array, its largest error: in a block's largest elements).

    A stack is decoded layer by layer.
    """
    shape = x.shape[stacked:]
    decoded = gather(x, None, (), codec, shape)

    def largest(y: jax.Array) -> jax.Array:
        rows = y if len(shape) > 1 else y.reshape(-1, 1, *shape)
        return jnp.max(_in_tiles(jnp.abs(rows), tile(shape, codec.block)), -1)

    error, most = largest(decoded - x), largest(x)
    return decoded, float(jnp.max(error / jnp.where(most > 0, most, 1)))


def _most_of_all(blocks: jax.Array, dim: int, axes: Axes, parts: int) -> jax.Array:
    """The largest magnitude (..., 1) of the tile that each block is a part of, along `dim`.

    A tile has so many `parts`, which several devices over `axes` may have.
    """
    most = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    count = most.shape[dim]
    tiles = (lax.axis_index(axes) * count + jnp.arange(count)) // parts
    shape = (*most.shape[:dim], -(-count * axes_size(axes) // parts), *most.shape[dim + 1 :])
    largest = jnp.zeros(shape).at[(*(slice(None),) * dim, tiles)].max(most)
    for name in axes:
        largest = collectives.all_max(largest, name)
    return jnp.take(largest, tiles, axis=dim)


def _in_tiles(x: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """(..., rows, columns) -> (..., rows / r, columns / c, r * c), padded with zeros."""
    *lead, rows, columns = x.shape
    (r, c), missing = sizes, [-n % t for n, t in zip((rows, columns), sizes, strict=True)]
    if any(missing):
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, n) for n in missing])
    *_, rows, columns = x.shape
    tiles = x.reshape(*lead, rows // r, r, columns // c, c)
    return jnp.swapaxes(tiles, -3, -2).reshape(*lead, rows // r, columns // c, r * c)


def _from_tiles(tiles: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """The inverse, with the padding."""
    *lead, rows, columns, _ = tiles.shape
    r, c = sizes
    apart = jnp.swapaxes(tiles.reshape(*lead, rows, columns, r, c), -3, -2)
    return apart.reshape(*lead, rows * r, columns * c)
