"""Limits on what a run may cost: bindings that a plan enforces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gin

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Positive
from research_dp.planning.row import Row


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most that each strategy of a plan may need; fields as in `plan`."""

    max_wire_ratio: float | None
    max_peak_bytes: int | None

    def exceeded(self, row: Row) -> Iterator[tuple[str, str]]:
        """(the binding, a sentence) for each limit that a row is above, or may be."""
        why = f": it {row.problem}".rstrip(".") if row.problem else ""
        if self.max_wire_ratio is not None:
            name, limit = "plan.max_wire_ratio", self.max_wire_ratio
            if row.wire_total is None or row.min_wire_bytes is None:
                yield name, f"{row.strategy} sends an unknown number of bytes{why}."
            elif row.wire_total - row.wire_of_model > limit * row.min_wire_bytes:
                ratio = row.wire_ratio
                excess = f"{ratio:.4g} times the least" if ratio else "without need"
                yield name, f"{row.strategy} sends {excess}, more than {limit:g}."
        if self.max_peak_bytes is not None:
            name = "plan.max_peak_bytes"
            # Where it does not even compile, what the compiler says that it needs.
            peak = row.peak_bytes or row.needed_bytes
            if peak is None:
                yield name, f"{row.strategy} needs an unknown number of bytes{why}."
            elif peak > self.max_peak_bytes:
                excess = f"more than {self.max_peak_bytes:,}"
                yield name, f"{row.strategy} needs {peak:,} bytes a device at its peak, {excess}."


@gin.register(module="planning")
@checked
def plan(*, max_wire_ratio: Positive | None = None, max_peak_bytes: Count | None = None) -> Budget:
    """The limits of `python -m research_dp.plan`: its status is 1 if a strategy exceeds one.

    A strategy whose cost is unknown, because it is refused for example, exceeds them too. Bindings
    have no effect on training.

    Args:
        max_wire_ratio: Wire bytes a step over the least of the table of strategies, e.g. 1.01.
        max_peak_bytes: Most bytes in use on a device at any moment of a step.

    Raises:
        UsageError: A limit makes no sense.
    """
    return Budget(max_wire_ratio, max_peak_bytes)
