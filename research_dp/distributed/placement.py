"""Putting trees on shardings, and saying where a global batch lies."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed.layout import by_path

PyTree = Any


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """`NamedSharding`s for a tree of `PartitionSpec`s."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def place(tree: PyTree, tree_shardings: PyTree) -> PyTree:
    """Puts this process's part of each host array on its sharding.

    Args:
        tree: Host arrays, holding what this process's devices need, in global order.
        tree_shardings: One sharding for all leaves, or a tree of them.

    Returns:
        Global arrays.
    """
    if isinstance(tree_shardings, jax.sharding.Sharding):
        tree_shardings = jax.tree.map(lambda _: tree_shardings, tree)
    if jax.process_count() == 1:
        return jax.device_put(tree, tree_shardings)
    return jax.tree.map(
        lambda x, s: jax.make_array_from_process_local_data(s, np.asarray(x)), tree, tree_shardings
    )


def local_indices(sharding: NamedSharding, shape: tuple[int, ...], dim: int) -> np.ndarray:
    """Indices along `dim` of a global array that this process's devices hold, ascending."""
    held = {
        index
        for slices in sharding.addressable_devices_indices_map(shape).values()
        if slices is not None
        for index in range(*slices[dim].indices(shape[dim]))
    }
    return np.asarray(sorted(held), np.int64)


def fingerprint(tree: PyTree) -> str:
    """SHA-256 over a tree of global arrays: path, dtype, shape and bytes of each, sorted by path.

    The same for any strategy, mesh and number of processes. Leaf by leaf, so that the host holds
    one whole array at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in by_path(tree).items():
        array = host_array(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def host_array(x: Any) -> np.ndarray:
    """A global array as a numpy array, in every process (a collective, if there are several)."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
