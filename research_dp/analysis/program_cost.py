"""What a compiled program costs: memory, FLOPs, communication, and a predicted time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from research_dp.analysis import hlo, hlo_collectives
from research_dp.analysis.hlo import Computation, Instruction
from research_dp.analysis.hlo_collectives import CompiledCollective
from research_dp.analysis.instruction_cost import flops
from research_dp.analysis.schedule import Events, Schedule, simulate
from research_dp.analysis.topologies import Route, Topology, route


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Costs of one run of a compiled program, a device. Bytes and FLOPs are exact."""

    memory: Any  # the compiler's figures, `compiled.memory_analysis()`
    flops: int  # of matrix multiplications
    collectives: tuple[CompiledCollective, ...]
    schedule: Schedule  # predicted times: estimates
    timeline: Timeline | Mixed | None = None  # of the program that was read

    def seconds_at(self, link_rate: float) -> float:
        """The predicted time of a step, in seconds, were the slowest links of another speed.

        Args:
            link_rate: Bytes/s of a device, above 0: between the hosts (GPU) or slices (TPU) of the
                topology, or inside if there is one. `link_rate(topology)` is the topology's own.
        """
        if self.timeline is None:
            raise ValueError("the cost has no timeline: it was not made by `read`")
        return self.timeline.at(link_rate).step

    @property
    def without_latency(self) -> Schedule:
        """The schedule, did collectives take the time of their bytes alone."""
        if self.timeline is None:
            return self.schedule
        return self.timeline.at(link_rate(self.timeline.topology), latency=False)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def collective_count(self) -> int:
        return sum(c.operations for c in self.collectives)

    def wire_bytes_by(self, *fields: str) -> dict[tuple[str, ...], float]:
        """By fields of a collective: ('kind', 'axes') gives {('permute', 'data+fsdp'): 4.5e9}."""
        return wire_bytes_by(self.collectives, *fields)


def on_average(parts: Sequence[tuple[ProgramCost, float]]) -> ProgramCost:
    """The cost of a step on average, of programs that each run in a share of the steps."""
    collectives = tuple(
        dataclasses.replace(c, share=c.share * share)
        for cost, share in parts
        for c in cost.collectives
    )
    timeline = Mixed(tuple((cost.timeline, share) for cost, share in parts))
    return dataclasses.replace(
        parts[0][0],
        flops=round(sum(share * cost.flops for cost, share in parts)),
        collectives=collectives,
        schedule=timeline.at(link_rate(timeline.topology)),
        timeline=timeline,
    )


def wire_bytes_by(
    collectives: Iterable[CompiledCollective], *fields: str
) -> dict[tuple[str, ...], float]:
    """Bytes that a device sends, by fields of a collective, as `ProgramCost.wire_bytes_by`."""
    total: dict[tuple[str, ...], float] = collections.defaultdict(float)
    for collective in collectives:
        values = (getattr(collective, field) for field in fields)
        key = tuple("+".join(v) if isinstance(v, tuple) else v for v in values)
        total[key] += collective.wire_bytes
    return dict(total)


def wire_totals(collectives: Sequence[CompiledCollective]) -> dict[str, Any]:
    """Bytes that a device sends: `total`, and `by_kind`, `by_axis`, `by_dtype` by name, sorted.

    `of_model` are those of its own: of losses and layers over all examples. `in_branches` are those
    of `lax.cond`, counted as if each step took the branch; those of `every` count by their share.
    """
    totals: dict[str, Any] = {"total": sum(c.wire_bytes for c in collectives)}
    totals["of_model"] = sum(c.wire_bytes for c in collectives if c.of_model)
    totals["in_branches"] = sum(c.wire_bytes for c in collectives if c.in_branch)
    for key, field in (("by_kind", "kind"), ("by_axis", "axes"), ("by_dtype", "dtype")):
        sums = wire_bytes_by(collectives, field)
        totals[key] = {name: total for (name,), total in sorted(sums.items())}
    return totals


def read(compiled: Any, mesh: Mesh, topology: Topology, text: str | None = None) -> ProgramCost:
    """Reads what `jax.jit(step).lower(*arguments).compile(options)` gives.

    All devices of the mesh take part; `text` is the program's, which else `compiled` prints.
    NotImplementedError: a collective in an unknown form, or in a loop of unknown length.
    """
    entry = hlo.parse(compiled.as_text() if text is None else text)
    devices = list(mesh.devices.flat)
    slices = [topology.domain(d) for d in devices] if topology.slices > 1 else None
    collectives = tuple(hlo_collectives.find_collectives(entry, dict(mesh.shape), slices))
    routes = {c.name: route(topology, [devices[i] for i in c.group]) for c in collectives}
    timeline = Timeline(entry, topology, collectives, routes)
    total = sum(flops_of(entry).values())
    schedule = timeline.at(link_rate(topology))
    return ProgramCost(compiled.memory_analysis(), total, collectives, schedule, timeline)


def collectives_of(text: str, mesh_sizes: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """The collectives of a program's text, by the sizes of its mesh; no device is needed.

    They are those of `read`, but for TPUs of several slices, which the sizes do not say.
    NotImplementedError: as `read`.
    """
    return tuple(hlo_collectives.find_collectives(hlo.parse(text), mesh_sizes))


def link_rate(topology: Topology) -> float:
    """Bytes/s of a device over the slowest links: between domains, or inside if there is one."""
    chip = topology.chip
    return chip.across_rate if topology.domains[0] > 1 else chip.inside_rate


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """A program and its devices, to be simulated with links of several speeds."""

    entry: Computation
    topology: Topology
    collectives: tuple[CompiledCollective, ...]
    routes: Mapping[str, Route]  # by a collective's name
    # What does not depend on the links: read once, for all simulations.
    events: dict[Instruction, Events] = dataclasses.field(default_factory=dict, repr=False)

    def at(self, link_rate: float, *, latency: bool = True) -> Schedule:
        """Simulates the program with the slowest links at so many bytes/s of a device."""
        chip = self.topology.chip
        if self.topology.domains[0] > 1:
            chip = dataclasses.replace(chip, across_rate=link_rate)
        else:
            chip = dataclasses.replace(chip, inside_rate=link_rate)
        routes = {name: along._replace(chip=chip) for name, along in self.routes.items()}
        # One operation may carry arrays of several types.
        times, nbytes = (collections.defaultdict[str, float](float) for _ in range(2))
        for collective in {(c.name, c.dtype): c for c in self.collectives}.values():
            times[collective.name] += routes[collective.name].sending(collective)
            nbytes[collective.name] += dataclasses.replace(collective, times=1).wire_bytes
        for name, one in {c.name: c for c in self.collectives}.items():
            if latency:
                times[name] = routes[name].seconds(one.kind, times[name])
            times[name] *= one.share  # on average over steps

        def network(name: str) -> tuple[float, bool, float]:
            return times[name], routes[name].crosses, nbytes[name]

        return simulate(self.entry, chip, network, self.events)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """Several programs, each of which runs in a share of the steps: as a `Timeline`."""

    parts: tuple[tuple[Any, float], ...]  # timelines and shares

    @property
    def topology(self) -> Topology:
        return self.parts[0][0].topology

    def at(self, link_rate: float, *, latency: bool = True) -> Schedule:
        """The schedule of a step on average."""
        found = [(timeline.at(link_rate, latency=latency), share) for timeline, share in self.parts]
        weighted = [np.array(dataclasses.astuple(one), float) * share for one, share in found]
        *times, is_lower_bound = np.sum(weighted, 0).tolist()
        return dataclasses.replace(Schedule(*times), is_lower_bound=bool(is_lower_bound))


def flops_of(entry: Computation) -> dict[str, int]:
    """FLOPs of a program by the operands' element type, loops multiplied out."""
    total: dict[str, int] = collections.defaultdict(int)
    for instruction, times, _ in hlo.executed(entry):
        count, dtype = flops(instruction)
        if count and times is None:
            problem = "a matrix multiplication in a loop of unknown length"
            raise NotImplementedError(f"{instruction.name}: {problem}")
        if count:
            total[dtype] += count * (times or 0)
    return dict(total)
