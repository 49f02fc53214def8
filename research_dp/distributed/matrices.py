"""Where the complete matrices of an update are computed: each on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.errors import UsageError
from research_dp.types import PyTree

MatrixFunction = Callable[[jax.Array], jax.Array]

_MESH: Any = jax.make_user_context(None)  # over which an update's arrays are sharded


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """While an update is traced: the mesh that its arrays are sharded over; None: they are not."""
    with _MESH(mesh if mesh is not None and mesh.shape[FSDP_AXIS] > 1 else None):
        yield


@checked
def on_matrices(function: MatrixFunction, tree: Arrays) -> PyTree:
    """Applies a function to complete matrices, however the arrays of a tree are sharded.

    For optimizers: under a strategy that shards gradients each device gets its share of the
    matrices, by one all-to-all for all matrices of a shape, and another brings back what they
    became. Elsewhere the function is just called.

    Args:
        function: Maps a batch of matrices (batch, rows, columns) to one of the same shape and
            dtype, each by itself, whatever the batch.
        tree: Arrays (..., rows, columns).

    Returns:
        A tree like `tree`.

    Raises:
        UsageError: An array has fewer than two dims, or the function changes a shape or dtype.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flat = []
    for x in leaves:
        if jnp.ndim(x) < 2:
            raise UsageError(f"on_matrices: an array of shape {jnp.shape(x)} has no matrices.")
        flat.append(x.reshape(-1, *x.shape[-2:]))
        like = jax.eval_shape(function, flat[-1])
        if (like.shape, like.dtype) != (flat[-1].shape, x.dtype):
            problem = f"makes {like.shape} {like.dtype} of {flat[-1].shape} {x.dtype}"
            raise UsageError(f"on_matrices: the function {problem}. Keep shape and dtype.")
    results = _shared_out(function, flat, _MESH.value) if _MESH.value else map(function, flat)
    shaped = [y.reshape(x.shape) for x, y in zip(leaves, results, strict=True)]
    return jax.tree.unflatten(treedef, shaped)


def _shared_out(function: MatrixFunction, given: list[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Batches of matrices after the function; each class of equal shapes as one batch."""
    results, classes = list(given), dict[Any, list[int]]()
    for i, x in enumerate(given):
        classes.setdefault((x.shape[1:], x.dtype), []).append(i)
    for members in classes.values():
        new = _of_class(function, [given[i] for i in members], mesh)
        for i, x in zip(members, new, strict=True):
            results[i] = x
    return results


def _of_class(function: MatrixFunction, given: list[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Batches of matrices of one shape, of which each device has a part of the rows or columns."""
    n, (rows, columns) = mesh.shape[FSDP_AXIS], given[0].shape[1:]
    dim = max(((s, d) for d, s in ((1, rows), (2, columns)) if s % n == 0), default=(0, 0))[1]
    if not dim:  # too few elements to share
        return [function(x) for x in given]
    spec = PartitionSpec(*(None,) * dim, FSDP_AXIS)
    share = functools.partial(_of_shards, function, dim=dim, devices=n)
    return jax.shard_map(share, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(given)


def _of_shards(
    function: MatrixFunction, given: Sequence[jax.Array], dim: int, devices: int
) -> list[jax.Array]:
    """This device's shards, along dim 1 or 2, of batches of matrices after the function."""
    counts = [len(x) for x in given]
    each = -(-sum(counts) // devices)  # matrices that a device gets; the last ones are zeros
    shards = jnp.pad(jnp.concatenate(given), ((0, devices * each - sum(counts)), (0, 0), (0, 0)))
    complete = lax.all_to_all(shards, FSDP_AXIS, 0, dim, tiled=True)
    shards = lax.all_to_all(function(complete), FSDP_AXIS, dim, 0, tiled=True)
    return jnp.split(shards[: sum(counts)], np.cumsum(counts)[:-1])
