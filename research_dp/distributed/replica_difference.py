"""Finds the mesh axes along which the replicas of an array differ, and words the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from research_dp.errors import some_of


def differing_axes(shards: Mapping[Any, Any], axis_names: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes along which devices have different contents of the same part of an array.

    `shards` has (index of the part, its bytes or checksum), by the mesh coordinates of the device.
    """
    different = set()
    for coordinates, (part, contents) in shards.items():
        for i, axis in enumerate(axis_names):
            first_part, first = shards[(*coordinates[:i], 0, *coordinates[i + 1 :])]
            if first_part == part and first != contents:
                different.add(axis)
    return tuple(axis for axis in axis_names if axis in different)


def difference_text(what: str, paths: Sequence[str], axes: Sequence[str], mesh: Mesh) -> str:
    """A message: which replicas of e.g. a 'gradient' or the 'model state' differ where, and why."""
    along = " and ".join(f"{axis} (size {mesh.shape[axis]})" for axis in axes)
    cause = "gradients are the same, so each device updates in its own way"
    if what == "gradient":
        cause = f"never synchronised over {' and '.join(axes)}"
    elif what == "model state":
        cause = (
            "statistics are each device's own; take a module with BatchNorm by from_linen or "
            "from_nnx, and average a statistic of your own over `batch_axes`"
        )
    return f"copies of {what} {some_of(paths, 3)} differ along mesh axis {along}: {cause}"
