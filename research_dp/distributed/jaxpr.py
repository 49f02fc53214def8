"""Reads traced programs: their operations, what these are made of, and which are elementwise.

A primitive is elementwise if `vmap` maps its application to scalars to itself: no list of names.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params
from jax.interpreters import partial_eval

# What a value is made of: the places of the parameters; None: of the examples too.
Source = frozenset[int] | None
Callers = tuple[Any, ...]  # operations whose programs an operation is in, the outermost first
Visit = Callable[[Any, Sequence[Source], Callers], None]
_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim")
_LIBRARIES = tuple(str(Path(str(x.__file__)).parent) for x in (flax, jax, optax))
_OWN = Path(__file__).parents[1]
_LIBRARIES += tuple(
    str(_OWN / x) for x in ("distributed", "models/flax", "models/supervised", "argument_checks")
)


def walk(jaxpr: Any, callers: Callers = ()) -> Iterator[tuple[Any, Callers]]:
    """All operations of a program and of the programs inside, each before those inside it."""
    for equation in jaxpr.eqns:
        yield equation, callers
        for inner in jaxprs_in_params(equation.params):
            yield from walk(inner, (*callers, equation))


def used_part(jaxpr: Any) -> Any:
    """A program without what no result needs, such as the primal of a gradient taken alone.

    Every compiler drops it.
    """
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return used


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
    first, last = carry_of(equation) if equation.primitive.name == "scan" else (0, 0)
    while True:
        results = _follow(inner[0], given, visit, (*callers, equation))
        pairs = zip(given[first:last], results, strict=False)
        carry = [None if a is None or b is None else a | b for a, b in pairs]
        if carry == given[first:last]:
            return carry + results[len(carry) :]
        given = [*given[:first], *carry, *given[last:]]


def carry_of(scan: JaxprEqn) -> tuple[int, int]:
    """The first of a loop's arguments that it carries, and the one after the last."""
    params = scan.params
    if "ft_in" in params:  # since JAX 0.11.2
        constants, carry, _ = map(len, params["ft_in"].unpack())
    else:
        constants, carry = params["num_consts"], params["num_carry"]
    return constants, constants + carry


def source_line(equation: Any) -> str:
    """The line of a source that made an operation: the innermost outside of the libraries."""
    made = equation.source_info.traceback
    frames = made.frames if made else []
    own = next((f for f in frames if not f.file_name.startswith(_LIBRARIES)), None)
    if own is None:
        return "an unknown line"
    return f"{Path(own.file_name).name}:{own.line_num} ({own.function_name})"


def line_of(error: BaseException) -> str:
    """The line that an error comes from: the innermost outside of the libraries."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = next((f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))), None)
    return f"{own.filename}:{own.lineno} ({own.name})" if own else "an unknown line"


def mixing_operation(program: ClosedJaxpr) -> str | None:
    """The first operation of a program that mixes the elements of an array; None: none does.

    The rows of a loop are other elements at each turn; a reshape keeps the order of all.
    """
    for equation, _ in walk(program.jaxpr):
        name, variables = equation.primitive.name, (*equation.invars, *equation.outvars)
        sizes = [math.prod(v.aval.shape) for v in variables]
        if any(True for _ in jaxprs_in_params(equation.params)):
            is_mixed = name == "scan" and len(equation.invars) > carry_of(equation)[1]
        elif name in _RESHAPES:
            is_turned = equation.params.get("dimensions") is not None and name == "reshape"
            is_mixed = sizes[0] != 1 and (sizes[0] != sizes[-1] or is_turned)
        else:
            is_mixed = max(sizes, default=1) > 1 and not is_elementwise(equation)
        if is_mixed:
            return name
    return None


def operations(program: ClosedJaxpr) -> list[tuple[Any, ...]]:
    """A program's operations, their numbers, flags and dtypes; no shapes, no reshapes."""

    def one(equation: JaxprEqn) -> tuple[Any, ...]:
        numbers = [str(v) for v in equation.invars if isinstance(v, Literal)]
        flags = [x for x in equation.params.values() if isinstance(x, bool | int | float | str)]
        results: list[Any] = [v.aval for v in equation.outvars]
        return equation.primitive, *numbers, *flags, *(x.dtype for x in results)

    return [one(e) for e, _ in walk(program.jaxpr) if e.primitive.name not in _RESHAPES]


def is_elementwise(equation: JaxprEqn) -> bool:
    """Whether it is a function of scalars, applied to all elements: dims of length 1 may repeat."""
    avals: list[Any] = [v.aval for v in equation.invars]
    results: list[Any] = [v.aval for v in equation.outvars]
    widest = max((x.shape for x in avals), key=len, default=None)
    is_drawn = equation.effects or equation.primitive.name == "rng_uniform"
    if is_drawn or {x.shape for x in results} != {widest}:
        return False
    if any(x.ndim not in (0, results[0].ndim) for x in avals):
        return False
    try:
        operands = tuple((x.ndim, x.dtype) for x in avals)
        return _maps_scalars(equation.primitive, tuple(equation.params.items()), operands)
    except TypeError:  # an unhashable parameter; no elementwise primitive has one
        return False


@functools.cache
def _maps_scalars(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], operands: tuple[Any, ...]
) -> bool:
    """Whether a primitive is the `vmap` of its own application to scalars.

    `operands` has (rank, dtype) of each; those of rank 0 are the same for all elements.
    """
    ranks = [rank for rank, _ in operands]
    if not set(ranks) <= {0, max(ranks)}:
        return False

    def function(*scalars: Any) -> Any:
        return primitive.bind(*scalars, **dict(params))

    for _ in range(max(ranks)):
        function = jax.vmap(function, in_axes=tuple(0 if rank else None for rank in ranks))
    arrays = [jax.ShapeDtypeStruct((2,) * rank, dtype) for rank, dtype in operands]
    try:
        program = jax.make_jaxpr(function)(*arrays).jaxpr
    except Exception:  # not for scalars, or without a rule for vmap: raises anything
        return False
    if not program.eqns:  # JAX omits a cast that changes nothing
        return set(program.outvars) <= set(program.invars)
    applied = [(e.primitive, e.params, e.invars, e.outvars) for e in program.eqns]
    return applied == [(primitive, dict(params), program.invars, program.outvars)]
