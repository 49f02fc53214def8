"""Runs a module on shards of its parameters, each unit's gathered for its calls.

The module is traced with unsharded parameters, each unit's call as a program of its own. The traced
program is then evaluated on shards. So a module needs no change, and transforms of Flax and JAX
around a unit's call are seen for what they are: a loop runs on the shards of its turns, and what is
recomputed in the backward pass is gathered together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from research_dp.distributed.differentiable_gather import drop_gathered
from research_dp.distributed.jaxpr import carry_of
from research_dp.distributed.overlap import Target, scan_prefetched
from research_dp.distributed.sharding import STACK, LeafSharding, of_one, unit_of
from research_dp.distributed.units import Units
from research_dp.models.flax.module_units import UnitCalls, passed_on, program_of, unit_called
from research_dp.types import PyTree

_UNNAMED = jax.make_jaxpr(lambda: None)().jaxpr.debug_info.with_unknown_names()


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A parameter of a unit, as this device has it; `stacked`: those of all turns of a loop."""

    value: Any
    sharding: LeafSharding
    stacked: bool


def apply_in_units(apply: Callable[..., Any], units: Units, params: PyTree, *arguments: Any) -> Any:
    """`apply(parameters, *arguments, units=...)`, each unit gathered for its calls.

    `apply` is traced: it closes over nothing that is differentiated.
    """
    kinds, gather, shardings = units.kinds, units.gather, units.shardings
    assert gather is not None

    def traced(params: PyTree, *arguments: Any) -> Any:
        return apply(params, *arguments, units=UnitCalls(kinds))

    full = jax.eval_shape(lambda params: gather(params, shardings), params)
    program, shape = jax.make_jaxpr(traced, return_shape=True)(full, *arguments)
    given = jax.tree.leaves(units.with_others(params), is_leaf=lambda x: isinstance(x, Target))
    for i, p in enumerate(jax.tree.leaves(shardings)):
        if unit := unit_of(p.path, kinds):
            given[i] = _Shard(given[i], p, kinds[unit] == STACK)
    results = _evaluate(program, [*given, *jax.tree.leaves(arguments)], units)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _evaluate(program: Any, given: Sequence[Any], units: Units) -> list[Any]:
    """The results of a program, of whose arguments some are shards."""
    values = dict(zip(program.jaxpr.invars, given, strict=True))
    values |= zip(program.jaxpr.constvars, program.consts, strict=True)
    for equation in program.jaxpr.eqns:
        given = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        if any(isinstance(x, _Shard) for x in given):
            results = _with_shards(equation, given, units)
        else:
            results = _bound(equation, given)
        values |= zip(equation.outvars, results, strict=True)
    return [x.val if isinstance(x, Literal) else values[x] for x in program.jaxpr.outvars]


def _bound(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """The results of an operation, which keeps its line of the source."""
    pairs = zip(equation.invars, given, strict=True)
    values = {x: value for x, value in pairs if not isinstance(x, Literal)}
    alone = Jaxpr((), list(values), equation.outvars, [equation], equation.effects, _UNNAMED)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*values.values())


def _with_shards(equation: Any, given: Sequence[Any], units: Units) -> Sequence[Any]:
    """The results of an operation that has a program, of whose arguments some are shards."""
    program, unit, name = program_of(equation), unit_called(equation), equation.primitive.name
    if name == "scan":
        return _scan(equation, program, given, units)
    shards = {i: x for i, x in enumerate(given) if isinstance(x, _Shard)}
    run: Callable[..., Any] = functools.partial(_evaluate, program, units=units)
    policy = drop_gathered
    if name.startswith("remat"):
        own, policy = shards, equation.params["policy"] or jax.checkpoint_policies.nothing_saveable
        if any(x.stacked for x in shards.values()):  # it has the loop, whose turns gather
            own, run = {}, _rematerialised(run, given, equation.params)
    else:
        own = {i: x for i, x in shards.items() if unit_of(x.sharding.path, units.kinds) == unit}

    passed = {out: shards[i] for out, i in passed_on(equation).items() if i in shards}

    def function(full: Mapping[int, Any]) -> Sequence[Any]:
        results = run([full.get(i, x) for i, x in enumerate(given)])
        return [None if out in passed else x for out, x in enumerate(results)]

    if own:
        values = {i: x.value for i, x in own.items()}
        shardings = {i: x.sharding for i, x in own.items()}
        results = units.run_shards(function, values, shardings, policy)
    else:
        results = function({})
    return [passed.get(out, x) for out, x in enumerate(results)]


def _rematerialised(
    run: Callable[..., Any], given: Sequence[Any], params: Mapping[str, Any]
) -> Callable[..., Any]:
    """`run` of arguments, recomputed in the backward pass as the parameters of `remat` say."""

    def of_values(values: Sequence[Any]) -> Any:
        results = run([
            dataclasses.replace(x, value=value) if isinstance(x, _Shard) else value
            for x, value in zip(given, values, strict=True)
        ])  # fmt: skip
        return [None if isinstance(x, _Shard) else x for x in results]

    recomputed = jax.checkpoint(
        of_values, policy=params["policy"], prevent_cse=params["prevent_cse"] is not False
    )
    return lambda given: recomputed([x.value if isinstance(x, _Shard) else x for x in given])


def _scan(equation: Any, program: Any, given: Sequence[Any], units: Units) -> Sequence[Any]:
    """A loop, whose turns are given the shards of their layers."""
    params, passed = equation.params, passed_on(equation)
    first, last = carry_of(equation)
    consts, carry, stacks = given[:first], given[first:last], given[last:]
    # Within another trace a loop that looks ahead would close over its values.
    is_outermost = not units.order.is_inside
    if units.prefetch and is_outermost and _can_look_ahead(equation, program, given):
        carry, ys = _scan_ahead(program, consts, carry, stacks, units), [None] * len(passed)
        return [given[passed[i]] if i in passed else x for i, x in enumerate([*carry, *ys])]

    def turn(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        layers = [
            _Shard(x, of_one(stack.sharding), False) if isinstance(stack, _Shard) else x
            for x, stack in zip(slices, stacks, strict=True)
        ]
        results = _evaluate(program, [*consts, *carry, *layers], units)
        results = [None if isinstance(x, _Shard) else x for x in results]
        return results[: len(carry)], results[len(carry) :]

    xs = [x.value if isinstance(x, _Shard) else x for x in stacks]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(turn, list(carry), xs, **options)
    return [given[passed[i]] if i in passed else x for i, x in enumerate([*carry, *ys])]


def _scan_ahead(
    program: Any, consts: Sequence[Any], carry: Sequence[Any], stacks: Sequence[Any], units: Units
) -> list[Any]:
    """The carry of a loop, of which each turn's layer is gathered during the turn before."""
    gather = units.gather
    assert gather is not None
    shards = {i: x for i, x in enumerate(stacks) if isinstance(x, _Shard)}
    shardings = {i: of_one(x.sharding) for i, x in shards.items()}
    each = {i: x for i, x in enumerate(stacks) if i not in shards}

    def turn(layers: Mapping[int, Any], carry: Sequence[Any], inputs: Mapping[int, Any]) -> Any:
        slices = {**layers, **inputs}
        given = [*consts, *carry, *(slices[i] for i in range(len(stacks)))]
        return _evaluate(program, given, units)[: len(carry)]

    stack = {i: x.value for i, x in shards.items()}
    return scan_prefetched(turn, gather, shardings, stack, list(carry), each)


def _can_look_ahead(equation: Any, program: Any, given: Sequence[Any]) -> bool:
    """Whether `scan_prefetched` computes the loop, with no more recomputed than the loop says.

    Its turns are one `remat` each, of which only inputs are kept, and have no results of their own.
    What they close over is not differentiated: it has integers, keys or nothing.
    """
    params = equation.params
    carry = range(*carry_of(equation))
    ys = range(len(carry), len(equation.outvars))
    fixed = [x for i, x in enumerate(given) if i not in carry and not isinstance(x, _Shard)]
    places = [i for i, x in enumerate(given) if isinstance(x, _Shard)]
    return (
        params["length"] > 1
        and not params["reverse"]
        and min(places) >= carry.stop
        and set(ys) <= passed_on(equation).keys()
        and all(_is_float(given[i]) for i in carry)
        and not any(map(_is_float, fixed))
        and _recomputes(program, places)
    )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _recomputes(program: Any, places: Sequence[int]) -> bool:
    """Whether only one `remat`, which keeps nothing, uses these arguments of a program."""
    variables = {program.jaxpr.invars[i] for i in places}

    def used(equation: Any) -> list[int]:
        pairs = enumerate(equation.invars)
        return [i for i, x in pairs if not isinstance(x, Literal) and x in variables]

    users = [equation for equation in program.jaxpr.eqns if used(equation)]
    if len(users) != 1:
        return False
    (user,) = users
    if user.primitive.name.startswith("remat"):
        return user.params["policy"] is None
    inner = None if user.primitive.name == "scan" else program_of(user)
    return inner is not None and _recomputes(inner, used(user))
