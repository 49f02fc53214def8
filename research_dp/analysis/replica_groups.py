"""Which devices take part in a collective together, and which mesh axes they span."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_LIST = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=@?(?:\w+)?mesh\[([^\]]*)\]\s*(.*?)\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([0-9,{} ]*)\}")


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, by its attributes; without any, all devices are one group.

    Raises:
        NotImplementedError: Groups in an unknown form.
    """
    if pairs := _PAIRS.search(attributes):
        return _listed(pairs[1])
    if groups := _LIST.search(attributes):
        return _listed(groups[1]) if groups[1] else [list(range(devices))]
    if iota := _IOTA.search(attributes):
        return _iota(*iota.groups())
    if mesh := _MESH.search(attributes):
        if mesh[2]:
            raise NotImplementedError(f"groups over a mesh with its own device order: {mesh[0]}")
        return _mesh_groups(mesh[1], mesh[3])
    if "replica_groups=" in attributes:
        form = attributes[attributes.index("replica_groups=") :][:80]
        raise NotImplementedError(f"groups in a form that this reader does not know: {form}")
    return [list(range(devices))]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _listed(text: str) -> list[list[int]]:
    """'{0,1},{2,3}'."""
    return [list(_integers(group)) for group in re.findall(r"\{([0-9, ]*)\}", text)]


def _iota(shape: str, dims: str, order: str | None) -> list[list[int]]:
    """'[8,8]<=[64]', '[4,2]<=[2,4]T(1,0)': consecutive numbers, transposed, cut into groups."""
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    if order:
        ids = ids.transpose(_integers(order))
    return ids.reshape(-1, _integers(shape)[-1]).tolist()


def _mesh_groups(mesh: str, axes: str) -> list[list[int]]:
    """A mesh, 'axis_0'=8,'axis_1'=8, and a group's axes, full or in part: 'axis_0':(2)4."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    parts = [  # (axis, product of the sub-axes before this one, its size)
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", axes)
    ]
    shape: list[int] = []  # the mesh's, with each axis that is used in part split into sub-axes
    dims: dict[int, int] = {}  # position in `parts` -> dim of `shape`
    for axis, full in sizes.items():
        done = 1
        of_axis = [(part, i) for i, part in enumerate(parts) if part[0] == axis]
        for (_, before, size), position in sorted(of_axis):
            if before > done:
                shape.append(before // done)
            dims[position] = len(shape)
            shape.append(size)
            done = before * size
        if done < full:
            shape.append(full // done)
    inner = [dims[i] for i in range(len(parts))]
    outer = [i for i in range(len(shape)) if i not in inner]
    members = math.prod(shape[i] for i in inner)
    return ids.reshape(shape).transpose(outer + inner).reshape(-1, members).tolist()


def mesh_axes(group: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group, positions in the flattened mesh, differ."""
    coordinates = np.unravel_index(np.asarray(group), tuple(sizes.values()))
    return tuple(name for name, along in zip(sizes, coordinates, strict=True) if np.ptp(along))


def connected_devices(pairs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The devices that pairs of a sender and a receiver connect with the first pair, in order."""
    group = set(pairs[0])
    while True:
        connected = group.union(*(pair for pair in pairs if group.intersection(pair)))
        if connected == group:
            return tuple(sorted(group))
        group = connected
