"""How often each loop of a compiled program runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from research_dp.analysis.hlo import Computation, Instruction, Module

# The value of parameter `number`, or of element `index` of it; None where it is not known.
Arguments = Callable[[int, int | None], int | None]
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body.

    GPU and CPU say it. A TPU program does not: there the condition's two sides are followed from
    the loop's start over one turn, and taken to go on by the same step.

    Args:
        module: The program.
        computation: Where the loop stands.
        loop: The `while` instruction.

    Returns:
        The number, or None where it depends on data.
    """
    if known := re.search(r'"known_trip_count":\s*{"n":\s*"?(\d+)', loop.attributes):
        return int(known[1])
    condition, body = module.called(loop, "condition"), module.called(loop, "body")
    if condition is None or body is None:
        return None
    start = computation.instructions[loop.operands[0]]

    def first(number: int, index: int | None) -> int | None:
        return value(module, computation, start, _unknown, index)

    def second(number: int, index: int | None) -> int | None:
        return value(module, body, body.root, first, index)

    compare, sides = _comparison(module, condition, first)
    _, next_sides = _comparison(module, condition, second)
    if compare is None or None in (*sides, *next_sides):
        return None
    gap = sides[1] - sides[0]  # type: ignore[operator]
    next_gap = next_sides[1] - next_sides[0]  # type: ignore[operator]
    return _turns(compare, gap, next_gap - gap)


def _turns(direction: str, gap: int, step: int) -> int | None:
    """How often `left < right` (or >, ...) holds while `right - left` goes gap, gap + step, ..."""
    if direction in ("GT", "GE"):
        direction, gap, step = {"GT": "LT", "GE": "LE"}[direction], -gap, -step
    if direction == "NE":
        direction, gap, step = "LT", abs(gap), -abs(step)
    if direction == "LE":
        direction, gap = "LT", gap + 1
    if direction != "LT" or (step >= 0 and gap > 0):
        return None
    return max(0, math.ceil(gap / -step)) if step else 0


def _comparison(
    module: Module, condition: Computation, arguments: Arguments
) -> tuple[str | None, tuple[int | None, ...]]:
    """The direction and the two sides of the comparison that a condition returns."""
    root = condition.root
    if root.opcode == "fusion" and (inner := module.called(root)):
        return _comparison(module, inner, _fused(module, condition, root, arguments))
    if root.opcode in ("copy", "bitcast"):
        root = condition.instructions[root.operands[0]]
    found = re.search(r"direction=(\w+)", root.attributes)
    if root.opcode != "compare" or not found:
        return None, ()
    sides = (condition.instructions[name] for name in root.operands)
    return found[1], tuple(value(module, condition, side, arguments) for side in sides)


def value(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    arguments: Arguments,
    index: int | None = None,
) -> int | None:
    """The whole number that an instruction gives, where constants and arguments decide it.

    Args:
        module: The program.
        computation: Where the instruction stands.
        instruction: What to evaluate.
        arguments: Values of the computation's parameters.
        index: Which element, where the instruction gives a tuple.
    """

    def operand(position: int, element: int | None = None) -> int | None:
        inner = computation.instructions[instruction.operands[position]]
        return value(module, computation, inner, arguments, element)

    opcode = instruction.opcode
    if opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if opcode == "parameter":
        return arguments(int(instruction.literal), index)
    if opcode == "get-tuple-element":
        return operand(0, instruction.index)
    if opcode == "tuple":
        return None if index is None else operand(index)
    if opcode in _TRANSPARENT:
        return operand(0)
    if opcode in _ARITHMETIC:
        left, right = operand(0), operand(1)
        return None if left is None or right is None else _ARITHMETIC[opcode](left, right)
    if opcode == "fusion" and (inner := module.called(instruction)):
        return value(
            module, inner, inner.root, _fused(module, computation, instruction, arguments), index
        )
    return None


def _fused(
    module: Module, computation: Computation, fusion: Instruction, arguments: Arguments
) -> Arguments:
    """The arguments that a fusion hands to its computation."""

    def argument(number: int, index: int | None) -> int | None:
        operand = computation.instructions[fusion.operands[number]]
        return value(module, computation, operand, arguments, index)

    return argument


def _unknown(number: int, index: int | None) -> int | None:
    """Nothing is known of the arguments of a computation that is not a loop's."""
    return None
