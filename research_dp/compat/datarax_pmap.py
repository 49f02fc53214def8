"""datarax's train step under `pmap`, for existing code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    Count,
    DeviceRows,
    Keys,
    MaxNorm,
    Transform,
    has_attributes,
    path_name,
)
from research_dp.compat.datarax import reduce_gradients_across_devices
from research_dp.distributed.collectives import all_mean
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.norms import clip_by_global_norm_sharded
from research_dp.distributed.optimizer import apply_optimizer
from research_dp.distributed.vma import refuse_mapped
from research_dp.errors import UsageError

PyTree = Any
Batch = Any

_BATCH_AXIS = "batch"
_State = Annotated[
    Any,
    has_attributes(
        ("params", "opt_state", "step", "replace"), "flax.training.train_state.TrainState"
    ),
]


@gin.register(module="distributed")
@checked
def data_parallel_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Transform,
    batch: DeviceRows,
    state: _State,
    rngs: Keys | None = None,
    *,
    has_aux: bool = False,
    max_grad_norm: MaxNorm | None = None,
    accumulation_steps: Count = 1,
) -> tuple[Any, dict[str, Any]]:
    """One training step under `pmap`, gradients averaged over its axis 'batch' (datarax).

    Compiled once for the same `loss_fn`, `optimizer` and options: make both outside the loop. For
    new code prefer `spmd_train_step` or a strategy.

    Args:
        loss_fn: ({'params': params, **model_state}, batch, rngs=...) -> the mean loss of a
            device's batch, 0-d. Without `rngs` it need not accept them.
        optimizer: Any optax transform.
        batch: Arrays (devices, rows a device, ...).
        state: Has `params`, `opt_state`, `step`, `replace`, and may have `model_state`, e.g. Flax's
            `TrainState`; each array has a first dim of devices, e.g. by
            `flax.jax_utils.replicate`.
        rngs: One random key or a tree of them. Device i uses `fold_in(key, i)`, and with several
            micro-batches `fold_in` of that and the micro-batch. Pass new keys at each step.
        has_aux: `loss_fn` returns (loss, aux).
        max_grad_norm: Averaged gradients are scaled to at most this global norm.
        accumulation_steps: Number of micro-batches that a device's rows are split into; their
            gradients are averaged before the devices communicate, once.

    Returns:
        The new state, and metrics: 'loss', the mean over all devices, on each of them (devices,);
        with `has_aux` also 'aux' of each device, (devices, ...), summed over micro-batches.
        `model_state` is unchanged: a loss that computes a new one returns it as aux.

    Raises:
        UsageError: An array has no such first dim, the batch is empty, rows do not divide into
            micro-batches, or this is called inside a map.
    """
    refuse_mapped("data_parallel_train_step")
    step = _pmapped(loss_fn, optimizer, has_aux, max_grad_norm, accumulation_steps)
    return step(*_one_row_per_device(state, batch, rngs))


def _one_row_per_device(state: Any, batch: Batch, rngs: Any) -> tuple[Any, Batch, Any]:
    """Puts row i of each array on device i, where `pmap` leaves its results, and keys on each.

    `pmap` accepts arrays from elsewhere, but compiles again for the results of its first call. Keys
    are repeated because jax 0.10.2 may mistake which argument an `in_axes` of None belongs to, if
    as many arrays as arguments are passed.
    """
    arrays = jax.tree_util.tree_leaves_with_path({"batch": batch, "state": state})
    rows = len(arrays[0][1]) if np.ndim(arrays[0][1]) else 0
    for path, x in arrays:
        name = f"{path_name(path)!r} of shape {np.shape(x)}"
        if 0 in np.shape(x)[:2] and path_name(path).split("/")[0] == "batch":
            raise UsageError(f"{name} has no rows.")
        if np.ndim(x) == 0 or len(x) != rows or rows > jax.local_device_count():
            raise UsageError(
                f"{name}: each array of batch and state needs a first dim of devices, the same "
                f"for all and at most {jax.local_device_count()}. flax.jax_utils.replicate makes "
                "such a state."
            )
    rngs = jax.tree.map(lambda key: jnp.broadcast_to(key, (rows, *key.shape)), rngs)
    if jax.process_count() > 1:
        return state, batch, rngs  # pmap puts them on this process's devices
    mesh = Mesh(jax.local_devices()[:rows], (_BATCH_AXIS,))
    by_device = NamedSharding(mesh, PartitionSpec(_BATCH_AXIS))
    return jax.device_put((state, batch, rngs), by_device)


@functools.lru_cache(maxsize=64)
def _pmapped(*options: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    return jax.pmap(functools.partial(_device_step, *options), axis_name=_BATCH_AXIS)


def _device_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    has_aux: bool,
    max_grad_norm: float | None,
    count: int,
    state: Any,
    batch: Batch,
    rngs: Any,
) -> tuple[Any, dict[str, Any]]:
    takes_rngs = rngs is not None or "rngs" in inspect.signature(loss_fn).parameters

    def loss(params: PyTree, micro: Batch, keys: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, **(getattr(state, "model_state", None) or {})}
        out = loss_fn(variables, micro, **({"rngs": keys} if takes_rngs else {}))
        return out if has_aux else (out, None)

    keys = _fold_in(rngs, jax.lax.axis_index(_BATCH_AXIS))

    def gradients(index: jax.Array, micro: Batch) -> tuple[PyTree, Any, jax.Array]:
        micro_keys = keys if count == 1 else _fold_in(keys, index)
        value, grads = jax.value_and_grad(loss, has_aux=True)(state.params, micro, micro_keys)
        return grads, value, index + 1

    total, (value, aux), _ = add_up(gradients, jnp.zeros((), jnp.int32), _split(batch, count))
    # All devices have the same number of micro-batches, of one size: their sum is divided by that
    # number here, and the mean over devices is taken below, once.
    local = jax.tree.map(lambda g: g / count, total)
    grads = reduce_gradients_across_devices(local, "mean", _BATCH_AXIS)
    if max_grad_norm is not None:
        grads, _ = clip_by_global_norm_sharded(grads, max_grad_norm, ())
    params, opt_state = apply_optimizer(optimizer, grads, state.opt_state, state.params)
    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    # As for the gradients: the mean over micro-batches, then, in all_mean, over devices.
    metrics = {"loss": all_mean(value / count, (_BATCH_AXIS,))}
    return new_state, {**metrics, "aux": aux} if has_aux else metrics


def _split(batch: Batch, count: int) -> Batch:
    """Adds a leading dim of micro-batches to a device's batch."""

    def split(path: Any, x: jax.Array) -> jax.Array:
        if count == 1:
            return x[None]
        if x.ndim == 0 or x.shape[0] % count:
            raise UsageError(
                f"accumulation_steps {count} does not divide the rows of batch leaf "
                f"{path_name(path)!r}, of shape {x.shape} on each device."
            )
        return x.reshape(count, -1, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(split, batch)


def _fold_in(keys: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
