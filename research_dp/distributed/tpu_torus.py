"""Reduce-scatter and all-gather in stages, one for each dimension of a TPU's torus.

XLA's TPU compiler implements a reduce-scatter over several dimensions of the torus, and a gather
over three, by an all-reduce: twice the bytes. Over one dimension at a time it does not, provided
that blocks have a dim of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from research_dp.distributed.buckets import pad_to_multiple
from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.errors import binding_error

# TPU memory has tiles of 8 rows of 128 elements; flat blocks are padded to a multiple.
_TILE = 8 * 128


@gin.register(module="distributed")
def torus_reduction(*, mesh: Mesh) -> Reduction:
    """A reduction that scatters and gathers along one dimension of a TPU's torus after the other.

    It sends the fewest bytes: XLA implements one collective over several dimensions by an
    all-reduce. But its collectives are more and smaller, and each waits for the one before.

    Args:
        mesh: The strategy's mesh, of TPUs.
    """
    if any(not hasattr(device, "coords") for device in mesh.devices.flat):
        kind = mesh.devices.flat[0].device_kind
        raise binding_error(
            "torus_reduction.mesh",
            f": a {kind!r} has no torus coordinates. Leave torus_reduction out.",
        )
    return staged_reduction(torus_stages(mesh))


def staged_reduction(stages: Mapping[str, Sequence[int]]) -> Reduction:
    """A reduction that scatters in stages over groups of an axis; three or more also gather so.

    `stages` has the sizes of an axis's stages, the major one first. An axis that is missing, or has
    another size than their product (on a part of the mesh), has one stage.
    """

    def groups_along(axis: str) -> list[list[list[int]]]:
        sizes = stages.get(axis, ())
        return groups_of(sizes) if math.prod(sizes) == lax.axis_size(axis) else []

    def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
        # Only sums: the caller divides, once, by the number of partial results.
        groups = groups_along(axis)
        if not groups:
            return PLAIN.reduce_scatter(x, axis, dim)
        front, devices = jnp.moveaxis(x, dim, 0), lax.axis_size(axis)
        blocks = _in_tiles(front.reshape(devices, -1, *front.shape[1:]))
        for group in groups:
            # Afterwards a device has the blocks of its groups in the later stages.
            blocks = lax.psum_scatter(blocks, axis, axis_index_groups=group, tiled=True)
        local = blocks.reshape(-1)[: front.size // devices]
        return jnp.moveaxis(local.reshape(-1, *front.shape[1:]), 0, dim)

    def all_gather(x: jax.Array, axis: str, dim: int, to: str) -> jax.Array:
        groups = groups_along(axis)
        # XLA gathers over two dimensions at once, on the links of both. JAX has no gather in groups
        # whose result is typed as replicated.
        if len(groups) < 3 or to != "varying":
            return PLAIN.all_gather(x, axis, dim, to)
        front = jnp.moveaxis(x, dim, 0)
        blocks = _in_tiles(front[None])
        for group in reversed(groups):
            blocks = lax.all_gather(blocks, axis, axis_index_groups=group, tiled=True, to=to)
        full = blocks.reshape(blocks.shape[0], -1)[:, : front.size]
        return jnp.moveaxis(full.reshape(-1, *front.shape[1:]), 0, dim)

    return dataclasses.replace(PLAIN, reduce_scatter=reduce_scatter, all_gather=all_gather)


def _in_tiles(blocks: jax.Array) -> jax.Array:
    """(blocks, ...) as (blocks, tiles, tile) if the blocks are flat, padded with zeros.

    Not if that more than doubles them: an all-reduce would send no more.
    """
    if blocks.ndim > 2 and blocks.shape[1] > 1:
        return blocks
    flat = blocks.reshape(blocks.shape[0], -1)
    tiles = pad_to_multiple(flat, _TILE, 1)
    if tiles.shape[1] > 2 * flat.shape[1]:
        return flat
    return tiles.reshape(blocks.shape[0], -1, _TILE)


def groups_of(stages: Sequence[int]) -> list[list[list[int]]]:
    """The groups of each stage, as indices along the axis; none for a single stage."""
    if len(stages) < 2:
        return []
    indices = np.arange(math.prod(stages)).reshape(tuple(stages))
    lines = (np.moveaxis(indices, i, -1).reshape(-1, size) for i, size in enumerate(stages))
    return [groups.tolist() for groups in lines]


def torus_stages(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """For each axis of a mesh of TPUs, its sizes along the dimensions of the torus, major first.

    An axis whose devices do not follow the torus has one stage. So has one over several slices,
    between which a stage would send each chip's part instead of the slice's sum.
    """
    result = {}
    for index, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])
        stages = {_stages([tuple(device.coords) for device in line]) for line in lines}
        only = stages.pop() if len(stages) == 1 else None
        result[name] = (lines.shape[1],) if only is None else only
    return result


def _stages(coords: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Sizes of the stages of an axis, by its devices' coordinates; None if they are no grid."""
    count = len(coords)
    if count < 2:
        return ()
    if len(set(coords)) < count:
        return None  # several slices, or cores of one chip
    for size in (n for n in range(count, 1, -1) if count % n == 0):
        steps = np.diff(np.reshape(coords, (count // size, size, -1)), axis=1)
        if np.count_nonzero(steps.any((0, 1))) == 1:  # all lines of so many follow one dimension
            major = _stages(coords[::size])
            return None if major is None else (*major, size)
    return None
