"""Compares replicas by checksums: a device that computes wrongly leaves the loss plausible."""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure, some_of
from research_dp.runs.checksum import as_bits
from research_dp.strategies import Strategy, StrategyConfig, TrainState, slots

_MOMENTS = "optimizer state"
_KINDS = {"params": "parameter", "opt_state": _MOMENTS, "slots": "slot state"}


class Difference(NamedTuple):
    """An array whose replicas differ, along which mesh axes they do, and the outlying devices."""

    kind: str
    path: str
    axes: tuple[str, ...]
    devices: tuple[jax.Device, ...]


class ReplicaCheck:
    """Compares the replicas of a state; compiled in a thread, while a run prepares its first step.

    `untouched` is the sentence about the last checkpoint; `accepted`: the last check's differences.
    """

    def __init__(self, strategy: Strategy, untouched: str = ""):
        self._strategy, self._mesh, self._untouched = strategy, strategy.mesh, untouched
        self.accepted, self._agreed = list[Difference](), False  # an earlier comparison
        # One device has no replicas, and what is split over all devices has none.
        self.leaves = {
            key: x
            for key, x in _leaves(strategy.abstract_state).items()
            if math.prod(x.sharding.shard_shape(x.shape)) * self._mesh.size > x.size
        }
        shardings = [NamedSharding(self._mesh, x.sharding.spec) for x in self.leaves.values()]

        def _gathered_checksums(shards: list[jax.Array]) -> jax.Array:
            local = jnp.stack([_checksum(x) for x in shards])
            # Nothing is summed over devices: each one gathers the checksums of all.
            return jax.lax.all_gather(local, self._mesh.axis_names)

        specs = [x.spec for x in shardings]
        options: Any = {"in_specs": (specs,), "out_specs": PartitionSpec(), "check_vma": False}
        program = jax.jit(jax.shard_map(_gathered_checksums, mesh=self._mesh, **options))
        shapes = jax.tree.map(lambda x, s: x.update(sharding=s), [*self.leaves.values()], shardings)
        if shapes:
            thread = ThreadPoolExecutor(1, "replicas")
            # Lowered here, where JAX's own switches are those of the run.
            self._compiled = thread.submit(program.lower(shapes).compile)
            thread.shutdown(wait=False)

    def differences(self, state: TrainState) -> list[Difference]:
        """Arrays whose replicas differ; the devices in the minority are named."""
        devices, leaves = self._mesh.devices, _leaves(state)
        arrays = [_on_mesh(leaves[key], self._mesh) for key in self.leaves]
        table = np.asarray(self._compiled.result()(arrays)).reshape(*devices.shape, -1)
        result = []
        for column, ((kind, path), leaf) in enumerate(self.leaves.items()):
            if (table[..., column] == table.flat[column]).all():
                continue
            parts = leaf.sharding.devices_indices_map(leaf.shape)
            shards = {
                place: (str(parts[device]), int(table[(*place, column)]))
                for place, device in np.ndenumerate(devices)
            }
            if axes := differing_axes(shards, self._mesh.axis_names):
                outliers = tuple(devices[place] for place in _outliers(shards))
                result.append(Difference(kind, path, axes, outliers))
        return result

    def check(self, step: int, state: TrainState) -> None:
        """Raises RunFailure if replicas differ after a step, unless `loss_over` accepts it."""
        strategy = self._strategy
        self.accepted = self.differences(state) if self.leaves else []
        accepts = strategy.splits_batch and strategy.spec.loss_over == "device"
        wrong = [x for x in self.accepted if not (accepts and x.kind == "model state")]
        if not wrong:
            self._agreed = True
            return
        has_moments = any(x.ndim for (kind, _), x in self.leaves.items() if kind == _MOMENTS)
        causes = _causes(wrong, strategy.config, _MOMENTS if has_moments else None)
        odd = {x.id: x for one in wrong for x in one.devices}
        shards = (self.leaves[x.kind, x.path] for x in wrong)
        parts = max(x.size // math.prod(x.sharding.shard_shape(x.shape)) for x in shards)
        if 2 * len(odd) * parts < self._mesh.size:  # else nobody knows which are right
            named = [f"{i} (process {x.process_index})" for i, x in sorted(odd.items())]
            causes = [f"device {some_of(named, 4)} computes wrongly: leave it out", *causes]
        elif strategy.splits_batch and wrong[0].kind == "model state":
            causes.append(f"{strategy.spec.gin_name}.loss_over = 'device' accepts it")
        elif self._agreed:
            causes.append("a device computes wrongly")
        text = difference_text(wrong, strategy.config, causes)
        raise RunFailure(f"step {step}: {text}.\n  {self._untouched}".rstrip())


def _leaves(state: TrainState) -> dict[tuple[str, str], Any]:
    def kind(part: str, path: str) -> str:
        """What is compared; slot `outer` has the parameters and model state of its replicas."""
        if part == "slots" and path.startswith("outer/replicas/"):
            part = path.split("/")[2]
        return _KINDS.get(part, part.replace("_", " "))

    return {
        (kind(part, path), path): x
        for part, tree in state._asdict().items()
        for path, x in by_path(tree).items()
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


def difference_text(
    differences: Sequence[Any], config: StrategyConfig, causes: Sequence[str] = ()
) -> str:
    """Which replicas differ where, and why: of the first one's kind, along its axes.

    A difference begins with a kind, e.g. 'gradient' or 'model state', a path and axes.
    """
    kind, _, axes, *_ = differences[0]
    paths = [path for what, path, along, *_ in differences if (what, along) == (kind, axes)]
    along = " and ".join(f"{axis} (size {config.mesh.shape[axis]})" for axis in axes)
    cause = ", or ".join(causes or _causes(differences, config, "gradient"))
    return f"copies of {kind} {some_of(paths, 3)} differ along mesh axis {along}: {cause}"


def _causes(differences: Sequence[Any], config: StrategyConfig, shows: str | None) -> list[str]:
    """What is to blame; `shows` is the kind that differs where gradients did, None: not known."""
    kind, path, axes, *_ = differences[0]

    def bound(name: str) -> str:
        slot = getattr(config, name)
        return f"data_parallel.{name} = {slots.attribute(slot, '__name__') or type(slot).__name__}"

    if kind == "model state":
        advice = "take a module with BatchNorm by from_linen or from_nnx, and average a statistic"
        return [f"statistics are each device's own; {advice} of your own over `batch_axes`"]
    if kind == "slot state":
        slot = bound(path.partition("/")[0])
        return [f"if they should, declare the axes in `differs_over` of {slot}"]
    causes = []
    if config.sync is not None and (shows is None or any(one[0] == shows for one in differences)):
        causes.append(f"never synchronised over {' and '.join(axes)} by {bound('sync')}")
    if config.update is not None and not (causes and shows):
        causes.append(f"updated by each device in its own way by {bound('update')}")
    if config.reduction is not PLAIN:
        causes.append("by sums of data_parallel.reduction")
    return causes or ["a device computes wrongly"]
