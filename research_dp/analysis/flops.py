"""FLOPs of matrix multiplications, in all the forms in which a compiled program has them.

`compiled.cost_analysis()` does not help: it gives nothing for absent GPUs, and on TPUs it counts
the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from research_dp.analysis.hlo import Array, Computation, Instruction, Module

# Custom calls that are one matrix multiplication: cuBLAS in its variants.
_MATMUL_CALLS = re.compile(r"__cublas\$|__onednn\$matmul|__cudnn\$(?!conv|fmha|norm)")
_ATTENTION_CALL = re.compile(r"__cudnn\$fmha\w*")


def flops(computation: Computation, instruction: Instruction) -> tuple[int, str]:
    """FLOPs of one instruction that multiplies matrices, and its operands' element type.

    Returns:
        (0, '') for all others: adding and exponentiating is bound by memory.
    """
    operands = computation.arrays(instruction)
    if instruction.opcode == "dot":
        contracting = instruction.dims("lhs_contracting_dims")
        return _dot(instruction.result[0], operands[0], contracting), operands[0].dtype
    if instruction.opcode == "convolution":
        return _convolution(instruction, operands), operands[0].dtype
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, operands)
    return 0, ""


def inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[int, str]]:
    """FLOPs of an instruction and, where it is a fusion, of what is fused in it."""
    count, dtype = flops(computation, instruction)
    if count:
        yield count, dtype
    if instruction.opcode in ("fusion", "call", "async-start"):
        inner = module.called(instruction) or module.called(instruction, "to_apply")
        if inner:
            for fused in inner.instructions.values():
                yield from inside(module, inner, fused)


def _dot(result: Array, left: Array, contracting: tuple[int, ...]) -> int:
    return 2 * math.prod(result.dims) * math.prod(left.dims[dim] for dim in contracting)


def _custom_call(instruction: Instruction, operands: list[Array]) -> tuple[int, str]:
    if _ATTENTION_CALL.match(instruction.target):
        return _attention(instruction, operands), operands[0].dtype
    if instruction.target.startswith("__cudnn$conv"):
        return _cudnn_convolution(instruction, operands), operands[0].dtype
    if _MATMUL_CALLS.match(instruction.target):
        found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
        contracting = tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()
        return _dot(instruction.result[0], operands[0], contracting), operands[0].dtype
    # A Pallas kernel says itself what it does, if its author told it.
    estimate = re.search(r'"cost_estimate":\s*{"flops":\s*"?(\d+)', instruction.attributes)
    return (int(estimate[1]), operands[0].dtype) if estimate and operands else (0, "")


def _attention(instruction: Instruction, operands: list[Array]) -> int:
    """Flash attention by cuDNN: two matrix multiplications forward, four backward.

    Masked-out parts count in full, and the scores that the backward pass computes once more do not:
    so all implementations of attention count the same.
    """
    *_, queries, keys = _numbers(instruction, "intermediate_tensor_shape")
    heads_and_batch = _numbers(instruction, "intermediate_tensor_shape")[:-2]
    head = operands[0].dims[-1]
    multiplications = 4 if "Backward" in instruction.target else 2
    return multiplications * 2 * math.prod(heads_and_batch) * queries * keys * head


def _numbers(instruction: Instruction, field: str) -> list[int]:
    found = re.search(rf'"{field}":\s*{{.*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else [0, 0]


def _labels(instruction: Instruction) -> tuple[str, str, str]:
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not found:
        raise NotImplementedError(f"{instruction.name}: a convolution without dim_labels")
    return found[1], found[2], found[3]


def _convolution(instruction: Instruction, operands: list[Array]) -> int:
    """A convolution: on a TPU, every matrix multiplication is one.

    There a batch dimension becomes a window that is dilated so that it meets one element at a time.
    So only positions where the window meets an element of the input, no padding and no hole, count.
    """
    left, right = operands[:2]
    inputs, kernel, outputs = _labels(instruction)
    valid = 1
    for place in sorted(set(outputs) - {"b", "f"}):
        valid *= _positions(
            left.dims[inputs.index(place)],
            right.dims[kernel.index(place)],
            instruction.result[0].dims[outputs.index(place)],
            _window(instruction, int(place), len(outputs) - 2),
        )
    feature_groups = _count(instruction, "feature_group_count")
    batch_groups = _count(instruction, "batch_group_count")
    return (
        2
        * valid
        * (left.dims[inputs.index("b")] // batch_groups)
        * (left.dims[inputs.index("f")] // feature_groups)
        * right.dims[kernel.index("o")]
    )


def _count(instruction: Instruction, attribute: str) -> int:
    found = re.search(rf"\b{attribute}=(\d+)", instruction.attributes)
    return int(found[1]) if found else 1


def _window(instruction: Instruction, place: int, spatial: int) -> dict[str, int]:
    """Stride, padding before and dilations of one dimension of a window."""
    found = re.search(r"window={([^}]*)}", instruction.attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}

    def number(field: str, default: int) -> int:
        values = fields.get(field, "").split("x")
        return int(values[place].split("_")[0]) if len(values) == spatial and values[0] else default

    return {
        "stride": number("stride", 1),
        "before": number("pad", 0),
        "left": number("lhs_dilate", 1),
        "right": number("rhs_dilate", 1),
    }


def _positions(size: int, window: int, results: int, how: dict[str, int]) -> int:
    """How many (result, window position) pairs meet an element of the input."""
    start = np.arange(results)[:, None] * how["stride"] - how["before"]
    at = start + np.arange(window)[None] * how["right"]
    reach = (size - 1) * how["left"] + 1
    return int(np.count_nonzero((at >= 0) & (at < reach) & (at % how["left"] == 0)))


def _cudnn_convolution(instruction: Instruction, operands: list[Array]) -> int:
    """Convolutions by cuDNN, forward and both gradients: as many FLOPs as the forward one has.

    The window's positions in the padding are counted too.
    """
    _, kernel_labels, _ = _labels(instruction)
    result = instruction.result[0]
    if "BackwardFilter" in instruction.target:
        outputs, kernel = operands[1], result
    elif "BackwardInput" in instruction.target:
        outputs, kernel = operands[0], operands[1]
    else:
        outputs, kernel = result, operands[1]
    return (
        2
        * math.prod(outputs.dims)
        * math.prod(kernel.dims)
        // kernel.dims[kernel_labels.index("o")]
    )
