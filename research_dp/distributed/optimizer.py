"""Applying an optimizer on what a device holds, and clipping by the true global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, described
from research_dp.distributed.collectives import PLAIN, Axes, Reduction
from research_dp.distributed.dependence import REPLICATED, Dependence, elementwise
from research_dp.distributed.elementwise import find_mixing
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import LeafSharding, by_path, path_name, shardings_like
from research_dp.errors import UsageError, first_line

PyTree = Any


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
                f"shape {p.shape}: data_parallel.sync and data_parallel.update do not fit.",
                binding="data_parallel.update",
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
    """An optimizer that keeps parameters in a wider dtype than they lie and travel in.

    It is initialised with wide parameters, which it updates with gradients cast to their dtype;
    what it is given from then on, and returns, is their rounding (Micikevicius et al., arXiv
    1710.03740). Being optimizer state, the wide ones are sharded where that is.
    """

    def init(params: PyTree) -> MasterState:
        return MasterState(params, optimizer.init(params))

    def update(
        grads: PyTree, state: MasterState, params: PyTree | None = None
    ) -> tuple[PyTree, MasterState]:
        wide = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, state.master)
        updates, inner = optimizer.update(wide, state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        # What is added to the rounded parameters so that they become the rounding of the new ones.
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


def norm_of_blocks(
    blocks: Iterable[tuple[jax.Array, Axes]], reduction: Reduction = PLAIN
) -> jax.Array:
    """L2 norm of arrays of which this device holds blocks: a 0-d float32.

    Args:
        blocks: (this device's block, the axes that the array is split over; () if it is whole).
        reduction: How sums of squares become one over devices.

    Returns:
        The norm of all arrays, the same on every device.
    """
    total = jnp.zeros((), jnp.float32)
    for axes, parts in _squares(blocks).items():
        mine = sum((square for _, square in parts), start=jnp.zeros((), jnp.float32))
        # Blocks are summed over the axes that split them, and those alone: along others devices
        # hold the same ones, and whole arrays are counted once. Nothing is divided.
        total += reduction.all_reduce(mine, axes) if axes else mine
    return jnp.sqrt(total)


@checked
def global_norm(
    tree: Arrays, layout: Annotated[PyTree, shardings_like("tree")], reduction: Reduction = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """L2 norm of a tree whose leaves lie as `layout` says, and which leaves spoil it.

    Args:
        tree: This device's blocks.
        layout: Placements.
        reduction: How sums of squares become one over devices.

    Returns:
        The norm, a 0-d float32; and float32 (leaves,) above 0 for a leaf whose sum of squares is
        not finite. Both the same on every device, by the collectives that the norm needs alone.
    """
    lying = ((FSDP_AXIS,) if p.dim is not None else () for p in jax.tree.leaves(layout))
    blocks = list(zip(jax.tree.leaves(tree), lying, strict=True))
    total, spoilt = jnp.zeros((), jnp.float32), [jnp.zeros((), jnp.float32)] * len(blocks)
    for axes, parts in _squares(blocks).items():
        mine = sum((square for _, square in parts), start=jnp.zeros((), jnp.float32))
        own = [(~jnp.isfinite(square)).astype(jnp.float32) for _, square in parts]
        # Summed as in `norm_of_blocks`; the flags travel along.
        together = jnp.stack([mine, *own])
        together = reduction.all_reduce(together, axes) if axes else together
        total += together[0]
        for (position, _), flag in zip(parts, together[1:], strict=True):
            spoilt[position] = flag
    return jnp.sqrt(total), jnp.stack(spoilt) if spoilt else jnp.zeros((0,), jnp.float32)


def _squares(
    blocks: Iterable[tuple[jax.Array, Axes]],
) -> dict[Axes, list[tuple[int, jax.Array]]]:
    """(position, sum of squares) of each block, by the axes that its array is split over."""
    squares: dict[Axes, list[tuple[int, jax.Array]]] = {}
    for position, (x, axes) in enumerate(blocks):
        squares.setdefault(axes, []).append((position, _sum_of_squares(x)))
    return squares


def _sum_of_squares(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _sum_of_squares(x.real) + _sum_of_squares(x.imag)
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def clip_factor(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """What to multiply gradients by so that their norm is at most `max_norm`; 1.0 if it is.

    No epsilon, as Optax has none. A norm that is not a number makes the factor NaN, and so every
    gradient: nothing is skipped.
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)


def find_mixing_update(
    optimizer: optax.GradientTransformation, layout: PyTree, opt_state: PyTree = None
) -> str | None:
    """Finds why an optimizer cannot be applied to shards; traces its update, computes nothing.

    Args:
        optimizer: The optimizer.
        layout: Placements of parameters and gradients.
        opt_state: Shapes and dtypes of its unsharded state; None: `init` makes it of the shards.

    Returns:
        Why its update of shards is not a shard of its update, as `find_mixing` has it; None: it is,
        or nothing is sharded.

    Raises:
        UsageError: The update fails for gradients, state and parameters, or the state does not
            show which parameter it belongs to.
    """
    params = jax.tree.map(abstract, layout)
    state = jax.eval_shape(optimizer.init, params) if opt_state is None else opt_state
    state = jax.tree.map(abstract, state)

    def update(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        state = optimizer.init(params) if opt_state is None else state
        return optimizer.update(grads, state, params)

    try:
        program = jax.make_jaxpr(update)(params, params, state)
    except Exception as error:
        raise UsageError(
            "the optimizer's update fails; it is called with gradients, state and parameters, and "
            f"nothing else: {type(error).__name__}: {first_line(error)}"
        ) from error
    if all(p.dim is None for p in jax.tree.leaves(layout)):
        return None

    def mapped(
        function: Callable[[Any, LeafSharding], Any], others: Callable[[Any], Any]
    ) -> PyTree:
        return (
            jax.tree.map(function, params, layout),
            map_state(optimizer, function, state, layout, others),
        )

    shards, shard_state = mapped(local_part, lambda x: x)
    labels, state_labels = mapped(_depends_on, lambda _: REPLICATED)
    return find_mixing(
        program,
        jax.tree.leaves((labels, labels, state_labels)),
        jax.tree.leaves((labels, state_labels)),
        on_shards=lambda: jax.make_jaxpr(update)(shards, shards, shard_state),
    )


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone: a sharding or weak type would make programs differ."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def local_part(x: Any, p: LeafSharding) -> Any:
    """Abstract local shard of an array, which is sharded if it has its parameter's shape."""
    return jax.ShapeDtypeStruct(p.local_shape if x.shape == p.shape else x.shape, x.dtype)


def _depends_on(x: Any, p: LeafSharding) -> Dependence:
    return elementwise(p.path) if p.dim is not None and x.shape == p.shape else REPLICATED
