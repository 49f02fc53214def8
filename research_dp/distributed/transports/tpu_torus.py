"""Scatters and gathers along one dimension of a TPU's torus after the other, at a ring's bytes.

XLA's TPU compiler sends a reduce-scatter over several dimensions of the torus as an all-reduce, and
a gather over three of them too: twice the bytes. Along one dimension at a time they stay what they
are, provided that blocks are counted by a dim of their own, and the stages together send what one
would.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.padding import pad_to_multiple
from research_dp.errors import UsageError

# A TPU lays arrays out in tiles of 8 rows of 128; flat blocks are cut into whole ones.
_TILE = 8 * 128


@gin.register(module="distributed")
def torus_reduction(*, mesh: Mesh) -> Reduction:
    """Scatters sums, and gathers blocks, along one dimension of a TPU's torus after the other.

    For `data_parallel.reduction`. Sends the least bytes, where one collective over several
    dimensions would be sent as an all-reduce; but in more, smaller collectives, each of which waits
    for the one before.

    Args:
        mesh: The strategy's mesh, whose devices know their place in the torus.

    Raises:
        UsageError: They do not: they are no TPUs.
    """
    if any(not hasattr(device, "coords") for device in mesh.devices.flat):
        kind = mesh.devices.flat[0].device_kind
        raise UsageError(
            f"data_parallel.reduction = @torus_reduction(): a {kind!r} has no place in a "
            "torus, as TPUs have. Leave it out.",
            binding="data_parallel.reduction",
        )
    return staged_reduction(torus_stages(mesh))


def staged_reduction(stages: Mapping[str, Sequence[int]]) -> Reduction:
    """Scatters sums in stages over groups of the devices of an axis; gathers, if there are three.

    Args:
        stages: For an axis the sizes of its stages, the major one first; their product is the
            axis's size. An axis that is not named has one stage, and so has one of another size,
            as on a part of the mesh.
    """

    def groups_along(axis: str) -> list[list[list[int]]]:
        own = stages.get(axis, ())
        return groups_of(own) if math.prod(own) == lax.axis_size(axis) else []

    def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
        # Only sums: whoever calls divides, once, by the number of partial results.
        groups = groups_along(axis)
        if not groups:
            return PLAIN.reduce_scatter(x, axis, dim)
        front, devices = jnp.moveaxis(x, dim, 0), lax.axis_size(axis)
        blocks = _in_tiles(front.reshape(devices, -1, *front.shape[1:]))
        for group in groups:
            # Afterwards a device has the blocks of those that it will share the later stages with.
            blocks = lax.psum_scatter(
                blocks, axis, scatter_dimension=0, tiled=True, axis_index_groups=group
            )
        mine = blocks.reshape(-1)[: front.size // devices]
        return jnp.moveaxis(mine.reshape(-1, *front.shape[1:]), 0, dim)

    def all_gather(x: jax.Array, axis: str, dim: int, to: str) -> jax.Array:
        groups = groups_along(axis)
        # Over two dimensions it stays a gather, and takes the links of both. JAX has no gather in
        # groups whose result is typed as the same on each device.
        if len(groups) < 3 or to != "varying":
            return PLAIN.all_gather(x, axis, dim, to)
        front = jnp.moveaxis(x, dim, 0)
        blocks = _in_tiles(front[None])
        for group in reversed(groups):
            blocks = lax.all_gather(
                blocks, axis, axis=0, tiled=True, axis_index_groups=group, to=to
            )
        whole = blocks.reshape(blocks.shape[0], -1)[:, : front.size]
        return jnp.moveaxis(whole.reshape(-1, *front.shape[1:]), 0, dim)

    return dataclasses.replace(PLAIN, reduce_scatter=reduce_scatter, all_gather=all_gather)


def _in_tiles(blocks: jax.Array) -> jax.Array:
    """(blocks, ...), of which what is flat is cut in whole tiles, filled up with zeros.

    Not if that more than doubles it: as much an all-reduce would send.
    """
    if blocks.ndim > 2 and blocks.shape[1] > 1:
        return blocks
    flat = blocks.reshape(blocks.shape[0], -1)
    tiles = pad_to_multiple(flat, _TILE, 1)
    if tiles.shape[1] > 2 * flat.shape[1]:
        return flat
    return tiles.reshape(blocks.shape[0], -1, _TILE)


def groups_of(stages: Sequence[int]) -> list[list[list[int]]]:
    """The groups of each stage, as positions along the axis; none for a single stage."""
    if len(stages) < 2:
        return []
    places = np.arange(math.prod(stages)).reshape(tuple(stages))
    return [
        np.moveaxis(places, stage, -1).reshape(-1, size).tolist()
        for stage, size in enumerate(stages)
    ]


def torus_stages(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """For each axis of a mesh of TPUs, its sizes along the dimensions of the torus, major first.

    An axis whose devices do not follow the torus has one stage, all of it; and so has one over
    several slices, between which a stage would send each chip's part instead of the slice's sum.
    """
    found = {}
    for index, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])
        cuts = {_stages([tuple(device.coords) for device in line]) for line in lines}
        only = cuts.pop() if len(cuts) == 1 else None
        found[name] = (lines.shape[1],) if only is None else only
    return found


def _stages(places: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Sizes of the stages of devices in a row, by their coordinates; None if they are no grid."""
    if len(places) < 2:
        return ()
    if len(set(places)) < len(places):
        return None  # of several slices, or cores of one chip
    size = next((n for n in range(len(places), 1, -1) if _in_lines(places, n)), None)
    before = None if size is None else _stages(places[::size])
    return None if before is None or size is None else (*before, size)


def _in_lines(places: Sequence[tuple[int, ...]], size: int) -> bool:
    """Whether each `size` neighbours of a row differ in one coordinate, the same for all."""
    if len(places) % size:
        return False
    along = set()
    for start in range(0, len(places), size):
        line = places[start : start + size]
        along |= {
            axis
            for one, other in itertools.pairwise(line)
            for axis, (a, b) in enumerate(zip(one, other, strict=True))
            if a != b
        }
    return len(along) == 1
