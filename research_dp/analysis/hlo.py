"""Parses an optimised program (`compiled.as_text()`) of XLA: its instructions, shapes and loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator

# The first line of a computation (is it the entry, its name) or an instruction (is it the root, its
# name). Each ends where the next one starts: a custom call's configuration may have several lines.
_START = re.compile(
    r"^(?:(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$|[ \t]+(ROOT )?%?([\w.\-]+) = )", re.MULTILINE
)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = re.compile(r"(?:[sufc]|bf)(\d+)")  # of an element: bf16, f8e4m3fn and its kin

_TRANSPARENT = {"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"}
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
# (number, index) -> the value of a parameter, or of an element of it; NaN where it is unknown.
Arguments = Callable[[int, int | None], float]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's type; its dtype in XLA's words, e.g. 'bf16'."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False  # in a TPU's on-chip memory, not in HBM

    @property
    def nbytes(self) -> int:
        bits = _BITS.match(self.dtype)  # tokens and opaque handles have no storage
        width = 8 if self.dtype == "pred" else int(bits[1]) if bits else 0
        return math.ceil(math.prod(self.dims) * width / 8)


@dataclasses.dataclass(eq=False, repr=False)
class Instruction:
    """One line of a program."""

    name: str  # unique in the module
    opcode: str  # e.g. 'all-gather-start'
    result: tuple[Array, ...]  # one array, or those of a tuple, nested ones flattened
    operands: tuple[Instruction, ...]  # of the same computation
    literal: str  # text between the operand brackets: a constant's value, a parameter's number
    attributes: str  # the rest of the line
    computation: Computation
    users: list[Instruction] = dataclasses.field(default_factory=list)  # have it as an operand

    def attribute(self, pattern: str, default: str = "") -> str:
        """The first group of a pattern's first match in the attributes."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else default

    def called(self, attribute: str = "calls") -> Computation | None:
        """The computation that an attribute (`calls`, `body`, ...) names."""
        return self.computation.siblings.get(self.attribute(rf"\b{attribute}=%?([\w.\-]+)"))

    @property
    def fused(self) -> Computation | None:
        """The computation inside a fusion; None for other instructions."""
        return self.called() if self.opcode == "fusion" else None

    @property
    def inlined(self) -> Computation | None:
        """The computation that a fusion, a call or an asynchronous wrapper runs once."""
        inlines = self.opcode in ("fusion", "call", "async-start")
        return (self.called() or self.called("to_apply")) if inlines else None

    @property
    def inputs(self) -> list[Array]:
        return [array for operand in self.operands for array in operand.result]

    @property
    def target(self) -> str:
        """The target of a custom call, else ''."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def is_async(self) -> bool:
        """Whether it starts an operation that another instruction waits for."""
        # The compiler marks a `*-start` that it does not overlap after all.
        is_sync = re.search(r'"is_sync":\s*true', self.attributes)
        return self.opcode.endswith("-start") and not is_sync


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """A function of a program."""

    name: str
    siblings: dict[str, Computation]  # all computations of the module, by name
    # By name, in the order of the schedule.
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction = dataclasses.field(init=False)
    parameters: dict[int, Instruction] = dataclasses.field(default_factory=dict)
    in_fusion: bool = False  # whether a fusion calls it


def parse(text: str) -> Computation:
    """The entry computation of a program; ValueError: there is none."""
    computations: dict[str, Computation] = {}
    entry = current = None
    starts = list(_START.finditer(text))
    for start, following in itertools.zip_longest(starts, starts[1:]):
        is_entry, header, is_root, name = start.groups()
        if header:
            current = computations[header] = Computation(header, computations)
            entry = current if is_entry else entry
            continue
        if current is None:
            continue
        line = text[start.end() : following.start() if following else None]
        line = line.rstrip().removesuffix("\n}")
        type_end = _closing_bracket(line, 0) + 1 if line.startswith("(") else line.index(" ")
        opening = line.index("(", type_end)
        closing = _closing_bracket(line, opening)
        literal, known = line[opening + 1 : closing], current.instructions
        operands = [known[other] for other in re.findall(r"%([\w.\-]+)", literal) if other in known]
        instruction = known[name] = Instruction(
            name,
            line[type_end:opening].strip(),
            arrays(line[:type_end]),
            tuple(operands),
            literal,
            line[closing + 1 :],
            current,
        )
        for operand in operands:
            operand.users.append(instruction)
        if instruction.opcode == "parameter":
            current.parameters[int(literal)] = instruction
        if is_root:
            current.root = instruction
    if entry is None:
        raise ValueError("no entry computation in this text: give what compiled.as_text() prints")
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if fused := instruction.fused:
                fused.in_fusion = True
    return entry


def _closing_bracket(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    raise ValueError(f"unbalanced brackets in {text[:200]!r}")


def integers(text: str) -> tuple[int, ...]:
    """All numbers in a text, e.g. '{0,1}'."""
    return tuple(map(int, re.findall(r"\d+", text)))


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, e.g. '(bf16[2,4]{1,0:T(8,128)S(1)}, f32[])'."""
    return tuple(
        Array(dtype, integers(dims), "S(1)" in layout)
        for dtype, dims, layout in _ARRAY.findall(_COMMENT.sub("", text))
    )


def executed(
    computation: Computation, times: int | None = 1, in_async: bool = False
) -> Iterator[tuple[Instruction, int | None, bool]]:
    """All instructions that a computation runs, each before those of the computations it calls.

    With how often, None where that is unknown, and whether inside an asynchronous wrapper.
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

    GPU and CPU programs state it. In a TPU program both sides of the condition are evaluated before
    and after the first iteration, and assumed to change by equal steps.
    """
    if known := loop.attribute(r'"known_trip_count":\s*{"n":\s*"?(\d+)'):
        return int(known)
    condition, body = loop.called("condition"), loop.called("body")
    if condition is None or body is None:
        return None

    def initial(number: int, index: int | None) -> float:
        return _evaluate(loop.operands[0], lambda *_: math.nan, index)

    def following(number: int, index: int | None) -> float:
        return _evaluate(body.root, initial, index)

    direction, gap = _comparison(condition.root, initial)
    step = _comparison(condition.root, following)[1] - gap
    # The condition, `left < right` or another, is true while the gap has the right sign.
    if direction in ("GT", "GE"):
        direction, gap, step = direction.replace("G", "L"), -gap, -step
    if direction == "NE":
        direction, gap, step = "LT", abs(gap), -abs(step)
    if direction == "LE":
        direction, gap = "LT", gap + 1
    if direction != "LT" or math.isnan(step) or (step >= 0 and gap > 0):
        return None
    return max(0, math.ceil(gap / -step)) if step else 0


def _comparison(root: Instruction, arguments: Arguments) -> tuple[str, float]:
    """The direction of a condition's comparison, and its right side less its left."""
    if fused := root.fused:
        return _comparison(fused.root, _fused_arguments(root, arguments))
    if root.opcode in ("copy", "bitcast"):
        root = root.operands[0]
    if root.opcode != "compare":
        return "", math.nan
    left, right = (_evaluate(side, arguments) for side in root.operands)
    return root.attribute(r"direction=(\w+)"), right - left


def _evaluate(instruction: Instruction, arguments: Arguments, index: int | None = None) -> float:
    """The integer that an instruction, or element `index` of its tuple, gives; NaN if unknown."""

    def operand(position: int, element: int | None = None) -> float:
        return _evaluate(instruction.operands[position], arguments, element)

    opcode, literal = instruction.opcode, instruction.literal
    if opcode == "constant":
        return int(literal) if re.fullmatch(r"-?\d+", literal) else math.nan
    if opcode == "parameter":
        return arguments(int(literal), index)
    if opcode == "get-tuple-element":
        return operand(0, int(instruction.attribute(r"\bindex=(\d+)", "0")))
    if opcode == "tuple" and index is not None:
        return operand(index)
    if opcode in _TRANSPARENT:
        return operand(0)
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](operand(0), operand(1))
    if fused := instruction.fused:
        return _evaluate(fused.root, _fused_arguments(instruction, arguments), index)
    return math.nan


def _fused_arguments(fusion: Instruction, arguments: Arguments) -> Arguments:
    """The arguments that a fusion passes to its computation."""
    return lambda number, index: _evaluate(fusion.operands[number], arguments, index)
