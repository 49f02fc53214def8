"""A step that went wrong, and what all who look for its cause need."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from research_dp.certification.compare_steps import Evidence, look
from research_dp.certification.harness import Batch, Bench
from research_dp.certification.tolerances import COARSE_ULPS, EPS, SIZE, Envelope, wide
from research_dp.distributed.mesh import batch_devices
from research_dp.errors import some_of
from research_dp.strategies import TrainState

ALIKE = 1e-3  # relative: what is this near to a multiple is that multiple
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """What is known of a step that went wrong.

    Attributes:
        bench: The strategy and its oracle.
        evidence: The step.
        earlier: The oracle's state one step before.
        other_batch: Another batch.
        dtypes: Floating-point dtypes that the configuration names.
    """

    bench: Bench
    evidence: Evidence
    earlier: TrainState
    other_batch: Batch
    dtypes: tuple[str, ...]

    def wrong(self, what: str) -> list[str]:
        """Leaves of a kind that differ, the worst first; gradients in elements or in size."""
        kinds = (what, SIZE) if what == "gradient" else (what,)
        return list(dict.fromkeys(d.leaf for d in self.evidence.wrong if d.what in kinds))

    @property
    def alike(self) -> float:
        """Relative distance within which one thing is a multiple of another."""
        coarse = self.bench.precision > EPS
        return COARSE_ULPS * self.bench.precision if coarse else ALIKE

    def again(self, bench: Bench | None = None, batch: Batch | None = None) -> Evidence:
        """The step with something changed."""
        seen = self.evidence
        bench = bench or self.bench
        batch = seen.batch if batch is None else batch
        return look(bench, seen.number, seen.before, batch, Envelope(bench.precision), seed=1)


def rows_of(case: Case, device: int) -> np.ndarray:
    """Places in the batch of the examples of one device."""
    spec = case.bench.spec
    each = np.arange(spec.batch_size).reshape(
        spec.accumulation_steps, batch_devices(case.bench.strategy.mesh), -1
    )
    return each[:, device].reshape(-1)


def ratio_of(found: Any, expected: Any, near: float = ALIKE) -> float | None:
    """The multiple of one array that another is; None if it is none."""
    a, b = wide(found).ravel(), wide(expected).ravel()
    square = float(b @ b)
    if not square or not np.all(np.isfinite(a)):
        return None
    ratio = float(a @ b) / square
    rest = float(np.linalg.norm(a - ratio * b))
    size = float(np.linalg.norm(a))
    return ratio if rest <= near * max(size, ALIKE * math.sqrt(square)) else None


def places_of(places: list[tuple[int, ...]], mesh: Any) -> str:
    """Devices by their place in the mesh."""
    told = [
        f"({' '.join(f'{axis} {at}' for axis, at in zip(mesh.axis_names, place, strict=True))})"
        for place in places
    ]
    return f"device{'s' if len(places) > 1 else ''} {some_of(told, SHOWN)}"


def leaves_of(leaves: list[str]) -> str:
    """The first of several paths."""
    return some_of(leaves, SHOWN)
