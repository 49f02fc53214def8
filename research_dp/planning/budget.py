"""What a run may cost at most: bindings that a plan is held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gin

from research_dp.distributed.errors import check_count, check_limit
from research_dp.distributed.kinds import Above, Count, Positive
from research_dp.planning.row import Row


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most that each strategy of a plan may need; fields as in `plan`."""

    max_wire_ratio: float | None
    max_peak_bytes: int | None

    def exceeded(self, row: Row) -> Iterator[tuple[str, str]]:
        """(the binding, a sentence) for each limit that a row is above."""
        ratio, most = row.wire_ratio, self.max_wire_ratio
        if most is not None and ratio is not None and ratio > most:
            yield (
                "plan.max_wire_ratio",
                f"{row.strategy} sends {ratio:.4g} times the least, more than {most:g}.",
            )
        # Where it does not even compile, what the compiler says that it needs.
        peak, limit = row.peak_bytes or row.needed_bytes, self.max_peak_bytes
        if limit is not None and peak is not None and peak > limit:
            yield (
                "plan.max_peak_bytes",
                f"{row.strategy} needs {peak:,} bytes a device at its peak, more than {limit:,}.",
            )


@gin.register(module="planning")
def plan(*, max_wire_ratio: Positive | None = None, max_peak_bytes: Count | None = None) -> Budget:
    """What `python -m research_dp.plan` holds strategies to; its status is 1 if one needs more.

    Bindings of it have no effect on training.

    Args:
        max_wire_ratio: Wire bytes a step over the least of the README's table, e.g. 1.01.
        max_peak_bytes: Most bytes in use on a device at any moment of a step.

    Raises:
        UsageError: A limit makes no sense.
    """
    if max_wire_ratio is not None:
        check_limit("plan.max_wire_ratio", max_wire_ratio, Above(0))
    if max_peak_bytes is not None:
        check_count("plan.max_peak_bytes", max_peak_bytes, 1)
    return Budget(max_wire_ratio, max_peak_bytes)
