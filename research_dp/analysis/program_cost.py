"""What a compiled program costs: memory, FLOPs, communication, and a predicted time.

In the simulated schedule one stream computes, one communicates, and nothing else costs time. An
instruction takes the longer of its FLOPs and its bytes of memory at the vendors' rates.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from research_dp.analysis import hlo, hlo_collectives
from research_dp.analysis.hlo import Computation, Instruction
from research_dp.analysis.instruction_cost import flops, flops_inside, hbm_bytes
from research_dp.analysis.topologies import Topology, route
from research_dp.distributed.hardware import Chip

# (name of a collective's instruction) -> the seconds of one execution, whether it leaves the host
# or slice, and the bytes that a device sends.
Network = Callable[[str], tuple[float, bool, float]]
# The keys by which the instruction that waits finds its collective: of a TPU's chain of fusions
# that carry one, and of a `send` between slices and its `recv`.
_CHAIN = r'(chain_id="\d+")'
_RENDEZVOUS = r'(_xla_host_transfer_rendezvous="[^"]+")'


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Predicted times of one run of a program, in seconds, and the bytes that a device sends."""

    compute: float  # all FLOPs at the peak rate
    memory: float  # all bytes to and from device memory at its rate
    network_inside: float  # collectives inside a host (GPU) or slice (TPU), one after the other
    network_across: float  # those that leave it
    exposed: float  # how long the compute stream waits for collectives
    step: float  # every instruction at the slower of compute and memory, and `exposed`
    wire_bytes: float
    hidden_bytes: float  # those that are sent while the compute stream does not wait for them
    is_lower_bound: bool = False  # one iteration is counted of a loop of unknown length

    @property
    def hidden_fraction(self) -> float | None:
        """The share of the wire bytes that is sent behind compute; None where there are none."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else None


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Costs of one run of a compiled program, a device. Bytes and FLOPs are exact."""

    memory: Any  # the compiler's figures, `compiled.memory_analysis()`
    flops: int  # of matrix multiplications
    collectives: tuple[hlo_collectives.CompiledCollective, ...]
    schedule: Schedule  # predicted times: estimates, from vendors' rates

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def collective_count(self) -> int:
        return sum(c.operations for c in self.collectives)

    def wire_bytes_by(self, *fields: str) -> dict[tuple[str, ...], float]:
        """By fields of a collective: ('kind', 'axes') gives {('permute', 'data+fsdp'): 4.5e9}."""
        total: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for collective in self.collectives:
            values = (getattr(collective, field) for field in fields)
            key = tuple("+".join(v) if isinstance(v, tuple) else v for v in values)
            total[key] += collective.wire_bytes
        return dict(total)


def read(compiled: Any, mesh: Mesh, topology: Topology, text: str | None = None) -> ProgramCost:
    """Reads what `jax.jit(step).lower(*arguments).compile(options)` gives.

    All devices of the mesh take part; `text` is the program's, which else `compiled` prints.
    NotImplementedError: a collective in an unknown form, or in a loop of unknown length.
    """
    entry = hlo.parse(compiled.as_text() if text is None else text)
    devices = list(mesh.devices.flat)
    slices = [topology.domain(d) for d in devices] if topology.slices > 1 else None
    collectives = hlo_collectives.find_collectives(entry, dict(mesh.shape), slices)
    routes = {c.name: route(topology, [devices[i] for i in c.group]) for c in collectives}
    # One operation may carry arrays of several types.
    times, nbytes = (collections.defaultdict[str, float](float) for _ in range(2))
    for collective in {(c.name, c.dtype): c for c in collectives}.values():
        times[collective.name] += routes[collective.name].seconds(collective)
        nbytes[collective.name] += dataclasses.replace(collective, times=1).wire_bytes
    schedule = simulate(
        entry, topology.chip, lambda name: (times[name], routes[name].crosses, nbytes[name])
    )
    total = sum(flops_of(entry).values())
    return ProgramCost(compiled.memory_analysis(), total, tuple(collectives), schedule)


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


# Positions in the simulation's clock: the fields of `Schedule`, of which `step` is the time of the
# compute stream, and the time of the network's stream.
_COMPUTE, _MEMORY, _INSIDE, _ACROSS, _EXPOSED, *_OTHERS = range(9)
_COMPUTE_STREAM, _WIRE_BYTES, _HIDDEN_BYTES, _NETWORK_STREAM = _OTHERS


def simulate(entry: Computation, chip: Chip, network: Network) -> Schedule:
    """Simulates a program's schedule on these devices."""
    simulation = _Simulation(chip, network)
    simulation.run(entry)
    for transfer in sorted(simulation.in_flight.values(), key=lambda transfer: transfer[0]):
        simulation.wait(*transfer)
    values = [*simulation.clock[:_NETWORK_STREAM].tolist(), simulation.is_lower_bound]
    return Schedule(*values)


class _Simulation:
    def __init__(self, chip: Chip, network: Network):
        self.chip = chip
        self.network = network
        self.clock = np.zeros(9)
        # When a collective arrives, how long it takes, and its bytes; by the key of its wait.
        self.in_flight: dict[str, tuple[float, float, float]] = {}
        self.is_lower_bound = False
        self.costs: dict[Instruction, tuple[float, float]] = {}

    def run(self, computation: Computation) -> None:
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                for callee, trips in hlo.callees(instruction):
                    self.is_lower_bound |= trips is None
                    self.repeat(callee, 1 if trips is None else trips)
                continue
            for awaited in _awaited(instruction):
                if awaited in self.in_flight:
                    self.wait(*self.in_flight.pop(awaited))
            for name, key in _started(instruction):
                if key is None:
                    self.wait(*self.send(name))
                else:
                    self.in_flight[key] = self.send(name)
            if instruction not in self.costs:
                time = sum(n / self.chip.peak(dtype) for n, dtype in flops_inside(instruction))
                self.costs[instruction] = time, hbm_bytes(instruction) / self.chip.memory_rate
            compute, memory = self.costs[instruction]
            self.clock[_COMPUTE] += compute
            self.clock[_MEMORY] += memory
            if not instruction.opcode.endswith("-start"):  # asynchronous copies run beside compute
                self.clock[_COMPUTE_STREAM] += max(compute, memory)

    def repeat(self, body: Computation, trips: int) -> None:
        """Simulates a loop until two iterations take equally long, and multiplies out the rest."""
        before = None
        for trip in range(trips):
            start = self.clock.copy()
            self.run(body)
            elapsed = self.clock - start
            if before is not None and np.allclose(elapsed, before, rtol=1e-9, atol=0):
                self.clock += elapsed * (trips - trip - 1)
                return
            before = elapsed

    def send(self, name: str) -> tuple[float, float, float]:
        """Puts a collective on the network, behind those already on it."""
        seconds, crosses, nbytes = self.network(name)
        arrival = max(self.clock[_COMPUTE_STREAM], self.clock[_NETWORK_STREAM]) + seconds
        self.clock[_NETWORK_STREAM] = arrival
        self.clock[_ACROSS if crosses else _INSIDE] += seconds
        self.clock[_WIRE_BYTES] += nbytes
        return arrival, seconds, nbytes

    def wait(self, arrival: float, seconds: float, nbytes: float) -> None:
        waited = max(0.0, arrival - self.clock[_COMPUTE_STREAM])
        self.clock[_COMPUTE_STREAM] += waited
        self.clock[_EXPOSED] += waited
        # A longer wait was for collectives before it on the network, which send none of its bytes.
        exposed = min(1.0, waited / seconds if seconds else 0)
        self.clock[_HIDDEN_BYTES] += nbytes * (1 - exposed)


def _started(instruction: Instruction) -> Iterator[tuple[str, str | None]]:
    """Collectives that it starts, each with the key of its wait; None: it waits itself."""
    if hlo_collectives.kind_of(instruction):
        key = instruction.name if instruction.is_async else None
        is_send = instruction.opcode == "send"
        yield instruction.name, instruction.attribute(_RENDEZVOUS) if is_send else key
    elif instruction.opcode in ("fusion", "async-start") and (wrapped := instruction.called()):
        for inner in wrapped.instructions.values():
            for name, key in _started(inner):
                of_chain = inner.attribute(_CHAIN) if hlo_collectives.starts_chain(inner) else key
                yield name, instruction.name if instruction.is_async else of_chain


def _awaited(instruction: Instruction) -> list[str]:
    """The keys of the collectives that an instruction waits for."""
    if instruction.opcode == "recv-done":
        return [instruction.operands[0].attribute(_RENDEZVOUS)]
    if instruction.opcode.endswith("-done") and instruction.operands:
        start = instruction.operands[0]
        while start.opcode == "async-update":
            start = start.operands[0]
        return [start.name]
    if fused := instruction.fused:
        inner = fused.instructions.values()
        if any(i.target == "AsyncCollectiveDone" for i in inner):
            return [chain for i in inner if (chain := i.attribute(_CHAIN))]
    return []
