"""Parses the text of an optimised program (`compiled.as_text()`) of XLA for GPU, TPU and CPU.

Only the structure is here: computations, instructions, shapes. What an instruction costs is in
`collectives.py`, `flops.py` and `schedule.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Bits of an element. What is missing here has no storage: tokens and opaque handles.
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128} | {
    f"{kind}{bits}": bits for kind in "suf" for bits in (1, 2, 4, 8, 16, 32, 64)
}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's type.

    Attributes:
        dtype: Element type in XLA's words, e.g. 'bf16'.
        dims: Sizes.
        on_chip: It lies in a TPU's on-chip memory, not in HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype)
        if bits is None:  # f8e4m3fn and its kin, f4e2m1fn
            bits = int(found[1]) if (found := re.match(r"f([48])e", self.dtype)) else 0
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        name: Unique in the module.
        opcode: E.g. 'all-gather-start'.
        result: The array, or the arrays of the tuple (nested ones flattened), that it makes.
        operands: Names of its operands, in the same computation.
        literal: What stands between the operand brackets: a constant's value, a parameter's number.
        attributes: The rest of the line.
        is_root: It is its computation's result.
    """

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> str | None:
        """The name of the computation that an attribute (`calls`, `body`, ...) names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    def dims(self, attribute: str) -> tuple[int, ...]:
        """A list of numbers such as `lhs_contracting_dims={1}`; empty where it is not given."""
        found = re.search(rf"\b{attribute}={{([0-9,]*)}}", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    @property
    def index(self) -> int:
        """Which element a `get-tuple-element` takes."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else 0

    @property
    def target(self) -> str:
        """The target of a custom call, else ''."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Where it comes from in the JAX program, e.g. '.../while/body/all_gather'."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of a program: its instructions in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that gives the result."""
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.literal): i for i in found}

    def arrays(self, instruction: Instruction) -> list[Array]:
        """The arrays that go into an instruction."""
        return [
            array
            for name in instruction.operands
            if name in self.instructions
            for array in self.instructions[name].result
        ]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations and the one that is run."""

    computations: dict[str, Computation]
    entry: Computation

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """Names of the computations inside fusions."""
        return frozenset(
            instruction.called("calls") or ""
            for computation in self.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "fusion"
        )

    def called(self, instruction: Instruction, attribute: str = "calls") -> Computation | None:
        """The computation that an instruction names, if it does."""
        return self.computations.get(instruction.called(attribute) or "")


def parse(text: str) -> Module:
    """Parses a program.

    Args:
        text: What `compiled.as_text()` gives.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    current: dict[str, Instruction] = {}
    for line in _whole_lines(text):
        if header := _HEADER.match(line):
            current = {}
            computations[header[2]] = Computation(header[2], current)
            entry = header[2] if header[1] else entry
        else:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("no entry computation in this text: give what compiled.as_text() prints")
    return Module(computations, computations[entry])


def _whole_lines(text: str) -> Iterator[str]:
    """Headers and instructions, each on one line.

    A custom call's configuration may run over several lines, and some of these start with '}'. So a
    computation ends where the next one starts, and all else is glued to the instruction before.
    """
    pending = ""
    for line in text.splitlines():
        starts = _HEADER.match(line) or _INSTRUCTION.match(line)
        if starts:
            if pending:
                yield pending
            pending = line
        elif pending and line not in ("}", ""):
            pending += "\n" + line
    if pending:
        yield pending


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opens = rest.index("(", end)
    closes = _closing(rest, opens)
    literal = rest[opens + 1 : closes]
    return Instruction(
        name=head[2],
        opcode=rest[end:opens].strip(),
        result=arrays(rest[:end]),
        operands=tuple(_OPERAND.findall(literal)),
        literal=literal,
        attributes=rest[closes + 1 :],
        is_root=bool(head[1]),
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    raise ValueError(f"unbalanced brackets in {text[:200]!r}")


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, e.g. '(bf16[2,4]{1,0:T(8,128)S(1)}, f32[])'."""
    return tuple(
        Array(
            dtype,
            tuple(int(n.lstrip("<=")) for n in dims.split(",") if n),
            "S(1)" in layout,
        )
        for dtype, dims, layout in _ARRAY.findall(_COMMENT.sub("", text))
    )
