"""The step that went wrong, and what every suspicion about it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from research_dp.certification import tolerances
from research_dp.certification.compare_steps import StepComparison, compare_step
from research_dp.certification.harness import Batch, Bench
from research_dp.certification.tolerances import SIZE, Envelope, as_float64, projection
from research_dp.distributed.mesh import batch_devices
from research_dp.errors import some_of
from research_dp.strategies import TrainState

SHOWN = 3
NEAR = 1e-3  # relative distance


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that went wrong."""

    bench: Bench
    step: StepComparison
    earlier: TrainState  # the oracle's, one step before
    other_batch: Batch
    dtypes: tuple[str, ...]  # floating-point dtypes that the configuration names

    def wrong(self, kind: str) -> list[str]:
        """Leaves of a kind that differ, the worst first; gradients in elements or in size."""
        kinds = (kind, SIZE) if kind == "gradient" else (kind,)
        return list(dict.fromkeys(d.leaf for d in self.step.wrong if d.kind in kinds))

    @property
    def tolerance(self) -> float:
        """Relative distance within which one array counts as a multiple of another."""
        precision = self.bench.precision
        return tolerances.COARSE_ULPS * precision if precision > tolerances.EPS else NEAR

    def rerun(self, bench: Bench | None = None, batch: Batch | None = None) -> StepComparison:
        """Compares the step again, with another bench or batch."""
        step, bench, batch = self.step, bench or self.bench, batch or self.step.batch
        envelope = Envelope(bench.precision)
        return compare_step(bench, step.number, step.before, batch, envelope, seed=1)

    def rows_by_device(self) -> list[np.ndarray]:
        """The positions in the batch of each device's examples."""
        spec, devices = self.bench.spec, batch_devices(self.bench.strategy.mesh)
        rows = np.arange(spec.batch_size).reshape(spec.accumulation_steps, devices, -1)
        return [rows[:, device].reshape(-1) for device in range(devices)]

    def devices_text(self, places: list[tuple[int, ...]]) -> str:
        """Devices by their coordinates in the mesh."""
        axes = self.bench.strategy.mesh.axis_names
        named = (zip(axes, place, strict=True) for place in places)
        names = [f"({' '.join(f'{axis} {i}' for axis, i in pairs)})" for pairs in named]
        return f"device{'s' if len(names) > 1 else ''} {some_of(names, SHOWN)}"


def ratio_of(actual: Any, expected: Any, tolerance: float = NEAR) -> float | None:
    """The factor by which one array is a multiple of another; None if it is no multiple."""
    ratio = projection(actual, expected)
    if ratio is None or not np.all(np.isfinite(as_float64(actual))):
        return None
    a, b = as_float64(actual), as_float64(expected)
    rest, size = float(np.linalg.norm(a - ratio * b)), float(np.linalg.norm(a))
    return ratio if rest <= tolerance * max(size, NEAR * float(np.linalg.norm(b))) else None
