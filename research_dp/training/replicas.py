"""Whether devices that should hold the same numbers do.

A device that computes wrongly, a process that has left the common order, a replica that nobody
averaged: the loss looks right for long. So each device takes a checksum of each array that it
holds, and those of devices that hold the same part are compared.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed.checksum import as_bits
from research_dp.distributed.errors import RunFailure, UsageError, some_of
from research_dp.distributed.layout import by_path
from research_dp.strategies import Strategy, TrainState

_PARTS = ("step", "params", "model_state", "opt_state", "loss_scale")
_NAMED = 4


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array that is not the same on two devices that should agree.

    Attributes:
        path: The array.
        devices: Those that differ from the others.
    """

    path: str
    devices: tuple[jax.Device, ...]

    def __str__(self) -> str:
        named = [f"{device.id} (process {device.process_index})" for device in self.devices]
        return f"{self.path} on device {some_of(named, _NAMED)}"


class ReplicaCheck:
    """Compares the replicas of a strategy's state; compiled at the first call.

    Args:
        strategy: The built strategy.

    Raises:
        UsageError: There is one device, so nothing to compare.
    """

    def __init__(self, strategy: Strategy):
        self._mesh = strategy.mesh
        if self._mesh.size == 1:
            raise UsageError(
                "train.check_replicas_every compares devices, but this run has one. Bind None.",
                binding="train.check_replicas_every",
            )
        self._leaves = _leaves(strategy.abstract_state)
        specs = [PartitionSpec(*x.sharding.spec) for x in self._leaves.values()]
        self._checksums = jax.jit(_program(self._mesh, specs))

    def start(self, state: TrainState) -> jax.Array:
        """Has the devices take the checksums of a state: (devices, arrays) uint32."""
        return self._checksums([_on(self._mesh, x) for x in _leaves(state).values()])

    def differences(self, checksums: Any) -> list[Difference]:
        """What differs; a device is named that differs from most of those it should equal."""
        table = np.asarray(checksums)
        devices = list(self._mesh.devices.flat)
        found = []
        for column, (path, leaf) in enumerate(self._leaves.items()):
            own = dict(zip(devices, table[:, column], strict=True))
            odd = [d for group in _replicas(leaf, devices) for d in _odd(group, own)]
            if odd:
                found.append(Difference(path, tuple(odd)))
        return found

    def look(self, step: int, checksums: Any) -> None:
        """Looks at the checksums of a step that is over.

        Raises:
            RunFailure: Replicas differ.
        """
        found = self.differences(checksums)
        if found:
            more = f"; and {len(found) - _NAMED} more arrays" if len(found) > _NAMED else ""
            raise RunFailure(
                f"step {step}: replicas differ: {'; '.join(map(str, found[:_NAMED]))}{more} "
                "(train.check_replicas_every).\n  A device computes wrongly, or something was not "
                "averaged. Continue from an earlier checkpoint, without the device that is named."
            )


def _leaves(state: TrainState) -> dict[str, Any]:
    """The arrays of a state, by path, each part under its name."""
    parts = {part: by_path(getattr(state, part)) for part in _PARTS}
    return {f"{part} {path}".rstrip(): x for part, own in parts.items() for path, x in own.items()}


def _program(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[[list[jax.Array]], jax.Array]:
    def take(blocks: list[jax.Array]) -> jax.Array:
        own = jnp.stack([_checksum(x) for x in blocks])
        # Nothing is summed over devices: each gets to see the checksums of all.
        return jax.lax.all_gather(own, mesh.axis_names)

    return jax.shard_map(
        take, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )


def _checksum(x: jax.Array) -> jax.Array:
    """A 0-d uint32 that any one changed element changes, and an exchange of two but by chance."""
    bits = as_bits(x).reshape(-1)
    # An odd factor can be undone, so a changed element changes its product for certain.
    odd = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits * (odd * np.uint32(0x9E3779B1)), dtype=jnp.uint32)


def _on(mesh: Mesh, x: jax.Array) -> jax.Array:
    """The same array, its devices named by the strategy's mesh; nothing is moved."""
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh == mesh:
        return x
    sharding = NamedSharding(mesh, x.sharding.spec)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def _replicas(leaf: Any, devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Groups of devices that hold the same part of an array."""
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    groups: dict[Hashable, list[jax.Device]] = collections.defaultdict(list)
    for device in devices:
        groups[tuple((s.start, s.stop) for s in indices[device])].append(device)
    return list(groups.values())


def _odd(group: Sequence[jax.Device], own: dict[jax.Device, Any]) -> list[jax.Device]:
    """The devices of a group whose checksum is not that of most; of two, both."""
    counts = collections.Counter(int(own[device]) for device in group)
    (usual, times), *others = counts.most_common()
    if others and others[0][1] == times:
        return list(group)
    return [device for device in group if own[device] != usual]
