"""What a compiled program costs: memory, FLOPs, communication, and a predicted time."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from jax.sharding import Mesh

from research_dp.analysis import hlo
from research_dp.analysis.flops import flops
from research_dp.analysis.hlo_collectives import CompiledCollective, find_collectives
from research_dp.analysis.link_model import route, seconds
from research_dp.analysis.timeline import Schedule, simulate
from research_dp.analysis.topologies import Topology
from research_dp.analysis.trip_count import executed


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Costs of one run of a compiled program, a device. Bytes and FLOPs are exact."""

    argument_bytes: int  # for a training step: the state and the batch
    output_bytes: int  # results, those that replace an argument included
    alias_bytes: int  # results that replace an argument (donated)
    temp_bytes: int
    peak_bytes: int  # most in use at any moment, arguments included
    flops: int  # of matrix multiplications
    flops_by_dtype: dict[str, int]  # by the operands' element type
    collectives: tuple[CompiledCollective, ...]
    crossing: frozenset[str]  # names of the collectives that leave a host (GPU) or a slice (TPU)
    schedule: Schedule  # predicted times: estimates, from vendors' rates

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def collective_count(self) -> int:
        return sum(c.operations for c in self.collectives)

    def wire_bytes_by(self, *fields: str) -> dict[tuple[str, ...], float]:
        """Wire bytes by fields of a collective: 'kind', 'dtype', 'axes', 'purpose'.

        E.g. `wire_bytes_by('kind', 'axes')` is `{('all-gather', 'fsdp'): 4.5e9, ...}`, several axes
        joined by a '+'.
        """
        total: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for collective in self.collectives:
            values = (getattr(collective, field) for field in fields)
            key = tuple("+".join(v) if isinstance(v, tuple) else v for v in values)
            total[key] += collective.wire_bytes
        return dict(total)

    @property
    def wire_bytes_across(self) -> float:
        """Bytes of the collectives that leave a host (GPU) or a slice (TPU)."""
        return sum(c.wire_bytes for c in self.collectives if c.name in self.crossing)


def read(compiled: Any, mesh: Mesh, topology: Topology, text: str | None = None) -> ProgramCost:
    """Reads a compiled program.

    Args:
        compiled: What `jax.jit(step).lower(*arguments).compile(options)` gives.
        mesh: The mesh that the program was written for; all its devices take part.
        topology: Where the mesh's devices are.
        text: The program's text; None: `compiled` prints it.

    Raises:
        NotImplementedError: A collective in an unknown form, or in a loop of unknown length.
    """
    memory = compiled.memory_analysis()
    module = hlo.parse(compiled.as_text() if text is None else text)
    devices = list(mesh.devices.flat)
    slices = [topology.domain(d) for d in devices] if topology.slices > 1 else None
    collectives = find_collectives(module, dict(mesh.shape), slices)
    routes = {c.name: route(topology, [devices[i] for i in c.group]) for c in collectives}
    # One operation may carry arrays of several types.
    times, nbytes = (collections.defaultdict[str, float](float) for _ in range(2))
    for collective in {(c.name, c.dtype): c for c in collectives}.values():
        times[collective.name] += seconds(collective, routes[collective.name])
        nbytes[collective.name] += dataclasses.replace(collective, times=1).wire_bytes
    schedule = simulate(
        module, topology.chip, lambda name: (times[name], routes[name].crosses, nbytes[name])
    )
    by_dtype = flops_of(module)
    return ProgramCost(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=sum(by_dtype.values()),
        flops_by_dtype=by_dtype,
        collectives=tuple(collectives),
        crossing=frozenset(name for name, links in routes.items() if links.crosses),
        schedule=schedule,
    )


def flops_of(module: hlo.Module) -> dict[str, int]:
    """FLOPs of a program by the operands' element type, loops multiplied out."""
    total: dict[str, int] = collections.defaultdict(int)
    for instruction, times, _ in executed(module.entry):
        count, dtype = flops(instruction)
        if not count:
            continue
        if times is None:
            name = instruction.name
            raise NotImplementedError(
                f"{name}: a matrix multiplication in a loop of unknown length"
            )
        total[dtype] += count * times
    return dict(total)
