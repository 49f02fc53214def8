"""datarax's train step under `pmap`, kept for code that is written that way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed import collectives, updates
from research_dp.distributed.data_parallel import reduce_gradients_across_devices
from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import path_name

PyTree = Any
Batch = Any

_BATCH_AXIS = "batch"


class _StepOptions(NamedTuple):
    """What a compiled step depends on; hashable."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    has_aux: bool
    max_grad_norm: float | None
    accumulation_steps: int


@gin.register(module="distributed")
def data_parallel_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    batch: Batch,
    state: Any,
    rngs: Any | None = None,
    *,
    has_aux: bool = False,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
) -> tuple[Any, dict[str, Any]]:
    """One training step under `pmap`, gradients averaged over its axis 'batch' (datarax).

    Compiled once for the same `loss_fn`, `optimizer` and options: make both outside the loop. New
    code is better off with `spmd_train_step` or a strategy.

    Args:
        loss_fn: ({'params': params, **model_state}, batch, rngs=...) -> the mean loss of a
            device's batch, 0-d. Without `rngs` it need not take them.
        optimizer: Any optax transform.
        batch: Arrays (devices, rows a device, ...).
        state: Has `params`, `opt_state`, `model_state`, `step` and `replace`; each array has a
            first dim of devices, e.g. by `flax.jax_utils.replicate`.
        rngs: One random key or a tree of them. Device i is given `fold_in(key, i)` of each, and
            with several micro-batches `fold_in` of that and the micro-batch. Pass new ones each
            step.
        has_aux: `loss_fn` returns (loss, aux).
        max_grad_norm: Averaged gradients are scaled to at most this global norm.
        accumulation_steps: Rows of a device are cut into this many micro-batches, whose gradients
            are averaged before devices communicate, once.

    Returns:
        The new state, and metrics: 'loss', the mean over all devices, on each of them (devices,);
        with `has_aux` also 'aux' as each device computed it, (devices, ...), or (devices,
        micro-batches, ...) if there are several. `model_state` is not changed: a loss that
        computes a new one returns it as aux.

    Raises:
        UsageError: An array has no such first dim, rows do not divide into micro-batches, or `rngs`
            are no random keys.
    """
    options = _StepOptions(loss_fn, optimizer, has_aux, max_grad_norm, accumulation_steps)
    return _pmapped(options)(*_one_a_device(state, batch, rngs))


def _one_a_device(state: Any, batch: Batch, rngs: Any) -> tuple[Any, Batch, Any]:
    """Puts row i of each array on device i, where `pmap` leaves its results, and keys on each.

    `pmap` would take arrays from elsewhere too, but compile once more for the results of its first
    call. Keys are repeated because jax 0.10.2 may mistake which argument an `in_axes` of None is
    for, if as many arrays as arguments are passed.
    """
    arrays = jax.tree_util.tree_leaves_with_path({"batch": batch, "state": state})
    rows = len(arrays[0][1]) if np.ndim(arrays[0][1]) else 0
    for path, x in arrays:
        if np.ndim(x) == 0 or len(x) != rows or rows > jax.local_device_count():
            raise UsageError(
                f"{path_name(path)!r} of shape {np.shape(x)}: each array of batch and state needs "
                f"a first dim of devices, the same for all and at most {jax.local_device_count()}. "
                "flax.jax_utils.replicate makes such a state."
            )
    rngs = jax.tree.map(lambda key: jnp.broadcast_to(key, (rows, *key.shape)), rngs)
    if jax.process_count() > 1:
        return state, batch, rngs  # pmap puts them on this process's devices
    line = Mesh(jax.local_devices()[:rows], (_BATCH_AXIS,))
    by_device = NamedSharding(line, PartitionSpec(_BATCH_AXIS))
    return jax.device_put((state, batch, rngs), by_device)


@functools.lru_cache(maxsize=64)
def _pmapped(options: _StepOptions) -> Callable[..., tuple[Any, dict[str, Any]]]:
    step = functools.partial(_device_step, options)
    return jax.pmap(step, axis_name=_BATCH_AXIS)


def _device_step(
    options: _StepOptions, state: Any, batch: Batch, rngs: Any
) -> tuple[Any, dict[str, Any]]:
    takes_rngs = rngs is not None or "rngs" in inspect.signature(options.loss_fn).parameters

    def loss(params: PyTree, micro: Batch, keys: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, **(state.model_state or {})}
        out = options.loss_fn(variables, micro, **({"rngs": keys} if takes_rngs else {}))
        return out if options.has_aux else (out, None)

    keys = collectives.device_keys(rngs, _BATCH_AXIS)
    gradients = functools.partial(jax.value_and_grad(loss, has_aux=True), state.params)
    (value, aux), grads = _mean_of_micro_batches(gradients, batch, keys, options.accumulation_steps)
    # Each device's loss is the mean of its own rows, and all have as many: the devices' gradients
    # are summed and divided by their number here, once for all micro-batches.
    grads = reduce_gradients_across_devices(grads, "mean", _BATCH_AXIS)
    grads = updates.clip_by_norm(grads, options.max_grad_norm)
    params, opt_state = updates.apply_optimizer(
        options.optimizer, grads, state.opt_state, state.params
    )
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    # As for the gradients: summed over devices and divided by their number, here alone.
    metrics = {"loss": collectives.all_mean(value, (_BATCH_AXIS,))}
    return new_state, {**metrics, "aux": aux} if options.has_aux else metrics


def _mean_of_micro_batches(
    gradients: Callable[..., tuple[tuple[jax.Array, Any], PyTree]],
    batch: Batch,
    keys: Any,
    count: int,
) -> tuple[tuple[jax.Array, Any], PyTree]:
    """((mean loss, aux of each), mean gradients) of a device's micro-batches; no communication."""
    if count == 1:
        return gradients(batch, keys)

    def cut(path: Any, x: jax.Array) -> jax.Array:
        if count < 1 or x.shape[0] % count:
            raise UsageError(
                f"accumulation_steps {count} does not divide the {x.shape[0]} rows that a device "
                f"has of batch leaf {path_name(path)!r}."
            )
        return x.reshape(count, -1, *x.shape[1:])

    def add(total: PyTree, micro: tuple[jax.Array, Batch]) -> tuple[PyTree, Any]:
        index, rows = micro
        folded = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
        out, grads = gradients(rows, folded)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), out

    micros = jnp.arange(count), jax.tree_util.tree_map_with_path(cut, batch)
    first = jax.tree.map(lambda x: x[0], micros[1])
    _, shapes = jax.eval_shape(gradients, first, keys)
    # Added up in at least float32.
    zeros = jax.tree.map(
        lambda g: jnp.zeros(g.shape, jnp.promote_types(g.dtype, jnp.float32)), shapes
    )
    total, (losses, aux) = jax.lax.scan(add, zeros, micros)
    # Micro-batches are of one size: the device's own mean is their sum by their number.
    grads = jax.tree.map(lambda t, g: (t / count).astype(g.dtype), total, shapes)
    return (jnp.mean(losses), aux), grads
