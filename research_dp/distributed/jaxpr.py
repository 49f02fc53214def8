"""Walks through traced programs: their operations, and what each one's arguments are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

# What a value is made of: the places of the parameters; None: of the examples too.
Source = frozenset[int] | None
Callers = tuple[Any, ...]  # operations whose programs an operation is in, the outermost first
Visit = Callable[[Any, Sequence[Source], Callers], None]


def walk(jaxpr: Any, callers: Callers = ()) -> Iterator[tuple[Any, Callers]]:
    """All operations of a program and of the programs inside, each before those inside it."""
    for equation in jaxpr.eqns:
        yield equation, callers
        for inner in jaxprs_in_params(equation.params):
            yield from walk(inner, (*callers, equation))


def trace_sources(program: ClosedJaxpr, count: int, visit: Visit) -> None:
    """Calls a function for each operation of a program, with what its arguments are made of.

    The program's first `count` arguments are the parameters, the others the examples'. Programs of
    calls and of loops of known length are entered; a loop's more than once, until the sources of
    its carry are known. Other operations that have programs are visited themselves.
    """
    own: list[Source] = [frozenset((i,)) for i in range(count)]
    _follow(program.jaxpr, own + [None] * (len(program.in_avals) - count), visit, ())


def _follow(jaxpr: Any, sources: Sequence[Source], visit: Visit, callers: Callers) -> list[Source]:
    """The sources of a program's results, given its arguments'."""
    known: dict[Any, Source] = dict(zip(jaxpr.invars, sources, strict=True))

    def source(x: Any) -> Source:
        return frozenset() if isinstance(x, Literal) else known.get(x, frozenset())

    for equation in jaxpr.eqns:
        given = [source(x) for x in equation.invars]
        results = _through(equation, given, visit, callers)
        known.update(zip(equation.outvars, results, strict=True))
    return [source(x) for x in jaxpr.outvars]


def _through(equation: Any, given: list[Source], visit: Visit, callers: Callers) -> list[Source]:
    """The sources of an operation's results."""
    inner = list(jaxprs_in_params(equation.params))
    same = len(inner) == 1 and len(inner[0].invars) == len(given)
    if same and len(inner[0].outvars) == len(equation.outvars):
        callers = (*callers, equation)
        if equation.primitive.name != "scan":
            return _follow(inner[0], given, visit, callers)
        return _through_loop(equation, inner[0], given, visit, callers)
    visit(equation, given, callers)
    own = frozenset().union(*(one for one in given if one is not None))
    return [None if None in given else own] * len(equation.outvars)


def _through_loop(
    equation: Any, body: Any, given: list[Source], visit: Visit, callers: Callers
) -> list[Source]:
    """The same of a scan, whose carry comes round until it has no new sources."""
    first, count = equation.params["num_consts"], equation.params["num_carry"]
    while True:
        results = _follow(body, given, visit, callers)
        before = given[first : first + count]
        carry = [
            None if one is None or other is None else one | other
            for one, other in zip(before, results[:count], strict=True)
        ]
        if carry == before:
            return carry + results[count:]
        given = [*given[:first], *carry, *given[first + count :]]
