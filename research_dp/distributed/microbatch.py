"""Sums over micro-batches, with one gather and one scatter for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisNames, Dtype, MicroBatches
from research_dp.distributed.collectives import cast_dtype, flat_axes
from research_dp.distributed.vma import as_varying, varying_axes
from research_dp.types import PyTree


def add_up(
    function: Callable[..., Any], carry: PyTree, micro_batches: PyTree, dtype: Any = None
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs a function on micro-batches one after another: (sum of gradients, sums, last carry).

    `function` is (carry, micro-batch) -> (gradients, further sums, new carry). Gradients are added
    up in `dtype`, their own if None or if they are complex.
    """
    first = jax.tree.map(lambda x: x[0], micro_batches)
    if jax.tree.leaves(micro_batches)[0].shape[0] == 1:
        return function(carry, first)

    def add(state: Any, micro: PyTree) -> tuple[Any, None]:
        total, sums, carry = state
        grads, more, carry = function(carry, micro)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return (total, jax.tree.map(jnp.add, sums, more), carry), None

    grads, sums, _ = jax.eval_shape(function, carry, first)
    zeros = jax.tree.map(lambda g: _zeros(g, cast_dtype(g.dtype, dtype)), grads)
    state, _ = lax.scan(add, (zeros, jax.tree.map(_zeros, sums), carry), micro_batches)
    return state


@checked
def accumulate_gradients(
    loss: Callable[[PyTree, PyTree], jax.Array],
    params: Arrays,
    micro_batches: MicroBatches,
    *,
    axis_names: AxisNames = (),
    gather: Callable[[PyTree], PyTree] | None = None,
    dtype: Dtype | None = None,
) -> tuple[jax.Array, PyTree]:
    """Mean loss and gradients over micro-batches, with one gather and one scatter for all of them.

    Returns (mean loss, gradients like `params`), what one batch of all examples would give. The
    caller calls `sync_gradients` afterwards, once. Until then each device has full gradients.
    Raises UsageError if there is no micro-batch, or if arrays differ in their number.

    Args:
        loss: (unsharded parameters, micro-batch) -> this device's own mean loss, 0-d.
        params: As this device has them.
        micro_batches: Arrays with a leading dim that counts at least one, of equal size.
        axis_names: The mesh axes that the batch is split over. Under `check_vma=True` autodiff
            would sum over them in each micro-batch; no effect elsewhere.
        gather: E.g. `partial(gather_params, axis_name='fsdp')`, whose gradients come back as
            shards; None: parameters are replicated.
        dtype: dtype in which gradients are added up; None: their own. Complex ones keep theirs.
    """
    axes = flat_axes(axis_names)

    def gathered(params: PyTree) -> PyTree:
        params = params if gather is None else gather(params)
        return jax.tree.map(lambda x: as_varying(x, axes), params)

    full, scatter = jax.vjp(gathered, params)

    def one(_: None, micro: PyTree) -> tuple[PyTree, jax.Array, None]:
        value, grads = jax.value_and_grad(loss)(full, micro)
        return grads, value, None

    total, value, _ = add_up(one, None, micro_batches, dtype)
    count = jax.tree.leaves(micro_batches)[0].shape[0]
    # Divided by the number of micro-batches alone: `gather` and `sync_gradients` divide by devices.
    (grads,) = scatter(jax.tree.map(lambda g, p: (g / count).astype(p.dtype), total, full))
    return value / count, grads


def _zeros(like: Any, dtype: Any = None) -> jax.Array:
    """Zeros of a traced value's shape, varying over the axes that it varies over."""
    return as_varying(jnp.zeros(like.shape, dtype or like.dtype), tuple(varying_axes(like)))
