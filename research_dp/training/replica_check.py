"""Compares replicas by checksums: a device that computes wrongly leaves the loss plausible."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure, binding_error, some_of
from research_dp.runs.checksum import as_bits
from research_dp.strategies import Strategy, TrainState

_PARTS = TrainState._fields
_NAMED = 4


class Difference(NamedTuple):
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
            problem = " compares devices, but this run has one. Bind None."
            raise binding_error("train.check_replicas_every", problem)
        self._leaves = _leaves(strategy.abstract_state, parts)
        specs = [PartitionSpec(*x.sharding.spec) for x in self._leaves.values()]

        def _gathered_checksums(shards: list[jax.Array]) -> jax.Array:
            local = jnp.stack([_checksum(x) for x in shards])
            # Nothing is summed over devices: each one gathers the checksums of all.
            return jax.lax.all_gather(local, self._mesh.axis_names)

        options: Any = {"in_specs": (specs,), "out_specs": PartitionSpec(), "check_vma": False}
        self._checksums = jax.jit(jax.shard_map(_gathered_checksums, mesh=self._mesh, **options))

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
                place: (str(parts[device]), int(table[(*place, column)]))
                for place, device in np.ndenumerate(devices)
            }
            if axes := differing_axes(shards, self._mesh.axis_names):
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


def split_dependence(strategy: Strategy, state: TrainState) -> list[str]:
    """Why numbers depend on how the batch is split, by a state after a step; a collective."""
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
    return [*reasons, strategy.doubt] if strategy.doubt else reasons


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


def _outliers(shards: Mapping[tuple[int, ...], tuple[Hashable, int]]) -> list[tuple[int, ...]]:
    """The devices that differ from most with the same part of an array; all of them in a tie.

    `shards` has (part, checksum) by the device's coordinates in the mesh.
    """
    result = []
    for part in dict.fromkeys(part for part, _ in shards.values()):
        group = {place: checksum for place, (p, checksum) in shards.items() if p == part}
        (usual, times), *others = collections.Counter(group.values()).most_common()
        is_tie = bool(others) and others[0][1] == times
        result += [place for place, checksum in group.items() if is_tie or checksum != usual]
    return result


def differing_axes(shards: Mapping[Any, Any], axis_names: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes along which devices have different contents of the same part of an array.

    `shards` has (index of the part, its bytes or checksum), by the mesh coordinates of the device.
    """
    different = set()
    for coordinates, (part, contents) in shards.items():
        for i, axis in enumerate(axis_names):
            first_part, first = shards[(*coordinates[:i], 0, *coordinates[i + 1 :])]
            if first_part == part and first != contents:
                different.add(axis)
    return tuple(axis for axis in axis_names if axis in different)


def difference_text(what: str, paths: Sequence[str], axes: Sequence[str], mesh: Mesh) -> str:
    """A message: which replicas of e.g. a 'gradient' or the 'model state' differ where, and why."""
    along = " and ".join(f"{axis} (size {mesh.shape[axis]})" for axis in axes)
    cause = "gradients are the same, so each device updates in its own way"
    if what == "gradient":
        cause = f"never synchronised over {' and '.join(axes)}"
    elif what == "model state":
        cause = (
            "statistics are each device's own; take a module with BatchNorm by from_linen or "
            "from_nnx, and average a statistic of your own over `batch_axes`"
        )
    return f"copies of {what} {some_of(paths, 3)} differ along mesh axis {along}: {cause}"
