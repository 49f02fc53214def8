"""Runs a traced program on labels in place of arrays: calls, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from research_dp.tracing.jaxpr import carry_of, program_called

Labels = Sequence[Any]


class Rules(Protocol):
    """How values are labelled, besides by calls and control flow.

    Labels are dataclasses with `join`, `mixed_by`, `scanned`, `stacked` and `is_same_everywhere`.
    """

    def apply(self, equation: JaxprEqn, inputs: Labels) -> list[Any]:
        """Labels of an operation's results, of those of its operands."""

    def of_constant(self, value: Any) -> Any:
        """The label of an array that the program did not take as an argument."""

    def called(self, equation: JaxprEqn, inputs: Labels, results: list[Any]) -> list[Any]:
        """Labels of a call's results, of those that its program's results have."""


def interpret(program: Any, arguments: Labels, rules: Rules) -> list[Any]:
    """Labels of a program's results, for arguments with these labels."""
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    values = dict(zip(jaxpr.constvars, map(rules.of_constant, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variables: Sequence[Any]) -> list[Any]:
        return [
            rules.of_constant(v.val) if isinstance(v, Literal) else values[v] for v in variables
        ]

    for equation in jaxpr.eqns:
        results = _apply(equation, read(equation.invars), rules)
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _apply(equation: JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    """Labels of the results of one operation."""
    if (called := program_called(equation)) is not None:
        return rules.called(equation, inputs, interpret(called, inputs, rules))
    return _CONTROL_FLOW.get(equation.primitive.name, _of_primitive)(equation, inputs, rules)


def _of_primitive(equation: JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    return rules.apply(equation, inputs)


def _cond(equation: JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    index, *operands = inputs
    if not index.is_same_everywhere:
        return [index.mixed_by("cond on")] * len(equation.outvars)
    branches = [interpret(program, operands, rules) for program in equation.params["branches"]]
    return [reduce(lambda a, b: a.join("cond", b), x) for x in zip(*branches, strict=True)]


def _while(equation: JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    params = equation.params
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def turn(carry: Labels) -> list[Any]:
        return interpret(params["body_jaxpr"], [*inputs[cond:body], *carry], rules)

    carry = _fixpoint("while", inputs[body:], turn)
    (condition,) = interpret(params["cond_jaxpr"], [*inputs[:cond], *carry], rules)
    same = condition.is_same_everywhere
    return carry if same else [condition.mixed_by("while on")] * len(carry)


def _scan(equation: JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    first, last = carry_of(equation)
    rows = [x.scanned() for x in inputs[last:]]

    def body(carry: Labels) -> list[Any]:
        return interpret(equation.params["jaxpr"], [*inputs[:first], *carry, *rows], rules)

    carry = _fixpoint("scan", inputs[first:last], lambda carry: body(carry)[: len(carry)])
    return carry + [x.stacked() for x in body(carry)[len(carry) :]]


_CONTROL_FLOW = {"cond": _cond, "while": _while, "scan": _scan}


def _fixpoint(name: str, carry: Labels, body: Callable[[Labels], list[Any]]) -> list[Any]:
    """The labels of a loop's carry, for any number of turns."""
    before, after = None, list(carry)
    while before != after:
        before = after
        after = [a.join(name, b) for a, b in zip(before, body(before), strict=True)]
    return after
