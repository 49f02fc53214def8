"""The collectives of a compiled program: what they move, how often, between whom."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from research_dp.analysis import replica_groups
from research_dp.analysis.hlo import Computation, Instruction, Module
from research_dp.analysis.trip_count import trip_count
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
_SLICE_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Words of a JAX program's names that say what was asked for, whatever the compiler made of it.
_PURPOSES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum": "all-reduce",
}


@dataclasses.dataclass(frozen=True)
class CompiledCollective(Collective):
    """One collective of a compiled program, for one element type.

    Attributes:
        name: The instruction.
        operations: How many operations this is, all times together. Arrays of several types may
            travel in one operation: it counts for the first of them, and 0 for the others.
        is_async: It starts in one place and is waited for in another.
        purpose: The kind that was asked for. A TPU sends some all-gathers as an all-reduce of
            arrays padded with zeros, and some reduce-scatters as a whole all-reduce, at twice the
            bytes.
        group: One group of devices, as positions in the flattened mesh.
    """

    name: str
    operations: int
    is_async: bool
    purpose: str
    group: tuple[int, ...]


def find(
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
    reader = _Reader(module, dict(mesh_sizes), slices)
    return list(reader.walk(module.entry, 1, False))


def kind_of(module: Module, computation: Computation, instruction: Instruction) -> str | None:
    """What kind of collective an instruction is or starts; None if it is none, or ends one.

    A TPU's asynchronous collective is a chain of fusions: `AsyncCollectiveStart`, compute with
    steps of it inside, `AsyncCollectiveDone`. The collective is printed in each; only the start
    counts.
    """
    if instruction.opcode == "send":
        transfer = _SLICE_TRANSFER.search(instruction.attributes)
        return _SLICE_KINDS[transfer[1]] if transfer else None
    kind = KINDS.get(instruction.opcode.removesuffix("-start"))
    if kind is None:
        return None
    chained = re.search(r'"async_collective_fusion_config"|chain_id=', instruction.attributes)
    if chained and not starts(computation, instruction):
        return None
    if kind == "all-reduce" and computation.name in module.fused and _slices(computation):
        return "reduce-scatter"
    return kind


def _slices(computation: Computation) -> bool:
    """Whether a fusion ends in a slice: a TPU's reduce-scatter, written as all-reduce and slice."""
    root = computation.root
    while root.opcode in ("bitcast", "copy", "convert", "reshape"):
        root = computation.instructions[root.operands[0]]
    return root.opcode == "dynamic-slice"


def starts(computation: Computation, instruction: Instruction) -> bool:
    """Whether a TPU's `AsyncCollectiveStart` takes this collective."""
    return any(
        i.target == "AsyncCollectiveStart" and instruction.name in i.operands
        for i in computation.instructions.values()
    )


def is_sync(instruction: Instruction) -> bool:
    """Whether the compiler marked a `*-start` as not overlapped after all."""
    return bool(re.search(r'"is_sync":\s*true', instruction.attributes))


class _Reader:
    """Walks through a program and collects its collectives."""

    def __init__(self, module: Module, sizes: dict[str, int], slices: Sequence[int] | None):
        self.module = module
        self.sizes = sizes
        slices = slices or [0] * math.prod(sizes.values())
        # Each slice runs a program of its own, whose groups number the slice's devices.
        by_slice: dict[int, list[int]] = {}
        for position, number in enumerate(slices):
            by_slice.setdefault(number, []).append(position)
        self.slice = by_slice[slices[0]]
        self.counterparts = [positions[0] for positions in by_slice.values()]

    def walk(
        self, computation: Computation, times: int | None, asynchronous: bool
    ) -> Iterator[CompiledCollective]:
        """Collectives of a computation that runs so many times (None: nobody knows)."""
        for instruction in computation.instructions.values():
            kind = kind_of(self.module, computation, instruction)
            if kind:
                if times is None:
                    raise NotImplementedError(
                        f"{instruction.name}: a collective in a loop of unknown length; use scan"
                    )
                yield from self.read(computation, instruction, kind, times, asynchronous)
            for inner, inner_times in entered(self.module, computation, instruction):
                wrapped = asynchronous or (
                    instruction.opcode == "async-start" and not is_sync(instruction)
                )
                turns = None if times is None or inner_times is None else times * inner_times
                yield from self.walk(inner, turns, wrapped)

    def read(
        self,
        computation: Computation,
        instruction: Instruction,
        kind: str,
        times: int,
        asynchronous: bool,
    ) -> Iterator[CompiledCollective]:
        """One collective: a record for each element type that travels in it."""
        group, axes = self.members(instruction, kind)
        started = instruction.opcode.endswith("-start") and not is_sync(instruction)
        started = started or instruction.opcode == "send"
        sizes: dict[str, int] = {}
        for array in computation.arrays(instruction):
            full = len(group) if kind == "all-gather" else 1
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.nbytes * full
        sizes.pop("token", None)
        for position, (dtype, nbytes) in enumerate(sizes.items()):
            yield CompiledCollective(
                kind=kind,
                axes=axes,
                devices=len(group),
                dtype=dtype,
                nbytes=nbytes,
                times=times,
                name=instruction.name,
                operations=0 if position else times,
                is_async=asynchronous or started or starts(computation, instruction),
                purpose=_purpose(self.module, computation, instruction, kind),
                group=group,
            )

    def members(
        self, instruction: Instruction, kind: str
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """One group of a collective, as positions in the flattened mesh, and its mesh axes."""
        if instruction.opcode == "send":
            # Devices at the same place of each slice; of an exchange the program tells no more.
            whole = kind in ("all-to-all", "permute")
            group = range(math.prod(self.sizes.values())) if whole else self.counterparts
            return tuple(group), replica_groups.mesh_axes(list(group), self.sizes)
        listed = replica_groups.replica_groups(instruction.attributes, len(self.slice))
        mapped = [tuple(self.slice[member] for member in group) for group in listed]
        if kind != "permute":
            return mapped[0], replica_groups.mesh_axes(mapped[0], self.sizes)
        along = {axis for pair in mapped for axis in replica_groups.mesh_axes(pair, self.sizes)}
        axes = tuple(axis for axis in self.sizes if axis in along)
        return replica_groups.joined(mapped), axes


def entered(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, int | None]]:
    """The computations that an instruction runs, and how often; every branch of a conditional."""
    if instruction.opcode == "while":
        if body := module.called(instruction, "body"):
            yield body, trip_count(module, computation, instruction)
    elif instruction.opcode in ("fusion", "call", "async-start"):
        inner = module.called(instruction) or module.called(instruction, "to_apply")
        if inner:
            yield inner, 1
    elif instruction.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        listed = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        either = (instruction.called(f"{side}_computation") for side in ("true", "false"))
        for name in listed or [name for name in either if name]:
            yield module.computations[name], 1


_SAME = ("bitcast", "copy", "convert", "reshape")


def _purpose(module: Module, computation: Computation, instruction: Instruction, kind: str) -> str:
    last = instruction.op_name.rsplit("/", 1)[-1]
    if last in _PURPOSES:
        return _PURPOSES[last]
    if kind == "all-reduce" and _padded(module, computation, instruction.operands[0]):
        return "all-gather"
    if kind == "all-reduce" and _sliced(module, computation, instruction.name):
        return "reduce-scatter"
    return kind


def _padded(module: Module, computation: Computation, name: str) -> bool:
    """Whether an array is a device's part written into an array of zeros."""
    made = computation.instructions[name]
    if made.opcode == "fusion" and (inner := module.called(made)):
        return _padded(module, inner, inner.root.name)
    if made.opcode in _SAME:
        return _padded(module, computation, made.operands[0])
    return made.opcode == "dynamic-update-slice"


def _sliced(module: Module, computation: Computation, name: str) -> bool:
    """Whether every use of an array takes a slice of it."""
    users = [i for i in computation.instructions.values() if name in i.operands]
    return bool(users) and all(_takes_slice(module, computation, user, name) for user in users)


def _takes_slice(module: Module, computation: Computation, user: Instruction, name: str) -> bool:
    if user.opcode == "dynamic-slice":
        return True
    if user.opcode in (*_SAME, "get-tuple-element"):
        return _sliced(module, computation, user.name)
    if user.opcode == "fusion" and (inner := module.called(user)):
        numbers = [i for i, operand in enumerate(user.operands) if operand == name]
        return all(_sliced(module, inner, inner.parameters[i].name) for i in numbers)
    return False
