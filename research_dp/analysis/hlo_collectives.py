"""The collectives of a compiled program: what they communicate, how often, between whom."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from research_dp.analysis.hlo import Computation, Instruction, executed, integers
from research_dp.distributed.batch_examples import SCOPE
from research_dp.distributed.collectives import share_of_steps
from research_dp.strategies.jaxpr_collectives import Collective

# By opcode; by the transfer between slices of TPUs, a `send` to the host, which does the rest; by
# the JAX primitive that it was compiled from. All in lower case, words joined by dashes.
KINDS = {kind: kind for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")} | {
    **{"psum": "all-reduce", "psum-scatter": "reduce-scatter", "ragged-all-to-all": "all-to-all"},
    **{"collective-permute": "permute", "collective-broadcast": "permute"},
    **{"one-to-one": "permute", "ppermute": "permute"},
}
# The forms in which XLA writes groups of devices.
_LIST = re.compile(r"(?:source_target_pairs|replica_groups)=\{(\{[0-9,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_ORDER = re.compile(r"device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\)")
_MESH = re.compile(r"replica_groups=@?(?:\w+)?mesh\[([^\]]*)\]\s*(.*?)\{([^}]*)\}")
_SAME_ELEMENTS = ("bitcast", "copy", "convert", "reshape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledCollective(Collective):
    """One collective of a compiled program, for one element type; it counts for the first of them.

    The kind may differ from the one that was asked for: a TPU executes some all-gathers as an
    all-reduce of arrays padded with zeros, and some reduce-scatters as one of the full array, at
    twice the bytes.
    """

    name: str  # of the instruction
    operations: int  # loops multiplied out
    is_async: bool
    purpose: str  # the kind that was asked for
    group: tuple[int, ...]  # one group of devices, as positions in the flattened mesh


def find_collectives(
    entry: Computation, mesh_sizes: Mapping[str, int], slices: Sequence[int] | None = None
) -> list[CompiledCollective]:
    """All collectives that a program runs, loops multiplied out.

    `slices` has the TPU slice of each device of the flattened mesh, where there are several.
    NotImplementedError: a collective in a loop of unknown length, or groups in an unknown form.
    """
    by_slice: dict[int, list[int]] = collections.defaultdict(list)
    for position, number in enumerate(slices or [0] * math.prod(mesh_sizes.values())):
        by_slice[number].append(position)
    result = []
    for instruction, times, in_async in executed(entry):
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
        path = instruction.attribute(r'op_name="([^"]*)"')
        share, in_branch = share_of_steps(path, path.count("/cond/branch_"))
        result += [
            CompiledCollective(
                kind,
                axes,
                len(group),
                dtype,
                nbytes,
                times,
                of_model=SCOPE in path,
                in_branch=in_branch,
                share=share,
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
    steps of it inside, `AsyncCollectiveDone`. It is printed in each; only the start counts.
    """
    if instruction.opcode == "send":
        transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
        return KINDS[transfer.lower().replace("_", "-")] if transfer else None
    kind = KINDS.get(instruction.opcode.removesuffix("-start"))
    if kind is None:
        return None
    chain = re.search(r'"async_collective_fusion_config"|chain_id=', instruction.attributes)
    if chain and not starts_chain(instruction):
        return None
    computation = instruction.computation
    if (
        kind == "all-reduce"
        and computation.in_fusion
        and _maker(computation.root) == "dynamic-slice"
    ):
        return "reduce-scatter"  # as a TPU writes one: a fusion of all-reduce and slice
    return kind


def starts_chain(instruction: Instruction) -> bool:
    """Whether a TPU's `AsyncCollectiveStart` takes this collective."""
    return any(user.target == "AsyncCollectiveStart" for user in instruction.users)


def _maker(array: Instruction) -> str:
    """The opcode that makes an array's elements, beneath fusions and copies."""
    if fused := array.fused:
        return _maker(fused.root)
    return _maker(array.operands[0]) if array.opcode in _SAME_ELEMENTS else array.opcode


def _group(
    instruction: Instruction, kind: str, sizes: Mapping[str, int], slices: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """One group of a collective, as positions in the flattened mesh, and its mesh axes."""
    if instruction.opcode == "send":
        # The first device of each slice. A program does not say between which devices an
        # all-to-all or a permute exchanges data: then all devices.
        group = tuple(members[0] for members in slices)
        if kind in ("all-to-all", "permute"):
            group = tuple(range(math.prod(sizes.values())))
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
    if (groups := _LIST.search(attributes)) and groups[1]:  # {0,1},{2,3}
        return [list(integers(group)) for group in re.findall(r"\{([0-9, ]*)\}", groups[1])]
    if iota := _IOTA.search(attributes):
        # [4,2]<=[2,4]T(1,0): cut into groups.
        return _transposed(*iota.groups()[1:]).reshape(-1, integers(iota[1])[-1]).tolist()
    if mesh := _MESH.search(attributes):
        members = _mesh_groups(mesh[1], mesh[3])
        if not mesh[2]:
            return members.tolist()
        if order := _ORDER.search(mesh[2]):  # device_ids=([8,512]T(1,0))
            return _transposed(*order.groups())[members].tolist()
        raise NotImplementedError(f"groups over a mesh with its own device order: {mesh[0]}")
    if "replica_groups=" in attributes and not groups:
        form = attributes[attributes.index("replica_groups=") :][:80]
        raise NotImplementedError(f"groups in a form that this reader does not know: {form}")
    return [list(range(devices))]


def _transposed(dims: str, order: str | None) -> np.ndarray:
    """Consecutive numbers as an array of these dims, transposed, and flat: '2,4', '1,0'."""
    shape = integers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(integers(order) if order else range(len(shape))).reshape(-1)


def _mesh_groups(mesh: str, axes: str) -> np.ndarray:
    """A mesh, 'axis_0'=8,'axis_1'=8, and a group's axes, full or in part: 'axis_0':(2)4."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    position, first = np.zeros_like(ids), ids  # in the group; the group's first device
    members = 1
    for name, before, part in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", axes):
        # A part is a digit of the position along the axis, below those of size `before`.
        names = list(sizes)
        size = int(part or sizes[name])
        stride = math.prod(sizes[later] for later in names[names.index(name) :])
        stride //= int(before or 1) * size
        digit = ids // stride % size
        position, first, members = position * size + digit, first - digit * stride, members * size
    return np.lexsort((position, first)).reshape(-1, members)


def mesh_axes(group: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group, positions in the flattened mesh, differ."""
    coordinates = np.unravel_index(np.asarray(group), tuple(sizes.values()))
    return tuple(name for name, along in zip(sizes, coordinates, strict=True) if np.ptp(along))


def connected_devices(pairs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The devices that pairs of a sender and a receiver connect with the first pair, in order."""
    group, known = set(pairs[0]), set[int]()
    while group != known:
        known = group
        group = known.union(*(pair for pair in pairs if known.intersection(pair)))
    return tuple(sorted(group))


def _purpose(instruction: Instruction, kind: str) -> str:
    primitive = instruction.attribute(r'op_name="([^"]*)"').rsplit("/", 1)[-1].replace("_", "-")
    if primitive in KINDS or kind != "all-reduce":
        return KINDS.get(primitive, kind)
    # A device's shard, written into an array of zeros.
    if _maker(instruction.operands[0]) == "dynamic-update-slice":
        return "all-gather"
    return "reduce-scatter" if _is_sliced(instruction) else kind


def _is_sliced(array: Instruction) -> bool:
    """Whether every use of an array takes a slice of it."""
    for user in array.users:
        taken = user.opcode == "dynamic-slice"
        if user.opcode in (*_SAME_ELEMENTS, "get-tuple-element"):
            taken = _is_sliced(user)
        elif fused := user.fused:
            numbers = [i for i, operand in enumerate(user.operands) if operand is array]
            taken = all(_is_sliced(fused.parameters[i]) for i in numbers)
        if not taken:
            return False
    return bool(array.users)
