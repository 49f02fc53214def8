"""Optimizers applied to what a device has, and master weights in their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import gin
import jax
import numpy as np
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Numbers, Placeable, described, has_attributes
from research_dp.distributed.sharding import by_path, path_name
from research_dp.errors import UsageError, first_line

PyTree = Any


class Optimizer(Protocol):
    """What `fsdp_apply_gradients` needs of an optimizer, which it traces in a copy.

    A class whose objects cannot be copied and traced may say by an attribute `elementwise = True`
    that each element is updated by itself.
    """

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree: ...


AnOptimizer = Annotated[
    Optimizer, has_attributes(("apply_gradients",), "OptaxAdapter(transform, state)")
]


@gin.register(module="distributed")
@checked
def apply_gradients(gradients: Numbers, parameters: Placeable, optimizer: AnOptimizer) -> PyTree:
    """Applies the optimizer to what this device has: replicated parameters, or its shards.

    Args:
        gradients: The averaged gradients.
        parameters: Arrays of the same shapes as the gradients.
        optimizer: An object with `apply_gradients`, e.g. `OptaxAdapter`.
    """
    return optimizer.apply_gradients(gradients, parameters)


def apply_optimizer(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """One optimizer step: (new parameters, new optimizer state), dtypes kept.

    If the update fails for a state that `optimizer.init` would not make, UsageError says so.
    """
    flat = jax.tree_util.tree_leaves_with_path(grads)
    for (path, g), p in zip(flat, jax.tree.leaves(params), strict=True):
        if g.shape != p.shape:
            given = f"a gradient of shape {g.shape} for {path_name(path)} of shape {p.shape}"
            raise UsageError(f"the optimizer is given {given}.")
    try:
        updates, new_state = optimizer.update(grads, opt_state, params)
    except Exception as error:  # a wrong state raises anything: it is looked for afterwards
        expected = jax.eval_shape(optimizer.init, params)
        check_state(opt_state, expected, "Make it by optimizer.init of these parameters.")
        structure: Any = jax.tree.structure(opt_state)
        if structure != jax.tree.structure(expected):
            raise UsageError(
                f"opt_state = {described(opt_state)} has another structure than what "
                f"optimizer.init makes of the parameters: {described(expected)}."
            ) from error
        raise
    return optax.apply_updates(params, updates), new_state


def check_state(opt_state: PyTree, expected: PyTree, advice: str) -> None:
    """Raises UsageError if an array of a state is missing, left over or of another shape."""
    given, by_name = by_path(opt_state), by_path(expected)
    for name in sorted(given.keys() | by_name.keys()):
        if name not in given or name not in by_name:
            raise UsageError(
                f"opt_state {name or 'itself'} is {'left over' if name in given else 'missing'}: "
                "the state must be that of the parameters that have gradients, and no others."
            )
        shape = np.shape(given[name])
        if shape != (right := by_name[name].shape):
            raise UsageError(
                f"opt_state {name} has shape {shape} on a device, not {right}. {advice}"
            )


class MasterState(NamedTuple):
    """State of `with_master_weights`."""

    master: PyTree
    inner: PyTree


def with_master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose state has master weights, wider than the parameters.

    It is initialised with wide parameters, and updates them with gradients cast to their dtype.
    From then on it is given, and returns, their rounding (Micikevicius et al., arXiv 1710.03740).
    """

    def init(params: PyTree) -> MasterState:
        return MasterState(params, optimizer.init(params))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MasterState]:
        wide = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, state.master)
        updates, inner = optimizer.update(wide, state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        # Added to the rounded parameters, these make them the rounding of the new ones.
        steps = jax.tree.map(lambda m, p: m - p.astype(m.dtype), master, params)
        return steps, MasterState(master, inner)

    return optax.GradientTransformation(init, update)


def map_state(
    optimizer: optax.GradientTransformation,
    function: Callable[[Any, Any], Any],
    opt_state: PyTree,
    shardings: PyTree,
    others: Callable[[Any], Any] = lambda x: x,
) -> PyTree:
    """Maps over an optimizer's state (or its like), each array with its parameter's sharding.

    `function` is (array, sharding) -> anything, for what `init` makes of a parameter; `others` is
    for what belongs to no parameter, such as counts. Raises UsageError if optax cannot tell them
    apart, for `init` computes with its parameters.
    """
    try:
        by_array = optax.tree.map_params(
            optimizer,
            lambda x, p: x if isinstance(x, optax.MaskedNode) else p,  # left to another part
            opt_state,
            shardings,
            transform_non_params=lambda _: None,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
    except Exception as error:
        raise UsageError(
            "the optimizer's state does not show which array belongs to which parameter, so it "
            f"cannot be sharded (optax.tree.map_params: {type(error).__name__}: "
            f"{first_line(error)})."
        ) from error
    return jax.tree.map(
        lambda p, x: jax.tree.map(others, x) if p is None else function(x, p),
        by_array,
        opt_state,
        is_leaf=lambda p: p is None,
    )
