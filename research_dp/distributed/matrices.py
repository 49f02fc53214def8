"""Where the complete matrices of an update are computed: each on one device."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays
from research_dp.distributed.buckets import pad_to_multiple
from research_dp.distributed.collectives import Axes, axes_size
from research_dp.distributed.sharding import fitted
from research_dp.errors import UsageError
from research_dp.types import PyTree

MatrixFunction = Callable[[jax.Array], jax.Array]

# The mesh over which an update's arrays are sharded, over which of its axes, and the dims that are,
# by parameter.
_MESH: Any = jax.make_user_context(None)
_AXES: Any = jax.make_user_context(None)
_DIMS: Any = jax.make_user_context(None)


@contextlib.contextmanager
def over(mesh: Mesh, shardings: PyTree) -> Iterator[None]:
    """While an update of arrays with these `LeafSharding`s is traced."""
    leaves = [p for p in jax.tree.leaves(shardings) if p.dim is not None]
    dims, axes = tuple((p.path, p.dim) for p in leaves), leaves[0].axes if leaves else ()
    with _MESH(mesh if leaves else None), _AXES(axes), _DIMS(dims):
        yield


def sharded_dim(path: str) -> int | None:
    """The sharded dim of a parameter, and of its gradient; None: it is not, or not known."""
    return dict(_DIMS.value or ()).get(path)


@checked
def on_matrices(function: MatrixFunction, tree: Arrays) -> PyTree:
    """Applies a function to complete matrices, however the arrays of a tree are sharded.

    For optimizers: under a strategy that shards gradients each device gets its share of the
    matrices, by one all-to-all for all matrices of a shape, and another brings back what they
    became. Elsewhere the function is just called.

    Args:
        function: Maps a batch of matrices (batch, rows, columns) to one of the same shape and
            dtype, each by itself, whatever the batch.
        tree: Arrays (..., rows, columns). One that is sharded along columns is sent once more.

    Returns:
        A tree like `tree`.

    Raises:
        UsageError: An array has fewer than two dims, or the function changes a shape or dtype.
    """
    return on_shared_matrices(function, tree, jax.tree.map(lambda _: True, tree))


def on_shared_matrices(function: MatrixFunction, tree: PyTree, by_rows: PyTree) -> PyTree:
    """`on_matrices`; `by_rows` says of each array whether it is sharded along rows, not columns."""
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
    mesh, cut = _MESH.value, jax.tree.leaves(by_rows)
    results = _shared_out(function, flat, cut, mesh) if mesh else map(function, flat)
    shaped = [y.reshape(x.shape) for x, y in zip(leaves, results, strict=True)]
    return jax.tree.unflatten(treedef, shaped)


def _shared_out(
    function: MatrixFunction, given: list[jax.Array], by_rows: list[bool], mesh: Mesh
) -> list[jax.Array]:
    """Batches of matrices after the function; each class of equal shapes as one batch."""
    results, classes, axes = list(given), dict[Any, list[int]](), _AXES.value
    n = math.prod(mesh.shape[axis] for axis in axes)
    for i, x in enumerate(given):
        classes.setdefault((x.shape[1:], x.dtype), []).append(i)
    for ((rows, columns), _), members in classes.items():
        can = [d for d, length in ((1, rows), (2, columns)) if length % n == 0]
        can = can or [1 if by_rows[members[0]] else 2]  # padded, all alike: shards of one size
        dims = [d if (d := 1 if by_rows[i] else 2) in can else can[0] for i in members]
        specs = [PartitionSpec(*(None,) * dim, axes) for dim in dims]
        share = functools.partial(_of_shards, function, (rows, columns), dims=dims, axes=axes)
        on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        parts = [pad_to_multiple(given[i], n, dim) for i, dim in zip(members, dims, strict=True)]
        new = on_mesh(share, in_specs=(specs,), out_specs=specs)(parts)
        for i, x in zip(members, new, strict=True):
            results[i] = fitted(x, given[i].shape)
    return results


def _of_shards(
    function: MatrixFunction,
    shape: tuple[int, int],
    given: list[jax.Array],
    dims: Sequence[int],
    axes: Axes,
) -> list[jax.Array]:
    """This device's shards of batches of matrices of one shape, along dims, after the function.

    `shape` is that of a matrix without padding.
    """
    n, counts = axes_size(axes), [len(x) for x in given]
    rows, columns = (s * n if d == dims[0] else s for d, s in enumerate(given[0].shape) if d)
    each = -(-sum(counts) // n)  # matrices that a device gets; the last ones are zeros
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in given])
    flat = jnp.pad(flat, ((0, n * each - sum(counts)), (0, 0)))
    by_rows = np.resize(np.repeat([d == 1 for d in dims], counts), (n, each))
    here = jnp.asarray(by_rows)[lax.axis_index(axes)][:, None, None]

    def either(of_rows: Callable[[], jax.Array], of_columns: Callable[[], jax.Array]) -> jax.Array:
        """By how the shards of each matrix were cut."""
        if by_rows.all() or not by_rows.any():
            return of_rows() if by_rows.all() else of_columns()
        a, b = of_rows(), of_columns()
        return jnp.where(here.reshape(each, *(1,) * (a.ndim - 1)), a, b)

    def exchange(x: jax.Array) -> jax.Array:  # (devices, each, ...), by device
        return lax.all_to_all(x, axes, 0, 0, tiled=True)

    parts = exchange(flat.reshape(n, each, -1)).swapaxes(0, 1)
    cut = (each, n, rows, columns // n)
    complete = either(
        lambda: parts.reshape(each, rows, columns),
        lambda: parts.reshape(cut).swapaxes(1, 2).reshape(each, rows, columns),
    )
    new = fitted(function(fitted(complete, (each, *shape))), complete.shape)
    parts = either(
        lambda: new.reshape(each, n, -1),
        lambda: new.reshape(each, rows, n, -1).swapaxes(1, 2).reshape(each, n, -1),
    )
    flat = exchange(parts.swapaxes(0, 1)).reshape(n * each, -1)
    pieces = jnp.split(flat[: sum(counts)], np.cumsum(counts)[:-1])
    return [x.reshape(like.shape) for x, like in zip(pieces, given, strict=True)]
