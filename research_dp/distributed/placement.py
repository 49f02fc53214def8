"""Puts trees of arrays on shardings, and reads global arrays back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp.distributed.collectives import flat_axes
from research_dp.distributed.sharding import by_path, path_name
from research_dp.errors import UsageError

PyTree = Any


def shardings(mesh: Mesh | AbstractMesh, specs: PyTree) -> PyTree:
    """`NamedSharding`s for a tree of `PartitionSpec`s; a `Sharding` in the tree is kept.

    Raises UsageError if a spec names an axis that the mesh lacks.
    """

    def on_mesh(path: Any, spec: Any) -> Sharding:
        if isinstance(spec, Sharding):
            return spec
        where = f" of {path_name(path)!r}" if path else ""
        if not isinstance(spec, PartitionSpec):
            raise UsageError(f"{spec!r}{where} is no jax.sharding.PartitionSpec.")
        missing = [a for dim in spec for a in flat_axes(dim) if a not in mesh.axis_names]
        if missing:
            raise UsageError(
                f"{spec}{where}: axis {missing[0]!r} is not found in mesh {dict(mesh.shape)}. "
                "Name one of the mesh's axes."
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        on_mesh, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def nbytes(tree: PyTree) -> tuple[int, int]:
    """Bytes of a tree of arrays with shardings, abstract ones too: (per device, in total)."""
    leaves = jax.tree.leaves(tree)
    local = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return local, sum(x.size * x.dtype.itemsize for x in leaves)


def place(tree: PyTree, tree_shardings: PyTree) -> PyTree:
    """Puts this process's part of each host array on its sharding, as global arrays.

    `tree` has the rows of this process's devices, in global order; arrays that are global already
    are resharded. `tree_shardings` is one for all leaves, or a tree in which None leaves a leaf
    where it is. Raises UsageError, with the path, if an array cannot be divided so.
    """

    def from_rows(path: Any, x: Any, sharding: Sharding) -> jax.Array:
        del path  # the number of rows depends on the process: jax checks it
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return _put(tree, tree_shardings, from_rows)


def put(tree: PyTree, tree_shardings: PyTree) -> PyTree:
    """Puts full arrays, the same in every process, on shardings: `place` for parameters."""

    def from_full(path: Any, x: Any, sharding: Sharding) -> jax.Array:
        _check_divides(path, x, sharding)
        full = x if isinstance(x, jax.Array) else np.asarray(x)
        return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])

    return _put(tree, tree_shardings, from_full)


def _put(
    tree: PyTree, tree_shardings: PyTree, assemble: Callable[[Any, Any, Sharding], jax.Array]
) -> PyTree:
    """Puts the leaves that have a sharding.

    `assemble(path, leaf, sharding)` makes a global array of what one of several processes has.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    treedef: Any = jax.tree.structure(tree)
    leaves = [leaf for _, leaf in flat]
    if isinstance(tree_shardings, Sharding):
        targets = [tree_shardings] * len(leaves)
    else:
        targets = treedef.flatten_up_to(tree_shardings)
    chosen = [i for i, target in enumerate(targets) if target is not None]
    for i in chosen:
        if jax.process_count() > 1 and not _is_global(leaves[i]):
            leaves[i] = assemble(flat[i][0], leaves[i], targets[i])
        else:
            _check_divides(flat[i][0], leaves[i], targets[i])
    arrays = jax.device_put([leaves[i] for i in chosen], [targets[i] for i in chosen])
    for i, x in zip(chosen, arrays, strict=True):
        target = targets[i]
        explicit = isinstance(target, NamedSharding) and target.mesh.are_all_axes_explicit
        if isinstance(x, jax.core.Tracer) and not explicit:
            # Under `jit` with `Auto` axes the compiler ignores device_put, but not this.
            x = jax.lax.with_sharding_constraint(x, target)
        leaves[i] = x
    return treedef.unflatten(leaves)


def _is_global(x: Any) -> bool:
    """Whether an array consists of all processes' parts already, or is traced."""
    return isinstance(x, jax.Array) and (
        isinstance(x, jax.core.Tracer) or not x.is_fully_addressable
    )


def _check_divides(path: Any, x: Any, sharding: Sharding) -> None:
    if not isinstance(sharding, NamedSharding):
        return
    shape = np.shape(x)
    for dim, names in enumerate(sharding.spec):
        parts = math.prod(sharding.mesh.shape[axis] for axis in flat_axes(names))
        if dim >= len(shape):
            problem = f"rank {len(shape)} is too small for {sharding.spec}. Leave it out, or"
        elif shape[dim] % parts:
            problem = (
                f"dim {dim} of length {shape[dim]} is not divisible by {parts}, the devices on "
                f"mesh axis {names!r}. Pad or drop rows, or"
            )
        else:
            continue
        name = repr(path_name(path)) if path else "an array"
        raise UsageError(
            f"{name} of shape {shape} cannot be sharded: {problem} replicate it with "
            "PartitionSpec()."
        )


def local_indices(sharding: NamedSharding, shape: tuple[int, ...], dim: int) -> np.ndarray:
    """Indices along `dim` of a global array that are on this process's devices, ascending."""
    indices = {
        index
        for slices in sharding.addressable_devices_indices_map(shape).values()
        if slices is not None
        for index in range(*slices[dim].indices(shape[dim]))
    }
    return np.asarray(sorted(indices), np.int64)


def fingerprint(tree: PyTree, alive: Callable[[], None] = lambda: None) -> str:
    """SHA-256 over a tree of global arrays: path, dtype, shape and bytes of each, sorted by path.

    The same 64 hex digits for any strategy, mesh and number of processes. The host reads one array
    at a time, and calls `alive` before each: billions of parameters take minutes.
    """
    digest = hashlib.sha256()
    for path, leaf in by_path(tree).items():
        alive()
        array = host_array(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def host_array(x: Any) -> np.ndarray:
    """A global array as a numpy array, in every process (a collective, if there are several)."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
