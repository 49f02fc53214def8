"""Whether devices that should hold the same numbers do.

A device that computes wrongly, a process that has left the common order, a replica that nobody
averaged: the loss looks right for long. So each device takes a checksum of each array that it
holds, and those of devices that hold the same part are compared.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed.checksum import as_bits
from research_dp.distributed.replica_difference import difference_text, differing_axes, part_of
from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure, UsageError, some_of
from research_dp.strategies import Strategy, TrainSpec, TrainState
from research_dp.strategies.random_draws import split_draws

_PARTS = ("step", "params", "model_state", "opt_state", "loss_scale")
_NAMED = 4
_Place = tuple[int, ...]  # of a device in the mesh


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array that is not the same on two devices that should agree.

    Attributes:
        path: The array.
        devices: Those that differ from the others.
        axes: The mesh axes along which they do.
    """

    path: str
    devices: tuple[jax.Device, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        named = [f"{device.id} (process {device.process_index})" for device in self.devices]
        return f"{self.path} on device {some_of(named, _NAMED)}"


class ReplicaCheck:
    """Compares the replicas of a strategy's state; compiled at the first call.

    Args:
        strategy: The built strategy.
        parts: The fields of a state that are compared.

    Raises:
        UsageError: There is one device, so nothing to compare.
    """

    def __init__(self, strategy: Strategy, parts: Sequence[str] = _PARTS):
        self._mesh, self._parts = strategy.mesh, parts
        if self._mesh.size == 1:
            raise UsageError(
                "train.check_replicas_every compares devices, but this run has one. Bind None.",
                binding="train.check_replicas_every",
            )
        self._leaves = _leaves(strategy.abstract_state, parts)
        specs = [PartitionSpec(*x.sharding.spec) for x in self._leaves.values()]
        self._checksums = jax.jit(_program(self._mesh, specs))

    def start(self, state: TrainState) -> jax.Array:
        """Has the devices take the checksums of a state: (devices, arrays) uint32."""
        return self._checksums([_on(self._mesh, x) for x in _leaves(state, self._parts).values()])

    def differences(self, checksums: Any) -> list[Difference]:
        """What differs; a device is named that differs from most of those it should equal."""
        table = np.asarray(checksums).reshape(*self._mesh.devices.shape, -1)
        found = []
        for column, (path, leaf) in enumerate(self._leaves.items()):
            parts = leaf.sharding.devices_indices_map(leaf.shape)
            shards = {
                place: (part_of(parts[device]), int(table[(*place, column)]))
                for place, device in np.ndenumerate(self._mesh.devices)
            }
            axes = differing_axes(shards, self._mesh.axis_names)
            if axes:
                odd = (self._mesh.devices[place] for place in _odd(shards))
                found.append(Difference(path, tuple(odd), axes))
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


def split_dependence(spec: TrainSpec, strategy: Strategy, state: TrainState) -> list[str]:
    """Reports what of a model depends on how the batch is split over devices.

    A collective, if the batch is split and the model has state.

    Args:
        spec: What the strategy was built for.
        strategy: The built strategy.
        state: A state after a step; statistics differ by then, if they are each device's own.
    """
    if not strategy.splits_batch:
        return []
    found = []
    if jax.tree.leaves(state.model_state):
        check = ReplicaCheck(strategy, ("model_state",))
        differences = check.differences(check.start(state))
        if differences:
            axes = differences[0].axes
            alike = [one.path for one in differences if one.axes == axes]
            paths = [path.removeprefix("model_state ") for path in alike]
            found.append(difference_text("model state", paths, axes, strategy.mesh))
    drawn = split_draws(spec, strategy)
    return [*found, drawn.message] if drawn else found


def _leaves(state: TrainState, names: Sequence[str]) -> dict[str, Any]:
    """The arrays of some parts of a state, by path, each part under its name."""
    parts = {part: by_path(getattr(state, part)) for part in names}
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


def _odd(shards: Mapping[_Place, tuple[Hashable, int]]) -> list[_Place]:
    """The devices whose checksum is not that of most with the same part; of two, both."""
    groups: dict[Hashable, list[_Place]] = collections.defaultdict(list)
    for place, (part, _) in shards.items():
        groups[part].append(place)
    return [place for group in groups.values() for place in _minority(group, shards)]


def _minority(
    group: Sequence[_Place], shards: Mapping[_Place, tuple[Hashable, int]]
) -> Sequence[_Place]:
    counts = collections.Counter(shards[place][1] for place in group)
    (usual, times), *others = counts.most_common()
    if others and others[0][1] == times:
        return group
    return [place for place in group if shards[place][1] != usual]
