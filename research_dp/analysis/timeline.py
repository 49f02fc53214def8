"""Plays a compiled program's schedule: what waits for the network, and what bounds the step.

An estimate from vendors' rates, of a machine that does everything else for nothing: one stream
computes, one sends. Each instruction takes the longer of its FLOPs at the peak rate and its bytes
at the memory's rate, each collective its bytes at the links' rate. What the schedule says is exact:
what is started when, and where it is waited for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from research_dp.analysis import flops
from research_dp.analysis import hbm_traffic as memory
from research_dp.analysis.hlo import Computation, Instruction, Module
from research_dp.analysis.hlo_collectives import entered, is_sync, kind_of, starts
from research_dp.distributed.hardware import Chip

# Gives the seconds of one execution of a collective, by its instruction's name, whether it leaves
# the host or slice, and the bytes that a device sends.
Network = Callable[[str], tuple[float, bool, float]]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Predicted times of one run of a program, in seconds.

    Attributes:
        compute: All FLOPs at the peak rate.
        memory: All bytes to and from device memory at its rate.
        network_inside: All collectives inside a host (GPU) or slice (TPU), one after the other.
        network_across: Those that leave it.
        exposed: How long the compute stream waits for collectives.
        step: The whole run: every instruction at the slower of compute and memory, and `exposed`.
        wire_bytes: What a device sends.
        hidden_bytes: The part of it that travels while the compute stream does not wait for it.
        is_lower_bound: Whether there is a loop of unknown length, of which one turn is counted.
    """

    compute: float
    memory: float
    network_inside: float
    network_across: float
    exposed: float
    step: float
    wire_bytes: float
    hidden_bytes: float
    is_lower_bound: bool = False

    @property
    def network(self) -> float:
        return self.network_inside + self.network_across

    @property
    def hidden_fraction(self) -> float | None:
        """The share of the wire bytes that travel behind compute; None where nothing is sent."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else None

    @property
    def bound(self) -> str:
        """What bounds the step from below: 'compute', 'memory' or 'network'."""
        times = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(times, key=lambda name: times[name])


def play(module: Module, chip: Chip, network: Network) -> Schedule:
    """Plays a program's schedule.

    Args:
        module: The program.
        chip: The devices' rates.
        network: How long each collective takes.
    """
    player = _Player(module, chip, network)
    player.computation(module.entry)
    for sent in sorted(player.finished.values(), key=lambda one: one.arrival):
        player.wait(sent)
    clock = [float(seconds) for seconds in player.clock]
    return Schedule(
        compute=clock[_COMPUTE],
        memory=clock[_MEMORY],
        network_inside=clock[_INSIDE],
        network_across=clock[_ACROSS],
        exposed=clock[_EXPOSED],
        step=clock[_COMPUTES],
        wire_bytes=clock[_BYTES],
        hidden_bytes=clock[_HIDDEN],
        is_lower_bound=player.is_lower_bound,
    )


# Places in the player's clock: the two streams' times, then sums.
_COMPUTES, _SENDS, _EXPOSED, _COMPUTE, _MEMORY, _INSIDE, _ACROSS, _BYTES, _HIDDEN = range(9)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A collective on its way: when it will have arrived, how long it takes, and its bytes."""

    arrival: float
    took: float
    nbytes: float


class _Player:
    def __init__(self, module: Module, chip: Chip, network: Network):
        self.module = module
        self.chip = chip
        self.network = network
        self.clock = np.zeros(9)
        self.finished: dict[str, _Sent] = {}  # what was started
        self.is_lower_bound = False
        self.costs: dict[str, tuple[float, float]] = {}

    def computation(self, computation: Computation) -> None:
        """Plays a computation's instructions in their order."""
        for instruction in computation.instructions.values():
            self.instruction(computation, instruction)

    def instruction(self, computation: Computation, instruction: Instruction) -> None:
        """Plays one instruction."""
        if instruction.opcode in ("while", "conditional", "call"):
            for inner, turns in entered(self.module, computation, instruction):
                self.is_lower_bound |= turns is None
                self.loop(inner, 1 if turns is None else turns)
            return
        for key in self.awaited(computation, instruction):
            if key in self.finished:
                self.wait(self.finished.pop(key))
        for name, later in self.sent(computation, instruction):
            sent = self.send(name)
            if later is None:
                self.wait(sent)
            else:
                self.finished[later] = sent
        self.work(computation, instruction)

    def loop(self, body: Computation, turns: int) -> None:
        """Plays a loop; once its turns are all alike, the rest of them in one go."""
        before = None
        for turn in range(turns):
            start = self.clock.copy()
            self.computation(body)
            took = self.clock - start
            if before is not None and np.allclose(took, before, rtol=1e-9, atol=0):
                self.clock += took * (turns - turn - 1)
                return
            before = took

    def work(self, computation: Computation, instruction: Instruction) -> None:
        """An instruction's own compute and memory traffic."""
        if instruction.name not in self.costs:
            found = flops.inside(self.module, computation, instruction)
            compute = sum(count / self.chip.peak(dtype) for count, dtype in found)
            moved = memory.moved(self.module, computation, instruction)
            self.costs[instruction.name] = compute, moved / self.chip.memory_rate
        compute, traffic = self.costs[instruction.name]
        self.clock[_COMPUTE] += compute
        self.clock[_MEMORY] += traffic
        if not instruction.opcode.endswith("-start"):  # copies that are started run beside
            self.clock[_COMPUTES] += max(compute, traffic)

    def send(self, name: str) -> _Sent:
        """Puts a collective on the network."""
        took, crosses, nbytes = self.network(name)
        arrival = max(self.clock[_COMPUTES], self.clock[_SENDS]) + took
        self.clock[_SENDS] = arrival
        self.clock[_ACROSS if crosses else _INSIDE] += took
        self.clock[_BYTES] += nbytes
        return _Sent(arrival, took, nbytes)

    def wait(self, sent: _Sent) -> None:
        """Lets the compute stream wait for a collective."""
        waited = max(0.0, sent.arrival - self.clock[_COMPUTES])
        self.clock[_COMPUTES] += waited
        self.clock[_EXPOSED] += waited
        # A longer wait was for what is before it on the network, and moves none of its bytes.
        self.clock[_HIDDEN] += sent.nbytes * (1 - min(1.0, waited / sent.took if sent.took else 0))

    def sent(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[str, str | None]]:
        """Collectives that an instruction sends, and under which key each is waited for later.

        The key is None where the instruction itself waits.
        """
        if kind_of(self.module, computation, instruction):
            later = instruction.opcode.endswith("-start") and not is_sync(instruction)
            if instruction.opcode == "send":
                return [(instruction.name, _rendezvous(instruction))]
            return [(instruction.name, instruction.name if later else None)]
        found: list[tuple[str, str | None]] = []
        inner = self.module.called(instruction)
        if instruction.opcode in ("fusion", "async-start") and inner:
            wrapped = instruction.opcode == "async-start" and not is_sync(instruction)
            for fused in inner.instructions.values():
                for name, key in self.sent(inner, fused):
                    if starts(inner, fused):
                        key = _chain(fused)
                    found.append((name, instruction.name if wrapped else key))
        return found

    def awaited(self, computation: Computation, instruction: Instruction) -> list[str]:
        """The keys of what an instruction waits for."""
        if instruction.opcode == "recv-done":
            return [_rendezvous(computation.instructions[instruction.operands[0]])]
        if instruction.opcode.endswith("-done") and instruction.operands:
            begun = computation.instructions[instruction.operands[0]]
            while begun.opcode == "async-update":
                begun = computation.instructions[begun.operands[0]]
            return [begun.name]
        inner = self.module.called(instruction)
        if instruction.opcode == "fusion" and inner:
            ends = any(i.target == "AsyncCollectiveDone" for i in inner.instructions.values())
            return [_chain(i) for i in inner.instructions.values() if ends and _chain(i)]
        return []


def _chain(instruction: Instruction) -> str:
    """The key of a TPU's chain of fusions that carry one collective; '' outside of them."""
    found = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return f"chain {found[1]}" if found else ""


def _rendezvous(instruction: Instruction) -> str:
    """The key by which a `send` between slices and its `recv` know each other."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    return f"rendezvous {found[1]}" if found else ""
