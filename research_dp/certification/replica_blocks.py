"""Whether devices that hold the same part of an array hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from research_dp.distributed.replica_difference import differing_axes, part_of
from research_dp.distributed.sharding import by_path


class Apart(NamedTuple):
    """An array whose copies differ.

    Attributes:
        what: 'gradient', 'parameter', 'optimizer state' or 'model state'.
        leaf: Its path.
        axes: Mesh axes along which they do.
    """

    what: str
    leaf: str
    axes: tuple[str, ...]


def differing(what: str, tree: Any, mesh: Mesh) -> Iterator[Apart]:
    """The arrays of a tree of global arrays whose copies are not the same bits."""
    for leaf, x in by_path(tree).items():
        shards = {
            place: (part_of(index), data.tobytes())
            for place, (index, data) in blocks(x, mesh).items()
        }
        axes = differing_axes(shards, mesh.axis_names)
        if axes:
            yield Apart(what, leaf, axes)


def blocks(x: jax.Array, mesh: Mesh) -> dict[tuple[int, ...], tuple[tuple[slice, ...], np.ndarray]]:
    """By the place of a device in the mesh: which part of an array it holds, and that part."""
    place = {device: index for index, device in np.ndenumerate(mesh.devices)}
    return {place[s.device]: (s.index, np.asarray(s.data)) for s in x.addressable_shards}
