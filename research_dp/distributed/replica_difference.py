"""Along which mesh axes the replicas of an array differ, and the sentence that reports it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from research_dp.errors import some_of

_NAMED = 3


def differing_axes(
    shards: Mapping[tuple[int, ...], tuple[Hashable, Hashable]], axis_names: Sequence[str]
) -> tuple[str, ...]:
    """The mesh axes along which devices have other contents of the same part of an array.

    Args:
        shards: For each device, by its place in the mesh: which part of the array it has, and the
            contents of that part (bytes, or a checksum).
        axis_names: The axes of the mesh, in the order of a place.
    """

    def differ(number: int) -> bool:
        for place, (part, contents) in shards.items():
            first = shards[(*place[:number], 0, *place[number + 1 :])]
            if first[0] == part and first[1] != contents:
                return True
        return False

    return tuple(axis for number, axis in enumerate(axis_names) if differ(number))


def part_of(index: Sequence[slice]) -> Hashable:
    """The part of an array that an index of slices stands for."""
    return tuple((s.start, s.stop) for s in index)


def difference_text(what: str, paths: Sequence[str], axes: Sequence[str], mesh: Mesh) -> str:
    """Which replicas differ, along which axes, why, and what to do.

    Args:
        what: 'gradient', 'parameter', 'optimizer state' or 'model state'.
        paths: Paths of the arrays that differ.
        axes: Mesh axes along which they do.
        mesh: The mesh.
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
