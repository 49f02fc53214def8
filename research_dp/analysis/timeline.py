"""Simulates a compiled program's schedule: what waits for the network, and what bounds the step.

An estimate from vendors' rates: one stream computes, one communicates, and nothing else costs
time. Each instruction takes the longer of its FLOPs at the peak rate and its bytes at the memory's
rate, each collective its bytes at the links' rate. Where each collective starts and where it is
waited for is exact: the program says it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from research_dp.analysis.flops import flops_inside
from research_dp.analysis.hbm_traffic import hbm_bytes
from research_dp.analysis.hlo import Computation, Instruction, Module
from research_dp.analysis.hlo_collectives import kind_of, starts_chain
from research_dp.analysis.trip_count import callees
from research_dp.distributed.hardware import Chip

# (name of a collective's instruction) -> the seconds of one execution, whether it leaves the host
# or slice, and the bytes that a device sends.
Network = Callable[[str], tuple[float, bool, float]]


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
    def network(self) -> float:
        return self.network_inside + self.network_across

    @property
    def hidden_fraction(self) -> float | None:
        """The share of the wire bytes that is sent behind compute; None where there are none."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else None

    @property
    def bound(self) -> str:
        """What bounds the step from below: 'compute', 'memory' or 'network'."""
        times = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(times, key=lambda name: times[name])


# Positions in the simulation's clock: the fields of `Schedule`, of which `step` is the time of the
# compute stream, and the time of the network's stream.
_COMPUTE, _MEMORY, _INSIDE, _ACROSS, _EXPOSED, *_OTHERS = range(9)
_COMPUTE_STREAM, _WIRE_BYTES, _HIDDEN_BYTES, _NETWORK_STREAM = _OTHERS


def simulate(module: Module, chip: Chip, network: Network) -> Schedule:
    """Simulates a program's schedule on these devices."""
    simulation = _Simulation(chip, network)
    simulation.run(module.entry)
    for transfer in sorted(simulation.in_flight.values(), key=lambda t: t.arrival):
        simulation.wait(transfer)
    values = [*simulation.clock[:_NETWORK_STREAM].tolist(), simulation.is_lower_bound]
    return Schedule(*values)


class _Transfer(NamedTuple):
    """A collective in flight: when it arrives, how long it takes, and its bytes."""

    arrival: float
    seconds: float
    nbytes: float


class _Simulation:
    def __init__(self, chip: Chip, network: Network):
        self.chip = chip
        self.network = network
        self.clock = np.zeros(9)
        self.in_flight: dict[str, _Transfer] = {}
        self.is_lower_bound = False
        self.costs: dict[Instruction, tuple[float, float]] = {}

    def run(self, computation: Computation) -> None:
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                for callee, trips in callees(instruction):
                    self.is_lower_bound |= trips is None
                    self.repeat(callee, 1 if trips is None else trips)
            else:
                self.execute(instruction)

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

    def execute(self, instruction: Instruction) -> None:
        for awaited in _awaited(instruction):
            if awaited in self.in_flight:
                self.wait(self.in_flight.pop(awaited))
        for name, key in _started(instruction):
            transfer = self.send(name)
            if key is None:
                self.wait(transfer)
            else:
                self.in_flight[key] = transfer
        self.compute(instruction)

    def compute(self, instruction: Instruction) -> None:
        if instruction not in self.costs:
            seconds = sum(n / self.chip.peak(dtype) for n, dtype in flops_inside(instruction))
            self.costs[instruction] = seconds, hbm_bytes(instruction) / self.chip.memory_rate
        compute, memory = self.costs[instruction]
        self.clock[_COMPUTE] += compute
        self.clock[_MEMORY] += memory
        if not instruction.opcode.endswith("-start"):  # asynchronous copies run beside compute
            self.clock[_COMPUTE_STREAM] += max(compute, memory)

    def send(self, name: str) -> _Transfer:
        """Puts a collective on the network, behind those already on it."""
        seconds, crosses, nbytes = self.network(name)
        arrival = max(self.clock[_COMPUTE_STREAM], self.clock[_NETWORK_STREAM]) + seconds
        self.clock[_NETWORK_STREAM] = arrival
        self.clock[_ACROSS if crosses else _INSIDE] += seconds
        self.clock[_WIRE_BYTES] += nbytes
        return _Transfer(arrival, seconds, nbytes)

    def wait(self, transfer: _Transfer) -> None:
        waited = max(0.0, transfer.arrival - self.clock[_COMPUTE_STREAM])
        self.clock[_COMPUTE_STREAM] += waited
        self.clock[_EXPOSED] += waited
        # A longer wait was for collectives before it on the network, which send none of its bytes.
        exposed = min(1.0, waited / transfer.seconds if transfer.seconds else 0)
        self.clock[_HIDDEN_BYTES] += transfer.nbytes * (1 - exposed)


def _started(instruction: Instruction) -> Iterator[tuple[str, str | None]]:
    """Collectives that it starts, each with the key of its wait; None: it waits itself."""
    if kind_of(instruction):
        key = instruction.name if instruction.is_async else None
        yield instruction.name, _rendezvous(instruction) if instruction.opcode == "send" else key
    elif instruction.opcode in ("fusion", "async-start") and (wrapped := instruction.called()):
        for inner in wrapped.instructions.values():
            for name, key in _started(inner):
                of_chain = _chain(inner) if starts_chain(inner) else key
                yield name, instruction.name if instruction.is_async else of_chain


def _awaited(instruction: Instruction) -> list[str]:
    """The keys of the collectives that an instruction waits for."""
    if instruction.opcode == "recv-done":
        return [_rendezvous(instruction.operands[0])]
    if instruction.opcode.endswith("-done") and instruction.operands:
        start = instruction.operands[0]
        while start.opcode == "async-update":
            start = start.operands[0]
        return [start.name]
    if fused := instruction.fused:
        inner = fused.instructions.values()
        if any(i.target == "AsyncCollectiveDone" for i in inner):
            return [chain for i in inner if (chain := _chain(i))]
    return []


def _chain(instruction: Instruction) -> str:
    """The key of a TPU's chain of fusions that carry one collective; '' outside of them."""
    number = instruction.attribute(r'chain_id="(\d+)"')
    return f"chain {number}" if number else ""


def _rendezvous(instruction: Instruction) -> str:
    """The key that a `send` between slices and its `recv` share."""
    key = instruction.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
    return f"rendezvous {key}" if key else ""
