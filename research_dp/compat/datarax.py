"""datarax's data-parallel functions, as adapters over this package's primitives.

What needs Flax NNX is in `compat.artifex`. Where datarax fails or guesses, these raise an error or
do what their names promise: a `UsageError` names the leaf by its path, and has the numbers.
docs/api_nnx.md has an example of each.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.distributed import placement
from research_dp.distributed.collectives import all_mean, flat_axes
from research_dp.distributed.gradient_sync import sum_gradients, sync_gradients
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.norms import clip_by_global_norm_sharded
from research_dp.distributed.optimizer import apply_optimizer
from research_dp.distributed.sharding import choose_dim
from research_dp.distributed.vma import refuse_mapped
from research_dp.errors import UsageError
from research_dp.types import PyTree

Batch = Any
# Unknown values are refused by `_by_reduce_type`, in datarax's words.
ReduceType = Annotated[str, types.Limit(lambda _: True, "'mean' or 'sum'")]
_FIELDS = ("params", "opt_state", "step", "replace")
_State = Annotated[Any, types.has_attributes(_FIELDS, "flax.training.train_state.TrainState")]
_BATCH_AXIS = "batch"  # of `data_parallel_train_step`


@checked
def create_data_parallel_sharding(
    mesh: Mesh | AbstractMesh, data_axis: str = "data"
) -> NamedSharding:
    """The sharding that splits dim 0 of an array over one mesh axis (datarax, artifex)."""
    return placement.shardings(mesh, PartitionSpec(data_axis))


@checked
def place_batch_on_shards(batch: Batch, sharding: Sharding) -> Batch:
    """Puts the arrays of a batch on a sharding (datarax).

    Arrays of numbers and random keys are placed, numpy arrays too (datarax does not place those).
    Other leaves are returned unchanged: strings, Python and numpy scalars, numpy arrays of text or
    objects. With several processes each gives its own rows, as `placement.place` expects.
    """

    def target(x: Any) -> Sharding | None:
        is_placed = isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and types.is_array(x))
        return sharding if is_placed else None

    def own(x: Any) -> Any:
        # JAX shares memory with host arrays on CPUs, and their owner may write to it.
        return x.copy() if isinstance(x, np.ndarray) and target(x) else x

    return placement.place(jax.tree.map(own, batch), jax.tree.map(target, batch))


@checked
def place_model_state_on_shards(
    state: types.Placeable,
    mesh: Mesh | AbstractMesh,
    param_sharding: str | Mapping[str, Any] | None = None,
) -> Any:
    """Puts a model's state on a mesh (datarax; artifex's `shard_model_state`).

    `state` is any pytree: dicts, `nnx.State`, train states. Empty sub-dicts are kept. With
    `param_sharding` 'replicate' or None every leaf is replicated. With 'shard' dim 0 of each leaf
    is sharded over the mesh's first axis; scalars, and leaves that it does not divide, are
    replicated. With a dict of paths, e.g. {'params/dense/kernel': PartitionSpec('data', None)},
    these leaves are placed, the others stay where they are. Raises UsageError for an unknown
    string, a path of no leaf, or a spec whose axis the mesh lacks or that does not divide its leaf.
    """

    def dim_0_spec(x: Any) -> PartitionSpec:
        axis, free = mesh.axis_names[0], tuple(dim == 0 for dim in range(np.ndim(x)))
        decision = choose_dim(np.shape(x), mesh.shape[axis], min_weight_size=0, free=free)
        return PartitionSpec() if decision.dim is None else PartitionSpec(axis)

    if isinstance(param_sharding, Mapping):
        targets = _by_path(state, placement.shardings(mesh, param_sharding))
    elif param_sharding == "shard":
        targets = placement.shardings(mesh, jax.tree.map(dim_0_spec, state))
    elif param_sharding in (None, "replicate"):
        targets = placement.shardings(mesh, PartitionSpec())
    else:
        raise UsageError(
            f"Unknown param_sharding: {param_sharding!r}. Use 'replicate', 'shard', None or a dict "
            "of paths to PartitionSpecs."
        )
    return placement.put(state, targets)


def _by_path(tree: PyTree, rules: Mapping[str, Sharding]) -> PyTree:
    """The sharding of each leaf by its path, or None; UsageError for a path of no leaf."""
    paths = [types.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for name in sorted(set(rules) - set(paths)):
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.3) or sorted(paths)[:3]
        raise UsageError(
            f"param_sharding {name!r} matches none of {len(paths)} paths; near it: "
            f"{', '.join(map(repr, near)) or 'nothing'}. Give the full path of a leaf."
        )
    return jax.tree.unflatten(jax.tree.structure(tree), [rules.get(path) for path in paths])


@checked
def reduce_gradients_across_devices(
    gradients: types.Numbers,
    reduce_type: ReduceType = "mean",
    axis_name: types.AxisNames = "batch",
    *,
    loss: types.Number | None = None,
) -> Any:
    """Mean or sum of each gradient over the devices (datarax; artifex's `all_reduce_gradients`).

    Inside `shard_map`, `pmap` or `vmap(axis_name=...)`; under `jit` see `spmd_train_step`.

    Args:
        gradients: Gradients of each device's own loss. The mean of integers is a float32. Under
            `shard_map(check_vma=True)` autodiff has already summed those of replicated parameters:
            they are not summed again, and their mean needs `loss`. Boxes that the axis splits keep
            their means (`sync_gradients`).
        reduce_type: 'mean' or 'sum', in any case of letters.
        axis_name: The bound axis, or a tuple of several; NameError if it is not bound.
        loss: The loss that was differentiated, as in `sync_gradients`: its type shows whether it
            was averaged over devices before, which gradients do not show. The sum of gradients of
            such a loss is a UsageError.
    """
    axes = flat_axes(axis_name)

    def total(gradients: Any) -> Any:
        return sum_gradients(gradients, axes, loss)  # nothing is divided

    mean = functools.partial(sync_gradients, axis_names=axes, loss=loss)
    return _by_reduce_type(reduce_type, mean=mean, sum=total)(gradients)


@checked
def reduce_gradient_tree(gradients: types.Numbers, reduce_type: ReduceType = "mean") -> Any:
    """Mean or sum over all elements of each gradient: one scalar a leaf (datarax).

    In spite of its name it does not average over devices: datarax has it so, for statistics.
    `reduce_gradients_across_devices` does. `reduce_type` may have any case of letters.
    """
    return jax.tree.map(_by_reduce_type(reduce_type, mean=jnp.mean, sum=jnp.sum), gradients)


def _by_reduce_type(reduce_type: str, **functions: Callable[..., Any]) -> Callable[..., Any]:
    if str(reduce_type).lower() not in functions:
        raise UsageError(f"Unsupported reduce_type: {reduce_type}. Use 'mean' or 'sum'.")
    return functions[str(reduce_type).lower()]


@checked
def data_parallel_train_step(
    loss_fn: Callable[..., Any],
    optimizer: types.Transform,
    batch: types.DeviceRows,
    state: _State,
    rngs: types.Keys | None = None,
    *,
    has_aux: bool = False,
    max_grad_norm: types.MaxNorm | None = None,
    accumulation_steps: types.Count = 1,
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
            `TrainState`; arrays have a first dim of devices (`flax.jax_utils.replicate`).
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
        name = f"{types.path_name(path)!r} of shape {np.shape(x)}"
        if 0 in np.shape(x)[:2] and types.path_name(path).split("/")[0] == "batch":
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
def _pmapped(
    loss_fn: Callable[..., Any], optimizer: Any, has_aux: bool, max_grad_norm: Any, count: int
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The compiled step; `count` is the number of micro-batches."""

    def fold_in(keys: PyTree, index: jax.Array) -> PyTree:
        return jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)

    def split(path: Any, x: jax.Array) -> jax.Array:
        if count == 1:
            return x[None]
        if x.ndim == 0 or x.shape[0] % count:
            raise UsageError(
                f"accumulation_steps {count} does not divide the rows of batch leaf "
                f"{types.path_name(path)!r}, of shape {x.shape} on each device."
            )
        return x.reshape(count, -1, *x.shape[1:])

    def step(state: Any, batch: Batch, rngs: Any) -> tuple[Any, dict[str, Any]]:
        takes_rngs = rngs is not None or "rngs" in inspect.signature(loss_fn).parameters

        def loss(params: PyTree, micro: Batch, keys: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, **(getattr(state, "model_state", None) or {})}
            out = loss_fn(variables, micro, **({"rngs": keys} if takes_rngs else {}))
            return out if has_aux else (out, None)

        keys = fold_in(rngs, jax.lax.axis_index(_BATCH_AXIS))

        def gradients(index: jax.Array, micro: Batch) -> tuple[PyTree, Any, jax.Array]:
            micro_keys = keys if count == 1 else fold_in(keys, index)
            value, grads = jax.value_and_grad(loss, has_aux=True)(state.params, micro, micro_keys)
            return grads, value, index + 1

        zero, micros = jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(split, batch)
        total, (value, aux), _ = add_up(gradients, zero, micros)
        # All devices have as many micro-batches of one size: gradients and loss are divided by
        # their number here, and averaged over devices below, once.
        local = jax.tree.map(lambda g: g / count, total)
        grads = reduce_gradients_across_devices(local, "mean", _BATCH_AXIS)
        if max_grad_norm is not None:
            grads, _ = clip_by_global_norm_sharded(grads, max_grad_norm, ())
        params, opt_state = apply_optimizer(optimizer, grads, state.opt_state, state.params)
        new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        metrics = {"loss": all_mean(value / count, (_BATCH_AXIS,))}
        return new_state, {**metrics, "aux": aux} if has_aux else metrics

    return jax.pmap(step, axis_name=_BATCH_AXIS)
