"""The collectives of a compiled program: what they communicate, how often, between whom."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from research_dp.analysis.hlo import Computation, Instruction, Module, integers
from research_dp.analysis.trip_count import executed
from research_dp.strategies.jaxpr_collectives import Collective

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}
# Between slices of TPUs: a `send` to the host, which does the rest.
_SLICE_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "permute",
}
# The JAX primitive that a collective was compiled from, by the last part of its `op_name`.
_PURPOSES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum": "all-reduce",
}
# The forms in which XLA writes groups of devices.
_LIST = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=@?(?:\w+)?mesh\[([^\]]*)\]\s*(.*?)\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([0-9,{} ]*)\}")
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape")


@dataclasses.dataclass(frozen=True)
class CompiledCollective(Collective):
    """One collective of a compiled program, for one element type.

    One operation may carry arrays of several types: it counts for the first of them. The kind may
    differ from the one that was asked for: a TPU executes some all-gathers as an all-reduce of
    arrays padded with zeros, and some reduce-scatters as an all-reduce of the full array, at twice
    the bytes.
    """

    name: str  # of the instruction
    operations: int  # loops multiplied out
    is_async: bool
    purpose: str  # the kind that was asked for
    group: tuple[int, ...]  # one group of devices, as positions in the flattened mesh


def find_collectives(
    module: Module, mesh_sizes: Mapping[str, int], slices: Sequence[int] | None = None
) -> list[CompiledCollective]:
    """All collectives that a program runs, loops multiplied out.

    The mesh's axes are in order; `slices` has the TPU slice of each device of the flattened mesh,
    where there are several.

    Raises:
        NotImplementedError: A collective in a loop whose length the program does not say, or
            between groups in an unknown form.
    """
    by_slice: dict[int, list[int]] = collections.defaultdict(list)
    for position, number in enumerate(slices or [0] * math.prod(mesh_sizes.values())):
        by_slice[number].append(position)
    result = []
    for instruction, times, in_async in executed(module.entry):
        kind = kind_of(instruction)
        if kind is None:
            continue
        if times is None:
            raise NotImplementedError(
                f"{instruction.name}: a collective in a loop of unknown length; use scan"
            )
        group, axes = _group(instruction, kind, mesh_sizes, list(by_slice.values()))
        is_async = in_async or instruction.is_async or instruction.opcode == "send"
        is_async |= starts_chain(instruction)
        sizes: dict[str, int] = collections.defaultdict(int)
        for array in instruction.inputs:
            # Bytes of the full array, which comes out of an all-gather and goes into the others.
            sizes[array.dtype] += array.nbytes * (len(group) if kind == "all-gather" else 1)
        sizes.pop("token", None)
        result += [
            CompiledCollective(
                *(kind, axes, len(group), dtype, nbytes, times),
                name=instruction.name,
                operations=0 if position else times,
                is_async=is_async,
                purpose=_purpose(instruction, kind),
                group=group,
            )
            for position, (dtype, nbytes) in enumerate(sizes.items())
        ]
    return result


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts; None if it is none, or ends one.

    A TPU's asynchronous collective is a chain of fusions: `AsyncCollectiveStart`, compute with
    steps of it inside, `AsyncCollectiveDone`. The collective is printed in each; only the start
    counts.
    """
    if instruction.opcode == "send":
        transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
        return _SLICE_KINDS[transfer] if transfer else None
    kind = KINDS.get(instruction.opcode.removesuffix("-start"))
    if kind is None:
        return None
    chain = re.search(r'"async_collective_fusion_config"|chain_id=', instruction.attributes)
    if chain and not starts_chain(instruction):
        return None
    computation = instruction.computation
    if kind == "all-reduce" and computation.in_fusion and _returns_slice(computation):
        return "reduce-scatter"  # as a TPU writes one: a fusion of all-reduce and slice
    return kind


def starts_chain(instruction: Instruction) -> bool:
    """Whether a TPU's `AsyncCollectiveStart` takes this collective."""
    return any(user.target == "AsyncCollectiveStart" for user in instruction.users)


def _returns_slice(computation: Computation) -> bool:
    root = computation.root
    while root.opcode in _SAME_ELEMENTS:
        root = root.operands[0]
    return root.opcode == "dynamic-slice"


def _group(
    instruction: Instruction, kind: str, sizes: Mapping[str, int], slices: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """One group of a collective, as positions in the flattened mesh, and its mesh axes."""
    if instruction.opcode == "send":
        # The first device of each slice. A program does not say between which devices an
        # all-to-all or a permute exchanges data: then all devices.
        every = range(math.prod(sizes.values()))
        exchange = kind in ("all-to-all", "permute")
        group = tuple(every if exchange else (members[0] for members in slices))
        return group, mesh_axes(group, sizes)
    # Each slice runs a program of its own, whose groups number the slice's devices.
    local_groups = replica_groups(instruction.attributes, len(slices[0]))
    groups = [tuple(slices[0][i] for i in members) for members in local_groups]
    if kind != "permute":
        return groups[0], mesh_axes(groups[0], sizes)
    crossed = {axis for pair in groups for axis in mesh_axes(pair, sizes)}
    return connected_devices(groups), tuple(axis for axis in sizes if axis in crossed)


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, by its attributes; without any, all devices are one group."""
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


def _listed(text: str) -> list[list[int]]:
    """'{0,1},{2,3}'."""
    return [list(integers(group)) for group in re.findall(r"\{([0-9, ]*)\}", text)]


def _iota(shape: str, dims: str, order: str | None) -> list[list[int]]:
    """'[8,8]<=[64]', '[4,2]<=[2,4]T(1,0)': consecutive numbers, transposed, cut into groups."""
    ids = np.arange(math.prod(integers(dims))).reshape(integers(dims))
    if order:
        ids = ids.transpose(integers(order))
    return ids.reshape(-1, integers(shape)[-1]).tolist()


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


def _purpose(instruction: Instruction, kind: str) -> str:
    primitive = instruction.attribute(r'op_name="([^"]*)"').rsplit("/", 1)[-1]
    if primitive in _PURPOSES:
        return _PURPOSES[primitive]
    if kind != "all-reduce":
        return kind
    if _is_padded(instruction.operands[0]):
        return "all-gather"
    return "reduce-scatter" if _is_sliced(instruction) else kind


def _is_padded(array: Instruction) -> bool:
    """Whether an array is a device's shard written into an array of zeros."""
    if fused := array.fused:
        return _is_padded(fused.root)
    if array.opcode in _SAME_ELEMENTS:
        return _is_padded(array.operands[0])
    return array.opcode == "dynamic-update-slice"


def _is_sliced(array: Instruction) -> bool:
    """Whether every use of an array takes a slice of it."""
    return bool(array.users) and all(_takes_slice(user, array) for user in array.users)


def _takes_slice(user: Instruction, array: Instruction) -> bool:
    if user.opcode in (*_SAME_ELEMENTS, "get-tuple-element"):
        return _is_sliced(user)
    if fused := user.fused:
        numbers = [i for i, operand in enumerate(user.operands) if operand is array]
        return all(_is_sliced(fused.parameters[i]) for i in numbers)
    return user.opcode == "dynamic-slice"
