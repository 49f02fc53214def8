"""Bytes that an instruction of a compiled program moves to and from device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from research_dp.analysis.hlo import Array, Computation, Instruction
from research_dp.analysis.hlo_collectives import KINDS

# Instructions without traffic: names for existing arrays, and waits for operations already started.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "while", "conditional", "call", "send", "recv",
    "async-update",
    *KINDS,  # their reads and writes keep pace with a network that is much slower
}  # fmt: skip
_FREE_CALLS = {
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked", "AsyncCollectiveStart", "AsyncCollectiveDone",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}  # of the first operand
_RENAMES = {"bitcast", "reshape"}
# Each element of their results needs many elements of their operands.
_READS_ALL = {"dot", "convolution", "sort", "scatter", "reduce-window", "custom-call"}


def hbm_bytes(instruction: Instruction) -> int:
    """Bytes read and written by an instruction: its operands' and its result's.

    Where an instruction takes a slice, the slice counts; where it updates an array in place, the
    update. Arrays in a TPU's on-chip memory do not count.
    """
    opcode = instruction.opcode
    if opcode == "copy-start":  # one read and one write, one of the two perhaps on chip
        return _nbytes(instruction.result[:2])
    if opcode == "slice-start":
        source, target = instruction.result[:2]
        return target.nbytes * (2 - source.on_chip - target.on_chip)
    if _is_free(instruction) or opcode.endswith(("-start", "-done")):
        return 0
    if fused := instruction.fused:
        return _fusion_bytes(instruction, fused)
    if opcode in _SLICES:
        return 2 * _nbytes(instruction.result)
    if opcode == "dynamic-update-slice":
        return 2 * _nbytes(instruction.operands[1].result)
    return _nbytes(instruction.inputs) + _nbytes(instruction.result)


def _is_free(instruction: Instruction) -> bool:
    return instruction.opcode in _FREE or instruction.target in _FREE_CALLS


def _nbytes(arrays: Iterable[Array]) -> int:
    return sum(array.nbytes for array in arrays if not array.on_chip)


def _size(instruction: Instruction) -> int:
    return sum(math.prod(array.dims) for array in instruction.result)


def _fusion_bytes(fusion: Instruction, fused: Computation) -> int:
    needed = _needed_elements(fused)
    read = 0
    for number, operand in enumerate(fusion.operands):
        if number in fused.parameters and _size(operand):
            share = needed[fused.parameters[number]]
            read += _nbytes(operand.result) * share // _size(operand)
    return read + _written_bytes(fused.root, fusion.result)


def _needed_elements(fused: Computation) -> dict[Instruction, int]:
    """How many elements of each array in a fusion its result needs; at most all.

    A fusion computes an element only where it is needed: where a slice is taken of an elementwise
    result, the slice. Arrays that are passed through, or updated in place, are not read.
    """
    instructions = fused.instructions.values()
    results = set(_results(fused.root))
    # By slices, whose sizes add up; by other users, of which the largest counts.
    sliced, used = dict.fromkeys(instructions, 0), dict.fromkeys(instructions, 0)
    for result in results:
        used[result] = 0 if _is_free(result) else _size(result)
    for user in reversed(instructions):
        needed = min(_size(user), sliced[user] + used[user])
        in_place = user in results and _is_in_place(user)
        inner_needs = _needed_elements(inner) if (inner := user.fused) else {}
        for number, operand in enumerate(user.operands):
            size = _size(operand)
            if inner:
                sliced[operand] += inner_needs[inner.parameters[number]]
            elif user.opcode in _SLICES and number == 0:
                sliced[operand] += needed
            elif not (in_place and number == 0):
                elementwise = size == _size(user) and user.opcode not in _READS_ALL
                share = min(needed, size) if elementwise or _is_free(user) else size
                used[operand] = max(used[operand], share)
    return {i: min(_size(i), sliced[i] + used[i]) for i in instructions}


def _is_in_place(update: Instruction) -> bool:
    """Whether it updates a part of an array that is the fusion's argument."""
    return (
        update.opcode == "dynamic-update-slice"
        and _results(update.operands[0])[0].opcode == "parameter"
    )


def _results(instruction: Instruction) -> list[Instruction]:
    """The elements of an instruction's result, under the instructions that only rename them."""
    while instruction.opcode in _RENAMES:
        instruction = instruction.operands[0]
    if instruction.opcode != "tuple":
        return [instruction]
    return [result for operand in instruction.operands for result in _results(operand)]


def _written_bytes(root: Instruction, arrays: tuple[Array, ...]) -> int:
    """Bytes that a fusion writes; of an array that it updates in place, the update's."""
    results = _results(root)
    if len(results) != 1:
        pairs = zip(results, arrays, strict=True) if len(results) == len(arrays) else ()
        return sum(_written_bytes(result, (array,)) for result, array in pairs)
    (result,) = results
    if _is_free(result):  # passed through
        return 0
    if _is_in_place(result) and not all(array.on_chip for array in arrays):
        update = sum(array.nbytes for array in result.operands[1].result)
        return min(_nbytes(arrays), update)
    if fused := result.fused:
        return _written_bytes(fused.root, arrays)
    return _nbytes(arrays)
