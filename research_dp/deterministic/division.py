"""Keeps compilers from computing a division, or a sum, as something else, here and not there.

XLA turns divisions into products with a reciprocal, or two divisions into one, as it finds them,
which depends on the number of devices and on shapes on a device. On CPUs the order of a sum depends
on the number of threads. Each way rounds otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from research_dp.deterministic.sum import add_pairs
from research_dp.distributed.buckets import pad_to_multiple
from research_dp.types import PyTree

# Calls, whose body may as well stand where they are, and the parameter that has it.
_CALLS = dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
_CALLS["jit"] = "jaxpr"
# What has programs of its own to run.
_CONTROL = ("checkpoint", "cond", "remat", "remat2", "scan", "while")


@dataclasses.dataclass(frozen=True)
class AsWritten:
    """A traced function, whose divisions no compiler rewrites. Not to be differentiated.

    Those in kernels and in maps of its own (`shard_map`) are left to the compiler.
    """

    program: ClosedJaxpr
    results: Any  # the structure of its results
    sums: bool = False  # whether sums of floats are added in one order, too

    def __call__(self, *args: PyTree) -> PyTree:
        results = evaluate(self.program, jax.tree.leaves(args), self.sums)
        return jax.tree.unflatten(self.results, results)


def as_written(function: Callable[..., PyTree], *args: PyTree, sums: bool = False) -> AsWritten:
    """Traces a function for arguments like these: arrays, or `jax.ShapeDtypeStruct`s."""
    program, results = jax.make_jaxpr(function, return_shape=True)(*args)
    return AsWritten(program, jax.tree.structure(results), sums)


def evaluate(closed: Any, args: list[Any], sums: bool) -> list[Any]:
    """The results of a traced program, whose divisions, and `sums`, no compiler rewrites."""
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, args, strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for equation in closed.jaxpr.eqns:
        where = equation.source_info
        scopes = source_info_util.current_name_stack() + where.name_stack
        context = source_info_util.user_context(where.traceback, name_stack=scopes)
        with context, equation.ctx.manager:
            results = _results(equation, [value(x) for x in equation.invars], sums)
        known.update(zip(equation.outvars, results, strict=True))
    return [value(x) for x in closed.jaxpr.outvars]


def _results(equation: Any, given: list[Any], sums: bool) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        return evaluate(params[_CALLS[name]], given, sums)
    is_sum = sums and name == "reduce_sum" and given[0].size > 0
    if is_sum and jnp.issubdtype(given[0].dtype, jnp.floating):
        return [_sum(given[0], params["axes"])]
    if name == "div" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        x, y = (jnp.broadcast_to(one, equation.outvars[0].aval.shape) for one in given)
        return [_opaque(lax.div(_opaque(x), _opaque(y, x)))]
    if name == "integer_pow" and params["y"] < 0:
        return [_opaque(equation.primitive.bind(_opaque(given[0]), **params))]
    if name in _CONTROL:
        params = {key: _rewritten(param, sums) for key, param in params.items()}
        program = equation.params.get("jaxpr")
        if program is not None and not isinstance(program, ClosedJaxpr):
            # Rematerialisation, whose program has no constants of its own: they become arguments.
            closed = _rewritten(ClosedJaxpr(program, ()), sums)
            body, consts = closed.jaxpr, closed.consts
            body = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
            params, given = {**params, "jaxpr": body}, [*consts, *given]
            if isinstance(params["prevent_cse"], tuple):
                params["prevent_cse"] = (False,) * len(consts) + params["prevent_cse"]
    results = equation.primitive.bind(*given, **params)
    return results if equation.primitive.multiple_results else [results]


def _rewritten(param: Any, sums: bool) -> Any:
    """Programs among an operation's parameters, as written; others as they are."""
    if isinstance(param, tuple):
        return tuple(_rewritten(one, sums) for one in param)
    if not isinstance(param, ClosedJaxpr):
        return param
    return jax.make_jaxpr(lambda *args: evaluate(param, list(args), sums))(*param.in_avals)


def _sum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum over some dims, of pairs; in the array's dtype."""
    # A choice, so that no product is fused with its addition, and rounded otherwise, here and not
    # there: the last stage of a compiler sees through `_opaque`.
    x = jnp.where(jnp.isnan(x), jnp.nan, x)
    kept = [n for i, n in enumerate(x.shape) if i not in axes]
    rows = jnp.moveaxis(x, axes, range(len(axes))).reshape(-1, *kept)
    return add_pairs(pad_to_multiple(rows, 1 << max(len(rows) - 1, 0).bit_length()))


def _opaque(x: jax.Array, other: jax.Array | None = None) -> jax.Array:
    """The same values, of which the algebraic simplifier knows nothing.

    Exclusive or with a zero that only the last stage of a compiler, which keeps divisions, sees.
    """
    bits = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    last = jnp.array(jnp.finfo(x.dtype).bits - 1, bits)
    number = lax.bitcast_convert_type(x, bits)
    zero = number if other is None else lax.bitcast_convert_type(other, bits)
    for _ in range(2):
        zero = lax.shift_right_logical(zero, jnp.broadcast_to(last, zero.shape))
    return lax.bitcast_convert_type(number ^ zero, x.dtype)
