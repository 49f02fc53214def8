"""A row of a plan: a strategy, and what its step costs on some devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from research_dp.errors import UsageError, message_of

JSON_KEYS = (
    *("strategy", "slots", "mesh", "batch_size", "accumulation_steps", "parameters"),
    *("params_bytes", "opt_bytes", "state_bytes", "batch_bytes", "temp_bytes", "peak_bytes"),
    *("needed_bytes", "available_bytes", "fits", "collectives", "wire_bytes", "min_wire_bytes"),
    *("hidden_fraction", "flops", "predicted_seconds", "is_lower_bound", "predicted_parts"),
    *("bound", "mfu", "tokens_per_second", "examples_per_second", "compile_seconds"),
    *("measured_seconds", "problem", "wire_ratio"),
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What was built.

    Attributes:
        slots: Which of `gather`, `sync` and `update` are filled; without the first two, the
            compiler or the update communicates.
        mesh: Sizes of the mesh's axes.
        batch_size: Examples a step, over all devices.
        accumulation_steps: Micro-batches a step.
        parameters: Number of parameters of the model.
    """

    slots: tuple[str, ...]
    mesh: dict[str, int]
    batch_size: int
    accumulation_steps: int
    parameters: int

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())


@dataclasses.dataclass
class Memory:
    """Bytes of a device.

    Attributes:
        params_bytes: Of its parameters between steps.
        opt_bytes: Of its optimizer state.
        state_bytes: Of all its state between steps.
        batch_bytes: Of its part of a batch.
        available_bytes: What a step may use; None: there is no limit.
        temp_bytes: Temporary memory of the step, by the compiler, as are the others below.
        peak_bytes: Most in use at any moment.
        needed_bytes: State, batch, temporary memory, and results that replace no argument.
    """

    params_bytes: int
    opt_bytes: int
    state_bytes: int
    batch_bytes: int
    available_bytes: int | None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    needed_bytes: int | None = None

    @property
    def state_fits(self) -> bool:
        return self.available_bytes is None or self.state_bytes <= self.available_bytes


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of a step that are alike; `devices` is the size of a group."""

    kind: str
    axes: str
    dtype: str
    purpose: str
    devices: int
    count: int
    wire_bytes: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Communication of a device: `wire_bytes` are 'total', 'by_kind', 'by_axis', 'by_dtype'."""

    collectives: list[CollectiveTotal]
    wire_bytes: dict[str, Any]

    @property
    def total(self) -> float:
        return self.wire_bytes["total"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a step takes, from vendors' rates.

    Attributes:
        flops: Of matrix multiplications; those of custom kernels are left out.
        hidden_fraction: The share of the wire bytes sent behind compute; None: there are none.
        predicted_seconds: A step.
        is_lower_bound: Whether one iteration is counted of a loop of unknown length.
        predicted_parts: Its parts, each as if it ran alone: 'compute', 'memory', 'network_inside' a
            host (GPU) or slice (TPU), 'network_across'; and 'exposed', the wait for the network.
        bound: The longest of the first four.
        mfu: Model FLOPs over the devices' peak; where the step was measured, this and the rates
            below are too.
        tokens_per_second: Of all devices.
        examples_per_second: Of all devices.
    """

    flops: int
    hidden_fraction: float | None
    predicted_seconds: float
    is_lower_bound: bool
    predicted_parts: dict[str, float]
    bound: str
    mfu: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None


@dataclasses.dataclass
class Row:
    """What a strategy's step costs. A part is None where it is unknown: `problem` says why.

    Attributes:
        strategy: Its name.
        setup: What was built; None: it was refused.
        memory: Known with `setup`.
        fits: Whether `memory.needed_bytes` is available.
        traffic: What a device sends.
        min_wire_bytes: The least that it must send, by the README's table.
        timing: How long a step takes.
        compile_seconds: Tracing and compiling.
        measured_seconds: A step on these devices, where it was run.
        problem: Why it cannot be run so, in a sentence.
    """

    strategy: str
    setup: Setup | None = None
    memory: Memory | None = None
    fits: bool = False
    traffic: Traffic | None = None
    min_wire_bytes: float | None = None
    timing: Timing | None = None
    compile_seconds: float | None = None
    measured_seconds: float | None = None
    problem: str | None = None

    @classmethod
    def refused(cls, name: str, error: UsageError) -> Row:
        """The row of a strategy that cannot be built."""
        return cls(name, problem=f"refused: {message_of(error)}")

    @property
    def wire_ratio(self) -> float | None:
        """Wire bytes over the least; None where nothing must be sent, or it is unknown."""
        if not self.min_wire_bytes or self.wire_total is None:
            return None
        return self.wire_total / self.min_wire_bytes

    @property
    def seconds(self) -> float:
        """A step's time: measured, else predicted, else 0."""
        return self.measured_seconds or (self.timing.predicted_seconds if self.timing else 0.0)

    @property
    def needed_bytes(self) -> int | None:
        return self.memory.needed_bytes if self.memory else None

    @property
    def available_bytes(self) -> int | None:
        return self.memory.available_bytes if self.memory else None

    @property
    def wire_total(self) -> float | None:
        return self.traffic.total if self.traffic else None

    def set_measured(self, seconds: float) -> None:
        """Records a step's measured time, and scales the rates to it."""
        self.measured_seconds = seconds
        if self.timing and (predicted := self.timing.predicted_seconds):
            rates = ("mfu", "tokens_per_second", "examples_per_second")
            values = {rate: getattr(self.timing, rate) for rate in rates}
            scaled = {rate: value and value * predicted / seconds for rate, value in values.items()}
            self.timing = dataclasses.replace(self.timing, **scaled)

    def as_json(self) -> dict[str, Any]:
        """All figures under their JSON keys, without the parts between."""
        figures: dict[str, Any] = {"slots": (), "is_lower_bound": False}
        figures |= dataclasses.asdict(self)
        for part in ("setup", "memory", "traffic", "timing"):
            figures |= figures[part] or {}
        figures["wire_ratio"] = self.wire_ratio
        return {key: figures.get(key) for key in JSON_KEYS}


def fastest_first(rows: Iterable[Row]) -> list[Row]:
    """The rows that fit, the shortest step first: as measured if each of them was, or predicted."""
    fitting = [row for row in rows if row.fits and row.timing is not None]
    if all(row.measured_seconds for row in fitting):
        return sorted(fitting, key=lambda row: row.seconds)
    return sorted(fitting, key=lambda row: row.timing.predicted_seconds if row.timing else 0.0)
