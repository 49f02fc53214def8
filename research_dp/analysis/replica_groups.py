"""Which devices take part in a collective together, and which mesh axes they span."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

# Groups are arrays of (group, member); members are positions in the flattened mesh.
_LIST = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=@?(?:\w+)?mesh\[([^\]]*)\]\s*(.*?)\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([0-9,{} ]*)\}")


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective.

    Args:
        attributes: The instruction's text after its operands.
        devices: Number of devices of the program; all of them are one group where none is given.

    Raises:
        NotImplementedError: Groups in a form that this reader does not know.
    """
    if pairs := _PAIRS.search(attributes):
        return _braces(pairs[1])
    if listed := _LIST.search(attributes):
        return _braces(listed[1]) if listed[1] else [list(range(devices))]
    if iota := _IOTA.search(attributes):
        return _iota(iota[1], iota[2], iota[3])
    if axes := _MESH.search(attributes):
        if axes[2]:
            raise NotImplementedError(f"groups over a mesh in an order of its own: {axes[0]}")
        return _mesh_axes(axes[1], axes[3])
    if "replica_groups=" in attributes:
        form = attributes[attributes.index("replica_groups=") :][:80]
        raise NotImplementedError(f"groups in a form that this reader does not know: {form}")
    return [list(range(devices))]


def _braces(text: str) -> list[list[int]]:
    """'{0,1},{2,3}'."""
    return [
        [int(n) for n in group.split(",") if n] for group in re.findall(r"\{([0-9, ]*)\}", text)
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _iota(shape: str, dims: str, order: str | None) -> list[list[int]]:
    """'[8,8]<=[64]', '[4,2]<=[2,4]T(1,0)': counting, transposed, cut into groups."""
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    if order:
        ids = ids.transpose(_numbers(order))
    return ids.reshape(_numbers(shape)).reshape(-1, _numbers(shape)[-1]).tolist()


def _mesh_axes(mesh: str, named: str) -> list[list[int]]:
    """A mesh, 'axis_0'=8,'axis_1'=8, and a group's axes, whole or in part: 'axis_0':(2)4."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    shape: list[int] = []  # the mesh with every axis that is used in part cut into three
    grouped: list[tuple[str, int, int]] = []
    for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", named):
        grouped.append((name, int(before or 1), int(size or sizes[name])))
    where: dict[int, int] = {}
    for name, full in sizes.items():
        parts = sorted((b, s, i) for i, (n, b, s) in enumerate(grouped) if n == name)
        done = 1
        for before, size, place in parts:
            if before > done:
                shape.append(before // done)
            where[place] = len(shape)
            shape.append(size)
            done = before * size
        if done < full:
            shape.append(full // done)
    inner = [where[i] for i in range(len(grouped))]
    outer = [i for i in range(len(shape)) if i not in inner]
    members = math.prod(shape[i] for i in inner)
    return ids.reshape(shape).transpose(outer + inner).reshape(-1, members).tolist()


def mesh_axes(group: Sequence[int], sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ.

    Args:
        group: Positions in the flattened mesh.
        sizes: Sizes of the mesh's axes, in order.
    """
    coordinates = np.unravel_index(np.asarray(group), tuple(sizes.values()))
    return tuple(name for name, along in zip(sizes, coordinates, strict=True) if np.ptp(along))


def joined(pairs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The devices that pairs of a sender and a receiver join with those of the first, in order."""
    partners: dict[int, list[int]] = {}
    for sender, receiver in pairs:
        partners.setdefault(sender, []).append(receiver)
        partners.setdefault(receiver, []).append(sender)
    found, waiting = set(pairs[0]), list(pairs[0])
    while waiting:
        new = set(partners[waiting.pop()]) - found
        found |= new
        waiting += new
    return tuple(sorted(found))
