"""Runs units on parameters gathered for them, and orders their collectives.

A compiler that is left alone starts gathers of all units at once, or joins them, and the whole
model is unsharded. Here a gather waits for the one before it. With look-ahead a unit is gathered
while the one before it runs. So it is in the backward pass, where the gradient of the last unit is
scattered meanwhile too. The order is that of FSDP2's implicit prefetching; the means are
optimisation barriers, whose tokens pass from unit to unit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state, jaxpr_as_fun

from research_dp.distributed.sharding import Parted, of_parts, parted
from research_dp.types import PyTree


class _Turn(NamedTuple):
    """Tokens, 0-d float32: in the backward pass their gradients go from unit to unit.

    A unit is not gathered before `start`, nor its gradient scattered before `end`.
    """

    start: jax.Array
    end: jax.Array


class Order:
    """The order of the units of one call of a loss, in which they are run."""

    def __init__(self) -> None:
        self._level = get_opaque_trace_state()
        self._turn: _Turn | None = None

    @property
    def is_inside(self) -> bool:
        """Whether this is the body of a loop, or of another transformation, within the loss."""
        return get_opaque_trace_state() != self._level

    def finish(self, total: jax.Array) -> jax.Array:
        """The same loss, not before the last unit; without it a compiler drops the tokens."""
        return total if self._turn is None else _last(total, self._turn)

    def run(
        self,
        function: Callable[[PyTree], Any],
        gather: Callable[[PyTree, PyTree], PyTree],
        shards: PyTree,
        shardings: PyTree,
        *,
        policy: Callable[..., bool],
        ahead: bool,
        keep: bool,
    ) -> Any:
        """`function(gather(shards, shardings))`; `function` may close over anything.

        Args:
            function: (unsharded parameters) -> pytree of arrays.
            gather: Its gradient scatters.
            shards: Parameters of the unit, as this device has them.
            shardings: Their `LeafSharding`s.
            policy: What of the forward pass is saved, see `jax.checkpoint`; never the unsharded
                parameters, which the backward pass gathers again.
            ahead: Whether a unit is gathered while the one before it is computed.
            keep: Whether unsharded parameters are saved for the backward pass.
        """
        is_inside = self.is_inside  # where each unit is the first
        turn = None if is_inside else self._turn
        if turn is None:
            shards, turn = _first(shards, shardings)
        full = jax.eval_shape(lambda shards: gather(shards, shardings), shards)
        program, shape = jax.make_jaxpr(function, return_shape=True)(full)
        unit = _unit(program, jax.tree.structure(shape), gather, shardings, policy, ahead, keep)
        out, turn = unit(*parted(shards, shardings), program.consts, turn)
        if not is_inside:
            self._turn = turn
        return out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """A function of `jax.vjp` without the unsharded parameters that it has kept."""

    leaves: list[Any]  # None: a parameter
    treedef: Any = dataclasses.field(metadata={"static": True})
    places: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def without(cls, vjp: Any, params: PyTree) -> _Saved:
        leaves, treedef = jax.tree.flatten(vjp)
        known = {id(x): place for place, x in enumerate(jax.tree.leaves(params))}
        places = tuple(known.get(id(x)) for x in leaves)
        kept = [x if place is None else None for x, place in zip(leaves, places, strict=True)]
        return cls(kept, treedef, places)

    @property
    def needs_params(self) -> bool:
        return any(place is not None for place in self.places)

    def with_params(self, params: PyTree) -> Callable[[Any], Any]:
        full = jax.tree.leaves(params)
        pairs = zip(self.leaves, self.places, strict=True)
        return jax.tree.unflatten(self.treedef, [x if i is None else full[i] for x, i in pairs])


def _unit(
    program: Any,
    out_tree: Any,
    gather: Callable[[PyTree, PyTree], PyTree],
    shardings: PyTree,
    policy: Callable[..., bool],
    ahead: bool,
    keep: bool,
) -> Callable[..., Any]:
    """(trained, frozen shards, what the program closes over, its turn) -> (results, next turn)."""
    layouts = parted(shardings, shardings)

    def computed(trained: PyTree, consts: list[Any], frozen: PyTree) -> PyTree:
        params = of_parts(Parted(trained, frozen), shardings)
        closed = jaxpr_as_fun(program.replace(consts=consts))
        return jax.tree.unflatten(out_tree, closed(*jax.tree.leaves(params)))

    rematerialised = jax.checkpoint(computed, policy=policy)

    def scatter_of(trained: PyTree) -> tuple[PyTree, Callable[[PyTree], Any]]:
        return jax.vjp(lambda shards: gather(shards, layouts.trained), trained)

    def gathered(shards: Parted, others: Any, start: jax.Array) -> tuple[Any, ...]:
        """In the order of the turn: unsharded parameters, and `others`, which the unit needs too.

        Then the function from their gradient to that of shards, and the next unit's start.
        """
        if not ahead:
            others, start = _after(others, start)
        shards, start = _after(shards, start)
        trained, scatter = scatter_of(shards.trained)
        params = Parted(trained, gather(shards.frozen, layouts.frozen))
        # One barrier: a scheduler delays the gather's end to it, and computes before.
        (params, others), start = _after((params, others), start)
        return params, others, scatter, start

    @jax.custom_vjp
    def unit(trained: PyTree, frozen: PyTree, consts: list[Any], turn: _Turn) -> tuple[Any, _Turn]:
        params, consts, _, start = gathered(Parted(trained, frozen), consts, turn.start)
        return rematerialised(params.trained, consts, params.frozen), _Turn(start, turn.end)

    def forward(trained: PyTree, frozen: PyTree, consts: list[Any], turn: _Turn) -> tuple[Any, Any]:
        shards = Parted(trained, frozen)
        params, consts, scatter, start = gathered(shards, consts, turn.start)

        of_trained = functools.partial(rematerialised, frozen=params.frozen)
        out, vjp = jax.vjp(of_trained, params.trained, consts)
        kept = (_Saved.without(vjp, ()), scatter) if keep else (_Saved.without(vjp, params), shards)
        return (out, _Turn(start, turn.end)), kept

    def backward(kept: tuple[_Saved, Any], gradients: tuple[Any, _Turn]) -> tuple[Any, ...]:
        saved, scatter = kept
        g, (start, end) = gradients
        params: PyTree = ()
        if not keep and saved.needs_params:
            params, g, scatter, start = gathered(scatter, g, start)
        elif not keep:  # what this gathers is not used, so a compiler leaves it out
            scatter = scatter_of(scatter.trained)[1]
        d_params, d_consts = saved.with_params(params)(g)
        start, end = lax.optimization_barrier((start, end))
        d_params, end = _after(d_params, end)
        (d_shards,) = scatter(d_params)
        d_shards, end = _after(d_shards, end)
        if not ahead:
            d_consts, end = _after(d_consts, end)
        return d_shards, None, d_consts, _Turn(start, end)

    unit.defvjp(forward, backward)
    return unit


def _after(tree: PyTree, token: jax.Array) -> tuple[PyTree, jax.Array]:
    """The tree, not computed with before the token is there; the token, not before the tree."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    tied, token = lax.optimization_barrier(([leaves[i] for i in places], token))
    for place, x in zip(places, tied, strict=True):
        leaves[place] = x
    return jax.tree.unflatten(treedef, leaves), token


def _nothing() -> _Turn:
    # x + -0.0 is x, also where x is 0.0 or -0.0.
    return _Turn(jnp.full((), -0.0), jnp.full((), -0.0))


def _first(shards: PyTree, shardings: PyTree) -> tuple[PyTree, _Turn]:
    """A first turn. Its gradient, nothing, goes into the smallest shard's: tokens must be used."""
    parts = parted(shards, shardings)
    leaves, treedef = jax.tree.flatten(parts)
    trained = range(len(jax.tree.leaves(parts.trained)))
    # Of equals the last: of a `Target` that is the part that is differentiated.
    place = min(trained or range(len(leaves)), key=lambda i: (leaves[i].size, -i))

    @jax.custom_vjp
    def run(x: jax.Array) -> tuple[jax.Array, _Turn]:
        return x, _nothing()

    def backward(_: None, gradients: tuple[jax.Array, _Turn]) -> tuple[jax.Array]:
        g, (start, end) = gradients
        return (g + (start + end).astype(g.dtype),)

    run.defvjp(lambda x: (run(x), None), backward)
    leaves[place], turn = run(leaves[place])
    return of_parts(jax.tree.unflatten(treedef, leaves), shardings), turn


@jax.custom_vjp
def _last(total: jax.Array, turn: _Turn) -> jax.Array:
    return total + (turn.start + turn.end).astype(total.dtype)


_last.defvjp(lambda total, turn: (_last(total, turn), None), lambda _, g: (g, _nothing()))
