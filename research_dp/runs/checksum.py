"""A checksum of an array that does not depend on its sharding.

Integer sums over the elements, each mixed with its position, are exact in any order: each device
sums its shard, and a host that reads the array from a file finds the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.distributed.sharding import by_path, fitted, key_data

PyTree = Any

_CHUNK = 2**22  # elements that the host reads at a time
_SMALL = 2**16  # the host reads arrays of so many elements sooner than a program is compiled


def tree_checksums(
    tree: PyTree, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Mapping[str, str]:
    """Checksums of global arrays, by path: 16 hex digits each, the same for any sharding.

    `shapes` are those without padding, of arrays that have some (`cut_shapes`).

    A change of one element always changes a checksum, other changes with probability 1 - 2**-64.
    Elements have 1, 2, 4 or 8 bytes. Devices with replicas of an array share the work, and do not
    communicate. A collective, if there are several processes.
    """
    arrays = by_path(key_data(tree))
    # What is stored in parts has its elements in the same order.
    lengths = {path: x.shape for path, x in arrays.items()}
    for path, shape in (shapes or {}).items():
        if arrays[path].size != math.prod(shape):
            lengths[path] = shape
    on_device = [path for path, x in arrays.items() if not _is_for_host(x)]
    # All devices' programs start before the host reads.
    parts = [
        _sums_of_parts(arrays[path], _fully_sharded(arrays[path]), lengths[path])
        for path in on_device
    ]
    on_host = {path: x for path, x in arrays.items() if path not in on_device}
    sums = {p: array_checksum(fitted(np.asarray(x), lengths[p])) for p, x in on_host.items()}
    if parts:
        local = np.stack([sum(np.asarray(s.data)[0] for s in x.addressable_shards) for x in parts])
        if jax.process_count() > 1:
            local = np.asarray(multihost_utils.process_allgather(local)).sum(0, dtype=np.uint32)
        sums |= zip(on_device, map(_hex, local), strict=True)
    return {path: sums[path] for path in arrays}


def _is_for_host(x: Any) -> bool:
    """Whether the host reads an array; all processes decide alike."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return True
    return x.size <= _SMALL and (x.is_fully_addressable or x.is_fully_replicated)


def array_checksum(x: np.ndarray) -> str:
    """The same of an array on the host, by numpy."""
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.view(np.dtype(f"u{min(flat.itemsize, 4)}"))
    total = np.zeros(2, np.uint64)
    for start in range(0, flat.size, _CHUNK):
        bits = flat[start : start + _CHUNK].astype(np.uint32)
        positions = np.arange(start, start + bits.size, dtype=np.uint64).astype(np.uint32)
        mixed, weights = _mix(bits, positions)
        total += [mixed.sum(dtype=np.uint64), (mixed * weights).sum(dtype=np.uint64)]
    return _hex(total.astype(np.uint32))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sums_of_parts(x: jax.Array, sharding: NamedSharding, cut: tuple[int, ...]) -> jax.Array:
    """(devices, 2) uint32: the sums of each device over its part of an array, cut to a shape."""
    by_dim, replica_axes = _axes_of(sharding, x.ndim)

    def sums(block: jax.Array) -> jax.Array:
        bits = as_bits(block)
        shape = (*cut, *bits.shape[x.ndim :])
        positions, padding = jnp.zeros(bits.shape, jnp.uint32), list[jax.Array]()
        for dim, length in enumerate(bits.shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
            if dim < x.ndim and by_dim[dim]:
                index += jax.lax.axis_index(by_dim[dim]).astype(jnp.uint32) * np.uint32(length)
            positions += index * np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
            if dim < x.ndim and cut[dim] < x.shape[dim]:
                padding.append(index >= cut[dim])
        mixed, weights = _mix(bits, positions)
        for is_padding in padding:
            mixed = jnp.where(is_padding, 0, mixed)
        result = jnp.stack([jnp.sum(y, dtype=jnp.uint32) for y in (mixed, mixed * weights)])
        for axis in replica_axes:  # only the first of several replicas counts
            result = jnp.where(jax.lax.axis_index(axis) == 0, result, 0)
        return result[None]

    mesh, everywhere = sharding.mesh, PartitionSpec(sharding.mesh.axis_names)
    return jax.shard_map(
        sums, mesh=mesh, in_specs=sharding.spec, out_specs=everywhere, check_vma=False
    )(x)


def as_bits(x: jax.Array) -> jax.Array:
    """Elements as uint32; those of 8 bytes, and random keys, as several in a dim of their own."""
    x = key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    unsigned = jnp.dtype(f"u{min(x.dtype.itemsize, 4)}")
    if x.dtype == jnp.bool_:
        x = x.astype(unsigned)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(bits: Any, positions: Any) -> tuple[Any, Any]:
    """(elements mixed with their positions, odd weights); uint32.

    The mixing (Wellons' lowbias32, 2018) is a bijection: different elements at a position differ.
    """
    x = bits + positions * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16)), positions * np.uint32(2) + np.uint32(1)


def _fully_sharded(x: jax.Array) -> NamedSharding:
    """A sharding that also splits an array over its replicas' axes, if they divide a dim."""
    sharding: Any = x.sharding
    by_dim, replica_axes = _axes_of(sharding, x.ndim)
    if not replica_axes or not sharding.mesh.are_all_axes_auto:
        return sharding
    for dim, names in enumerate(by_dim):
        axes = (*names, *replica_axes)
        if x.shape[dim] % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0:
            spec = PartitionSpec(*by_dim[:dim], axes, *by_dim[dim + 1 :])
            return NamedSharding(sharding.mesh, spec)
    return sharding


def _axes_of(sharding: NamedSharding, ndim: int) -> tuple[list[Axes], Axes]:
    """The mesh axes that each dim is split over, and those that split none."""
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    by_dim = [flat_axes(names) for names in spec]
    split = {axis for names in by_dim for axis in names}
    return by_dim, tuple(axis for axis in sharding.mesh.axis_names if axis not in split)


def _hex(pair: Any) -> str:
    return "".join(f"{int(part):08x}" for part in pair)
