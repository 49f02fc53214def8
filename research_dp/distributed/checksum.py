"""A checksum of an array that does not depend on where its parts lie.

Integer sums over the elements, each mixed with its place: exact in any order, so devices add up
what they hold, and a host that reads the array back from a file finds the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.distributed.layout import by_path

PyTree = Any

_CHUNK = 2**22  # elements that the host takes at a time


def tree_checksums(tree: PyTree) -> Mapping[str, str]:
    """Checksums of global arrays, by path: 16 hex digits each.

    One program over all devices, which share the work of arrays that several of them hold. A
    collective, if there are several processes.

    Args:
        tree: Arrays on the devices, of elements of 1, 2, 4 or 8 bytes.

    Returns:
        The same for any sharding. One changed element changes it for certain, others but with
        probability 2**-64.
    """
    named = by_path(tree)
    leaves = list(named.values())
    sums = jax.device_get(_sums_of(leaves, tuple(map(_shared_out, leaves))))
    return {path: _hex(pair) for path, pair in zip(named, sums, strict=True)}


def array_checksum(x: np.ndarray) -> str:
    """The same of an array on the host, by numpy alone."""
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.view(np.dtype(f"u{min(flat.itemsize, 4)}"))
    total = np.zeros(2, np.uint64)
    for start in range(0, flat.size, _CHUNK):
        bits = flat[start : start + _CHUNK].astype(np.uint32)
        places = np.arange(start, start + bits.size, dtype=np.uint64).astype(np.uint32)
        mixed, weights = _mix(bits, places)
        total += [mixed.sum(dtype=np.uint64), (mixed * weights).sum(dtype=np.uint64)]
    return _hex(total.astype(np.uint32))


@functools.partial(jax.jit, static_argnums=1)
def _sums_of(leaves: Sequence[jax.Array], shardings: Sequence[NamedSharding | None]) -> jax.Array:
    """(leaves, 2) uint32."""
    return jnp.stack(list(map(_sums, leaves, shardings))) if leaves else jnp.zeros((0, 2))


def _sums(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """(2,) uint32: sums modulo 2**32."""
    if sharding is not None:
        x = jax.lax.with_sharding_constraint(x, sharding)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    unsigned = jnp.dtype(f"u{min(x.dtype.itemsize, 4)}")
    if x.dtype == jnp.bool_:
        x = x.astype(unsigned)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    places = jnp.zeros(bits.shape, jnp.uint32)
    for dim, stride in _strides(bits.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        places += along * np.uint32(stride % 2**32)
    mixed, weights = _mix(bits, places)
    # The compiler adds up what the devices found; nothing is divided.
    return jnp.stack([jnp.sum(y, dtype=jnp.uint32) for y in (mixed, mixed * weights)])


def _strides(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(dim, how many places apart its neighbours are) in row-major order."""
    return ((dim, math.prod(shape[dim + 1 :])) for dim in range(len(shape)))


def _mix(bits: Any, places: Any) -> tuple[Any, Any]:
    """(elements mixed with their places, odd weights); uint32.

    The mixing (Wellons' lowbias32, 2018) can be undone, so no two elements at a place are alike.
    """
    x = bits + places * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16)), places * np.uint32(2) + np.uint32(1)


def _shared_out(x: jax.Array) -> NamedSharding | None:
    """A sharding that cuts an array over the mesh axes that do not cut it yet, where one divides.

    Nothing is sent for it: each device takes a part of what it holds.
    """
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.are_all_axes_auto:
        return None
    spec: list[Any] = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    cut = [names if isinstance(names, tuple) else (names,) if names else () for names in spec]
    free = tuple(a for a in sharding.mesh.axis_names if all(a not in names for names in cut))
    for dim, names in enumerate(cut):
        parts = math.prod(sharding.mesh.shape[axis] for axis in (*names, *free))
        if free and x.shape[dim] and x.shape[dim] % parts == 0:
            spec[dim] = (*names, *free)
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return None


def _hex(pair: Any) -> str:
    return "".join(f"{int(part):08x}" for part in pair)
