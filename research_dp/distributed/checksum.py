"""A checksum of an array that does not depend on where its parts lie.

Integer sums over the elements, each mixed with its place: exact in any order, so each device sums
what it holds, and a host that reads the array back from a file finds the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.distributed.sharding import by_path

PyTree = Any

_CHUNK = 2**22  # elements that the host takes at a time
_SMALL = 2**16  # arrays of so many elements are sooner read by the host than compiled for


def tree_checksums(tree: PyTree) -> Mapping[str, str]:
    """Checksums of global arrays, by path: 16 hex digits each.

    Devices share the work of an array that several of them hold, and send each other nothing.
    A collective, if there are several processes.

    Args:
        tree: Arrays on the devices, of elements of 1, 2, 4 or 8 bytes.

    Returns:
        The same for any sharding. One changed element changes it for certain, others but with
        probability 2**-64.
    """
    named = by_path(tree)
    on_devices = {path: _device_sums(x) for path, x in named.items() if not _for_the_host(x)}
    sums = {path: _host_sums(np.asarray(x)) for path, x in named.items() if path not in on_devices}
    if on_devices:
        sums |= zip(on_devices, _added_up(list(on_devices.values())), strict=True)
    return {path: _hex(sums[path]) for path in named}


def array_checksum(x: np.ndarray) -> str:
    """The same of an array on the host, by numpy alone."""
    return _hex(_host_sums(x))


def _for_the_host(x: Any) -> bool:
    """Whether the host reads an array, which all processes then do."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return True
    return x.size <= _SMALL and (x.is_fully_addressable or x.is_fully_replicated)


def _host_sums(x: np.ndarray) -> np.ndarray:
    """(2,) uint32."""
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.view(np.dtype(f"u{min(flat.itemsize, 4)}"))
    total = np.zeros(2, np.uint64)
    for start in range(0, flat.size, _CHUNK):
        bits = flat[start : start + _CHUNK].astype(np.uint32)
        places = np.arange(start, start + bits.size, dtype=np.uint64).astype(np.uint32)
        mixed, weights = _mix(bits, places)
        total += [mixed.sum(dtype=np.uint64), (mixed * weights).sum(dtype=np.uint64)]
    return total.astype(np.uint32)


def _added_up(parts: Sequence[jax.Array]) -> np.ndarray:
    """(arrays, 2) uint32: the sums (devices, 2) of each array, over devices and processes."""
    own = np.stack([sum(np.asarray(s.data)[0] for s in x.addressable_shards) for x in parts])
    if jax.process_count() == 1:
        return own
    return np.asarray(multihost_utils.process_allgather(own)).sum(0, dtype=np.uint32)


def _device_sums(x: jax.Array) -> jax.Array:
    """(devices, 2) uint32: what each device finds in its part of an array."""
    return _sums_of_parts(x, _shared_out(x))


@functools.partial(jax.jit, static_argnums=1)
def _sums_of_parts(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    axes = sharding.mesh.axis_names
    cut = _axes_by_dim(sharding, x.ndim)
    idle = [axis for axis in axes if all(axis not in names for names in cut)]

    def sums(block: jax.Array) -> jax.Array:
        bits = as_bits(block)
        shape = (*x.shape, *bits.shape[x.ndim :])
        places = jnp.zeros(bits.shape, jnp.uint32)
        for dim, length in enumerate(bits.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
            if dim < x.ndim and cut[dim]:
                along += jax.lax.axis_index(cut[dim]).astype(jnp.uint32) * np.uint32(length)
            places += along * np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        mixed, weights = _mix(bits, places)
        found = jnp.stack([jnp.sum(y, dtype=jnp.uint32) for y in (mixed, mixed * weights)])
        # Of devices that hold the same part the first one counts.
        first = [jax.lax.axis_index(axis) == 0 for axis in idle]
        return jnp.where(jnp.all(jnp.array(first, bool)), found, 0)[None]

    return jax.shard_map(
        sums,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )(x)


def as_bits(x: jax.Array) -> jax.Array:
    """Elements as uint32; those of 8 bytes as two, in a dim of their own."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    unsigned = jnp.dtype(f"u{min(x.dtype.itemsize, 4)}")
    if x.dtype == jnp.bool_:
        x = x.astype(unsigned)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(bits: Any, places: Any) -> tuple[Any, Any]:
    """(elements mixed with their places, odd weights); uint32.

    The mixing (Wellons' lowbias32, 2018) can be undone, so no two elements at a place are alike.
    """
    x = bits + places * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16)), places * np.uint32(2) + np.uint32(1)


def _shared_out(x: jax.Array) -> NamedSharding:
    """A sharding that cuts an array over the mesh axes that do not cut it yet, where one divides.

    Nothing is sent for it: each device takes a part of what it holds.
    """
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    cut = _axes_by_dim(sharding, x.ndim)
    idle = tuple(a for a in sharding.mesh.axis_names if all(a not in names for names in cut))
    if not idle or not sharding.mesh.are_all_axes_auto:
        return sharding
    for dim, names in enumerate(cut):
        parts = math.prod(sharding.mesh.shape[axis] for axis in (*names, *idle))
        if x.shape[dim] % parts == 0:
            spec = [*cut[:dim], (*names, *idle), *cut[dim + 1 :]]
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return sharding


def _axes_by_dim(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that cut each dim."""
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return [names if isinstance(names, tuple) else (names,) if names else () for names in spec]


def _hex(pair: Any) -> str:
    return "".join(f"{int(part):08x}" for part in pair)
