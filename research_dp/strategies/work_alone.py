"""Which parameters a function computes with alone, before any example comes in.

What it makes of parameters alone is the same for each logical shard of a device: a compiler may do
it once for all, or anew beside each use, and round otherwise. Parameters that go straight into
operations with examples leave it no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

# Operations that only move numbers: the same bits wherever they are done.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "gather"),
        *("iota", "name", "pad", "reshape", "rev", "select_n", "slice", "split", "squeeze"),
        "transpose",
    )
)
# What a value is made of: the places of the parameters; None: of the examples too.
_Source = frozenset[int] | None


def worked_on_alone(program: ClosedJaxpr, count: int) -> list[bool]:
    """Whether a program computes with a parameter alone, for each of its first `count` arguments.

    Alone or with other parameters and constants; also in derivatives that it takes. Where that is
    not known, as of kernels and loops of unknown length, it is assumed.

    Args:
        program: Its further arguments are the examples'; what it closes over is a constant.
        count: How many parameters it has.
    """
    mine: list[_Source] = [frozenset((i,)) for i in range(count)]
    alone: set[int] = set()
    _follow(program.jaxpr, mine + [None] * (len(program.in_avals) - count), alone)
    return [i in alone for i in range(count)]


def _follow(jaxpr: Any, sources: Sequence[_Source], alone: set[int]) -> list[_Source]:
    """The sources of a program's results, given its arguments'; adds to `alone`."""
    known: dict[Any, _Source] = dict(zip(jaxpr.invars, sources, strict=True))

    def source(x: Any) -> _Source:
        return frozenset() if isinstance(x, Literal) else known.get(x, frozenset())

    for equation in jaxpr.eqns:
        given = [source(x) for x in equation.invars]
        known.update(zip(equation.outvars, _through(equation, given, alone), strict=True))
    return [source(x) for x in jaxpr.outvars]


def _through(equation: Any, given: list[_Source], alone: set[int]) -> list[_Source]:
    """The sources of an operation's results."""
    inner = list(jaxprs_in_params(equation.params))
    same = len(inner) == 1 and len(inner[0].invars) == len(given)
    if same and len(inner[0].outvars) == len(equation.outvars):
        if equation.primitive.name != "scan":
            return _follow(inner[0], given, alone)
        return _through_loop(equation, inner[0], given, alone)
    own = frozenset().union(*(one for one in given if one is not None))
    mixed = None in given
    if inner or (not mixed and equation.primitive.name not in _MOVES):
        alone |= own
    return [None if mixed else own] * len(equation.outvars)


def _through_loop(equation: Any, body: Any, given: list[_Source], alone: set[int]) -> list[_Source]:
    """The same of a scan, whose carry comes round until it tells nothing new."""
    first, count = equation.params["num_consts"], equation.params["num_carry"]
    while True:
        results = _follow(body, given, alone)
        before = given[first : first + count]
        carry = [_joined(*pair) for pair in zip(before, results[:count], strict=True)]
        if carry == before:
            return carry + results[count:]
        given = [*given[:first], *carry, *given[first + count :]]


def _joined(one: _Source, other: _Source) -> _Source:
    return None if one is None or other is None else one | other
