"""Parses the text of an optimised program (`compiled.as_text()`) of XLA for GPU, TPU and CPU.

Only the structure is here: computations, instructions, shapes. The modules beside this one say
what an instruction costs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

# Bits of an element. Types that are missing here have no storage: tokens and opaque handles.
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128} | {
    f"{kind}{bits}": bits for kind in "suf" for bits in (1, 2, 4, 8, 16, 32, 64)
}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET = re.compile(r"[()]")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's type; its dtype in XLA's words, e.g. 'bf16'."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False  # in a TPU's on-chip memory, not in HBM

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype, 0)
        if small_float := re.match(r"f([48])e", self.dtype):  # f8e4m3fn and its kin, f4e2m1fn
            bits = int(small_float[1])
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(eq=False, repr=False)
class Instruction:
    """One line of a program."""

    name: str  # unique in the module
    opcode: str  # e.g. 'all-gather-start'
    result: tuple[Array, ...]  # one array, or those of a tuple, nested ones flattened
    operands: tuple[Instruction, ...]  # of the same computation
    literal: str  # text between the operand brackets: a constant's value, a parameter's number
    attributes: str  # the rest of the line
    is_root: bool
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
        if self.opcode not in ("fusion", "call", "async-start"):
            return None
        return self.called() or self.called("to_apply")

    @property
    def inputs(self) -> list[Array]:
        return [array for operand in self.operands for array in operand.result]

    @property
    def target(self) -> str:
        """The target of a custom call, else ''."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def is_async(self) -> bool:
        """Whether it starts an operation that another instruction waits for.

        The compiler marks a `*-start` that it does not overlap after all.
        """
        is_start = self.opcode.endswith("-start")
        return is_start and not re.search(r'"is_sync":\s*true', self.attributes)


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """A function of a program: its instructions by name, in the order of the schedule."""

    name: str
    siblings: dict[str, Computation]  # all computations of the module, by name
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    in_fusion: bool = False  # whether a fusion calls it

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        instructions = self.instructions.values()
        return {int(i.literal): i for i in instructions if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """Parses a program as `compiled.as_text()` prints it; ValueError: it has no entry."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _statements(text):
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation(header[2], computations)
            entry = current if header[1] else entry
        elif current is not None:
            instruction = _instruction(line, current)
            current.instructions[instruction.name] = instruction
            for operand in instruction.operands:
                operand.users.append(instruction)
    if entry is None:
        raise ValueError("no entry computation in this text: give what compiled.as_text() prints")
    for instruction in itertools.chain(*(c.instructions.values() for c in computations.values())):
        if fused := instruction.fused:
            fused.in_fusion = True
    return Module(computations, entry)


def _statements(text: str) -> Iterator[str]:
    """Headers and instructions, each as one string.

    A custom call's configuration may run over several lines, some of which start with '}'. So a
    computation ends where the next one starts, and other lines belong to the instruction before.
    """
    pending: list[str] = []
    for line in text.splitlines():
        starts = _HEADER.match(line) or _INSTRUCTION.match(line)
        if starts and pending:
            yield "\n".join(pending)
            pending = []
        if starts or (pending and line not in ("}", "")):
            pending.append(line)
    if pending:
        yield "\n".join(pending)


def _instruction(line: str, computation: Computation) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    rest = line[head.end() :]
    type_end = _closing_bracket(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", type_end)
    closing = _closing_bracket(rest, opening)
    literal, known = rest[opening + 1 : closing], computation.instructions
    return Instruction(
        name=head[2],
        opcode=rest[type_end:opening].strip(),
        result=arrays(rest[:type_end]),
        operands=tuple(known[name] for name in _OPERAND.findall(literal) if name in known),
        literal=literal,
        attributes=rest[closing + 1 :],
        is_root=bool(head[1]),
        computation=computation,
    )


def _closing_bracket(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
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
