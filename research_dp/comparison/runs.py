"""Runs as their folders describe them: configuration, records, results, checkpoints, program.

A folder may be damaged, of another version, or written to meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.analysis import program_cost
from research_dp.argument_checks import fits
from research_dp.certification.tolerances import precision_of
from research_dp.errors import UsageError, first_line, printable
from research_dp.runs import checkpoint_files, files
from research_dp.runs.facts import are_facts, program_text, read_facts, read_program, read_summary
from research_dp.runs.manifest import Damaged, Manifest
from research_dp.runs.records import Columns, read_columns
from research_dp.runs.status import Status, status_of
from research_dp.training import throughput
from research_dp.types import Bound

# Where time goes: in `summary.json` -> in the records.
SECONDS = {name: f"{part}_seconds" for name, part in throughput.SECONDS.items()}
# What a comparison uses of `summary.json`; what has another type is not read.
_SUMMARY: dict[str, Any] = {
    **{"step": int, "devices": int, "strategy": str, "params_fingerprint": str},
    **{"steps_per_second": float, "seconds": dict[str, float], "warnings": list, "data": dict},
}


@dataclasses.dataclass(frozen=True)
class WireBytes:
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
    wire: WireBytes | None = None
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
        return list(map(str, self.summary.get("warnings", ())))

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
        return precision_of(self.bindings)

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

    @property
    def newest(self) -> Manifest | None:
        """The manifest of its newest complete checkpoint."""
        return self.manifests[max(self.manifests)] if self.manifests else None


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, named by the parts of their paths that tell them apart.

    UsageError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"{folder} is given twice.")
    return [read_run(*pair) for pair in zip(names(folders), folders, strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """A unique name of each folder: its last part, or as many as it takes."""
    paths = [folder.absolute().parts for folder in folders]
    found: list[str] = []
    for length in range(1, max(map(len, paths), default=0) + 1):
        found = [printable(str(Path(*path[-length:])), most=sys.maxsize) for path in paths]
        if len(set(found)) == len(found):
            break
    return found


def read_run(name: str, folder: Path) -> Run:
    """Reads one folder, which a run may be writing to."""
    status = status_of(folder)
    if status.state == "no run":
        return Run(name, folder, status)
    written = read_facts(folder)
    facts, unknown = (written, []) if are_facts(written) else ({}, [])
    if written and not facts:
        unknown.append(f"{name}: its {files.FACTS} is damaged, or of another version; not read.")
    elif not written:
        unknown.append(f"{name}: it has no {files.FACTS}, as runs of earlier versions.")
    # That of an earlier end is not of a run that was continued.
    summary: Mapping[str, Any] = {}
    with contextlib.suppress(OSError):
        summary = read_summary(folder) if status.state == "done" else {}
    summary = {k: x for k, x in summary.items() if k in _SUMMARY and fits(x, _SUMMARY[k])}
    wire = None
    try:
        wire = _wire(read_program(folder), tuple(facts["mesh"].items())) if facts else None
    except FileNotFoundError:
        why = (facts["program"] or {}).get("problem") or "its program is not in its folder"
        unknown.append(f"{name}: the bytes that it sends are not known: {why}.")
    except _UNREADABLE as error:
        unknown.append(f"{name}: the bytes that it sends are not known: {first_line(error)}.")
    bindings = {
        key: Bound(*(fields[field] for field in Bound._fields))
        for key, fields in facts.get("bindings", {}).items()
    }
    records = read_columns(folder)
    return Run(name, folder, status, facts, summary, records, bindings, wire, unknown)


# What a damaged program, or one that does not fit its mesh, raises.
_UNREADABLE = (OSError, EOFError, LookupError, NotImplementedError, ValueError, zlib.error)


@functools.lru_cache(maxsize=64)  # the runs of a sweep share programs
def _wire(compressed: bytes, mesh: tuple[tuple[str, int], ...]) -> WireBytes:
    collectives = program_cost.collectives_of(program_text(compressed), dict(mesh))
    totals = program_cost.wire_totals(collectives)
    return WireBytes(totals["total"], totals["by_kind"], totals["by_axis"])


def read_params(folder: Path, step: int) -> Mapping[str, Any]:
    """The parameters of a run's checkpoint as host arrays; raises Damaged or OSError."""
    checkpoint = folder / files.CHECKPOINTS / str(step)
    return checkpoint_files.read_fields(checkpoint, "params")[1]["params"]
