"""A row of a plan: a strategy, and what its step costs on some devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from research_dp.errors import UsageError, message_of


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


@dataclasses.dataclass
class Row:
    """What a strategy's step costs a device: the figures of `plan --json`, in its order.

    A figure is None where it is unknown: `problem` says why. Rates are as measured where the step
    was, else follow from the predicted time.
    """

    strategy: str
    mesh: dict[str, int] | None = None  # None: the strategy was refused
    batch_size: int | None = None
    accumulation_steps: int | None = None
    parameters: int | None = None  # elements, of the model
    params_bytes: int | None = None
    opt_bytes: int | None = None
    slots_bytes: int | None = None  # of slots with state
    state_bytes: int | None = None  # between steps: parameters, optimizer state and the rest
    padding_bytes: int | None = None  # of the state: devices do not divide each array
    batch_bytes: int | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None  # most in use at any moment
    needed_bytes: int | None = None  # state, batch, temporary, results that replace no argument
    available_bytes: int | None = None  # None: there is no limit
    fits: bool = False
    collectives: list[CollectiveTotal] | None = None
    wire_bytes: dict[str, Any] | None = None  # 'total', 'of_model', 'by_kind', ...
    min_wire_bytes: float | None = None  # by the table of strategies, in the dtypes that are bound
    narrow_wire_bytes: float | None = None  # the same in two bytes an element
    narrow_file: str | None = None  # that binds such dtypes
    hidden_fraction: float | None = None  # of the wire bytes, sent behind compute
    flops: int | None = None  # of matrix multiplications, without those of custom kernels
    predicted_seconds: float | None = None
    predicted_range: tuple[float, float] | None = None  # eight of ten steps; None: not calibrated
    calibrated_by: str | None = None  # the published steps that the range is from
    is_lower_bound: bool = False  # one iteration is counted of a loop of unknown length
    # Each as if it ran alone: 'compute', 'memory', 'network_inside' a host (GPU) or slice (TPU),
    # 'network_across'; 'exposed', the wait for the network; 'slowed', by which collectives beside
    # compute slow it; 'latency', what bytes do not take.
    predicted_parts: dict[str, float] | None = None
    bound: str | None = None  # the longest of the first four parts
    mfu: float | None = None  # model FLOPs over the devices' peak
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    compile_seconds: float | None = None
    measured_seconds: float | None = None  # a step on these devices
    problem: str | None = None  # why it cannot be run so

    @classmethod
    def refused(cls, name: str, error: UsageError) -> Row:
        """The row of a strategy that cannot be built."""
        return cls(name, problem=f"refused: {message_of(error)}")

    @property
    def devices(self) -> int:
        return math.prod((self.mesh or {}).values())

    @property
    def wire_total(self) -> float | None:
        return self.wire_bytes["total"] if self.wire_bytes else None

    @property
    def wire_in_branches(self) -> float:
        """Those of the wire bytes that a step may not send: of branches of `lax.cond`."""
        return (self.wire_bytes or {}).get("in_branches", 0.0)

    @property
    def wire_of_model(self) -> float:
        """Those of the wire bytes that are the model's: of losses over all examples."""
        return (self.wire_bytes or {}).get("of_model", 0.0)

    @property
    def wire_ratio(self) -> float | None:
        """The strategy's wire bytes over the least; None: nothing must be sent, or not known."""
        if not self.min_wire_bytes or self.wire_total is None:
            return None
        return (self.wire_total - self.wire_of_model) / self.min_wire_bytes

    @property
    def is_wide(self) -> bool:
        """Whether the dtypes that are bound take more than two bytes an element."""
        return (self.min_wire_bytes or 0.0) > 1.01 * (self.narrow_wire_bytes or math.inf)

    @property
    def seconds(self) -> float:
        """A step's time: measured, else predicted, else 0."""
        return self.measured_seconds or self.predicted_seconds or 0.0

    def is_as_fast_as(self, other: Row) -> bool:
        """Whether the ranges of two predicted times overlap: neither is known to be less."""
        one, two = self.predicted_range, other.predicted_range
        if one is None or two is None or self.measured_seconds or other.measured_seconds:
            return False
        return one[0] <= two[1] and two[0] <= one[1]

    @property
    def state_fits(self) -> bool:
        if self.state_bytes is None or self.available_bytes is None:
            return self.state_bytes is not None
        return self.state_bytes <= self.available_bytes

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "wire_ratio": self.wire_ratio}


Curves = Mapping[str, Mapping[int, Row]]  # strategy -> number of devices -> its row there


def fastest_first(rows: Iterable[Row]) -> list[Row]:
    """The rows that fit, the shortest step first: as measured if each of them was, or predicted."""
    fitting = [row for row in rows if row.fits and row.predicted_seconds is not None]
    measured = all(row.measured_seconds for row in fitting)
    return sorted(fitting, key=lambda r: r.seconds if measured else r.predicted_seconds or 0.0)
