"""Compares replicas of the state on devices that should have the same bits.

A device that computes wrongly, or a replica that was never averaged, leaves the loss plausible for
long. So each device takes a checksum of each shard, and those of the same shard are compared.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
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
# By the coordinates of a device in the mesh: its part of an array, and that part's checksum.
_Shards = Mapping[tuple[int, ...], tuple[Hashable, int]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array whose replicas differ, the outlying devices, and along which mesh axes they do."""

    path: str
    devices: tuple[jax.Device, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        named = [f"{device.id} (process {device.process_index})" for device in self.devices]
        return f"{self.path} on device {some_of(named, _NAMED)}"


class ReplicaCheck:
    """Compares the replicas of some fields of a state; compiled at the first call."""

    def __init__(self, strategy: Strategy, parts: Sequence[str] = _PARTS):
        self._mesh, self._parts = strategy.mesh, parts
        if self._mesh.size == 1:
            raise UsageError(
                "train.check_replicas_every compares devices, but this run has one. Bind None.",
                binding="train.check_replicas_every",
            )
        self._leaves = _leaves(strategy.abstract_state, parts)
        specs = [PartitionSpec(*x.sharding.spec) for x in self._leaves.values()]
        self._checksums = jax.jit(
            jax.shard_map(
                self._gathered_checksums,
                mesh=self._mesh,
                in_specs=(specs,),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )

    def checksums(self, state: TrainState) -> jax.Array:
        """Dispatches the checksums of a state's shards: (devices, arrays) uint32."""
        leaves = _leaves(state, self._parts).values()
        return self._checksums([_on_mesh(x, self._mesh) for x in leaves])

    def differences(self, checksums: Any) -> list[Difference]:
        """Arrays whose replicas differ; the devices in the minority are named."""
        devices = self._mesh.devices
        table = np.asarray(checksums).reshape(*devices.shape, -1)
        result = []
        for column, (path, leaf) in enumerate(self._leaves.items()):
            parts = leaf.sharding.devices_indices_map(leaf.shape)
            shards = {
                place: (part_of(parts[device]), int(table[(*place, column)]))
                for place, device in np.ndenumerate(devices)
            }
            axes = differing_axes(shards, self._mesh.axis_names)
            if axes:
                outliers = tuple(devices[place] for place in _outliers(shards))
                result.append(Difference(path, outliers, axes))
        return result

    def check(self, step: int, checksums: Any) -> None:
        """Raises RunFailure if replicas differ after a step that has finished."""
        if differences := self.differences(checksums):
            more = len(differences) - _NAMED
            named = [*map(str, differences[:_NAMED]), *[f"and {more} more arrays"] * (more > 0)]
            raise RunFailure(
                f"step {step}: replicas differ: {'; '.join(named)} (train.check_replicas_every).\n"
                "  A device computes wrongly, or something was not averaged. Continue from an "
                "earlier checkpoint, without the device that is named."
            )

    def _gathered_checksums(self, shards: list[jax.Array]) -> jax.Array:
        local = jnp.stack([_checksum(x) for x in shards])
        # Nothing is summed over devices: each one gathers the checksums of all.
        return jax.lax.all_gather(local, self._mesh.axis_names)


def split_dependence(spec: TrainSpec, strategy: Strategy, state: TrainState) -> list[str]:
    """Reports why a model's numbers depend on how the batch is split over devices.

    A collective. The state is one after a step: by then per-device statistics differ.
    """
    if not strategy.splits_batch:
        return []
    reasons = []
    if jax.tree.leaves(state.model_state):
        check = ReplicaCheck(strategy, ("model_state",))
        if differences := check.differences(check.checksums(state)):
            axes = differences[0].axes
            same = (one.path for one in differences if one.axes == axes)
            names = [path.removeprefix("model_state ") for path in same]
            reasons.append(difference_text("model state", names, axes, strategy.mesh))
    draws = split_draws(spec, strategy)
    return [*reasons, draws.message] if draws else reasons


def _leaves(state: TrainState, parts: Sequence[str]) -> dict[str, Any]:
    return {
        f"{part} {path}".rstrip(): x
        for part in parts
        for path, x in by_path(getattr(state, part)).items()
    }


def _checksum(x: jax.Array) -> jax.Array:
    """A 0-d uint32 that changes with any one element, and nearly always with two exchanged."""
    bits = as_bits(x).reshape(-1)
    # Multiplying by an odd factor is invertible, so a changed element changes its product.
    odd = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits * (odd * np.uint32(0x9E3779B1)), dtype=jnp.uint32)


def _on_mesh(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The same array with its devices named by the strategy's mesh; nothing is copied."""
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh == mesh:
        return x
    sharding = NamedSharding(mesh, x.sharding.spec)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _outliers(shards: _Shards) -> list[tuple[int, ...]]:
    """The devices that differ from most with the same part; all of them in a tie."""
    groups: dict[Hashable, list[tuple[int, ...]]] = collections.defaultdict(list)
    for place, (part, _) in shards.items():
        groups[part].append(place)
    result = []
    for group in groups.values():
        (usual, times), *others = collections.Counter(shards[p][1] for p in group).most_common()
        is_tie = bool(others) and others[0][1] == times
        result += [place for place in group if is_tie or shards[place][1] != usual]
    return result
