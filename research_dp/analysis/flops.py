"""FLOPs of matrix multiplications, in all the forms in which a compiled program has them.

`compiled.cost_analysis()` does not help: it gives nothing for absent GPUs, and on TPUs it counts
the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from research_dp.analysis.hlo import Instruction, integers

# Custom calls that are one matrix multiplication: cuBLAS in its variants.
_MATMUL_CALLS = re.compile(r"__cublas\$|__onednn\$matmul|__cudnn\$(?!conv|fmha|norm)")
_ATTENTION_CALL = re.compile(r"__cudnn\$fmha\w*")


def flops(instruction: Instruction) -> tuple[int, str]:
    """FLOPs of a matrix multiplication, and its operands' element type; (0, '') of all others."""
    counters = {"dot": _matmul, "convolution": _convolution, "custom-call": _custom_call}
    counter = counters.get(instruction.opcode)
    count = counter(instruction) if counter else 0
    return (count, instruction.inputs[0].dtype) if count else (0, "")


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
    """A matrix multiplication, whose attributes have the contracting dims in this pattern."""
    left, dims = instruction.inputs[0], integers(instruction.attribute(contracting))
    return 2 * math.prod(instruction.result[0].dims) * math.prod(left.dims[dim] for dim in dims)


def _custom_call(instruction: Instruction) -> int:
    target = instruction.target
    if _ATTENTION_CALL.match(target):
        return _attention(instruction)
    if target.startswith("__cudnn$conv"):
        return _cudnn_convolution(instruction)
    if _MATMUL_CALLS.match(target):
        return _matmul(instruction, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
    # Authors of Pallas kernels may state the cost.
    estimate = instruction.attribute(r'"cost_estimate":\s*{"flops":\s*"?(\d+)', "0")
    return int(estimate) if instruction.inputs else 0


def _attention(instruction: Instruction) -> int:
    """Flash attention by cuDNN: two matrix multiplications forward, four backward.

    Masked-out parts count in full, and the scores that the backward pass recomputes do not count:
    so all implementations of attention count the same.
    """
    shape = instruction.attribute(
        r'"intermediate_tensor_shape":\s*{.*?"dimensions":\s*\[([^\]]*)\]', "0, 0"
    )
    multiplications = 4 if "Backward" in instruction.target else 2
    return multiplications * 2 * math.prod(integers(shape)) * instruction.inputs[0].dims[-1]


def _dim_labels(instruction: Instruction) -> tuple[str, str, str]:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        raise NotImplementedError(f"{instruction.name}: a convolution without dim_labels")
    return labels[1], labels[2], labels[3]


def _convolution(instruction: Instruction) -> int:
    """A convolution: on a TPU, every matrix multiplication is one.

    There a batch dimension becomes a window that is dilated so that it meets one element at a time.
    So only positions where the window meets an element of the input, no padding and no hole, count.
    """
    inputs, kernel, outputs = _dim_labels(instruction)
    left, right = instruction.inputs[:2]
    result = instruction.result[0]
    spatial = sorted(set(outputs) - {"b", "f"})
    window = {
        field: [int(value.split("_")[0]) for value in values.split("x")]
        for field, values in re.findall(
            r"(\w+)=([\w\-]+)", instruction.attribute(r"window={([^}]*)}")
        )
    }
    positions = 1
    for label in spatial:
        positions *= _valid_positions(
            left.dims[inputs.index(label)],
            right.dims[kernel.index(label)],
            result.dims[outputs.index(label)],
            {name: v[int(label)] for name, v in window.items() if len(v) == len(spatial)},
        )
    for label, group_count in (("b", "batch_group_count"), ("f", "feature_group_count")):
        groups = int(instruction.attribute(rf"\b{group_count}=(\d+)", "1"))
        positions *= left.dims[inputs.index(label)] // groups
    return 2 * positions * right.dims[kernel.index("o")]


def _valid_positions(size: int, window_size: int, results: int, window: dict[str, int]) -> int:
    """How many pairs of a result and a window position meet an element of the input."""
    start = np.arange(results)[:, None] * window.get("stride", 1) - window.get("pad", 0)
    place = start + np.arange(window_size)[None] * window.get("rhs_dilate", 1)
    dilation = window.get("lhs_dilate", 1)
    inside = (place >= 0) & (place <= (size - 1) * dilation)
    return int(np.count_nonzero(inside & (place % dilation == 0)))


def _cudnn_convolution(instruction: Instruction) -> int:
    """Convolutions by cuDNN, forward and both gradients: as many FLOPs as the forward one has.

    The window's positions in the padding are counted too.
    """
    _, kernel_labels, _ = _dim_labels(instruction)
    outputs, kernel = instruction.result[0], instruction.inputs[1]
    if "BackwardFilter" in instruction.target:
        outputs, kernel = kernel, outputs
    elif "BackwardInput" in instruction.target:
        outputs = instruction.inputs[0]
    products = math.prod(outputs.dims) * math.prod(kernel.dims)
    return 2 * products // kernel.dims[kernel_labels.index("o")]
