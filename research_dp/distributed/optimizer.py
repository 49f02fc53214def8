"""The optimizer applied to local arrays, and the global norm of sharded gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import gin
import jax
import numpy as np
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Numbers, Placeable, described, has_attributes
from research_dp.distributed.sharding import LeafSharding, by_path, path_name
from research_dp.errors import UsageError, first_line

PyTree = Any


class Optimizer(Protocol):
    """What `fsdp_apply_gradients` needs of an optimizer.

    It is traced, in a copy, to show that each element is updated by itself. A class whose objects
    cannot be copied and traced may say so itself, by an attribute `elementwise = True`.
    """

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree: ...


@gin.register(module="distributed")
@checked
def apply_gradients(
    gradients: Numbers,
    parameters: Placeable,
    optimizer: Annotated[
        Optimizer, has_attributes(("apply_gradients",), "OptaxAdapter(transform, state)")
    ],
) -> PyTree:
    """Applies the optimizer to what this device has: replicated parameters, or its shards.

    Args:
        gradients: Averaged gradients.
        parameters: Arrays of the same shapes.
        optimizer: Has `apply_gradients(gradients, parameters) -> parameters`.

    Returns:
        The new parameters.
    """
    return optimizer.apply_gradients(gradients, parameters)


def apply_optimizer(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """One optimizer step: (new parameters, new optimizer state), dtypes kept.

    Raises:
        UsageError: A gradient has another shape than its parameter, or the update fails for a state
            that `optimizer.init` would not make of the parameters.
    """
    flat = jax.tree_util.tree_leaves_with_path(grads)
    for (path, g), p in zip(flat, jax.tree.leaves(params), strict=True):
        if g.shape != p.shape:
            raise UsageError(
                f"the optimizer is given a gradient of shape {g.shape} for {path_name(path)} of "
                f"shape {p.shape}."
            )
    try:
        updates, new_state = optimizer.update(grads, opt_state, params)
    except Exception:  # a wrong state raises whatever it meets: it is looked for afterwards
        _check_state_of(optimizer, opt_state, params)
        raise
    return optax.apply_updates(params, updates), new_state


def _check_state_of(
    optimizer: optax.GradientTransformation, opt_state: PyTree, params: PyTree
) -> None:
    """Raises UsageError for a state of other paths, shapes or structure than `init` gives it."""
    expected = jax.eval_shape(optimizer.init, params)
    check_state(opt_state, expected, "Make it by optimizer.init of these parameters.")
    given: Any = jax.tree.structure(opt_state)
    if given != jax.tree.structure(expected):
        raise UsageError(
            f"opt_state = {described(opt_state)} has another structure than what optimizer.init "
            f"makes of the parameters: {described(expected)}."
        )


def check_state(opt_state: PyTree, expected: PyTree, advice: str) -> None:
    """Checks the paths and shapes of an optimizer's state.

    Args:
        opt_state: The state.
        expected: Arrays, or their shapes and dtypes.
        advice: What to do about an array of another shape.

    Raises:
        UsageError: An array is missing, left over or of another shape.
    """
    given, wanted = by_path(opt_state), by_path(expected)
    for name in sorted(given.keys() | wanted.keys()):
        if name not in given or name not in wanted:
            raise UsageError(
                f"opt_state {name or 'itself'} is {'left over' if name in given else 'missing'}: "
                "the state must be that of the parameters that have gradients, and no others."
            )
        shape = np.shape(given[name])
        if shape != wanted[name].shape:
            raise UsageError(
                f"opt_state {name} has shape {shape} on a device, not {wanted[name].shape}. "
                f"{advice}"
            )


class MasterState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
        master: Parameters in their own, wider dtype.
        inner: State of the optimizer.
    """

    master: PyTree
    inner: PyTree


def with_master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that keeps master weights in a wider dtype than that of the parameters.

    It is initialised with wide parameters, and updates them with gradients cast to their dtype.
    From then on it is given, and returns, their rounding (Micikevicius et al., arXiv 1710.03740).
    Master weights are optimizer state, and sharded like it.
    """

    def init(params: PyTree) -> MasterState:
        return MasterState(params, optimizer.init(params))

    def update(
        grads: PyTree, state: MasterState, params: PyTree | None = None
    ) -> tuple[PyTree, MasterState]:
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
    layout: PyTree,
    others: Callable[[Any], Any] = lambda x: x,
) -> PyTree:
    """Maps over an optimizer's state, each array beside its parameter's placement.

    Args:
        optimizer: The optimizer.
        function: (array, placement) -> anything; for what `init` makes of a parameter.
        opt_state: The state, or one of its structure.
        layout: Placements of the parameters.
        others: For what belongs to no parameter, such as counts.

    Raises:
        UsageError: `init` computes with its parameters, so that optax cannot find what is theirs.
    """

    def place_of(x: Any, p: LeafSharding) -> Any:
        return x if isinstance(x, optax.MaskedNode) else p

    try:
        places = optax.tree.map_params(
            optimizer,
            place_of,
            opt_state,
            layout,
            transform_non_params=lambda _: None,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),  # left to another part
        )
    except Exception as error:
        raise UsageError(
            "the optimizer's state does not show which array belongs to which parameter, so it "
            f"cannot be sharded (optax.tree.map_params: {type(error).__name__}: "
            f"{first_line(error)})."
        ) from error
    return jax.tree.map(
        lambda p, x: jax.tree.map(others, x) if p is None else function(x, p),
        places,
        opt_state,
        is_leaf=lambda p: p is None,
    )
