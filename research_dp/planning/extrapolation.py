"""What a strategy would cost on other numbers of devices, from a few that were compiled.

Weak scaling: each device keeps its examples. State is exact, by the rule that lays it out. What a
step needs besides, what it sends and how long it takes follow from compiled programs by formulas,
which are applied to the compiled sizes too: how far they are off there is part of the result.
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
from research_dp.distributed.hardware import Chip
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.distributed.placement import nbytes
from research_dp.errors import UsageError
from research_dp.planning.estimate import Row
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.strategies.jaxpr_collectives import Collective
from research_dp.strategies.state import infer_state_sharding

# Numbers of devices that a page shows, beside those that were compiled.
SIZES = tuple(2**power for power in range(3, 13))

_WIDTHS_OF_ROWS = ("s32", "u32", "s64", "u64")


@dataclasses.dataclass(frozen=True)
class Held:
    """What lies on a device of a mesh between steps: exact, nothing is compiled for it.

    Attributes:
        mesh: Sizes of the axes.
        state_bytes: Of parameters, optimizer state and the rest.
        split: How many elements of the model's parameters are split at all.
    """

    mesh: Mapping[str, int]
    state_bytes: int
    split: int


@dataclasses.dataclass(frozen=True)
class Point:
    """A strategy on a number of devices; sizes are a device's, None where it is not known.

    Attributes:
        devices: How many.
        compiled: Whether its program was compiled; else the figures follow from formulas, all but
            `state_bytes`.
        state_bytes: What lies there between steps.
        needed_bytes: What a step needs.
        wire_bytes: What a step sends.
        seconds: What a step takes, from vendors' rates.
    """

    devices: int
    compiled: bool
    state_bytes: int | None
    needed_bytes: float | None
    wire_bytes: float | None
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Curve:
    """A strategy by number of devices.

    Attributes:
        strategy: Its name.
        points: By number of devices.
        checks: What the formulas give for each size that was compiled, from the others: beside its
            own point, the measure of how far the rest can be trusted.
        remark: Why there are no more points; '' if there are all.
    """

    strategy: str
    points: tuple[Point, ...]
    checks: tuple[tuple[Point, Point], ...] = ()
    remark: str = ""


def held(
    recipe: StrategyConfig, spec: TrainSpec, row: Row, meshes: Mapping[int, dict[str, int]]
) -> dict[int, Held]:
    """What lies on a device of each of these meshes, by the rule.

    Args:
        recipe: The strategy.
        spec: The run.
        row: The strategy's row on some mesh of several devices; it tells whether parameters are
            split between steps.
        meshes: Sizes of the axes, by number of devices.

    Returns:
        It by number of devices, without those for which the rule has no layout.
    """
    spec = recipe.fitted(spec)
    found = {}
    for number, sizes in meshes.items():
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        try:
            layouts, state = infer_state_sharding(recipe, spec, mesh, params_sharded=True)
        except UsageError:
            continue  # a rule that names dims may choose one that so many devices do not divide
        places = jax.tree.leaves(layouts.slices)
        whole = sum(place.nbytes for place in places)
        if row.params_bytes == whole:
            layouts, state = infer_state_sharding(recipe, spec, mesh, params_sharded=False)
        split = sum(math.prod(place.shape) for place in places if place.dim is not None)
        found[number] = Held(sizes, nbytes(state)[0], split)
    return found


def meshes(rows: Sequence[Row], sizes: Iterable[int]) -> dict[int, dict[str, int]]:
    """The strategy's mesh on other numbers of devices: the axis that grew between rows takes them.

    Numbers that the other axis does not divide are left out; all, where no axis grew, or both.
    """
    known = [row.mesh for row in rows if row.mesh]
    if len(known) == 1:
        axes = [axis for axis, size in known[0].items() if size > 1]
    else:
        axes = [axis for axis in known[0] if len({mesh[axis] for mesh in known}) > 1]
    if len(axes) != 1:
        return {}
    fixed = math.prod(size for axis, size in known[0].items() if axis != axes[0])
    return {n: {**known[0], axes[0]: n // fixed} for n in sizes if n % fixed == 0}


def curve(rows: Sequence[Row], at: Mapping[int, Held], where: Topology) -> Curve:
    """A strategy's curve.

    Args:
        rows: Its rows, of several numbers of devices, all with as many examples a device.
        at: What it holds, by number of devices; empty: that is not known.
        where: Devices of the kind that is planned for.
    """
    rows = sorted(rows, key=devices)
    name, points = rows[0].strategy, {devices(row): _point(row) for row in rows}
    if any(n not in at or at[n].state_bytes != points[n].state_bytes for n in points):
        remark = "What it holds elsewhere does not follow from its mesh and rule."
        if not at:
            remark = "Which axis of its mesh grows with the devices is not known."
        if devices(rows[-1]) == 1:
            remark = "It runs on one device, however many there are."
        return Curve(name, tuple(points[n] for n in sorted(points)), remark=remark)
    split = max(at[n].split for n in points)
    known = [r for r in rows if r.needed_bytes is not None and at[devices(r)].split == split]
    remark, checks = "", []
    for n in sorted(set(at) - set(points)) if known else ():
        if at[n].split == split:
            points[n] = extrapolate(known, n, at, where)
        else:
            remark = remark or f"On {n:,} devices other parameters are split than were compiled."
    for row in known:
        others = [other for other in known if other is not row]
        if others:
            guess = extrapolate(others, devices(row), at, where)
            checks.append((points[devices(row)], guess))
    return Curve(name, tuple(points[n] for n in sorted(points)), tuple(checks), remark)


def extrapolate(rows: Sequence[Row], number: int, at: Mapping[int, Held], where: Topology) -> Point:
    """A point by formulas.

    What a step needs beside state and batch goes as a + b / n through the two nearest compiled
    sizes (one: a alone): what is whole, and what is split. Each collective sends its bytes times
    (g - 1) / g for groups of g, twice that for a sum; sums of shards over replicas go with the
    shard, indices of rows with the batch. The step is that of the nearest compiled size, less its
    wait, plus reading and writing what the state is more; plus the new time on the network, of
    which as large a share is waited for.

    Args:
        rows: Compiled.
        number: How many devices.
        at: What is held, by number of devices.
        where: Devices of the kind that is planned for.
    """
    near = _nearest(rows, number)
    state = at[number].state_bytes
    needed = state + _besides(rows, number)
    sent = step = None
    if near.collectives is not None and near.predicted_parts and near.predicted_seconds:
        parts = near.predicted_parts
        played = parts["network_inside"] + parts["network_across"]
        sent, took = _network(near, at[number].mesh, where)
        if took:
            # What the formula leaves out, it leaves out on the compiled size too.
            took *= played / _network(near, near.mesh or {}, where)[1]
        waited = took * parts["exposed"] / played if played else 0.0
        more = 2 * (state - at[devices(near)].state_bytes) / where.chip.memory_rate
        step = near.predicted_seconds - parts["exposed"] + more + waited
    return Point(number, False, state, needed, sent, step)


def _besides(rows: Sequence[Row], number: int) -> float:
    """Bytes of a step beside the state."""
    nearest = sorted(rows, key=lambda row: abs(math.log(devices(row) / number)))[:2]
    sizes = [float((row.needed_bytes or 0) - (row.state_bytes or 0)) for row in nearest]
    if len(sizes) == 1:
        return sizes[0]
    first, second = (1 / devices(row) for row in nearest)
    slope = (sizes[1] - sizes[0]) / (second - first)
    return max(0.0, sizes[0] + slope * (1 / number - first))


def _network(row: Row, mesh: Mapping[str, int], where: Topology) -> tuple[float, float]:
    """Bytes that a row's collectives would send on another mesh, and seconds at links' rates."""
    old, sent, took = row.mesh or {}, 0.0, 0.0
    for one in row.collectives or ():
        axes = tuple(axis for axis in mesh if axis in one["axes"].split("+"))
        before = math.prod(old[axis] for axis in axes)
        group = math.prod(mesh[axis] for axis in axes)
        if before == 1:  # of what it would send on more devices, the row tells nothing
            continue
        # By the bytes sent for each byte of the full array. Sums of pairs are `tree_reduction`'s:
        # all that an array takes send together as many as a reduce-scatter.
        kind = one["kind"]
        halved = kind == "reduce-scatter" and one["devices"] < before
        payload = one["wire_bytes"] / Collective(kind, axes, before, one["dtype"], 1, 1).wire_bytes
        if axes == (DATA_AXIS,):
            payload *= old[FSDP_AXIS] / mesh[FSDP_AXIS]
        if kind == "all-gather" and one["dtype"] in _WIDTHS_OF_ROWS:
            payload *= group / before
        way = route_of(axes, mesh, where)
        if halved:  # inside a host or slice first
            inside = payload * (1 - 1 / way.members)
            across = payload * (1 / way.members - 1 / group)
            sent += inside + across
            took += inside / way.inside_direct + across / way.across
            continue
        moved = Collective(kind, axes, group, one["dtype"], payload, 1)
        sent += moved.wire_bytes
        took += seconds(moved, way)
    return sent, took


def route_of(axes: Sequence[str], mesh: Mapping[str, int], where: Topology) -> Route:
    """The links of a group of a mesh whose devices are not at hand, laid out in their order."""
    names = list(mesh)
    domains = np.arange(math.prod(mesh.values())) // domain_size(where)
    index = tuple(slice(None) if name in axes else 0 for name in names)
    group = domains.reshape(tuple(mesh.values()))[index].ravel()
    count, inside = len(set(group.tolist())), where.chip.inside_rate
    if where.chip.platform == "tpu":
        # As many dimensions of the torus as the group can extend in.
        inside *= 2 * min(where.chip.torus, max(1, (len(group) // count).bit_length() - 1))
    chip = where.chip
    return Route(count, len(group) // count, inside, chip.inside_rate, chip.across_rate)


def domain_size(where: Topology) -> int:
    """Devices of a host (GPU), of as large a slice as there is (TPU)."""
    domains, members = where.domains
    if where.chip.platform == "tpu" and domains == 1:
        return max(where.chip.slice_chips, members)
    return members


def neighbours(where: Topology) -> list[str]:
    """The names of a quarter and of four times the devices: two more sizes to compile for."""
    chip, (domains, members) = where.chip, where.domains
    total, names = domains * members, []
    for count in (total // 4, total * 4):
        if total % 4 or not 2 <= count <= SIZES[-1] or count % min(count, members):
            continue
        names.append(_name(chip, count, domains, members))
    return names


def _name(chip: Chip, count: int, domains: int, members: int) -> str:
    if chip.platform == "cpu":
        return f"cpu:{count}"
    if chip.platform == "gpu":
        inside = min(count, members)
        return f"{chip.name}:{count // inside}x{inside}"
    slices = domains if count // domains <= chip.slice_chips else 4 * domains
    return f"{slices}x{chip.name}-{count // slices}" if slices > 1 else f"{chip.name}-{count}"


def _point(row: Row) -> Point:
    sent = row.wire_total if row.wire_bytes else None
    return Point(devices(row), True, row.state_bytes, row.needed_bytes, sent, row.predicted_seconds)


def _nearest(rows: Sequence[Row], number: int) -> Row:
    return min(rows, key=lambda row: abs(math.log(devices(row) / number)))


def devices(row: Row) -> int:
    """Devices of a row's mesh."""
    return math.prod((row.mesh or {}).values())
