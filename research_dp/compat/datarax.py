"""datarax's data-parallel functions, as adapters over this package's primitives.

What needs Flax NNX is in `compat.artifex`. Where datarax fails or guesses, these raise an error or
do what their names promise; docs/api_nnx.md has an example of each.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    AxisNames,
    Limit,
    Number,
    Numbers,
    Placeable,
    is_array,
    path_name,
)
from research_dp.distributed import collectives, gradient_means, placement
from research_dp.distributed.gradient_sync import sync_gradients
from research_dp.distributed.shard_rules import choose_dim
from research_dp.errors import UsageError

PyTree = Any
Batch = Any
# Unknown values are refused by `_by_reduce_type`, in datarax's words.
ReduceType = Annotated[str, Limit(lambda _: True, "'mean' or 'sum'")]


@gin.register(module="distributed")
@checked
def create_data_parallel_sharding(mesh: Mesh | AbstractMesh, data_axis: str = "data") -> Sharding:
    """The sharding that splits dim 0 of an array over one mesh axis (datarax, artifex).

    Raises:
        UsageError: The mesh has no such axis.
    """
    return placement.shardings(mesh, PartitionSpec(data_axis))


@gin.register(module="distributed")
@checked
def place_batch_on_shards(batch: Batch, sharding: Sharding) -> Batch:
    """Puts the arrays of a batch on a sharding (datarax).

    Arrays of numbers and random keys are placed, numpy arrays too (datarax does not place those).
    Other leaves are returned unchanged: strings, Python and numpy scalars, numpy arrays of text or
    objects. With several processes each gives its own rows, as `placement.place` expects.

    Raises:
        UsageError: An array cannot be divided; the message has its path and the numbers.
    """

    def target(x: Any) -> Sharding | None:
        is_placed = isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and is_array(x))
        return sharding if is_placed else None

    return placement.place(batch, jax.tree.map(target, batch))


@gin.register(module="distributed")
@checked
def place_model_state_on_shards(
    state: Placeable,
    mesh: Mesh | AbstractMesh,
    param_sharding: str | Mapping[str, Any] | None = None,
) -> Any:
    """Puts a model's state on a mesh (datarax; artifex's `shard_model_state`).

    `state` is any pytree: dicts, `nnx.State`, train states. Empty sub-dicts are kept. With
    `param_sharding` 'replicate' or None every leaf is replicated. With 'shard' dim 0 of each leaf
    is sharded over the mesh's first axis; scalars, and leaves that it does not divide, are
    replicated. With a dict of paths, e.g. {'params/dense/kernel': PartitionSpec('data', None)},
    these leaves are placed, the others stay where they are.

    Raises:
        UsageError: An unknown string, a path of no leaf (with the nearest paths), or a spec with an
            axis that the mesh lacks or that does not divide its leaf.
    """
    if isinstance(param_sharding, Mapping):
        return placement.put(state, _matched(state, placement.shardings(mesh, param_sharding)))
    if param_sharding == "shard":
        specs = jax.tree.map(lambda x: _dim_0_spec(x, mesh), state)
    elif param_sharding in (None, "replicate"):
        specs = PartitionSpec()
    else:
        raise UsageError(
            f"Unknown param_sharding: {param_sharding!r}. Use 'replicate', 'shard', None or a dict "
            "of paths to PartitionSpecs."
        )
    return placement.put(state, placement.shardings(mesh, specs))


def _matched(tree: PyTree, rules: Mapping[str, Sharding]) -> PyTree:
    """The sharding of each leaf by its path, or None; UsageError for a path of no leaf."""
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for name in sorted(set(rules) - set(paths)):
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.3) or sorted(paths)[:3]
        raise UsageError(
            f"param_sharding {name!r} matches none of {len(paths)} paths; near it: "
            f"{', '.join(map(repr, near)) or 'nothing'}. Give the full path of a leaf."
        )
    return jax.tree.unflatten(jax.tree.structure(tree), [rules.get(path) for path in paths])


def _dim_0_spec(x: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    axis, shape = mesh.axis_names[0], np.shape(x)
    free = tuple(dim == 0 for dim in range(len(shape)))
    decision = choose_dim(shape, mesh.shape[axis], min_weight_size=0, free=free)
    return PartitionSpec() if decision.dim is None else PartitionSpec(axis)


@gin.register(module="distributed")
@checked
def reduce_gradients_across_devices(
    gradients: Numbers,
    reduce_type: ReduceType = "mean",
    axis_name: AxisNames = "batch",
    *,
    loss: Number | None = None,
) -> Any:
    """Mean or sum of each gradient over the devices (datarax; artifex's `all_reduce_gradients`).

    Inside `shard_map`, `pmap` or `vmap(axis_name=...)`. Under `nnx.jit` and `jax.jit` the compiler
    does it: see `spmd_train_step`.

    Args:
        gradients: Gradients of each device's own loss. Leaves keep shape and dtype; the mean of
            integers is a float32. Under `shard_map(check_vma=True)` autodiff has already summed
            those of replicated parameters: they are not summed again, and their mean needs `loss`.
            Boxes that the axis splits keep their means (`sync_gradients`).
        reduce_type: 'mean' or 'sum', in any case of letters.
        axis_name: The bound axis, or a tuple of several.
        loss: The loss that was differentiated, as in `sync_gradients`: its type shows whether it
            was averaged over devices before, which gradients do not show.

    Raises:
        UsageError: Another `reduce_type`; the sum of gradients whose `loss` was averaged before; or
            the mean of gradients that are the same on each device, without `loss`.
        NameError: The axis is not bound, e.g. `pmap` was not given `axis_name`.
    """
    axes = collectives.flat_axes(axis_name)

    def mean(gradients: Any) -> Any:
        return sync_gradients(gradients, axis_names=axes, loss=loss)

    def total(gradients: Any) -> Any:
        gradient_means.check_own_loss(loss, axes)
        # Sums over `axes` unless autodiff has summed already. Nothing is divided.
        return jax.tree.map(lambda gradient: gradient_means.sum_gradient(gradient, axes), gradients)

    return _by_reduce_type(reduce_type, mean=mean, sum=total)(gradients)


@gin.register(module="distributed")
@checked
def reduce_gradient_tree(gradients: Numbers, reduce_type: ReduceType = "mean") -> Any:
    """Mean or sum over all elements of each gradient: one scalar a leaf (datarax).

    In spite of its name it does not average over devices: datarax has it so, for statistics.
    Gradients under `jit` are global arrays, already reduced (`spmd_train_step`); inside `shard_map`
    and `pmap` use `reduce_gradients_across_devices`. `reduce_type` may have any case of letters.
    """
    return jax.tree.map(_by_reduce_type(reduce_type, mean=jnp.mean, sum=jnp.sum), gradients)


def _by_reduce_type(reduce_type: str, **functions: Callable[..., Any]) -> Callable[..., Any]:
    if str(reduce_type).lower() not in functions:
        raise UsageError(f"Unsupported reduce_type: {reduce_type}. Use 'mean' or 'sum'.")
    return functions[str(reduce_type).lower()]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The mesh axis that each logical dim is sharded over, or None (datarax).

    `PartitionSpec(*rules('data', 'embed'))` is the spec of an array with these dims: the batch and
    embeddings. `mlp` is for hidden layers, `heads` for attention heads.
    """

    data: str | None = None
    embed: str | None = None
    mlp: str | None = None
    heads: str | None = None

    def __call__(self, *dims: str) -> tuple[str | None, ...]:
        """The mesh axis of each dim; AttributeError for a name without a rule."""
        return tuple(getattr(self, dim) for dim in dims)


@gin.register(module="distributed")
@checked
def data_parallel_rules(data_axis: str = "data") -> MeshRules:
    """Rules that shard only the batch (datarax)."""
    return MeshRules(data=data_axis)
