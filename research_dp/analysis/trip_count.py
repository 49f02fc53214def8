"""How often each loop of a compiled program runs, and so each of its instructions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator

from research_dp.analysis.hlo import Computation, Instruction

# (number, index) -> the value of a parameter, or of an element of it; None where it is unknown.
Arguments = Callable[[int, int | None], int | None]
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def executed(
    computation: Computation, times: int | None = 1, in_async: bool = False
) -> Iterator[tuple[Instruction, int | None, bool]]:
    """All instructions that a computation runs, each before those of the computations it calls.

    Yields:
        The instruction; how often it runs, None where that is unknown; whether it is inside an
        asynchronous wrapper.
    """
    for instruction in computation.instructions.values():
        yield instruction, times, in_async
        wrapped = in_async or (instruction.opcode == "async-start" and instruction.is_async)
        for callee, trips in callees(instruction):
            total = None if times is None or trips is None else times * trips
            yield from executed(callee, total, wrapped)


def callees(instruction: Instruction) -> Iterator[tuple[Computation, int | None]]:
    """The computations that an instruction runs, and how often; every branch of a conditional."""
    if instruction.opcode == "while":
        if body := instruction.called("body"):
            yield body, trip_count(instruction)
    elif instruction.opcode == "conditional":
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        names = re.findall(r"%?([\w.\-]+)", listed)
        sides = (instruction.called(f"{side}_computation") for side in ("true", "false"))
        branches = [instruction.computation.siblings[name] for name in names]
        yield from ((branch, 1) for branch in branches or sides if branch)
    elif inlined := instruction.inlined:
        yield inlined, 1


def trip_count(loop: Instruction) -> int | None:
    """How often a `while` runs its body; None where it depends on data.

    GPU and CPU programs state it. A TPU program does not: there both sides of the condition are
    evaluated before the first iteration and after it, and assumed to change by equal steps.
    """
    if known := loop.attribute(r'"known_trip_count":\s*{"n":\s*"?(\d+)'):
        return int(known)
    condition, body = loop.called("condition"), loop.called("body")
    if condition is None or body is None:
        return None

    def initial(number: int, index: int | None) -> int | None:
        return _evaluate(loop.operands[0], lambda number, index: None, index)

    def following(number: int, index: int | None) -> int | None:
        return _evaluate(body.root, initial, index)

    direction, first = _comparison(condition.root, initial)
    _, second = _comparison(condition.root, following)
    if first is None or second is None:
        return None
    return _iterations(direction, first, second - first)


def _iterations(direction: str, gap: int, step: int) -> int | None:
    """How often `left < right` (or >, ...) is true while `right - left` is gap, gap + step, ..."""
    if direction in ("GT", "GE"):
        direction, gap, step = {"GT": "LT", "GE": "LE"}[direction], -gap, -step
    if direction == "NE":
        direction, gap, step = "LT", abs(gap), -abs(step)
    if direction == "LE":
        direction, gap = "LT", gap + 1
    if direction != "LT" or (step >= 0 and gap > 0):
        return None
    return max(0, math.ceil(gap / -step)) if step else 0


def _comparison(root: Instruction, arguments: Arguments) -> tuple[str, int | None]:
    """The direction of a condition's comparison, and its right side less its left if known."""
    if fused := root.fused:
        return _comparison(fused.root, _fused_arguments(root, arguments))
    if root.opcode in ("copy", "bitcast"):
        root = root.operands[0]
    direction = root.attribute(r"direction=(\w+)")
    if root.opcode != "compare" or not direction:
        return "", None
    left, right = (_evaluate(side, arguments) for side in root.operands)
    return direction, None if left is None or right is None else right - left


def _evaluate(
    instruction: Instruction, arguments: Arguments, index: int | None = None
) -> int | None:
    """The integer that an instruction, or element `index` of its tuple, gives; None if unknown."""

    def operand(position: int, element: int | None = None) -> int | None:
        return _evaluate(instruction.operands[position], arguments, element)

    opcode = instruction.opcode
    if opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if opcode == "parameter":
        return arguments(int(instruction.literal), index)
    if opcode == "get-tuple-element":
        return operand(0, int(instruction.attribute(r"\bindex=(\d+)", "0")))
    if opcode == "tuple":
        return None if index is None else operand(index)
    if opcode in _TRANSPARENT:
        return operand(0)
    if opcode in _ARITHMETIC:
        left, right = operand(0), operand(1)
        return None if left is None or right is None else _ARITHMETIC[opcode](left, right)
    if fused := instruction.fused:
        return _evaluate(fused.root, _fused_arguments(instruction, arguments), index)
    return None


def _fused_arguments(fusion: Instruction, arguments: Arguments) -> Arguments:
    """The arguments that a fusion passes to its computation."""
    return lambda number, index: _evaluate(fusion.operands[number], arguments, index)
