"""FLOPs of an instruction's matrix multiplications, and its bytes to and from device memory.

`compiled.cost_analysis()` does not help: it gives nothing for absent GPUs, and on TPUs it counts
the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from research_dp.analysis.hlo import Array, Computation, Instruction, integers
from research_dp.analysis.hlo_collectives import KINDS

# Custom calls that are one matrix multiplication: cuBLAS in its variants.
_MATMUL_CALLS = re.compile(r"__cublas\$|__onednn\$matmul|__cudnn\$(?!conv|fmha|norm)")
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
# Each element of their results needs many elements of their operands.
_READS_ALL = {"dot", "convolution", "sort", "scatter", "reduce-window", "custom-call"}


def flops(instruction: Instruction) -> tuple[int, str]:
    """FLOPs of a matrix multiplication, and its operands' element type; (0, '') of all others."""
    counters = {"dot": _matmul, "convolution": _convolution, "custom-call": _custom_call}
    count = counters.get(instruction.opcode, lambda _: 0)(instruction)
    return (count, instruction.inputs[0].dtype) if count else (0, "")


def is_attention(instruction: Instruction) -> bool:
    """Whether it is cuDNN's flash attention, forward or backward."""
    return instruction.target.startswith("__cudnn$fmha")


def flops_inside(instruction: Instruction) -> Iterator[tuple[int, str]]:
    """`flops` of an instruction and, where it is a fusion or a call, of those it runs."""
    count, dtype = flops(instruction)
    if count:
        yield count, dtype
    if inlined := instruction.inlined:
        for inner in inlined.instructions.values():
            yield from flops_inside(inner)


def _matmul(
    instruction: Instruction, contracting: str = r"\blhs_contracting_dims={([0-9,]*)}"
) -> int:
    left, dims = instruction.inputs[0], integers(instruction.attribute(contracting))
    return 2 * math.prod(instruction.result[0].dims) * math.prod(left.dims[dim] for dim in dims)


def _custom_call(instruction: Instruction) -> int:
    target = instruction.target
    if is_attention(instruction):
        # Flash attention: two matrix multiplications forward, four backward. Masked parts count and
        # recomputed scores do not: so all implementations of attention count the same.
        pattern = r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]'
        elements = math.prod(integers(instruction.attribute(pattern, "0, 0")))
        return (8 if "Backward" in target else 4) * elements * instruction.inputs[0].dims[-1]
    if target.startswith("__cudnn$conv"):
        # Forward and both gradients alike; the window's positions in the padding count too.
        _, kernel_labels, _ = _dim_labels(instruction)
        outputs, kernel = instruction.result[0], instruction.inputs[1]
        if "BackwardFilter" in target:
            outputs, kernel = kernel, outputs
        elif "BackwardInput" in target:
            outputs = instruction.inputs[0]
        products = math.prod(outputs.dims) * math.prod(kernel.dims)
        return 2 * products // kernel.dims[kernel_labels.index("o")]
    if _MATMUL_CALLS.match(target):
        return _matmul(instruction, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
    # Authors of Pallas kernels may state the cost.
    estimate = instruction.attribute(r'"cost_estimate":\s*{"flops":\s*"?(\d+)', "0")
    return int(estimate) if instruction.inputs else 0


def _dim_labels(instruction: Instruction) -> tuple[str, ...]:
    """The dims of the inputs, the kernel and the outputs of a convolution, a letter each."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        raise NotImplementedError(f"{instruction.name}: a convolution without dim_labels")
    return labels.groups()


def _convolution(instruction: Instruction) -> int:
    """A convolution: on a TPU, every matrix multiplication is one.

    There a batch dimension becomes a window, dilated to meet one element at a time. So positions
    count only where the window meets an element of the input, no padding and no hole.
    """
    shapes = [array.dims for array in (*instruction.inputs[:2], instruction.result[0])]
    inputs, kernel, outputs = (
        dict(zip(labels, dims, strict=True))
        for labels, dims in zip(_dim_labels(instruction), shapes, strict=True)
    )
    spatial = sorted(outputs.keys() - {"b", "f"})
    fields = re.findall(r"(\w+)=([\w\-]+)", instruction.attribute(r"window={([^}]*)}"))
    window = {
        field: [int(value.split("_")[0]) for value in values.split("x")] for field, values in fields
    }
    total = 2 * kernel["o"]
    for label in spatial:
        # Pairs of a result and a window position that meet an element of the input.
        along = {name: v[int(label)] for name, v in window.items() if len(v) == len(spatial)}
        start = np.arange(outputs[label])[:, None] * along.get("stride", 1) - along.get("pad", 0)
        place = start + np.arange(kernel[label])[None] * along.get("rhs_dilate", 1)
        dilation = along.get("lhs_dilate", 1)
        inside = (place >= 0) & (place <= (inputs[label] - 1) * dilation)
        total *= int(np.count_nonzero(inside & (place % dilation == 0)))
    for label, group_count in (("b", "batch_group_count"), ("f", "feature_group_count")):
        total *= inputs[label] // int(instruction.attribute(rf"\b{group_count}=(\d+)", "1"))
    return total


def hbm_bytes(instruction: Instruction) -> int:
    """Bytes of an instruction's operands and results, without those in a TPU's on-chip memory.

    Where it takes a slice, the slice counts; where it updates an array in place, the update.
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
        needed, total = _needed_elements(fused), _written_bytes(fused.root, instruction.result)
        for number, operand in enumerate(instruction.operands):
            if number in fused.parameters and (size := _size(operand)):
                total += _nbytes(operand.result) * needed[fused.parameters[number]] // size
        return total
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


def _needed_elements(fused: Computation) -> dict[Instruction, int]:
    """How many elements of each array in a fusion its result needs; at most all.

    Of an elementwise result of which a slice is taken, only the slice is computed. Arrays that are
    passed through, or updated in place, are not read.
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
    is_update = update.opcode == "dynamic-update-slice"
    return is_update and _results(update.operands[0])[0].opcode == "parameter"


def _results(instruction: Instruction) -> list[Instruction]:
    """The elements of an instruction's result, under the instructions that only rename them."""
    while instruction.opcode in ("bitcast", "reshape"):
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
