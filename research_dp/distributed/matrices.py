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

# The mesh over which an update's arrays are sharded, and the dims that are, by parameter.
_MESH: Any = jax.make_user_context(None)
_DIMS: Any = jax.make_user_context(None)


@contextlib.contextmanager
def over(mesh: Mesh, shardings: PyTree) -> Iterator[None]:
    """While an update of arrays with these `LeafSharding`s is traced."""
    sharded = tuple((p.path, p.dim) for p in jax.tree.leaves(shardings) if p.dim is not None)
    with _MESH(mesh if sharded else None), _DIMS(sharded):
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
    results, classes, n = list(given), dict[Any, list[int]](), mesh.shape[FSDP_AXIS]
    for i, x in enumerate(given):
        classes.setdefault((x.shape[1:], x.dtype), []).append(i)
    for ((rows, columns), _), members in classes.items():
        can = [d for d, length in ((1, rows), (2, columns)) if length % n == 0]
        if not can:  # the devices divide neither dim: left to the compiler
            new = [function(given[i]) for i in members]
        else:
            dims = [d if (d := 1 if by_rows[i] else 2) in can else can[0] for i in members]
            specs = [PartitionSpec(*(None,) * dim, FSDP_AXIS) for dim in dims]
            share = functools.partial(_of_shards, function, dims=dims, devices=n)
            on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
            new = on_mesh(share, in_specs=(specs,), out_specs=specs)([given[i] for i in members])
        for i, x in zip(members, new, strict=True):
            results[i] = x
    return results


def _of_shards(
    function: MatrixFunction, given: list[jax.Array], dims: Sequence[int], devices: int
) -> list[jax.Array]:
    """This device's shards of batches of matrices of one shape, along dims, after the function."""
    n, counts = devices, [len(x) for x in given]
    rows, columns = (s * n if d == dims[0] else s for d, s in enumerate(given[0].shape) if d)
    each = -(-sum(counts) // n)  # matrices that a device gets; the last ones are zeros
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in given])
    flat = jnp.pad(flat, ((0, n * each - sum(counts)), (0, 0)))
    by_rows = np.resize(np.repeat([d == 1 for d in dims], counts), (n, each))
    here = jnp.asarray(by_rows)[lax.axis_index(FSDP_AXIS)][:, None, None]

    def either(of_rows: Callable[[], jax.Array], of_columns: Callable[[], jax.Array]) -> jax.Array:
        """By how the shards of each matrix were cut."""
        if by_rows.all() or not by_rows.any():
            return of_rows() if by_rows.all() else of_columns()
        a, b = of_rows(), of_columns()
        return jnp.where(here.reshape(each, *(1,) * (a.ndim - 1)), a, b)

    def exchange(x: jax.Array) -> jax.Array:  # (devices, each, ...), by device
        return lax.all_to_all(x, FSDP_AXIS, 0, 0, tiled=True)

    parts = exchange(flat.reshape(n, each, -1)).swapaxes(0, 1)
    cut = (each, n, rows, columns // n)
    complete = either(
        lambda: parts.reshape(each, rows, columns),
        lambda: parts.reshape(cut).swapaxes(1, 2).reshape(each, rows, columns),
    )
    new = function(complete)
    parts = either(
        lambda: new.reshape(each, n, -1),
        lambda: new.reshape(each, rows, n, -1).swapaxes(1, 2).reshape(each, n, -1),
    )
    flat = exchange(parts.swapaxes(0, 1)).reshape(n * each, -1)
    pieces = jnp.split(flat[: sum(counts)], np.cumsum(counts)[:-1])
    return [x.reshape(like.shape) for x, like in zip(pieces, given, strict=True)]
