"""Bytes that an instruction of a compiled program moves to and from device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from research_dp.analysis.collectives import KINDS
from research_dp.analysis.hlo import Array, Computation, Instruction, Module

# Instructions that move nothing: names for what is there, and waiting for what was started.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "while", "conditional", "call", "send", "recv",
    "async-update",
    *KINDS,  # what they read and write keeps pace with a network that is much slower
}  # fmt: skip
_FREE_CALLS = {
    "AllocateBuffer",
    "ConcatBitcast",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
}
_PART_OF_FIRST = {"dynamic-slice", "slice", "gather"}
_RENAMING = {"bitcast", "reshape"}
# As large as what they read, perhaps, but an element of theirs needs many.
_READS_ALL = {"dot", "convolution", "sort", "scatter", "reduce-window", "custom-call"}


def _is_free(instruction: Instruction) -> bool:
    return instruction.opcode in _FREE or instruction.target in _FREE_CALLS


def moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes read and written by an instruction: its operands' and its result's.

    Of what it only takes a slice of, the slice counts; of what it updates in place, the update.
    Arrays in a TPU's on-chip memory cost nothing here.
    """
    opcode = instruction.opcode
    if _is_free(instruction) or opcode.endswith("-done"):
        return 0
    if opcode.endswith("-start"):
        return _copied(computation, instruction)
    inner = module.called(instruction)
    if opcode == "fusion" and inner is not None:
        return _fused(module, computation, instruction, inner)
    if opcode in _PART_OF_FIRST:
        return 2 * _sum(instruction.result)
    if opcode == "dynamic-update-slice":
        return 2 * _sum(computation.instructions[instruction.operands[1]].result)
    return _sum(computation.arrays(instruction)) + _sum(instruction.result)


def _sum(arrays: Iterable[Array]) -> int:
    return sum(array.nbytes for array in arrays if not array.on_chip)


def _copied(computation: Computation, instruction: Instruction) -> int:
    """An asynchronous copy or slice: read here, written there, one of the two perhaps on chip."""
    if instruction.opcode == "copy-start":
        return _sum(instruction.result[:2])
    if instruction.opcode == "slice-start":
        source, target = instruction.result[:2]
        return target.nbytes * (2 - source.on_chip - target.on_chip)
    return 0


def _fused(
    module: Module, computation: Computation, fusion: Instruction, inner: Computation
) -> int:
    needed = _needed(module, inner)
    read = 0
    for number, name in enumerate(fusion.operands):
        parameter = inner.parameters.get(number)
        made = computation.instructions[name]
        if parameter is not None and _size(made):
            read += _sum(made.result) * needed[parameter.name] // _size(made)
    return read + _written(module, inner, inner.root, fusion.result)


def _size(instruction: Instruction) -> int:
    return sum(math.prod(array.dims) for array in instruction.result)


def _needed(module: Module, computation: Computation) -> dict[str, int]:
    """How many elements of each array in a fusion its result needs; at most all.

    A fusion makes an element when it is needed: of an elementwise result of which a slice is taken,
    the slice. What is handed through, or written in place, is not read.
    """
    made = computation.instructions
    needed = dict.fromkeys(made, 0)
    for part in _parts(computation, computation.root):
        needed[part.name] = 0 if _is_free(part) else _size(part)
    for user in reversed(made.values()):
        inner = module.called(user) if user.opcode == "fusion" else None
        for number, name in enumerate(user.operands):
            wanted = _wanted(user, number, needed[user.name], _size(made[name]))
            if inner is not None:
                wanted = _needed(module, inner)[inner.parameters[number].name]
            needed[name] = min(_size(made[name]), needed[name] + wanted)
    return needed


def _wanted(user: Instruction, number: int, needed: int, size: int) -> int:
    """How many of an operand's `size` elements are read for those of a result that are needed."""
    first = number == 0
    if user.opcode in _RENAMING or (user.opcode in _PART_OF_FIRST and first):
        return needed
    if _is_free(user) or (user.opcode == "dynamic-update-slice" and first):
        return 0
    elementwise = size == _size(user) and user.opcode not in _READS_ALL
    return needed if elementwise else size


def _parts(computation: Computation, made: Instruction) -> list[Instruction]:
    """What a fusion's result consists of, whatever it is called last."""
    while made.opcode in _RENAMING:
        made = computation.instructions[made.operands[0]]
    if made.opcode != "tuple":
        return [made]
    parts = (computation.instructions[name] for name in made.operands)
    return [one for part in parts for one in _parts(computation, part)]


def _written(
    module: Module, computation: Computation, root: Instruction, result: tuple[Array, ...]
) -> int:
    """Bytes that a fusion writes: of an array that it updates in place, the update."""
    made = root
    while made.opcode in _RENAMING:
        made = computation.instructions[made.operands[0]]
    if made.opcode == "tuple":
        parts = [computation.instructions[name] for name in made.operands]
        if len(parts) == len(result):
            pairs = zip(parts, result, strict=True)
            return sum(_written(module, computation, part, (array,)) for part, array in pairs)
    if _is_free(made):  # handed through
        return 0
    if made.opcode == "dynamic-update-slice" and not all(array.on_chip for array in result):
        update = computation.instructions[made.operands[1]].result
        return min(_sum(result), sum(array.nbytes for array in update))
    if made.opcode == "fusion" and (inner := module.called(made)):
        return _written(module, inner, inner.root, result)
    return _sum(result)
