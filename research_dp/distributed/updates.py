"""Applying an optimizer on what a device holds, and clipping by the true global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params

from research_dp.distributed.collectives import PLAIN, Axes, Reduction
from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import path_name
from research_dp.distributed.mesh import FSDP_AXIS

PyTree = Any

# Primitives that mix elements of one array, or draw at random for a shape; an optimizer that uses
# them on a parameter computes something else on a shard. Matched by prefix.
_MIXING = (
    *("reduce", "dot_general", "conv_", "sort", "cum", "argm", "top_k", "scan", "while", "gather"),
    *("qr", "svd", "eig", "cholesky", "lu", "householder", "triangular_solve", "fft"),
    *("random_bits", "threefry", "rng_"),
)


def apply_optimizer(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """One optimizer step: (new parameters, new optimizer state), dtypes kept.

    Raises:
        UsageError: A gradient has another shape than its parameter.
    """
    flat = jax.tree_util.tree_leaves_with_path(grads)
    for (path, g), p in zip(flat, jax.tree.leaves(params), strict=True):
        if g.shape != p.shape:
            raise UsageError(
                f"the optimizer is given a gradient of shape {g.shape} for {path_name(path)} of "
                f"shape {p.shape}: data_parallel.sync and data_parallel.update do not fit.",
                binding="data_parallel.update",
            )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


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
    """

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)  # a parameter that this part leaves to another

    return optax.tree.map_params(
        optimizer,
        lambda x, p: x if is_masked(x) else function(x, p),
        opt_state,
        layout,
        transform_non_params=others,
        is_leaf=is_masked,
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
        total += reduction.all_sum(mine, axes) if axes else mine
    return jnp.sqrt(total)


def global_norm(
    tree: PyTree, layout: PyTree, reduction: Reduction = PLAIN
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
        together = reduction.all_sum(together, axes) if axes else together
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
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        squares.setdefault(axes, []).append((position, square))
    return squares


def clip_factor(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """What to multiply gradients by so that their norm is at most `max_norm`; 1.0 if it is.

    No epsilon, as Optax has none. A norm that is not a number makes the factor NaN, and so every
    gradient: nothing is skipped.
    """
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)


def mixing_primitive(optimizer: optax.GradientTransformation, params: PyTree) -> str | None:
    """Name of an operation by which the optimizer mixes elements of a parameter, if there is one.

    An optimizer without any can be applied to shards. Decided on the traced update, for abstract
    parameters: nothing is computed.

    Args:
        optimizer: The optimizer.
        params: Parameters, or `jax.ShapeDtypeStruct`s.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    return mixing_in(optimizer.update, params, opt_state, params)


def mixing_in(function: Callable[..., Any], *args: Any) -> str | None:
    """Name of an operation of a function, traced for these arguments, that mixes elements."""
    return _find_mixing(jax.make_jaxpr(function)(*args).jaxpr)


def _find_mixing(jaxpr: Any) -> str | None:
    for equation in jaxpr.eqns:
        variables = (*equation.invars, *equation.outvars)
        on_arrays = any(getattr(v.aval, "ndim", 0) > 0 for v in variables)
        if on_arrays and equation.primitive.name.startswith(_MIXING):
            return equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            found = _find_mixing(inner)
            if found:
                return found
    return None
