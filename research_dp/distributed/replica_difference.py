"""Finds the mesh axes along which the replicas of an array differ, and words the message."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from research_dp.errors import some_of

_NAMED = 3


def differing_axes(
    shards: Mapping[tuple[int, ...], tuple[Hashable, Hashable]], axis_names: Sequence[str]
) -> tuple[str, ...]:
    """The mesh axes along which devices have different contents of the same part of an array.

    `shards` has, by the mesh coordinates of a device, (the part that it has, its contents: bytes,
    or a checksum).
    """

    def differ(axis: int) -> bool:
        for coordinates, (part, contents) in shards.items():
            first = shards[(*coordinates[:axis], 0, *coordinates[axis + 1 :])]
            if first[0] == part and first[1] != contents:
                return True
        return False

    return tuple(axis for i, axis in enumerate(axis_names) if differ(i))


def part_of(index: Sequence[slice]) -> Hashable:
    """The part of an array that an index of slices selects, hashable."""
    return tuple((s.start, s.stop) for s in index)


def difference_text(what: str, paths: Sequence[str], axes: Sequence[str], mesh: Mesh) -> str:
    """A message: which replicas differ along which mesh axes, why, and what to do.

    `what` is 'gradient', 'parameter', 'optimizer state' or 'model state'; `paths` are the arrays'.
    """
    sizes: Mapping[str, Any] = mesh.shape
    along = " and ".join(f"{axis} (size {sizes[axis]})" for axis in axes)
    text = f"copies of {what} {some_of(paths, _NAMED)} differ along mesh axis {along}: "
    if what == "gradient":
        return text + f"never synchronised over {' and '.join(axes)}"
    if what == "model state":
        return text + (
            "statistics are each device's own; take them over batch_axes, e.g. "
            "BatchNorm(axis_name=batch_axes or None) while training"
        )
    return text + "gradients are the same, so each device updates in its own way"
