"""A run as its folder describes it: configuration, records, results, checkpoints, program."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.certification.tolerances import precision_of
from research_dp.runs import checkpoint_files, files
from research_dp.runs.manifest import Damaged, Manifest
from research_dp.runs.status import Status
from research_dp.training import metrics
from research_dp.types import Bound

# Where time goes: in `summary.json` -> in the records.
SECONDS = {name: f"{part}_seconds" for name, part in metrics.SECONDS.items()}
# Metric -> its values at the records of a split, float64; NaN where a record lacks it.
Columns = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Wire:
    """Bytes that a device sends in a training step, as the compiled program says."""

    total: float
    by_kind: Mapping[str, float]  # e.g. 'all-gather'
    by_axis: Mapping[str, float]  # e.g. 'data+fsdp'


@dataclasses.dataclass(frozen=True)
class Run:
    """One run; what is missing or unreadable in its folder is empty or None.

    Attributes:
        name: Its label, unique in a comparison.
        folder: Its folder.
        status: Whether it is done, running, stopped, died, or no run.
        facts: What is in `run.json`.
        summary: What is in `summary.json`.
        records: Split ('train', 'eval') -> columns, 'step' among them, in increasing order.
        bindings: Name of a parameter -> its value and the place that bound it.
        wire: Bytes sent in a step; None: the program is not known.
        unknown: Why parts of it are not known, a sentence each.
    """

    name: str
    folder: Path
    status: Status
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    records: Mapping[str, Columns] = dataclasses.field(default_factory=dict)
    bindings: Mapping[str, Bound] = dataclasses.field(default_factory=dict)
    wire: Wire | None = None
    unknown: Sequence[str] = ()

    @property
    def is_run(self) -> bool:
        return self.status.state != "no run"

    @property
    def step(self) -> int:
        """The step of its end, or of its newest record."""
        return int(self.summary.get("step") or self.last("train", "step") or 0)

    @property
    def strategy(self) -> str:
        return str(self.facts.get("strategy") or self.summary.get("strategy") or "")

    @property
    def algorithm(self) -> str | None:
        """Why it is another algorithm by design; None: it is not."""
        return self.facts.get("algorithm")

    @property
    def start(self) -> Mapping[str, Any]:
        """Command, commit, versions and devices of its newest start."""
        return (self.facts.get("starts") or [{}])[-1]

    @property
    def platform(self) -> str:
        return str(self.start.get("platform", ""))

    @property
    def devices(self) -> str:
        """Its devices in words, e.g. '8 x cpu'."""
        count = self.start.get("devices") or self.summary.get("devices")
        kind = self.start.get("device_kind", "devices")
        return f"{count} x {kind}" if count else ""

    @property
    def gigabytes_sent(self) -> float | None:
        """Gigabytes that a device sent in all steps."""
        return self.wire.total * self.step / 1e9 if self.wire else None

    def column(self, split: str, metric: str) -> np.ndarray:
        """A metric's values by record; empty if the split has none."""
        return self.records.get(split, {}).get(metric, np.zeros(0))

    def last(self, split: str, metric: str) -> float | None:
        """The newest value of a metric that is known."""
        known = self.column(split, metric)
        known = known[~np.isnan(known)]
        return float(known[-1]) if len(known) else None

    @property
    def warnings(self) -> list[str]:
        """What it warned of."""
        found = self.summary.get("warnings")
        return list(map(str, found)) if isinstance(found, list) else []

    @property
    def peak_memory(self) -> float | None:
        """The most bytes in use that a device reported."""
        known = self.column("train", "device_memory_bytes")
        return float(np.nanmax(known)) if len(known) and not np.isnan(known).all() else None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Where the time went: of the newest start, or summed over the records so far."""
        if "seconds" in self.summary:
            return dict(self.summary["seconds"])
        columns = {name: (split, name) for split in self.records for name in self.records[split]}
        return {
            short: float(np.nansum(self.column(*columns[name])))
            for short, name in SECONDS.items()
            if name in columns
        }

    @property
    def precision(self) -> float:
        """Machine epsilon of the coarsest dtype that gradients have before they are summed."""
        optimizers = _reached(self.bindings, "train.optimizer")
        others = ((n, b.value) for n, b in self.bindings.items() if n not in optimizers)
        return precision_of((name, value.strip("'")) for name, value in others)

    @property
    def first_nonfinite(self) -> int | None:
        """The step of the first record whose loss is not finite."""
        steps, losses = self.column("train", "step"), self.column("train", "loss")
        bad = np.flatnonzero(~np.isfinite(losses))
        return int(steps[bad[0]]) if len(bad) else None

    @functools.cached_property
    def manifests(self) -> Mapping[int, Manifest]:
        """The manifest of each complete checkpoint, by step."""
        folder, found = self.folder / files.CHECKPOINTS, {}
        for step in checkpoint_files.steps_in(folder):
            try:
                found[step] = checkpoint_files.read_manifest(folder / str(step))
            except (Damaged, OSError):
                continue  # a running run may be removing it; `checkpoints --verify` judges it
        return found


def read_params(folder: Path, step: int) -> Mapping[str, Any]:
    """The parameters of a run's checkpoint as host arrays; raises Damaged or OSError."""
    checkpoint = folder / files.CHECKPOINTS / str(step)
    return checkpoint_files.read_fields(checkpoint, "params")[1]["params"]


def _reached(bindings: Mapping[str, Bound], root: str) -> set[str]:
    """Names of the bindings to which the value of one leads, that one included."""
    found, pending = set[str](), {root} & bindings.keys()
    while pending:
        name = pending.pop()
        found.add(name)
        for referred in re.findall(r"[@%]([\w./]+)", bindings[name].value):
            last = re.split(r"[./]", referred)[-1]
            own = (n for n in bindings if n == last or re.split(r"[./]", n)[-2:-1] == [last])
            pending |= set(own) - found
    return found
