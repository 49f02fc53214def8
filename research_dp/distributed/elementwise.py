"""Shows that a function is elementwise in parameters that are sharded, from its traced programs.

An optimizer may be applied to shards if each element of its results depends on the same element of
gradients, parameters and state, and on values that are equal on all devices. Every intermediate
value of the program is labelled with what it depends on (abstract interpretation). The program for
unsharded parameters and that for shards are read side by side: they must differ in shapes alone.

Any primitive, known or unknown, mixes elements unless it is shown to be elementwise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from research_dp.distributed.dependence import (
    CONSTANT,
    REPLICATED,
    Dependence,
    is_deterministic,
    is_elementwise,
    join,
    mixed,
    name_of,
)
from research_dp.errors import first_line

# Primitives that run the program in their parameter `jaxpr` or `call_jaxpr` once.
_CALLS = {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}
_KEEP_ORDER = {"reshape", "squeeze", "broadcast_in_dim"}

Pair = tuple[Any, Any]  # the same part of both programs


class _ProgramsDiffer(Exception):
    """The program for shards is another than that for unsharded parameters."""


def find_mixing(
    program: ClosedJaxpr,
    arguments: Sequence[Dependence],
    results: Sequence[Dependence],
    *,
    on_shards: Callable[[], ClosedJaxpr] | None = None,
) -> str | None:
    """Finds why a function is not elementwise.

    Args:
        program: Its program for unsharded parameters; for shards, if that alone can be traced.
        arguments: What each argument depends on, flat.
        results: What each result may depend on, flat. Further results must not be 'mixed'.
        on_shards: Traces the program for one device's shards, which is compared.

    Returns:
        The reason, in a few words: the primitive, and the path of a parameter. None: it is
        elementwise.
    """
    try:
        other = program if on_shards is None else on_shards()
        consts = _captured((program.consts, other.consts))
        found = _interpret((program.jaxpr, other.jaxpr), [*consts, *arguments])
    except Exception as error:
        # The function fails for shards, or has another program. The program for unsharded
        # parameters usually shows why.
        if on_shards is None:
            raise
        reason = find_mixing(program, arguments, results)
        if reason is None and not isinstance(error, _ProgramsDiffer):
            reason = f"{type(error).__name__} for shards: {first_line(error)}"
        return reason or "its program depends on the shape of a parameter"
    if len(found) < len(results):
        return "its state changes structure"
    for one, wanted in itertools.zip_longest(found, results):
        if one.kind == "mixed":
            return one.detail
        if wanted is not None and not one.fits(wanted):
            return f"{name_of(one)} in the update of {wanted.detail or 'replicated state'}"
    return None


def _interpret(programs: Pair, inputs: Sequence[Dependence]) -> list[Dependence]:
    """Labels of the results of both programs; `inputs` are those of constants and arguments."""
    labels: dict[Any, Dependence] = {}  # of the variables of both programs
    twins: dict[Any, Any] = {}  # variables of the second program -> those of the first
    sources: dict[Any, Any] = {}  # what was broadcast or reshaped -> a constant of equal elements

    def source(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable if is_literal else sources.get(variable, variable)

    def equations_of(program: Jaxpr) -> Iterator[JaxprEqn]:
        # A scalar parameter has shards of rank 1: constants are broadcast for these alone.
        for equation in program.eqns:
            if equation.primitive.name in _KEEP_ORDER:
                first = source(equation.invars[0])
                if isinstance(first, core.Literal) or labels[first] == CONSTANT:
                    sources[equation.outvars[0]] = first
                    continue
            yield equation

    def write(one: Sequence[Any], other: Sequence[Any], found: Sequence[Dependence]) -> None:
        for (v, twin), label in zip(_together(one, other), found, strict=True):
            if getattr(v.aval, "dtype", None) != getattr(twin.aval, "dtype", None):
                raise _ProgramsDiffer
            if label.kind == "replicated" and v.aval.shape != twin.aval.shape:
                label = mixed("an array whose shape depends on the parameter's")
            elif label.kind == "replicated" and np.prod(v.aval.shape) == 1:
                label = CONSTANT
            labels[v] = labels[twin] = label
            twins[twin] = v

    def read(one: Sequence[Any], other: Sequence[Any]) -> list[Dependence]:
        found = []
        for pair in _together(one, other):
            v, twin = map(source, pair)
            literals = [x for x in (v, twin) if isinstance(x, core.Literal)]
            if len(literals) == 2:
                found += _captured(([v.val], [twin.val]))
            elif literals or twins[twin] is not v:
                raise _ProgramsDiffer
            else:
                found.append(labels[v])
        return found

    unsharded, local = programs
    write((*unsharded.constvars, *unsharded.invars), (*local.constvars, *local.invars), inputs)
    for one, other in itertools.zip_longest(equations_of(unsharded), equations_of(local)):
        if one is None or other is None or one.primitive is not other.primitive:
            raise _ProgramsDiffer
        write(one.outvars, other.outvars, _apply((one, other), read(one.invars, other.invars)))
    return read(unsharded.outvars, local.outvars)


def _apply(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    """Labels of the results of one equation."""
    one, other = equations
    name = one.primitive.name
    if name in _CALLS:
        return _call(
            _programs(equations, "jaxpr" if "jaxpr" in one.params else "call_jaxpr"), inputs
        )
    if name in _CONTROL_FLOW:
        if not _same(*map(_options, equations)):
            raise _ProgramsDiffer
        return _CONTROL_FLOW[name](equations, inputs)
    if name in _KEEP_ORDER and inputs[0].kind in ("elementwise", "mixed"):
        return [_moved(equations, inputs[0])]
    first = next((label for label in inputs if label.kind == "mixed"), None)
    if first is not None:
        label = first
    elif is_elementwise(one) and is_elementwise(other) and _same(one.params, other.params):
        label = functools.reduce(
            functools.partial(join, name),
            (_fitting(equations, i, label) for i, label in enumerate(inputs)),
            CONSTANT,
        )
    elif (
        all(label.kind in ("constant", "replicated") for label in inputs)
        and _same(one.params, other.params)
        and _shapes(one.invars) == _shapes(other.invars)
        and is_deterministic(one)
    ):
        label = REPLICATED
    else:
        label = mixed(" of ".join([name, *sorted({x.detail for x in inputs if x.detail})[:1]]))
    return [label] * len(one.outvars)


def _fitting(equations: Pair, position: int, label: Dependence) -> Dependence:
    """The label of an operand of an elementwise primitive, which must not be broadcast."""
    fits = all(e.invars[position].aval.shape == e.outvars[0].aval.shape for e in equations)
    if label.kind != "elementwise" or fits:
        return label
    return mixed(f"{equations[0].primitive.name} broadcasts {name_of(label)}")


def _moved(equations: Pair, label: Dependence) -> Dependence:
    """The label of what gets another shape: row-major order stays, if no element is repeated."""
    sizes = [{np.prod(v.aval.shape) for v in (e.invars[0], *e.outvars)} for e in equations]
    plain = all(
        e.params.get("dimensions") is None for e in equations if e.primitive.name == "reshape"
    )
    if label.kind != "elementwise" or (plain and all(len(size) == 1 for size in sizes)):
        return label
    return mixed(f"{equations[0].primitive.name} of {name_of(label)}")


def _call(programs: tuple[Pair, Pair], inputs: Sequence[Dependence]) -> list[Dependence]:
    """Labels of the results of a program inside a primitive."""
    consts = _captured(programs[1])
    return _interpret(programs[0], [*consts, *inputs])


def _cond(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    index, *operands = inputs
    if index.kind not in ("constant", "replicated"):
        reason = index.detail if index.kind == "mixed" else f"cond on {name_of(index)}"
        return [mixed(reason)] * len(equations[0].outvars)
    branches = [
        _call(_programs(equations, "branches", number), operands)
        for number, _ in enumerate(_together(*(e.params["branches"] for e in equations)))
    ]
    joined = functools.partial(join, "cond")
    return [functools.reduce(joined, labels) for labels in zip(*branches, strict=True)]


def _while(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    params = equations[0].params
    tests, bodies = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = _fixpoint(
        "while",
        inputs[bodies:],
        lambda carry: _call(_programs(equations, "body_jaxpr"), [*inputs[tests:bodies], *carry]),
    )
    (more,) = _call(_programs(equations, "cond_jaxpr"), [*inputs[:tests], *carry])
    if more.kind in ("constant", "replicated"):
        return carry
    return [mixed(more.detail if more.kind == "mixed" else f"while on {name_of(more)}")] * len(
        carry
    )


def _scan(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    params = equations[0].params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    # Rows of what is scanned over, and stacked results, are other elements in each turn.
    rows = [
        mixed(f"scan over {name_of(x)}") if x.kind == "elementwise" else x for x in inputs[last:]
    ]

    def turn(carry: Sequence[Dependence]) -> list[Dependence]:
        return _call(_programs(equations, "jaxpr"), [*inputs[:first], *carry, *rows])

    carry = _fixpoint("scan", inputs[first:last], lambda carry: turn(carry)[: len(carry)])
    return [*carry, *map(_stacked, turn(carry)[len(carry) :])]


def _stacked(label: Dependence) -> Dependence:
    """The label of the values that a scan stacks."""
    if label.kind == "elementwise":
        return mixed(f"scan of {name_of(label)}")
    return label if label.kind == "mixed" else REPLICATED


_CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}


def _fixpoint(
    name: str,
    carry: Sequence[Dependence],
    turn: Callable[[Sequence[Dependence]], Sequence[Dependence]],
) -> list[Dependence]:
    """The labels of a loop's carry, whatever the number of turns."""
    before, now = None, list(carry)
    while before != now:
        before = now
        now = [join(name, a, b) for a, b in zip(before, turn(before), strict=True)]
    return now


def _captured(consts: Pair) -> list[Dependence]:
    """Labels of arrays that a function did not take as arguments."""

    def label(one: Any, other: Any) -> Dependence:
        traced = isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer)
        plain = not traced and not jax.dtypes.issubdtype(jnp.result_type(one), jax.dtypes.extended)
        if one is not other and not (plain and np.array_equal(one, other, equal_nan=True)):
            return mixed("a number that depends on the parameter's shape")
        if np.size(one) == 1:
            return CONSTANT
        flat = np.asarray(one).ravel() if plain else None
        return CONSTANT if flat is not None and np.all(flat == flat[:1]) else REPLICATED

    return [label(*pair) for pair in _together(*consts)]


def _programs(equations: Pair, name: str, number: int | None = None) -> tuple[Pair, Pair]:
    """(programs, their constants) in a parameter of both equations."""
    inner = [e.params[name] if number is None else e.params[name][number] for e in equations]
    open_ = [(x, ()) if isinstance(x, Jaxpr) else (x.jaxpr, x.consts) for x in inner]
    return (open_[0][0], open_[1][0]), (open_[0][1], open_[1][1])


def _options(equation: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation that are not programs."""
    return {
        name: value
        for name, value in equation.params.items()
        if not any(isinstance(x, Jaxpr | ClosedJaxpr) for x in jax.tree.leaves(value))
    }


def _together(one: Sequence[Any], other: Sequence[Any]) -> list[Pair]:
    if len(one) != len(other):
        raise _ProgramsDiffer
    return list(zip(one, other, strict=True))


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in variables]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether parameters are equal; arrays among them count as different."""
    try:
        return one is other or bool(one == other)
    except ValueError:
        return False
