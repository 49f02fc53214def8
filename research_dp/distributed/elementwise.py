"""Proves that a function is elementwise in sharded parameters, from its traced programs.

An optimizer may be applied to shards if each element of its results depends only on the same
element of gradients, parameters and state, and on values that are equal on all devices. Abstract
interpretation labels every intermediate value with its `Dependence`. The programs for unsharded
parameters and for shards are read in parallel: they must differ in shapes only. A primitive mixes
elements unless it is shown to be elementwise.
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

from research_dp.distributed import dependence
from research_dp.distributed.dependence import CONSTANT, REPLICATED, Dependence, mixed, mixed_by
from research_dp.errors import first_line

# Primitives that run the program in their parameter `jaxpr` or `call_jaxpr` once.
_CALLS = {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}
_RESHAPES = {"reshape", "squeeze", "broadcast_in_dim"}
_SAME_EVERYWHERE = ("constant", "replicated")

Pair = tuple[Any, Any]  # corresponding parts of the unsharded and the local program


class _ProgramsDiffer(Exception):
    """The program for shards differs from that for unsharded parameters in more than shapes."""


def find_mixing(
    program: ClosedJaxpr,
    arguments: Sequence[Dependence],
    results: Sequence[Dependence],
    *,
    on_shards: Callable[[], ClosedJaxpr] | None = None,
) -> str | None:
    """Finds why a function is not elementwise, in a few words; None: it is.

    `program` is for unsharded parameters; `on_shards` traces that for one device's shards, which is
    compared; None: `program` is that one. `arguments` and `results` say, flat, what each depends on
    and may depend on. Further results must not be 'mixed'.
    """
    try:
        local = program if on_shards is None else on_shards()
        consts = _labels_of_constants((program.consts, local.consts))
        labels = _interpret((program.jaxpr, local.jaxpr), [*consts, *arguments])
    except Exception as error:
        # The function fails for shards, or has another program. The program for unsharded
        # parameters usually shows why.
        if on_shards is None:
            raise
        reason = find_mixing(program, arguments, results)
        if reason is None and not isinstance(error, _ProgramsDiffer):
            reason = f"{type(error).__name__} for shards: {first_line(error)}"
        return reason or "its program depends on the shape of a parameter"
    if len(labels) < len(results):
        return "its state changes structure"
    for label, expected in itertools.zip_longest(labels, results):
        if label.kind == "mixed":
            return label.detail
        if expected is not None and not label.fits(expected):
            return f"{label.source} in the update of {expected.detail or 'replicated state'}"
    return None


def _interpret(programs: Pair, inputs: Sequence[Dependence]) -> list[Dependence]:
    """Labels of the results of both programs; `inputs` are those of constants and arguments."""
    labels: dict[Any, Dependence] = {}  # of the variables of both programs
    twins: dict[Any, Any] = {}  # variable of the local program -> of the unsharded one
    sources: dict[Any, Any] = {}  # a reshaped or broadcast constant -> the constant

    def source(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable if is_literal else sources.get(variable, variable)

    def equations_of(program: Jaxpr) -> Iterator[JaxprEqn]:
        # Shards of a scalar parameter have rank 1: only there are constants broadcast.
        for equation in program.eqns:
            if equation.primitive.name in _RESHAPES:
                operand = source(equation.invars[0])
                if isinstance(operand, core.Literal) or labels[operand] == CONSTANT:
                    sources[equation.outvars[0]] = operand
                    continue
            yield equation

    def write(full: Sequence[Any], local: Sequence[Any], new: Sequence[Dependence]) -> None:
        for (v, twin), label in zip(_pairs(full, local), new, strict=True):
            if getattr(v.aval, "dtype", None) != getattr(twin.aval, "dtype", None):
                raise _ProgramsDiffer
            if label.kind == "replicated" and v.aval.shape != twin.aval.shape:
                label = mixed("an array whose shape depends on the parameter's")
            elif label.kind == "replicated" and np.prod(v.aval.shape) == 1:
                label = CONSTANT
            labels[v] = labels[twin] = label
            twins[twin] = v

    def read(full: Sequence[Any], local: Sequence[Any]) -> list[Dependence]:
        result = []
        for pair in _pairs(full, local):
            v, twin = map(source, pair)
            literals = [x for x in (v, twin) if isinstance(x, core.Literal)]
            if len(literals) == 2:
                result += _labels_of_constants(([v.val], [twin.val]))
            elif literals or twins[twin] is not v:
                raise _ProgramsDiffer
            else:
                result.append(labels[v])
        return result

    full, local = programs
    write((*full.constvars, *full.invars), (*local.constvars, *local.invars), inputs)
    for a, b in itertools.zip_longest(equations_of(full), equations_of(local)):
        if a is None or b is None or a.primitive is not b.primitive:
            raise _ProgramsDiffer
        write(a.outvars, b.outvars, _apply((a, b), read(a.invars, b.invars)))
    return read(full.outvars, local.outvars)


def _apply(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    """Labels of the results of one equation."""
    full, local = equations
    name = full.primitive.name
    if name in _CALLS:
        parameter = "jaxpr" if "jaxpr" in full.params else "call_jaxpr"
        return _call(equations, inputs, parameter)
    if name in _CONTROL_FLOW:
        if not _equal(*map(_options, equations)):
            raise _ProgramsDiffer
        return _CONTROL_FLOW[name](equations, inputs)
    if name in _RESHAPES and inputs[0].kind in ("elementwise", "mixed"):
        return [_reshaped(equations, inputs[0])]
    first_mixed = next((label for label in inputs if label.kind == "mixed"), None)
    if first_mixed is not None:
        label = first_mixed
    elif all(map(dependence.is_elementwise, equations)) and _equal(full.params, local.params):
        label = functools.reduce(
            functools.partial(dependence.join, name),
            (_unbroadcast(equations, i, label) for i, label in enumerate(inputs)),
            CONSTANT,
        )
    elif (
        all(label.kind in _SAME_EVERYWHERE for label in inputs)
        and _equal(full.params, local.params)
        and [v.aval.shape for v in full.invars] == [v.aval.shape for v in local.invars]
        and dependence.is_deterministic(full)
    ):
        label = REPLICATED
    else:
        label = mixed(" of ".join([name, *sorted({x.detail for x in inputs if x.detail})[:1]]))
    return [label] * len(full.outvars)


def _unbroadcast(equations: Pair, position: int, label: Dependence) -> Dependence:
    """The label of an operand of an elementwise primitive, which must not broadcast it."""
    fits = all(e.invars[position].aval.shape == e.outvars[0].aval.shape for e in equations)
    if label.kind != "elementwise" or fits:
        return label
    return mixed_by(f"{equations[0].primitive.name} broadcasts", label)


def _reshaped(equations: Pair, label: Dependence) -> Dependence:
    """The label of a reshaped array: row-major order stays, if no element is repeated."""
    sizes = [{np.prod(v.aval.shape) for v in (e.invars[0], *e.outvars)} for e in equations]
    in_order = all(
        e.params.get("dimensions") is None for e in equations if e.primitive.name == "reshape"
    )
    if label.kind != "elementwise" or (in_order and all(len(size) == 1 for size in sizes)):
        return label
    return mixed_by(f"{equations[0].primitive.name} of", label)


def _call(
    equations: Pair, inputs: Sequence[Dependence], parameter: str, branch: int | None = None
) -> list[Dependence]:
    """Labels of the results of a program in a parameter of both equations."""
    inner = [e.params[parameter] for e in equations]
    if branch is not None:
        inner = [branches[branch] for branches in inner]
    programs = tuple(x if isinstance(x, Jaxpr) else x.jaxpr for x in inner)
    consts = tuple(() if isinstance(x, Jaxpr) else x.consts for x in inner)
    return _interpret(programs, [*_labels_of_constants(consts), *inputs])  # type: ignore[arg-type]


def _cond(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    index, *operands = inputs
    if index.kind not in _SAME_EVERYWHERE:
        return [mixed_by("cond on", index)] * len(equations[0].outvars)
    branches = [
        _call(equations, operands, "branches", number)
        for number, _ in enumerate(_pairs(*(e.params["branches"] for e in equations)))
    ]
    join = functools.partial(dependence.join, "cond")
    return [functools.reduce(join, labels) for labels in zip(*branches, strict=True)]


def _while(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    params = equations[0].params
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    consts = inputs[cond:body]
    carry = _fixpoint(
        "while", inputs[body:], lambda carry: _call(equations, [*consts, *carry], "body_jaxpr")
    )
    (condition,) = _call(equations, [*inputs[:cond], *carry], "cond_jaxpr")
    if condition.kind in _SAME_EVERYWHERE:
        return carry
    return [mixed_by("while on", condition)] * len(carry)


def _scan(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    params = equations[0].params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    # Rows of scanned arrays, and stacked results, are other elements at each iteration.
    rows = [mixed_by("scan over", x) if x.kind == "elementwise" else x for x in inputs[last:]]

    def body(carry: Sequence[Dependence]) -> list[Dependence]:
        return _call(equations, [*inputs[:first], *carry, *rows], "jaxpr")

    carry = _fixpoint("scan", inputs[first:last], lambda carry: body(carry)[: len(carry)])
    stacked = body(carry)[len(carry) :]
    return carry + [
        REPLICATED if x.kind in _SAME_EVERYWHERE else mixed_by("scan of", x) for x in stacked
    ]


_CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}


def _fixpoint(
    name: str,
    carry: Sequence[Dependence],
    body: Callable[[Sequence[Dependence]], Sequence[Dependence]],
) -> list[Dependence]:
    """The labels of a loop's carry, for any number of iterations."""
    before, after = None, list(carry)
    while before != after:
        before = after
        after = [dependence.join(name, a, b) for a, b in zip(before, body(before), strict=True)]
    return after


def _labels_of_constants(consts: Pair) -> list[Dependence]:
    """Labels of arrays that a function did not take as arguments."""

    def label(a: Any, b: Any) -> Dependence:
        traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
        plain = not traced and not jax.dtypes.issubdtype(jnp.result_type(a), jax.dtypes.extended)
        if a is not b and not (plain and np.array_equal(a, b, equal_nan=True)):
            return mixed("a number that depends on the parameter's shape")
        if np.size(a) == 1:
            return CONSTANT
        flat = np.asarray(a).ravel() if plain else None
        return CONSTANT if flat is not None and np.all(flat == flat[:1]) else REPLICATED

    return [label(*pair) for pair in _pairs(*consts)]


def _options(equation: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation that are not programs."""
    return {
        name: value
        for name, value in equation.params.items()
        if not any(isinstance(x, Jaxpr | ClosedJaxpr) for x in jax.tree.leaves(value))
    }


def _pairs(full: Sequence[Any], local: Sequence[Any]) -> list[Pair]:
    if len(full) != len(local):
        raise _ProgramsDiffer
    return list(zip(full, local, strict=True))


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether parameters are equal; arrays among them count as different."""
    try:
        return a is b or bool(a == b)
    except ValueError:
        return False
