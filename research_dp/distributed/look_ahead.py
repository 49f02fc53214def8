"""A stack of units with the collectives of one unit beside the compute of another.

A loop that gathers inside its body leaves it to the compiler to start a gather earlier, which it
cannot do across turns. Here both loops are written out, each turn of which gathers for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def scan_ahead(
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
