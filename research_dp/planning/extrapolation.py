"""What a strategy would cost on other numbers of devices, from a few that were compiled.

Weak scaling: the number of examples a device stays. State is exact, by the rule that shards it. The
step's memory, communication and time follow from compiled programs by formulas. These are applied
to the compiled sizes too: how far they are off there is part of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh

from research_dp.analysis.link_model import Route, seconds
from research_dp.analysis.topologies import Topology
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.distributed.placement import nbytes
from research_dp.errors import UsageError
from research_dp.planning.row import CollectiveTotal, Row
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.strategies.jaxpr_collectives import Collective
from research_dp.strategies.state import infer_state_sharding

# Numbers of devices that a page shows, beside those that were compiled.
SIZES = tuple(2**power for power in range(3, 13))

_INDEX_DTYPES = ("s32", "u32", "s64", "u64")


@dataclasses.dataclass(frozen=True)
class MeshState:
    """A device's state between steps on some mesh: exact, nothing is compiled for it."""

    mesh: Mapping[str, int]
    state_bytes: int
    sharded: int  # how many elements of the model's parameters are sharded at all


@dataclasses.dataclass(frozen=True)
class Point:
    """A step of a strategy on a number of devices; sizes are a device's, None where unknown."""

    devices: int
    compiled: bool  # else all but `state_bytes` is extrapolated
    state_bytes: int | None
    needed_bytes: float | None
    wire_bytes: float | None
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Curve:
    """A strategy by number of devices; `checks` show how far it can be trusted."""

    strategy: str
    points: tuple[Point, ...]
    checks: tuple[tuple[Point, Point], ...] = ()  # compiled, and extrapolated from other sizes
    remark: str = ""  # why there are no more points; '' if there are all


def mesh_states(
    config: StrategyConfig, spec: TrainSpec, row: Row, meshes: Mapping[int, dict[str, int]]
) -> dict[int, MeshState]:
    """The state of a device on each of these meshes, by the rule, where it has a sharding.

    Whether parameters are sharded between steps follows from the row of a mesh of several devices.
    """
    spec = config.fitted(spec)
    states = {}
    for number, sizes in meshes.items():
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        try:
            shardings, state = infer_state_sharding(config, spec, mesh, params_sharded=True)
        except UsageError:
            continue  # a rule that names dims may choose one that so many devices do not divide
        leaves = jax.tree.leaves(shardings.slices)
        if row.memory and row.memory.params_bytes == sum(leaf.nbytes for leaf in leaves):
            _, state = infer_state_sharding(config, spec, mesh, params_sharded=False)
        sharded = sum(math.prod(leaf.shape) for leaf in leaves if leaf.dim is not None)
        states[number] = MeshState(sizes, nbytes(state)[0], sharded)
    return states


def scaled_meshes(rows: Sequence[Row], sizes: Iterable[int]) -> dict[int, dict[str, int]]:
    """The strategy's mesh on other numbers of devices: the axis that grew between rows grows.

    Without numbers that the other axis does not divide; without any where none grew, or both.
    """
    known = [row.setup.mesh for row in rows if row.setup]
    if len(known) == 1:
        axes = [axis for axis, size in known[0].items() if size > 1]
    else:
        axes = [axis for axis in known[0] if len({mesh[axis] for mesh in known}) > 1]
    if len(axes) != 1:
        return {}
    fixed = math.prod(size for axis, size in known[0].items() if axis != axes[0])
    return {n: {**known[0], axes[0]: n // fixed} for n in sizes if n % fixed == 0}


def curve(rows: Sequence[Row], states: Mapping[int, MeshState], where: Topology) -> Curve:
    """A strategy's curve through its rows, all with as many examples a device.

    Without `states`, its state by number of devices, nothing is extrapolated.
    """
    compiled = {_devices(row): row for row in sorted(rows, key=_devices)}
    name, points = rows[0].strategy, {n: _compiled_point(row) for n, row in compiled.items()}
    if any(n not in states or states[n].state_bytes != points[n].state_bytes for n in points):
        remark = "Its state elsewhere does not follow from its mesh and rule."
        if not states:
            remark = "Which axis of its mesh grows with the devices is not known."
        if max(compiled) == 1:
            remark = "It runs on one device, however many there are."
        return Curve(name, tuple(points.values()), remark=remark)
    sharded = max(states[n].sharded for n in points)
    alike = [row for n, row in compiled.items() if states[n].sharded == sharded]
    known = [row for row in alike if row.needed_bytes is not None]
    remark, checks = "", []
    for n in sorted(set(states) - set(points)) if known else ():
        if states[n].sharded == sharded:
            points[n] = extrapolate(known, n, states, where)
        else:
            remark = remark or f"On {n:,} devices other parameters are split than were compiled."
    for row in known:
        if others := [other for other in known if other is not row]:
            guess = extrapolate(others, _devices(row), states, where)
            checks.append((points[_devices(row)], guess))
    return Curve(name, tuple(points[n] for n in sorted(points)), tuple(checks), remark)


def extrapolate(
    rows: Sequence[Row], number: int, states: Mapping[int, MeshState], where: Topology
) -> Point:
    """A point by formulas.

    The memory that a step needs beside the state is a + b / n through the two nearest compiled
    sizes (one: a alone): what is replicated, and what is sharded. Each collective sends its bytes
    times (g - 1) / g for groups of g, twice that for an all-reduce; reductions of shards over
    replicas scale with the shard, indices of rows with the batch. The step is that of the nearest
    compiled size, less its wait, plus reading and writing the additional state, plus the new time
    on the network, of which as large a share is waited for.
    """
    nearest = sorted(rows, key=lambda row: abs(math.log(_devices(row) / number)))[:2]
    near, state = nearest[0], states[number].state_bytes
    needed = state + _step_bytes(nearest, number)
    wire_bytes = step = None
    if near.setup and near.traffic and near.timing and near.timing.predicted_seconds:
        parts = near.timing.predicted_parts
        predicted = parts["network_inside"] + parts["network_across"]
        wire_bytes, network = _network(near, states[number].mesh, where)
        if network:
            # The formula's error on the compiled size is taken to be the same here.
            network *= predicted / _network(near, near.setup.mesh, where)[1]
        waited = network * parts["exposed"] / predicted if predicted else 0.0
        more = 2 * (state - states[_devices(near)].state_bytes) / where.chip.memory_rate
        step = near.timing.predicted_seconds - parts["exposed"] + more + waited
    return Point(number, False, state, needed, wire_bytes, step)


def _step_bytes(nearest: Sequence[Row], number: int) -> float:
    """Bytes of a step beside the state, from one or two compiled sizes."""
    sizes = [
        float((row.needed_bytes or 0) - (row.memory.state_bytes if row.memory else 0))
        for row in nearest
    ]
    if len(sizes) == 1:
        return sizes[0]
    first, second = (1 / _devices(row) for row in nearest)
    slope = (sizes[1] - sizes[0]) / (second - first)
    return max(0.0, sizes[0] + slope * (1 / number - first))


def _network(row: Row, mesh: Mapping[str, int], where: Topology) -> tuple[float, float]:
    """Bytes that a row's collectives would send on another mesh, and seconds at links' rates."""
    assert row.setup and row.traffic
    costs = [_scaled(total, row.setup.mesh, mesh, where) for total in row.traffic.collectives]
    return sum(nbytes for nbytes, _ in costs), sum(time for _, time in costs)


def _scaled(
    total: CollectiveTotal, old: Mapping[str, int], mesh: Mapping[str, int], where: Topology
) -> tuple[float, float]:
    """Bytes and seconds of one kind of collective on another mesh."""
    axes = tuple(axis for axis in mesh if axis in total.axes.split("+"))
    before = math.prod(old[axis] for axis in axes)
    group = math.prod(mesh[axis] for axis in axes)
    if before == 1:  # the row says nothing about what it would send on more devices
        return 0.0, 0.0
    # Reductions in pairs are `tree_reduction`'s: together they send as much as a reduce-scatter.
    in_pairs = total.kind == "reduce-scatter" and total.devices < before
    payload = total.wire_bytes / Collective(total.kind, axes, before, total.dtype, 1, 1).wire_bytes
    if axes == (DATA_AXIS,):
        payload *= old[FSDP_AXIS] / mesh[FSDP_AXIS]
    if total.kind == "all-gather" and total.dtype in _INDEX_DTYPES:
        payload *= group / before
    links = mesh_route(axes, mesh, where)
    if in_pairs:  # inside a host or slice first
        inside = payload * (1 - 1 / links.members)
        across = payload * (1 / links.members - 1 / group)
        return inside + across, inside / links.direct_rate + across / links.across_rate
    # Fractions of a byte count: the payload is an estimate.
    collective = Collective(total.kind, axes, group, total.dtype, payload, 1)  # type: ignore[arg-type]
    return collective.wire_bytes, seconds(collective, links)


def mesh_route(axes: Sequence[str], mesh: Mapping[str, int], where: Topology) -> Route:
    """The links of a group of a mesh whose devices are not at hand, in the devices' order."""
    chip, members = where.chip, where.domains[1]
    if chip.platform == "tpu" and where.slices == 1:
        members = max(chip.slice_chips, members)  # the mesh grows in as large a slice as there is
    domains = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())) // members
    group = domains[tuple(slice(None) if name in axes else 0 for name in mesh)].ravel()
    count = len(np.unique(group))
    ring_rate = chip.inside_rate
    if chip.platform == "tpu":
        # As many dimensions of the torus as the group can extend in.
        ring_rate *= 2 * min(chip.torus, max(1, (len(group) // count).bit_length() - 1))
    return Route(count, len(group) // count, ring_rate, chip.inside_rate, chip.across_rate)


def neighbours(where: Topology) -> list[str]:
    """The names of a quarter and of four times the devices: two more sizes to compile for."""
    chip, (domains, members) = where.chip, where.domains
    total, names = domains * members, []
    for count in (total // 4, total * 4):
        if total % 4 or not 2 <= count <= SIZES[-1] or count % min(count, members):
            continue
        if chip.platform == "cpu":
            names.append(f"cpu:{count}")
        elif chip.platform == "gpu":
            gpus = min(count, members)
            names.append(f"{chip.name}:{count // gpus}x{gpus}")
        else:
            slices = domains if count // domains <= chip.slice_chips else 4 * domains
            several = f"{slices}x" if slices > 1 else ""
            names.append(f"{several}{chip.name}-{count // slices}")
    return names


def _compiled_point(row: Row) -> Point:
    state_bytes = row.memory.state_bytes if row.memory else None
    seconds = row.timing.predicted_seconds if row.timing else None
    return Point(_devices(row), True, state_bytes, row.needed_bytes, row.wire_total, seconds)


def _devices(row: Row) -> int:
    return row.setup.devices if row.setup else 1
