"""What a strategy would cost on other numbers of devices, from a few that were compiled.

Weak scaling: the number of examples a device stays. State is exact, by the rule that shards it; the
rest follows by formulas, whose errors on the compiled sizes are part of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh

from research_dp.analysis.topologies import Route, Topology
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.distributed.placement import nbytes
from research_dp.errors import UsageError
from research_dp.planning.row import Row
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.strategies.jaxpr_collectives import Collective
from research_dp.strategies.state import infer_state_sharding

SIZES = tuple(2**power for power in range(3, 13))  # that a page shows, beside compiled ones
# How each figure of a page is obtained.
FORMULAS = (
    ("state", "exact, by the rule that shards it; nothing is compiled for it"),
    (
        "peak memory",
        "the state, and a + b/n through the two nearest compiled sizes for the rest; what is "
        "compiled for one size only is taken as constant",
    ),
    (
        "wire bytes",
        "each collective's bytes times (g-1)/g for groups of g devices, twice that for a sum; sums "
        "of shards over replicas shrink with the shard, indices of rows grow with the batch",
    ),
    (
        "step",
        "the nearest compiled size's, less its wait for the network, plus two passes over the "
        "additional state, plus the new time of the network at its links' rates times the share of "
        "it that the nearest compiled size waits for",
    ),
)
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
    """The state of a device on each of these meshes, by the rule, where it has a sharding."""
    spec = config.fitted(spec)
    states = {}
    for number, sizes in meshes.items():
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        try:
            shardings, state = infer_state_sharding(config, spec, mesh, params_sharded=True)
        except UsageError:
            continue  # a rule that names dims may choose one that so many devices do not divide
        leaves = jax.tree.leaves(shardings.slices)
        if row.params_bytes == sum(leaf.nbytes for leaf in leaves):  # on several devices
            _, state = infer_state_sharding(config, spec, mesh, params_sharded=False)
        sharded = sum(math.prod(leaf.shape) for leaf in leaves if leaf.dim is not None)
        states[number] = MeshState(sizes, nbytes(state)[0], sharded)
    return states


def scaled_meshes(rows: Sequence[Row], sizes: Iterable[int]) -> dict[int, dict[str, int]]:
    """The mesh on other numbers of devices.

    The axis whose size differs between the compiled meshes scales; numbers that the other axis does
    not divide are left out.
    """
    first, *others = (row.mesh for row in rows if row.mesh is not None)
    known = [first, *(others or [dict.fromkeys(first, 1)])]  # one mesh: axes that are split
    axes = [axis for axis in first if len({mesh[axis] for mesh in known}) > 1]
    if len(axes) != 1:  # none grew, or both
        return {}
    fixed = math.prod(size for axis, size in first.items() if axis != axes[0])
    return {n: {**first, axes[0]: n // fixed} for n in sizes if n % fixed == 0}


def curve(rows: Sequence[Row], states: Mapping[int, MeshState], where: Topology) -> Curve:
    """A strategy's curve through its rows; nothing is extrapolated without `states`."""
    compiled = {row.devices: row for row in sorted(rows, key=lambda row: row.devices)}
    name = rows[0].strategy
    points = {
        n: Point(n, True, r.state_bytes, r.needed_bytes, r.wire_total, r.predicted_seconds)
        for n, r in compiled.items()
    }
    remark, checks = "", []
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
    for n in sorted(set(states) - set(points)) if known else ():
        if states[n].sharded == sharded:
            points[n] = extrapolate(known, n, states, where)
        else:
            remark = remark or f"On {n:,} devices other parameters are split than were compiled."
    for row in known:
        if others := [other for other in known if other is not row]:
            guess = extrapolate(others, row.devices, states, where)
            checks.append((points[row.devices], guess))
    return Curve(name, tuple(points[n] for n in sorted(points)), tuple(checks), remark)


def extrapolate(
    rows: Sequence[Row], number: int, states: Mapping[int, MeshState], where: Topology
) -> Point:
    """A point by `FORMULAS`."""
    nearest = sorted(rows, key=lambda row: abs(math.log(row.devices / number)))[:2]
    near, state = nearest[0], states[number].state_bytes
    rest = [float((row.needed_bytes or 0) - (row.state_bytes or 0)) for row in nearest]
    if len(rest) > 1:  # a + b / n: what is replicated, and what is sharded
        first, second = (1 / row.devices for row in nearest)
        slope = (rest[1] - rest[0]) / (second - first)
        rest[0] = max(0.0, rest[0] + slope * (1 / number - first))
    wire_bytes = step = None
    if near.mesh and near.predicted_parts and near.predicted_seconds:
        parts = near.predicted_parts
        predicted = parts["network_inside"] + parts["network_across"]
        wire_bytes, network = _network(near, states[number].mesh, where)
        if network:
            # The formula's error on the compiled size is taken to be the same here.
            network *= predicted / _network(near, near.mesh, where)[1]
        waited = network * parts["exposed"] / predicted if predicted else 0.0
        more = 2 * (state - states[near.devices].state_bytes) / where.chip.memory_rate
        step = near.predicted_seconds - parts["exposed"] + more + waited
    return Point(number, False, state, state + rest[0], wire_bytes, step)


def _network(row: Row, mesh: Mapping[str, int], where: Topology) -> tuple[float, float]:
    """Bytes that a row's collectives would send on another mesh, and seconds at links' rates."""
    old, sent, time = row.mesh or {}, 0.0, 0.0
    chip, in_domain = where.chip, where.domains[1]
    if chip.platform == "tpu" and where.slices == 1:
        in_domain = max(chip.slice_chips, in_domain)  # the mesh grows in as large a slice as can be
    domains = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())) // in_domain
    for total in row.collectives or ():
        kind, axes = total.kind, tuple(axis for axis in mesh if axis in total.axes.split("+"))
        before, group = (math.prod(sizes[axis] for axis in axes) for sizes in (old, mesh))
        if before == 1:  # the row says nothing about what it would send on more devices
            continue
        payload = total.wire_bytes / Collective(kind, axes, before, total.dtype, 1, 1).wire_bytes
        if axes == (DATA_AXIS,):
            payload *= old[FSDP_AXIS] / mesh[FSDP_AXIS]
        if kind == "all-gather" and total.dtype in _INDEX_DTYPES:
            payload *= group / before
        # The links of a group, in the devices' order, which extends in as many dims as it can.
        along = domains[tuple(slice(None) if name in axes else 0 for name in mesh)]
        count = len(np.unique(along))
        dims = min(chip.torus, (group // count).bit_length() - 1)
        links = Route(chip, count, group // count, dims)
        if kind == "reduce-scatter" and total.devices < before:
            # In pairs, as `tree_reduction` does, inside a host or slice first. Together they send
            # as much as a reduce-scatter.
            inside = payload * (1 - 1 / links.members)
            across = payload * (1 / links.members - 1 / group)
            sent += inside + across
            time += inside / chip.inside_rate + across / chip.across_rate
        else:
            # Fractions of a byte count: the payload is an estimate.
            collective = Collective(kind, axes, group, total.dtype, payload, 1)  # type: ignore[arg-type]
            sent += collective.wire_bytes
            time += links.seconds(collective)
    return sent, time


def neighbours(where: Topology) -> list[str]:
    """The names of a quarter and of four times the devices: two more sizes to compile for."""
    chip, (domains, members) = where.chip, where.domains
    total, names = domains * members, []
    for count in (total // 4, total * 4):
        if total % 4 or not 2 <= count <= SIZES[-1] or count % min(count, members):
            continue
        gpus = min(count, members)
        slices = domains if count // domains <= chip.slice_chips else 4 * domains
        name = {"cpu": f"cpu:{count}", "gpu": f"{chip.name}:{count // gpus}x{gpus}"}
        tpu = f"{slices}x" * (slices > 1) + f"{chip.name}-{count // slices}"
        names.append(name.get(chip.platform, tpu))
    return names
