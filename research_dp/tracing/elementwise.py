"""Proves that a function is elementwise in sharded parameters, from its traced programs.

An optimizer may be applied to shards if each element of its results depends only on the same
element of gradients, parameters and state, and on values that are equal on all devices. Abstract
interpretation labels every value with its `Dependence`. The programs for unsharded parameters and
for shards are read in parallel: they must differ in shapes only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from research_dp.errors import first_line
from research_dp.tracing.jaxpr import carry_of, is_deterministic, is_elementwise, program_called

_PROGRAMS = {"jaxpr", "branches", "cond_jaxpr", "body_jaxpr"}  # of control flow
_RESHAPES = {"reshape", "squeeze", "broadcast_in_dim"}

Pair = tuple[Any, Any]  # corresponding parts of the unsharded and the local program


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What the elements of an array depend on. A leaf, not a pytree.

    'constant': all elements are equal, and the same on all devices. 'replicated': the array is the
    same on all devices. 'elementwise': each element depends on the element of one parameter, with
    path `detail` if it is known, at the same position in row-major order. 'mixed', for the reason
    `detail`: none of these.
    """

    kind: Literal["constant", "replicated", "elementwise", "mixed"]
    detail: str = ""

    @property
    def is_same_everywhere(self) -> bool:
        return self.kind in ("constant", "replicated")

    @property
    def source(self) -> str:
        """What an array with this label is made of, for a message."""
        if self.kind == "elementwise":
            return self.detail or "a shard"
        return "an array that is not sharded with the parameter"

    def fits(self, expected: Dependence) -> bool:
        """Whether a result with this label may be used where `expected` is."""
        if self.kind == "elementwise":
            paths = {self.detail, expected.detail} - {""}
            return expected.kind == "elementwise" and len(paths) <= 1
        return self.kind == "constant" or self.kind == expected.kind == "replicated"

    def mixed_by(self, operation: str) -> Dependence:
        """The label of the result of an operation that mixes the elements of this array."""
        return self if self.kind == "mixed" else mixed(f"{operation} {self.source}")

    def join(self, operation: str, other: Dependence) -> Dependence:
        """The label of an elementwise function of two arrays."""
        if self.kind == "mixed" or other == CONSTANT or self == other:
            return self
        if other.kind == "mixed" or self == CONSTANT:
            return other
        if self.kind == other.kind == "elementwise" and self.fits(other):
            return self if self.detail else other
        return mixed(f"{operation} of {self.source} and {other.source}")

    def scanned(self) -> Dependence:
        """The label of what each turn of a loop gets: rows are other elements at each."""
        return self.mixed_by("scan over") if self.kind == "elementwise" else self

    def stacked(self) -> Dependence:
        """The label of what the turns of a loop give, along a new dim."""
        return REPLICATED if self.is_same_everywhere else self.mixed_by("scan of")


CONSTANT, REPLICATED = Dependence("constant"), Dependence("replicated")
elementwise = partial(Dependence, "elementwise")  # of the parameter with this path
mixed = partial(Dependence, "mixed")  # for this reason
Labels = Sequence[Dependence]


class _ProgramsDiffer(Exception):
    """The program for shards differs from that for unsharded parameters in more than shapes."""


class Rules(NamedTuple):
    """How values are labelled, besides by calls and control flow.

    Labels are dataclasses with `kind`, `join`, `mixed_by`, `scanned`, `stacked` and
    `is_same_everywhere`, as `Dependence` has them.

    Attributes:
        apply: (corresponding equations, labels of their operands) -> labels of the results.
        of_constant: Corresponding arrays of the programs -> their label.
        called: (equation of a call, labels of its operands, of its results) -> of its results.
    """

    apply: Callable[[Pair, Any], list[Any]]
    of_constant: Callable[[Any, Any], Any]
    called: Callable[[JaxprEqn, Any, list[Any]], list[Any]] = lambda equation, given, found: found


def find_mixing(
    program: Any, arguments: Labels, results: Labels, *, on_shards: Callable[[], Any] | None = None
) -> str | None:
    """Finds why a function is not elementwise, in a few words; None: it is.

    `program` is for unsharded parameters; `on_shards` traces the one for shards, to be compared.
    `arguments` and `results` say, flat, what each may depend on; further ones may not be 'mixed'.
    """
    try:
        labels = interpret((program, on_shards() if on_shards else program), arguments, _RULES)
    except Exception as error:
        if on_shards is None:
            raise
        # The program for unsharded parameters usually shows why.
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


def interpret(programs: Sequence[Any], arguments: Sequence[Any], rules: Rules) -> list[Any]:
    """Labels of the results of both programs, which may be one, for arguments with these labels."""
    consts = [x.consts if isinstance(x, ClosedJaxpr) else () for x in programs]
    full, local = (x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in programs)
    # Variable of either program -> its label, an object that two corresponding variables share; of
    # a reshaped or broadcast constant, the constant's label or the literal.
    values: dict[Any, Any] = {}

    def value(x: Any) -> Any:
        return x if isinstance(x, core.Literal) else values[x]

    def equations_of(program: Jaxpr) -> Iterator[JaxprEqn]:
        # Shards of a scalar parameter have rank 1: only there are constants broadcast.
        for equation in program.eqns:
            if equation.primitive.name in _RESHAPES:
                operand = value(equation.invars[0])
                if isinstance(operand, core.Literal) or operand == CONSTANT:
                    values[equation.outvars[0]] = operand
                    continue
            yield equation

    def write(full: Sequence[Any], local: Sequence[Any], new: Labels) -> None:
        for (v, twin), label in zip(_pairs(full, local), new, strict=True):
            if getattr(v.aval, "dtype", None) != getattr(twin.aval, "dtype", None):
                raise _ProgramsDiffer
            if label.kind == "replicated" and v.aval.shape != twin.aval.shape:
                label = mixed("an array whose shape depends on the parameter's")
            elif label.kind == "replicated" and np.prod(v.aval.shape) == 1:
                label = CONSTANT
            values[v] = values[twin] = dataclasses.replace(label)

    def read(full: Sequence[Any], local: Sequence[Any]) -> list[Dependence]:
        result = []
        for pair in _pairs(full, local):
            a, b = map(value, pair)
            if isinstance(a, core.Literal) and isinstance(b, core.Literal):
                a = b = rules.of_constant(a.val, b.val)
            if a is not b:
                raise _ProgramsDiffer
            result.append(a)
        return result

    inputs = [*itertools.starmap(rules.of_constant, _pairs(*consts)), *arguments]
    write((*full.constvars, *full.invars), (*local.constvars, *local.invars), inputs)
    for a, b in itertools.zip_longest(equations_of(full), equations_of(local)):
        if a is None or b is None or a.primitive is not b.primitive:
            raise _ProgramsDiffer
        write(a.outvars, b.outvars, _apply((a, b), read(a.invars, b.invars), rules))
    return read(full.outvars, local.outvars)


def _apply(equations: Pair, inputs: list[Any], rules: Rules) -> list[Any]:
    """Labels of the results of one equation."""
    full, local = equations
    name = full.primitive.name
    if program_called(full) is not None:
        found = interpret([program_called(e) for e in equations], inputs, rules)
        return rules.called(full, inputs, found)
    if name in _CONTROL_FLOW:
        options = [{k: e.params[k] for k in e.params.keys() - _PROGRAMS} for e in equations]
        if full is not local and not _equal(*options):
            raise _ProgramsDiffer
        return _CONTROL_FLOW[name](equations, inputs, rules)
    return rules.apply(equations, inputs)


def _of_primitive(equations: Pair, inputs: list[Dependence]) -> list[Dependence]:
    """Labels of the results of a primitive."""
    full, local = equations
    name = full.primitive.name
    if name in _RESHAPES and inputs[0].kind == "elementwise":
        # Row-major order stays, if no element is repeated.
        sizes = [{np.prod(v.aval.shape) for v in (e.invars[0], *e.outvars)} for e in equations]
        in_order = name != "reshape" or all(e.params.get("dimensions") is None for e in equations)
        stays = in_order and all(len(size) == 1 for size in sizes)
        label = inputs[0] if stays else inputs[0].mixed_by(f"{name} of")
    elif any(x.kind == "mixed" for x in inputs):
        label = next(x for x in inputs if x.kind == "mixed")
    elif all(map(is_elementwise, equations)) and _equal(full.params, local.params):
        label = CONSTANT
        results = [e.outvars[0].aval.shape for e in equations]
        for x, *operands in zip(inputs, full.invars, local.invars, strict=True):
            if x.kind == "elementwise" and [v.aval.shape for v in operands] != results:
                x = x.mixed_by(f"{name} broadcasts")
            label = label.join(name, x)
    elif (
        all(x.is_same_everywhere for x in inputs)
        and _equal(full.params, local.params)
        and [v.aval.shape for v in full.invars] == [v.aval.shape for v in local.invars]
        and is_deterministic(full)
    ):
        label = REPLICATED
    else:
        label = mixed(" of ".join([name, *sorted({x.detail for x in inputs if x.detail})[:1]]))
    return [label] * len(full.outvars)


def _call(equations: Pair, parameter: str, inputs: Sequence[Any], rules: Rules) -> list[Any]:
    return interpret([e.params[parameter] for e in equations], inputs, rules)


def _cond(equations: Pair, inputs: list[Any], rules: Rules) -> list[Any]:
    index, *operands = inputs
    if not index.is_same_everywhere:
        return [index.mixed_by("cond on")] * len(equations[0].outvars)
    pairs = _pairs(*(e.params["branches"] for e in equations))
    branches = [interpret(pair, operands, rules) for pair in pairs]
    return [reduce(lambda a, b: a.join("cond", b), x) for x in zip(*branches, strict=True)]


def _while(equations: Pair, inputs: list[Any], rules: Rules) -> list[Any]:
    params = equations[0].params
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    consts = inputs[cond:body]
    carry = _fixpoint(
        "while",
        inputs[body:],
        lambda carry: _call(equations, "body_jaxpr", [*consts, *carry], rules),
    )
    (condition,) = _call(equations, "cond_jaxpr", [*inputs[:cond], *carry], rules)
    same = condition.is_same_everywhere
    return carry if same else [condition.mixed_by("while on")] * len(carry)


def _scan(equations: Pair, inputs: list[Any], rules: Rules) -> list[Any]:
    first, last = carry_of(equations[0])
    rows = [x.scanned() for x in inputs[last:]]

    def body(carry: Sequence[Any]) -> list[Any]:
        return _call(equations, "jaxpr", [*inputs[:first], *carry, *rows], rules)

    carry = _fixpoint("scan", inputs[first:last], lambda carry: body(carry)[: len(carry)])
    return carry + [x.stacked() for x in body(carry)[len(carry) :]]


_CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}


def _fixpoint(name: str, carry: Sequence[Any], body: Callable[[Any], Any]) -> list[Any]:
    """The labels of a loop's carry, for any number of iterations."""
    before, after = None, list(carry)
    while before != after:
        before = after
        after = [a.join(name, b) for a, b in zip(before, body(before), strict=True)]
    return after


def _label_of_constant(a: Any, b: Any) -> Dependence:
    """Label of an array that a function did not take as an argument."""
    traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    plain = not traced and not jax.dtypes.issubdtype(jnp.result_type(a), jax.dtypes.extended)
    if a is not b and not (plain and np.array_equal(a, b, equal_nan=True)):
        return mixed("a number that depends on the parameter's shape")
    flat = np.asarray(a).ravel() if plain else None
    uniform = np.size(a) == 1 or (flat is not None and np.all(flat == flat[:1]))
    return CONSTANT if uniform else REPLICATED


_RULES = Rules(_of_primitive, _label_of_constant)


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
