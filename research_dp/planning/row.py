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

    `slots` are those of `gather`, `sync` and `update` that are filled; without the first two, the
    compiler or the update communicates.
    """

    slots: tuple[str, ...]
    mesh: dict[str, int]
    batch_size: int
    accumulation_steps: int
    parameters: int  # elements, of the model

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())


@dataclasses.dataclass
class Memory:
    """Bytes of a device: its state between steps, its part of a batch, and the compiler's figures.

    `needed_bytes` are state, batch, temporary memory, and results that replace no argument.
    """

    params_bytes: int
    opt_bytes: int
    state_bytes: int  # parameters, optimizer state and the rest
    batch_bytes: int
    available_bytes: int | None  # None: there is no limit
    temp_bytes: int | None = None
    peak_bytes: int | None = None  # most in use at any moment
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
    """How long a step takes, from vendors' rates; `mfu` and rates as measured where it was.

    The parts are each as if it ran alone: 'compute', 'memory', 'network_inside' a host (GPU) or
    slice (TPU), 'network_across'; and 'exposed', the wait for the network.
    """

    flops: int  # of matrix multiplications; those of custom kernels are left out
    hidden_fraction: float | None  # of the wire bytes, sent behind compute; None: there are none
    predicted_seconds: float
    is_lower_bound: bool  # one iteration is counted of a loop of unknown length
    predicted_parts: dict[str, float]
    bound: str  # the longest of the first four parts
    mfu: float | None = None  # model FLOPs over the devices' peak
    tokens_per_second: float | None = None
    examples_per_second: float | None = None


@dataclasses.dataclass
class Row:
    """What a strategy's step costs. A part is None where it is unknown: `problem` says why."""

    strategy: str
    setup: Setup | None = None  # None: it was refused
    memory: Memory | None = None  # known with `setup`
    fits: bool = False
    traffic: Traffic | None = None
    min_wire_bytes: float | None = None  # by the README's table
    timing: Timing | None = None
    compile_seconds: float | None = None
    measured_seconds: float | None = None  # a step on these devices
    problem: str | None = None  # why it cannot be run so

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
        figures: dict[str, Any] = {"slots": (), "is_lower_bound": False, **dataclasses.asdict(self)}
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
