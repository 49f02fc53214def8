"""Applying an optimizer on what a device holds, and clipping by the true global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params

from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import lay_out, path_name
from research_dp.distributed.mesh import FSDP_AXIS

PyTree = Any

# Primitives that mix elements of one array; an optimizer that uses them on a parameter computes
# something else on a shard. Matched by prefix.
_MIXING = (
    *("reduce", "dot_general", "conv_", "sort", "cum", "argm", "top_k", "scan", "while", "gather"),
    *("qr", "svd", "eig", "cholesky", "lu", "householder", "triangular_solve", "fft"),
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


def global_norm(tree: PyTree, layout: PyTree, reduction: Reduction = PLAIN) -> jax.Array:
    """L2 norm of a tree whose leaves lie as `layout` says: a 0-d float32, the same everywhere."""
    sharded: list[jax.Array] = []
    held_whole: list[jax.Array] = []
    for x, p in zip(jax.tree.leaves(tree), jax.tree.leaves(layout), strict=True):
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        (held_whole if p.dim is None else sharded).append(square)
    total = sum(held_whole, start=jnp.zeros((), jnp.float32))
    if sharded:
        # Blocks are summed over `fsdp` alone: replicas along `data` hold the same ones, and whole
        # leaves are counted once.
        total += reduction.all_sum(sum(sharded, start=jnp.zeros((), jnp.float32)), (FSDP_AXIS,))
    return jnp.sqrt(total)


def clip_factor(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """What to multiply gradients by so that their norm is at most `max_norm`; 1.0 if it is."""
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    return max_norm / jnp.maximum(norm, max_norm)


def clip_by_norm(grads: PyTree, max_norm: float | None) -> PyTree:
    """Gradients scaled so that their global norm is at most `max_norm`; None: as they are.

    Args:
        grads: Whole gradients: global arrays, or mapped ones that are the same on every device.
        max_norm: The greatest norm, of the tree as one vector, in float32.

    Returns:
        The gradients in their own dtypes, times max_norm / max(norm, max_norm).
    """
    if max_norm is None:
        return grads
    # Nothing is sharded by hand here, so nothing is summed over devices by hand.
    factor = clip_factor(global_norm(grads, lay_out(grads, None, 1)), max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def mixing_primitive(optimizer: optax.GradientTransformation, params: PyTree) -> str | None:
    """Name of an operation by which the optimizer mixes elements of a parameter, if there is one.

    An optimizer without any can be applied to shards. Decided on the traced update, for abstract
    parameters: nothing is computed.

    Args:
        optimizer: The optimizer.
        params: Parameters, or `jax.ShapeDtypeStruct`s.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    jaxpr = jax.make_jaxpr(optimizer.update)(params, opt_state, params)
    return _find_mixing(jaxpr.jaxpr)


def _find_mixing(jaxpr: Any) -> str | None:
    for equation in jaxpr.eqns:
        on_arrays = any(getattr(v.aval, "ndim", 0) > 0 for v in equation.invars)
        if on_arrays and equation.primitive.name.startswith(_MIXING):
            return equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            found = _find_mixing(inner)
            if found:
                return found
    return None
