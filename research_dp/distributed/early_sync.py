"""Gradients of replicated parameters, synchronised as soon as a unit's backward pass is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from research_dp.distributed.layout import Placement
from research_dp.distributed.linear import with_gradient
from research_dp.distributed.remat import GATHERED

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


def _undivided(gradient: jax.Array, place: Placement) -> jax.Array:
    """A synchronised gradient; if it is a slice, its own gradient comes back undivided.

    As `with_gradient` has it: autodiff's transpose of `sync` gathers slices and divides them.
    """
    if place.dim is None:
        return gradient
    return with_gradient(lambda x: x, lambda g: g * place.axis_size)(gradient)


def _is_held(x: Any) -> bool:
    return isinstance(x, Held)
