"""The collectives of a compiled program: what they communicate, how often, between whom."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from research_dp.analysis.hlo import Computation, Instruction, Module
from research_dp.analysis.replica_groups import connected_devices, mesh_axes, replica_groups
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
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape")


@dataclasses.dataclass(frozen=True)
class CompiledCollective(Collective):
    """One collective of a compiled program, for one element type.

    Attributes:
        name: The instruction.
        operations: How many operations this is, loops multiplied out. One operation may carry
            arrays of several types: it counts for the first of them, and 0 for the others.
        is_async: It starts in one place and is waited for in another.
        purpose: The kind that was asked for. A TPU executes some all-gathers as an all-reduce of
            arrays padded with zeros, and some reduce-scatters as an all-reduce of the full array,
            at twice the bytes.
        group: One group of devices, as positions in the flattened mesh.
    """

    name: str
    operations: int
    is_async: bool
    purpose: str
    group: tuple[int, ...]


def find_collectives(
    module: Module, mesh_sizes: Mapping[str, int], slices: Sequence[int] | None = None
) -> list[CompiledCollective]:
    """All collectives that a program runs, loops multiplied out.

    Args:
        module: The program.
        mesh_sizes: Sizes of the mesh's axes, in order.
        slices: The TPU slice of each device of the flattened mesh, where there are several.

    Raises:
        NotImplementedError: A collective in a loop whose length the program does not say, or
            between groups in an unknown form.
    """
    groups = _Groups(mesh_sizes, slices)
    result = []
    for instruction, times, in_async in executed(module):
        kind = kind_of(instruction)
        if kind is None:
            continue
        if times is None:
            raise NotImplementedError(
                f"{instruction.name}: a collective in a loop of unknown length; use scan"
            )
        group, axes = groups.of(instruction, kind)
        is_async = instruction.is_async or instruction.opcode == "send"
        sizes: dict[str, int] = collections.defaultdict(int)
        for array in instruction.inputs:
            # Bytes of the full array, which comes out of an all-gather and goes into the others.
            sizes[array.dtype] += array.nbytes * (len(group) if kind == "all-gather" else 1)
        sizes.pop("token", None)
        for position, (dtype, nbytes) in enumerate(sizes.items()):
            collective = CompiledCollective(
                kind=kind,
                axes=axes,
                devices=len(group),
                dtype=dtype,
                nbytes=nbytes,
                times=times,
                name=instruction.name,
                operations=0 if position else times,
                is_async=in_async or is_async or starts_chain(instruction),
                purpose=_purpose(instruction, kind),
                group=group,
            )
            result.append(collective)
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


class _Groups:
    """Which devices of a mesh take part in a collective."""

    def __init__(self, mesh_sizes: Mapping[str, int], slices: Sequence[int] | None):
        self.mesh_sizes = mesh_sizes
        slices = slices or [0] * math.prod(mesh_sizes.values())
        positions: dict[int, list[int]] = {}
        for position, number in enumerate(slices):
            positions.setdefault(number, []).append(position)
        # Each slice runs a program of its own, whose groups number the slice's devices.
        self.first_slice = positions[slices[0]]
        self.counterparts = [of_slice[0] for of_slice in positions.values()]

    def of(self, instruction: Instruction, kind: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """One group of a collective, as positions in the flattened mesh, and its mesh axes."""
        sizes = self.mesh_sizes
        if instruction.opcode == "send":
            # The first device of each slice. A program does not say between which devices an
            # all-to-all or a permute exchanges data: then all devices.
            group = self.counterparts
            if kind in ("all-to-all", "permute"):
                group = list(range(math.prod(sizes.values())))
            return tuple(group), mesh_axes(group, sizes)
        local_groups = replica_groups(instruction.attributes, len(self.first_slice))
        groups = [tuple(self.first_slice[i] for i in members) for members in local_groups]
        if kind != "permute":
            return groups[0], mesh_axes(groups[0], sizes)
        crossed = {axis for pair in groups for axis in mesh_axes(pair, sizes)}
        return connected_devices(groups), tuple(axis for axis in sizes if axis in crossed)


def _purpose(instruction: Instruction, kind: str) -> str:
    primitive = instruction.attribute(r'op_name="([^"]*)"').rsplit("/", 1)[-1]
    if primitive in _PURPOSES:
        return _PURPOSES[primitive]
    if kind == "all-reduce" and _is_padded(instruction.operands[0]):
        return "all-gather"
    if kind == "all-reduce" and _is_sliced(instruction):
        return "reduce-scatter"
    return kind


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
