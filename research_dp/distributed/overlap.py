"""Collectives of one unit beside the compute of another.

Gradients of replicated parameters are synchronised as soon as a unit's backward pass is done. A
stack of units is gathered one unit ahead, by loops written out here: a compiler cannot start a
gather earlier across the turns of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from research_dp.distributed.differentiable_gather import GATHERED, with_gradient
from research_dp.distributed.sharding import LeafSharding, Parted, of_parts, parted
from research_dp.types import PyTree

# (gradients, their shardings, state by leaf) -> (gradients as the update takes them, new state).
Sync = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Target(NamedTuple):
    """A replicated parameter, and what autodiff gives a gradient for.

    The gradient of `target`, an array of its shape, is the synchronised one; that of `state` is the
    new state of `sync`.
    """

    param: Any
    target: Any
    state: Any


def targets_of(sync: Sync, params: PyTree, shardings: PyTree, states: PyTree) -> PyTree:
    """Arrays of the shapes that synchronised gradients have: the parameters, where they fit."""

    def one(param: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return param if param.shape == shape.shape else jnp.zeros(shape.shape, param.dtype)

    synced = jax.eval_shape(lambda p, s: sync(p, shardings, s)[0], params, states)
    return jax.tree.map(one, params, synced)


def with_target(params: PyTree, targets: PyTree, states: PyTree) -> PyTree:
    """Parameters for `Units` whose `gather` is `synchronised`, differentiated in the others."""

    def one(param: jax.Array, target: jax.Array, state: PyTree) -> Target:
        return Target(jax.lax.stop_gradient(param), target, state)

    return jax.tree.map(one, params, targets, states)


def synchronised(sync: Sync) -> Callable[[PyTree, PyTree], PyTree]:
    """A `gather` for replicated parameters: it communicates their gradients alone, by `sync`.

    Parameters that are no `Target` pass, and their gradients are not synchronised.
    """

    def undivided(gradient: jax.Array, p: LeafSharding) -> jax.Array:
        # Autodiff's transpose of `sync` gathers shards and divides them: see `with_gradient`.
        if p.dim is None:
            return gradient
        return with_gradient(lambda x: x, lambda g: g * p.axis_size)(gradient)

    def pass_on(params: PyTree, shardings: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Target))
        targets = [x for x in leaves if isinstance(x, Target)]
        if not targets:
            return params
        if len(targets) < len(leaves):
            pairs = zip(leaves, jax.tree.leaves(shardings), strict=True)
            passed = iter(pass_on(targets, [p for x, p in pairs if isinstance(x, Target)]))
            one = (next(passed) if isinstance(x, Target) else x for x in leaves)
            return jax.tree.unflatten(treedef, one)

        @jax.custom_vjp
        def run(params: PyTree, target: PyTree, states: PyTree) -> PyTree:
            return jax.tree.map(lambda x: checkpoint_name(x, GATHERED), params)

        def forward(params: PyTree, target: PyTree, states: PyTree) -> tuple[PyTree, PyTree]:
            # The backward pass needs the dtypes of the targets only.
            like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), target)
            return run(params, target, states), (like, states)

        def backward(kept: Any, grads: PyTree) -> tuple[None, PyTree, PyTree]:
            like, states = kept
            means, new = sync(grads, shardings, states)
            synced = jax.tree.map(undivided, means, shardings)
            return None, jax.tree.map(lambda g, x: g.astype(x.dtype), synced, like), new

        run.defvjp(forward, backward)
        return run(*(jax.tree.unflatten(treedef, part) for part in zip(*leaves, strict=True)))

    return pass_on


def scan_prefetched(
    function: Callable[..., Any],
    gather: Callable[[PyTree, PyTree], PyTree],
    shardings: PyTree,
    stack: PyTree,
    carry: Any,
    each: Any,
) -> Any:
    """Runs units one after the other, each gathered while the one before it runs.

    In the backward pass the unit before is gathered, and the gradient of the unit after is
    scattered, while a unit is computed again and differentiated. Only the input of a unit is kept;
    the last unit is not gathered twice. Arguments are those of `Units.scan`; `gather` is for one
    unit, whose `shardings` are given, its gradient scatters, and the stack has two units or more.
    """
    last = jax.tree.leaves(stack)[0].shape[0] - 1
    layouts = parted(shardings, shardings)

    def gathered(stack: Parted, index: Any) -> Parted:
        return Parted(*map(gather, _at(stack, index), layouts))

    def computed(params: Parted, carry: Any, index: Any) -> Any:
        return function(of_parts(params, shardings), carry, _at(each, index))

    def forward(stack: Parted, carry: Any) -> tuple[Any, Any]:
        def turn(state: Any, index: jax.Array) -> tuple[Any, Any]:
            carry, params = state
            following = gathered(stack, index + 1)
            return (computed(params, carry, index), following), carry

        first = carry, gathered(stack, 0)
        (carry, params), inputs = lax.scan(turn, first, jnp.arange(last))
        return computed(params, carry, last), (stack, inputs, carry, params)

    def backward(kept: Any, g: Any) -> tuple[Parted, Any]:
        stack, inputs, last_input, last_params = kept

        def differentiate(params: Parted, x: Any, index: Any, g: Any) -> tuple[PyTree, Any]:
            def of_trained(trained: PyTree, x: Any) -> Any:
                return computed(params._replace(trained=trained), x, index)

            return jax.vjp(of_trained, params.trained, x)[1](g)

        def scatter_into(grads: PyTree, index: Any, d_params: PyTree) -> PyTree:
            # What it gathers is not used.
            shards = _at(stack.trained, index)
            (shard,) = jax.vjp(lambda x: gather(x, layouts.trained), shards)[1](d_params)
            return jax.tree.map(
                lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0), grads, shard
            )

        def turn(state: Any, index: jax.Array) -> tuple[Any, None]:
            grads, params, d_after, g = state
            before = gathered(stack, index - 1)
            grads = scatter_into(grads, index + 1, d_after)
            d_params, g = differentiate(params, _at(inputs, index), index, g)
            return (grads, before, d_params, g), None

        params = gathered(stack, last - 1)
        d_params, g = differentiate(last_params, last_input, last, g)
        state = (jax.tree.map(jnp.zeros_like, stack.trained), params, d_params, g)
        (grads, params, d_params, g), _ = lax.scan(turn, state, jnp.arange(last - 1, 0, -1))
        grads = scatter_into(grads, 1, d_params)
        d_params, g = differentiate(params, _at(inputs, 0), 0, g)
        return Parted(scatter_into(grads, 0, d_params), None), g

    @jax.custom_vjp
    def run(stack: Parted, carry: Any) -> Any:
        return forward(stack, carry)[0]

    run.defvjp(forward, backward)
    return run(parted(stack, shardings), carry)


def _at(stacked: PyTree, index: Any) -> PyTree:
    """One unit of a stack, without a copy of the others."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
