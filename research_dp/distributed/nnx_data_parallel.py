"""The functions of datarax and artifex that need Flax NNX.

Flax NNX takes long to import, so `research_dp` imports this file when a name of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin
import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp.distributed import data_parallel, placement
from research_dp.distributed.clipping import clip_by_global_norm_sharded
from research_dp.distributed.errors import UsageError
from research_dp.distributed.replication import refuse_mapped
from research_dp.distributed.updates import check_max_norm

Batch = Any


def spmd_train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    loss_fn: Callable[[nnx.Module, Batch], jax.Array],
    batch: Batch,
    *,
    has_aux: bool = False,
    rngs: Any | None = None,
    max_grad_norm: float | None = None,
) -> Any:
    """One training step on global arrays; the compiler inserts the collectives (datarax).

    To be called under `nnx.jit`. Wherever model, optimizer and batch lie (replicated, sharded, on
    one device), the numbers are those of one device. There is no accumulation of micro-batches
    here, because the compiler would reduce the gradients of each: use a strategy.

    Args:
        model: Updated in place, e.g. its batch statistics by `loss_fn`.
        optimizer: Updated in place, and the model's variables of its `wrt` with it.
        loss_fn: (model, batch) -> loss, 0-d: the mean over the whole batch.
        batch: Global arrays, e.g. of `place_batch_on_shards`.
        has_aux: `loss_fn` returns (loss, aux).
        rngs: If given, `loss_fn` is called with `rngs=rngs`, e.g. an `nnx.Rngs`.
        max_grad_norm: Gradients are scaled to at most this global norm.

    Returns:
        The loss, or (loss, aux) with `has_aux`.

    Raises:
        UsageError: `max_grad_norm` is not a number of at least 0, or it is called inside
            `shard_map`, `pmap` or `vmap(axis_name=...)`.
    """
    refuse_mapped("spmd_train_step")
    check_max_norm("max_grad_norm", max_grad_norm)
    of_model = nnx.DiffState(0, optimizer.wrt)
    gradients = nnx.value_and_grad(loss_fn, argnums=of_model, has_aux=has_aux)
    value, grads = gradients(model, batch, **({} if rngs is None else {"rngs": rngs}))
    # The loss is a mean over the global batch, so the compiler sums over devices where the batch
    # is split, and the mean divides: nobody may do either again.
    if max_grad_norm is not None:
        grads, _ = clip_by_global_norm_sharded(grads, max_grad_norm, ())
    optimizer.update(model, grads)
    return value


def place_nnx_state_on_shards(
    state: nnx.State,
    mesh: Mesh,
    filter_sharding: nnx.StateSharding | dict[Any, PartitionSpec | Sharding],
) -> nnx.State:
    """Puts the variables of an NNX state where the first filter that matches each says (datarax).

    Args:
        state: E.g. `nnx.state(model)`, or `nnx.state(optimizer)`.
        mesh: A mesh with axes of type `Auto` or `Explicit`.
        filter_sharding: NNX filters, e.g. `nnx.Param`, `...` or a predicate, -> the spec on `mesh`,
            or a whole sharding, of all arrays of the variable.

    Returns:
        A state of the same variables, their types and metadata kept.

    Raises:
        UsageError: A variable that no filter matches, a spec with an axis that the mesh lacks or
            that does not divide an array; the message has the variable's path.
    """
    if not isinstance(filter_sharding, nnx.StateSharding):
        filter_sharding = nnx.StateSharding(filter_sharding)
    filters = filter_sharding.filters
    targets = placement.shardings(mesh, list(filter_sharding.shardings))

    def target(path: tuple[Any, ...], variable: Any) -> Any:
        first = _first_match(filters, path, variable)
        return jax.tree.map(lambda _: targets[first], variable)

    return placement.put(state, nnx.map_state(target, state))


def _first_match(filters: Sequence[Any], path: tuple[Any, ...], variable: Any) -> int:
    """Index of the first filter that matches a variable."""
    for index, each in enumerate(filters):
        if nnx.filterlib.to_predicate(each)(path, variable):
            return index
    raise UsageError(
        f"{'/'.join(map(str, path))!r}, a {type(variable).__name__}, matches none of the filters "
        f"{list(filters)}. Add one, e.g. `...` for all others."
    )


class DataParallel(nnx.Module):
    """artifex's data-parallel functions as methods; it holds no state.

    Those that have a twin with the suffix `_static` are the same without an instance.
    """

    def __init__(self) -> None:
        pass

    def create_data_parallel_sharding(self, mesh: Mesh, data_axis: str = "data") -> NamedSharding:
        """See `research_dp.create_data_parallel_sharding`."""
        return self.create_data_parallel_sharding_static(mesh, data_axis)

    @staticmethod
    def create_data_parallel_sharding_static(mesh: Mesh, data_axis: str = "data") -> NamedSharding:
        """See `research_dp.create_data_parallel_sharding`."""
        return data_parallel.create_data_parallel_sharding(mesh, data_axis)

    def shard_batch(self, batch: Any, sharding: NamedSharding) -> Any:
        """Puts every leaf of a batch on a sharding; `place_batch_on_shards` spares some.

        Args:
            batch: Any pytree of jax and numpy arrays.
            sharding: E.g. of `create_data_parallel_sharding`.

        Raises:
            UsageError: A leaf of rank 0 (a number, a string), or one that cannot be divided; the
                message has its path.
        """
        return self.shard_batch_static(batch, sharding)

    @staticmethod
    def shard_batch_static(batch: Any, sharding: NamedSharding) -> Any:
        """See `shard_batch`."""
        return placement.place(batch, sharding)

    def shard_model_state(
        self, state: Any, mesh: Mesh, param_sharding: Literal["replicate", "shard"] = "replicate"
    ) -> Any:
        """See `research_dp.place_model_state_on_shards`, whose dicts of paths it takes too."""
        return data_parallel.place_model_state_on_shards(state, mesh, param_sharding)

    def all_reduce_gradients(
        self,
        gradients: Any,
        reduce_type: Literal["mean", "sum"] = "mean",
        axis_name: str = "batch",
        *,
        loss: jax.Array | None = None,
    ) -> Any:
        """See `research_dp.reduce_gradients_across_devices`."""
        return self.all_reduce_gradients_static(gradients, reduce_type, axis_name, loss=loss)

    @staticmethod
    def all_reduce_gradients_static(
        gradients: Any,
        reduce_type: Literal["mean", "sum"] = "mean",
        axis_name: str = "batch",
        *,
        loss: jax.Array | None = None,
    ) -> Any:
        """See `research_dp.reduce_gradients_across_devices`."""
        return data_parallel.reduce_gradients_across_devices(
            gradients, reduce_type, axis_name, loss=loss
        )

    def replicate_params(self, params: Any, mesh: Mesh) -> Any:
        """Puts every leaf whole on every device; Python numbers become arrays."""
        return data_parallel.place_model_state_on_shards(params, mesh, "replicate")


with gin.unlock_config():  # this file may be imported after the configuration was locked
    for _each in (spmd_train_step, place_nnx_state_on_shards, DataParallel):
        gin.register(module="distributed")(_each)
