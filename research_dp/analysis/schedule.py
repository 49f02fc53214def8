"""The predicted schedule of a program: one stream computes, one communicates.

Nothing else costs time. An instruction takes the longer of its FLOPs and its bytes of memory, at
the vendors' rates or, where a device is calibrated, at those that published steps reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from research_dp.analysis import hlo, hlo_collectives
from research_dp.analysis.hlo import Computation, Instruction
from research_dp.analysis.instruction_cost import flops_inside, hbm_bytes, is_attention
from research_dp.distributed.mesh import Chip

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

    compute: float  # all FLOPs
    memory: float  # all bytes to and from device memory
    network_inside: float  # collectives inside a host (GPU) or slice (TPU), one after the other
    network_across: float  # those that leave it
    exposed: float  # how long the compute stream waits for collectives
    slowed: float  # how much longer compute takes for the collectives beside it
    step: float  # every instruction at the slower of compute and memory, `exposed` and `slowed`
    wire_bytes: float
    hidden_bytes: float  # those that are sent while the compute stream does not wait for them
    is_lower_bound: bool = False  # one iteration is counted of a loop of unknown length

    @property
    def hidden_fraction(self) -> float | None:
        """The share of the wire bytes that is sent behind compute; None where there are none."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else None


class Events(NamedTuple):
    """What happens at an instruction, whatever the links."""

    calls: tuple[tuple[Computation, int | None], ...] = ()  # and the trips; then nothing else
    awaited: tuple[str, ...] = ()  # keys of collectives
    started: tuple[tuple[str, str | None], ...] = ()  # names of collectives, keys of their waits
    compute: float = 0.0  # seconds
    memory: float = 0.0
    elapsed: float = 0.0  # on the compute stream


# Positions in the simulation's clock: the fields of `Schedule`, of which `step` is the time of the
# compute stream, and the time of the network's stream.
_COMPUTE, _MEMORY, _INSIDE, _ACROSS, _EXPOSED, _SLOWED, *_OTHERS = range(10)
_COMPUTE_STREAM, _WIRE_BYTES, _HIDDEN_BYTES, _NETWORK_STREAM = _OTHERS


def simulate(
    entry: Computation,
    chip: Chip,
    network: Network,
    events: dict[Instruction, Events] | None = None,
) -> Schedule:
    """Simulates a program's schedule on these devices; `events` keeps what was read of it."""
    simulation = _Simulation(chip, network, {} if events is None else events)
    simulation.run(entry)
    for transfer in sorted(simulation.in_flight.values(), key=lambda transfer: transfer[0]):
        simulation.wait(*transfer)
    values = [*simulation.clock[:_NETWORK_STREAM].tolist(), simulation.is_lower_bound]
    return Schedule(*values)


def _events_of(instruction: Instruction, chip: Chip) -> Events:
    if instruction.opcode in ("while", "conditional", "call"):
        return Events(calls=tuple(hlo.callees(instruction)))
    compute = sum(n / chip.peak(dtype) for n, dtype in flops_inside(instruction))
    memory = hbm_bytes(instruction) / chip.memory_rate
    if known := chip.calibration:
        compute /= known.attention if is_attention(instruction) else known.matmul
        memory *= known.memory
    # Asynchronous copies run beside compute.
    elapsed = 0.0 if instruction.opcode.endswith("-start") else max(compute, memory)
    awaited, started = tuple(_awaited(instruction)), tuple(_started(instruction))
    return Events((), awaited, started, compute, memory, elapsed)


class _Simulation:
    def __init__(self, chip: Chip, network: Network, events: dict[Instruction, Events]):
        self.chip = chip
        self.overlap = chip.calibration.overlap if chip.calibration else 0.0
        self.network = network
        self.events = events
        self.clock = np.zeros(10)
        # When a collective arrives, how long it takes, and its bytes; by the key of its wait.
        self.in_flight: dict[str, tuple[float, float, float]] = {}
        self.is_lower_bound = False

    def run(self, computation: Computation) -> None:
        for instruction in computation.instructions.values():
            if instruction not in self.events:
                self.events[instruction] = _events_of(instruction, self.chip)
            calls, awaited, started, compute, memory, elapsed = self.events[instruction]
            for callee, trips in calls:
                self.is_lower_bound |= trips is None
                self.repeat(callee, 1 if trips is None else trips)
            for key in awaited:
                if key in self.in_flight:
                    self.wait(*self.in_flight.pop(key))
            for name, wait_key in started:
                if wait_key is None:
                    self.wait(*self.send(name))
                else:
                    self.in_flight[wait_key] = self.send(name)
            self.clock[_COMPUTE] += compute
            self.clock[_MEMORY] += memory
            self.clock[_COMPUTE_STREAM] += elapsed

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
        # The wait, if there is one, is shorter by as much.
        slowed = self.overlap * max(0.0, seconds - waited)
        waited = max(0.0, waited - slowed)
        self.clock[_COMPUTE_STREAM] += waited + slowed
        self.clock[_EXPOSED] += waited
        self.clock[_SLOWED] += slowed
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
