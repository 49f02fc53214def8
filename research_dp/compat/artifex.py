"""Functions of datarax and artifex that take Flax NNX modules.

Flax NNX takes long to import, so `research_dp` imports this file when a name of it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.compat import datarax
from research_dp.compat.nnx import changed
from research_dp.distributed import placement
from research_dp.distributed.collectives import flat_axes
from research_dp.distributed.norms import clip_by_global_norm_sharded
from research_dp.distributed.vma import refuse_mapped
from research_dp.errors import UsageError

Batch = Any


@checked
def spmd_train_step(
    model: nnx.Module,
    optimizer: Annotated[nnx.Optimizer, "an nnx.Optimizer, e.g. nnx.Optimizer(model, tx, wrt=...)"],
    loss_fn: Callable[[nnx.Module, Batch], jax.Array],
    batch: Batch,
    *,
    has_aux: bool = False,
    rngs: Any | None = None,
    max_grad_norm: types.TracedNorm | None = None,
) -> Any:
    """One training step on global arrays; the compiler inserts the collectives (datarax).

    To be called under `nnx.jit`, outside any map. All arrays are on the devices of one mesh, or
    uncommitted (as a model's constructor leaves them); their shardings do not change the numbers.
    On a mesh with `Explicit` axes, parameters that share an axis with the batch are all-gathered
    for the loss. Micro-batches are not accumulated: the compiler would reduce each's gradients.

    Args:
        model: Updated in place, e.g. its batch statistics by `loss_fn`.
        optimizer: Updated in place, with the model's variables of its `wrt`. A
            `nnx.ModelAndOptimizer` must be that of `model`.
        loss_fn: (model, batch) -> loss, 0-d, the mean over the global batch.
        batch: Global arrays, e.g. of `place_batch_on_shards`.
        has_aux: Whether (loss, aux) is what `loss_fn` and the step return, not the loss.
        rngs: If given, `loss_fn` is called with `rngs=rngs`, e.g. an `nnx.Rngs`.
        max_grad_norm: Gradients are scaled to at most this global norm.

    Raises:
        UsageError: Arrays are committed to different devices, or this is called inside a map.
    """
    refuse_mapped("spmd_train_step")
    _refuse_other_devices({"model": nnx.state(model), "batch": batch})
    has_model = isinstance(optimizer, nnx.ModelAndOptimizer)
    if has_model and vars(optimizer)["model"] is not model:
        raise UsageError(
            "spmd_train_step.optimizer is a ModelAndOptimizer of another model: give its own, "
            "optimizer.model, as model."
        )
    loss = _with_gathered_params(loss_fn, optimizer.wrt, batch)
    wrt = nnx.DiffState(0, optimizer.wrt)
    gradients = nnx.value_and_grad(loss, argnums=wrt, has_aux=has_aux)
    value, grads = gradients(model, batch, **({} if rngs is None else {"rngs": rngs}))
    # The loss is a mean over the global batch: the compiler sums over devices, and the mean
    # divides. Nobody may do either again.
    if max_grad_norm is not None:
        grads, _ = clip_by_global_norm_sharded(grads, max_grad_norm, ())
    optimizer.update(*([grads] if has_model else [model, grads]))
    return value


def _with_gathered_params(
    loss_fn: Callable[..., Any], wrt: Any, batch: Batch
) -> Callable[..., Any]:
    """The loss with parameters all-gathered over the batch's `Explicit` axes.

    JAX multiplies no arrays that are sharded over the same such axis, and infers no sharding for
    the gradient of a parameter on no mesh. Gradients come back sharded as the parameters are.
    """
    shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(batch) if types.is_array(x)]
    axes = {name for sharding in shardings for dim in sharding.spec for name in flat_axes(dim)}
    if not axes:
        return loss_fn
    mesh = next(sharding.mesh for sharding in shardings if not sharding.mesh.empty)

    def gathered(x: Any) -> Any:
        if not types.is_array(x):
            return x  # a random key
        spec = jax.typeof(x).sharding.spec
        kept = (tuple(name for name in flat_axes(dim) if name not in axes) for dim in spec)
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))

    def loss(model: nnx.Module, batch: Batch, **kwargs: Any) -> Any:
        graphdef, *variables = nnx.split(model, wrt, ...)
        params, others = jax.tree.map(gathered, variables)
        before = jax.tree.map(lambda x: x, others)  # the module modifies its own variables
        replicated = nnx.merge(graphdef, params, others)
        value = loss_fn(replicated, batch, **kwargs)
        nnx.update(model, changed(before, nnx.state(replicated, nnx.Not(wrt))))
        return value

    return loss


def _refuse_other_devices(tree: Any) -> None:
    """Raises UsageError if arrays are committed to different devices; tracers are skipped."""
    first: dict[Any, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
            first.setdefault(frozenset(x.sharding.device_set), types.path_name(path))
    if len(first) > 1:
        (one, a), (other, b), *_ = first.items()
        raise UsageError(
            f"spmd_train_step: {a} is on {len(one)} devices and {b} on {len(other)} others. Put "
            "model and optimizer on the batch's mesh: place_nnx_state_on_shards."
        )


@checked
def place_nnx_state_on_shards(
    state: Annotated[nnx.State, "an nnx.State, e.g. nnx.state(model)"],
    mesh: Mesh | AbstractMesh,
    filter_sharding: nnx.StateSharding | dict[Any, PartitionSpec | Sharding],
) -> nnx.State:
    """Puts each variable of an NNX state on the sharding of the first filter it matches (datarax).

    `filter_sharding` maps NNX filters, e.g. `nnx.Param`, `...` or a predicate, to the spec on
    `mesh`, or the sharding, of all arrays of the variable. Variables keep types and metadata. A
    variable that matches no filter is a UsageError.
    """
    if not isinstance(filter_sharding, nnx.StateSharding):
        filter_sharding = nnx.StateSharding(filter_sharding)
    filters = list(filter_sharding.filters)
    targets = placement.shardings(mesh, list(filter_sharding.shardings))

    def target(path: tuple[Any, ...], variable: Any) -> Any:
        matches = (nnx.filterlib.to_predicate(each)(path, variable) for each in filters)
        sharding = next(itertools.compress(targets, matches), None)
        if sharding is None:
            raise UsageError(
                f"{'/'.join(map(str, path))!r}, a {type(variable).__name__}, matches none of the "
                f"filters {filters}. Add one, e.g. `...` for all others."
            )
        return jax.tree.map(lambda _: sharding, variable)

    return placement.put(state, nnx.map_state(target, state))


class DataParallel(nnx.Module):
    """artifex's data-parallel functions as methods; it has no state.

    The methods with the suffix `_static` are the same without an instance. The functions that they
    call describe them.
    """

    def __init__(self) -> None:  # artifex's signature
        pass

    def create_data_parallel_sharding(self, mesh: Mesh, data_axis: str = "data") -> NamedSharding:
        """The sharding that splits dim 0 over one mesh axis."""
        return datarax.create_data_parallel_sharding(mesh, data_axis)

    create_data_parallel_sharding_static = staticmethod(datarax.create_data_parallel_sharding)

    def shard_batch(self, batch: Any, sharding: Sharding) -> Any:
        """Puts every leaf on a sharding; `place_batch_on_shards` skips some.

        UsageError, with the path, for a leaf of rank 0 or one that the sharding does not divide.
        """
        return self.shard_batch_static(batch, sharding)

    @staticmethod
    @checked
    def shard_batch_static(batch: types.Placeable, sharding: Sharding) -> Any:
        """As `shard_batch`."""
        return placement.place(batch, sharding)

    def shard_model_state(
        self, state: Any, mesh: Mesh, param_sharding: Literal["replicate", "shard"] = "replicate"
    ) -> Any:
        """As `place_model_state_on_shards`, whose dicts of paths it accepts too."""
        return datarax.place_model_state_on_shards(state, mesh, param_sharding)

    def all_reduce_gradients(
        self,
        gradients: Any,
        reduce_type: Literal["mean", "sum"] = "mean",
        axis_name: str = "batch",
        *,
        loss: jax.Array | None = None,
    ) -> Any:
        """As `reduce_gradients_across_devices`: the mean or sum of each gradient over devices."""
        return datarax.reduce_gradients_across_devices(gradients, reduce_type, axis_name, loss=loss)

    all_reduce_gradients_static = staticmethod(datarax.reduce_gradients_across_devices)

    @checked
    def replicate_params(self, params: types.Placeable, mesh: Mesh | AbstractMesh) -> Any:
        """Replicates every leaf on all devices; Python numbers become arrays."""
        return datarax.place_model_state_on_shards(params, mesh, "replicate")
