"""Collectives of one unit beside the compute of another.

Gradients of replicated parameters are synchronised as soon as a unit's backward pass is done. A
stack of units is gathered one unit ahead: a loop that gathers inside its body leaves it to the
compiler to start a gather earlier, which it cannot do across turns, so both loops are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from research_dp.distributed.linear import with_gradient
from research_dp.distributed.remat import GATHERED
from research_dp.distributed.sharding import LeafSharding

PyTree = Any
# (gradients, placements) -> gradients as the update takes them.
Sync = Callable[[PyTree, PyTree], PyTree]


class Held(NamedTuple):
    """A parameter that is whole, and what its gradient is taken with respect to.

    Attributes:
        whole: The parameter.
        target: An array of the synchronised gradient's shape; its values are not used.
    """

    whole: Any
    target: Any


def targets_of(sync: Sync, params: PyTree, layout: PyTree) -> PyTree:
    """Arrays of the shapes that synchronised gradients have: the parameters, where they fit."""

    def one(param: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return param if param.shape == shape.shape else jnp.zeros(shape.shape, param.dtype)

    return jax.tree.map(one, params, jax.eval_shape(lambda p: sync(p, layout), params))


def hold(params: PyTree, targets: PyTree) -> PyTree:
    """Parameters for `Units` whose `gather` is `synchronised`, differentiated in `targets`."""
    return jax.tree.map(lambda p, t: Held(jax.lax.stop_gradient(p), t), params, targets)


def synchronised(sync: Sync) -> Callable[[PyTree, PyTree], PyTree]:
    """A `gather` for parameters that are whole: nothing moves but their gradient, through `sync`.

    What is not `Held` passes, and its gradient is not synchronised.
    """

    def gather(held: PyTree, layout: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(held, is_leaf=_is_held)
        if not any(map(_is_held, leaves)):
            return held
        whole = jax.tree.unflatten(treedef, [x.whole for x in leaves])
        target = jax.tree.unflatten(treedef, [x.target for x in leaves])

        def synced(grads: PyTree) -> PyTree:
            return jax.tree.map(_undivided, sync(grads, layout), layout)

        return _pass(synced, whole, target)

    return gather


def _pass(sync: Callable[[PyTree], PyTree], whole: PyTree, target: PyTree) -> PyTree:
    @jax.custom_vjp
    def run(whole: PyTree, target: PyTree) -> PyTree:
        del target
        return jax.tree.map(lambda x: checkpoint_name(x, GATHERED), whole)

    def forward(whole: PyTree, target: PyTree) -> tuple[PyTree, PyTree]:
        # Of the targets only the dtypes are needed on the way back.
        return run(whole, target), jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), target)

    def backward(like: PyTree, grads: PyTree) -> tuple[None, PyTree]:
        return None, jax.tree.map(lambda g, x: g.astype(x.dtype), sync(grads), like)

    run.defvjp(forward, backward)
    return run(whole, target)


def _undivided(gradient: jax.Array, place: LeafSharding) -> jax.Array:
    """A synchronised gradient; if it is a slice, its own gradient comes back undivided.

    As `with_gradient` has it: autodiff's transpose of `sync` gathers slices and divides them.
    """
    if place.dim is None:
        return gradient
    return with_gradient(lambda x: x, lambda g: g * place.axis_size)(gradient)


def _is_held(x: Any) -> bool:
    return isinstance(x, Held)


def scan_prefetched(
    function: Callable[[PyTree, Any, Any], Any],
    whole: Callable[[PyTree], PyTree],
    stack: PyTree,
    carry: Any,
    each: Any,
) -> Any:
    """Runs units one after the other; forward, each is gathered while the one before it runs.

    Backward, the unit before is gathered, and the gradient of the unit after is scattered, while
    a unit is computed again and differentiated. Nothing is kept of a unit but its input; the last
    unit is not gathered twice.

    Args:
        function: (whole parameters of one unit, carry, its part of `each`) -> carry. It closes
            over nothing that is differentiated.
        whole: Makes the held parameters of one unit whole; its gradient scatters.
        stack: Held parameters, stacked along dim 0, of two units or more.
        carry: What the first unit takes.
        each: Further inputs, stacked along dim 0, not differentiated.

    Returns:
        What the last unit returns.
    """
    last = jax.tree.leaves(stack)[0].shape[0] - 1

    def forward(stack: PyTree, carry: Any) -> tuple[Any, Any]:
        def turn(state: Any, index: jax.Array) -> tuple[Any, Any]:
            carry, own = state
            following = whole(_at(stack, index + 1))
            return (function(own, carry, _at(each, index)), following), carry

        (carry, own), inputs = lax.scan(turn, (carry, whole(_at(stack, 0))), jnp.arange(last))
        return function(own, carry, _at(each, last)), (stack, inputs, carry, own)

    def backward(kept: Any, g: Any) -> tuple[PyTree, Any]:
        stack, inputs, last_input, last_own = kept

        def differentiate(own: PyTree, x: Any, index: Any, g: Any) -> tuple[PyTree, Any]:
            return jax.vjp(lambda own, x: function(own, x, _at(each, index)), own, x)[1](g)

        def scatter_into(grads: PyTree, index: Any, d_own: PyTree) -> PyTree:
            (mine,) = jax.vjp(whole, _at(stack, index))[1](d_own)  # what it gathers is not used
            return jax.tree.map(
                lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0), grads, mine
            )

        def turn(state: Any, index: jax.Array) -> tuple[Any, None]:
            grads, own, d_after, g = state
            before = whole(_at(stack, index - 1))
            grads = scatter_into(grads, index + 1, d_after)
            d_own, g = differentiate(own, _at(inputs, index), index, g)
            return (grads, before, d_own, g), None

        own = whole(_at(stack, last - 1))
        d_own, g = differentiate(last_own, last_input, last, g)
        state = (jax.tree.map(jnp.zeros_like, stack), own, d_own, g)
        (grads, own, d_own, g), _ = lax.scan(turn, state, jnp.arange(last - 1, 0, -1))
        grads = scatter_into(grads, 1, d_own)
        d_own, g = differentiate(own, _at(inputs, 0), 0, g)
        return scatter_into(grads, 0, d_own), g

    @jax.custom_vjp
    def run(stack: PyTree, carry: Any) -> Any:
        return forward(stack, carry)[0]

    run.defvjp(forward, backward)
    return run(stack, carry)


def _at(stacked: PyTree, index: Any) -> PyTree:
    """One of a stack, without copying the others."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
