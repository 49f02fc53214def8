"""Walks through traced programs: their operations, and what each one's arguments are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

# What a value is made of: the places of the parameters; None: of the examples too.
Source = frozenset[int] | None
Callers = tuple[Any, ...]  # operations whose programs an operation is in, the outermost first
Visit = Callable[[Any, Sequence[Source], Callers], None]
_LIBRARIES = tuple(str(Path(str(x.__file__)).parent) for x in (flax, jax, optax))
_OWN = Path(__file__).parents[1]
_LIBRARIES += tuple(
    str(_OWN / x)
    for x in ("tracing", "distributed", "models/flax", "models/supervised", "argument_checks")
)


def walk(jaxpr: Any, callers: Callers = ()) -> Iterator[tuple[Any, Callers]]:
    """All operations of a program and of the programs inside, each before those inside it."""
    for equation in jaxpr.eqns:
        yield equation, callers
        for inner in jaxprs_in_params(equation.params):
            yield from walk(inner, (*callers, equation))


def trace_sources(program: ClosedJaxpr, count: int, visit: Visit) -> None:
    """Calls a function for each operation of a program, with what its arguments are made of.

    The program's first `count` arguments are the parameters, the others the examples'. Programs of
    calls and scans are entered; a scan's until the sources of its carry are known.
    """
    params: list[Source] = [frozenset((i,)) for i in range(count)]
    _follow(program.jaxpr, params + [None] * (len(program.in_avals) - count), visit, ())


def _follow(jaxpr: Any, given: Sequence[Source], visit: Visit, callers: Callers) -> list[Source]:
    """The sources of a program's results, given its arguments'."""
    known: dict[Any, Source] = dict(zip(jaxpr.invars, given, strict=True))

    def sources(variables: Sequence[Any]) -> list[Source]:
        nothing: Source = frozenset()
        return [nothing if isinstance(x, Literal) else known.get(x, nothing) for x in variables]

    for equation in jaxpr.eqns:
        results = _through(equation, sources(equation.invars), visit, callers)
        known.update(zip(equation.outvars, results, strict=True))
    return sources(jaxpr.outvars)


def _through(equation: Any, given: list[Source], visit: Visit, callers: Callers) -> list[Source]:
    """The sources of an operation's results, for any number of turns of a scan."""
    inner, outputs = list(jaxprs_in_params(equation.params)), len(equation.outvars)
    if [(len(x.invars), len(x.outvars)) for x in inner] != [(len(given), outputs)]:
        visit(equation, given, callers)
        sources = frozenset().union(*(x or () for x in given))
        return [None if None in given else sources] * outputs
    is_scan = equation.primitive.name == "scan"
    first = equation.params["num_consts"] if is_scan else 0
    last = first + equation.params["num_carry"] if is_scan else 0
    while True:
        results = _follow(inner[0], given, visit, (*callers, equation))
        pairs = zip(given[first:last], results, strict=False)
        carry = [None if a is None or b is None else a | b for a, b in pairs]
        if carry == given[first:last]:
            return carry + results[len(carry) :]
        given = [*given[:first], *carry, *given[last:]]


def source_line(equation: Any) -> str:
    """The line of a source that made an operation: the innermost outside of the libraries."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else []
    own = next((f for f in frames if not f.file_name.startswith(_LIBRARIES)), None)
    if own is None:
        return "an unknown line"
    return f"{Path(own.file_name).name}:{own.line_num} ({own.function_name})"
