"""Bytes that an instruction of a compiled program moves to and from device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from research_dp.analysis.hlo import Array, Computation, Instruction, Module
from research_dp.analysis.hlo_collectives import KINDS

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
    parts = {part.name for part in _parts(computation, computation.root)}
    sliced, whole = dict.fromkeys(made, 0), dict.fromkeys(made, 0)
    for name in parts:
        whole[name] = 0 if _is_free(made[name]) else _size(made[name])
    for user in reversed(made.values()):
        needed = min(_size(user), sliced[user.name] + whole[user.name])
        in_place = user.name in parts and _is_in_place(computation, user)
        inner = module.called(user) if user.opcode == "fusion" else None
        read = _needed(module, inner) if inner is not None else {}
        for number, name in enumerate(user.operands):
            size = _size(made[name])
            if inner is not None:
                sliced[name] += read[inner.parameters[number].name]
            elif user.opcode in _PART_OF_FIRST and number == 0:
                sliced[name] += needed
            elif not (in_place and number == 0):
                elementwise = size == _size(user) and user.opcode not in _READS_ALL
                wanted = min(needed, size) if elementwise or _is_free(user) else size
                whole[name] = max(whole[name], wanted)
    return {name: min(_size(made[name]), sliced[name] + whole[name]) for name in made}


def _is_in_place(computation: Computation, made: Instruction) -> bool:
    """Whether it updates a part of an array that the fusion is given."""
    if made.opcode != "dynamic-update-slice":
        return False
    (updated,) = _parts(computation, computation.instructions[made.operands[0]])
    return updated.opcode == "parameter"


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
    parts = _parts(computation, root)
    if len(parts) != 1:
        pairs = zip(parts, result, strict=True) if len(parts) == len(result) else ()
        return sum(_written(module, computation, part, (array,)) for part, array in pairs)
    (made,) = parts
    if _is_free(made):  # handed through
        return 0
    if _is_in_place(computation, made) and not all(array.on_chip for array in result):
        update = computation.instructions[made.operands[1]].result
        return min(_sum(result), sum(array.nbytes for array in update))
    if made.opcode == "fusion" and (inner := module.called(made)):
        return _written(module, inner, inner.root, result)
    return _sum(result)
