"""A comparison: runs, verdicts, configurations and costs, as JSON and as tables."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from research_dp import html_page
from research_dp.certification.noise import Noise
from research_dp.certification.tolerances import FACTOR
from research_dp.comparison import tables
from research_dp.comparison.differences import Setting
from research_dp.comparison.runs import Run
from research_dp.comparison.tables import ROLES, WORDS
from research_dp.comparison.verdicts import Verdict
from research_dp.console import Table, put
from research_dp.planning.row import Row
from research_dp.runs import files


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    """Predicted seconds of a step by the speed of the slowest link.

    Attributes:
        rates: Bits a second and device, in increasing order; the topology's own is among them.
        own: The topology's own rate.
        seconds: Run -> predicted seconds of a step, by rate.
    """

    rates: Sequence[float]
    own: float
    seconds: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs side by side; printed, it is the text of the command.

    Attributes:
        runs: The runs, in the order given.
        reference: The run that the others are compared with; None: no folder is a run.
        settings: What differs between their configurations, what should not first.
        verdicts: Of each pair that was compared; those with the reference come first.
        topology: The devices for which steps were planned; '' without a plan.
        is_timed: Whether the planned times are those of real devices; a CPU's rates are nominal.
        planned: Run -> row of the plan.
        links: Predicted times by link speed; None without a plan.
        noise: The measured bounds of what rounding explains.
        remarks: What else went wrong in comparing, a sentence each.
    """

    runs: Sequence[Run]
    reference: Run | None
    settings: Sequence[Setting]
    verdicts: Sequence[Verdict]
    topology: str = ""
    is_timed: bool = False
    planned: Mapping[str, Row] = dataclasses.field(default_factory=dict)
    links: LinkTimes | None = None
    noise: Sequence[Noise] = ()
    remarks: Sequence[str] = ()

    @property
    def is_clean(self) -> bool:
        """Whether all are runs that did not die, all was done, nothing differs that should not."""
        states = {run.status.state for run in self.runs}
        return (
            not self.remarks
            and not states & {"died", "no run"}
            and all(verdict.kind != "differs" for verdict in self.verdicts)
            and all(setting.role != "other" for setting in self.settings)
        )

    @property
    def of_reference(self) -> Mapping[str, Verdict]:
        """Run -> the verdict on it, compared with the reference."""
        name = self.reference.name if self.reference else ""
        return {v.a: v for v in self.verdicts if v.b == name}

    @property
    def eval_metrics(self) -> list[str]:
        """Names of the metrics of evaluation, the loss first."""
        names = {name for run in self.runs for name in run.records.get("eval", {})}
        names -= {"step", "eval_seconds"}
        return sorted(names, key=lambda name: (name != "loss", name))

    def title(self) -> str:
        """One sentence with the number of runs of each verdict."""
        if self.reference is None:
            return "No folder is a run."
        if len(self.runs) == 1:
            return f"{self.reference.name} is the only run: give a second one to compare it with."
        counts = collections.Counter(WORDS[v.kind] for v in self.of_reference.values())
        results = ", ".join(f"{counts[word]} {word}" for word in WORDS.values() if counts[word])
        count = len(self.runs) - 1
        runs = "run" if count == 1 else "runs"
        return f"{count} {runs} compared with {self.reference.name}: {results or 'none'}."

    def notes(self) -> Iterator[str]:
        """What a reader must know before ranking anything, a sentence each."""
        yield from self.remarks
        runs = [run for run in self.runs if run.is_run]
        devices = dict.fromkeys(run.devices for run in runs if run.devices)
        if len(devices) > 1:
            yield (
                f"The runs had other devices ({'; '.join(devices)}): do not rank their times "
                "against each other."
            )
        if any(run.platform == "cpu" for run in runs):
            yield "Times marked CPU were measured on a CPU. They say nothing about accelerators."
        for noise in self.noise:
            yield (
                f"Allowed difference: {FACTOR} times what rounding changed in a run on one device, "
                f"over {noise.steps} steps; precision {noise.precision:.1g}."
            )
        if self.topology and not self.is_timed:
            yield f"Times for {self.topology} are not predicted: a CPU's rates are nominal."
        for run in runs:
            if (step := run.first_nonfinite) is not None:
                yield f"{run.name}: the loss is not finite from step {step} on."
            yield from (f"{run.name}: {warning}" for warning in run.warnings)
            yield from run.unknown

    def as_json(self) -> dict[str, Any]:
        """All that the page shows, for programs; numbers that are not finite are None."""
        content = {
            "title": self.title(),
            "clean": self.is_clean,
            "reference": self.reference.name if self.reference else None,
            "notes": list(self.notes()),
            "runs": {run.name: self._run_as_json(run) for run in self.runs},
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "settings": [dataclasses.asdict(setting) for setting in self.settings],
            "topology": self.topology or None,
            "links": dataclasses.asdict(self.links) if self.links else None,
            "noise": [noise.as_json() for noise in self.noise],
        }
        return files.as_json(content)

    def _run_as_json(self, run: Run) -> dict[str, Any]:
        row = self.planned.get(run.name)
        return {
            "folder": str(run.folder),
            "state": run.status.state,
            "message": run.status.message,
            "strategy": run.strategy,
            "algorithm": run.algorithm,
            "mesh": run.facts.get("mesh"),
            "step": run.step,
            "gigabytes_sent": run.gigabytes_sent,
            "bytes_per_device": run.facts.get("bytes_per_device"),
            "program": run.facts.get("program"),
            "wire_bytes": dataclasses.asdict(run.wire) if run.wire else None,
            "device_memory_bytes": run.peak_memory,
            "seconds": run.seconds,
            "starts": run.facts.get("starts", []),
            "summary": dict(run.summary),
            "records": {
                split: {name: column.tolist() for name, column in columns.items()}
                for split, columns in run.records.items()
            },
            "planned": row.as_json() if row else None,
        }

    def __str__(self) -> str:
        text = io.StringIO()
        put(*self.parts(), file=text)
        return text.getvalue()

    def parts(self, *, verbose: bool = False) -> Iterator[Any]:
        """Text and tables for a terminal, the verdicts first."""
        is_sure = self.is_clean and all(v.kind != "unknown" for v in self.verdicts)
        yield Text(self.title(), "bold green" if is_sure else "bold yellow")
        if self.reference is not None:
            yield tables.verdict_table(self.runs, self.reference, self.of_reference)
        shown = [s for s in self.settings if verbose or s.role != "strategy"]
        yield from tables.settings_tables(shown)
        yield tables.run_table(self.runs, self.eval_metrics)
        yield tables.memory_table(self.runs, self.planned, self.topology)
        yield tables.wire_table(self.runs)
        if self.planned:
            yield tables.plan_table(self.planned, self.topology, self.is_timed)
        if verbose and any(run.seconds for run in self.runs):
            yield tables.seconds_table(self.runs)
        if hidden := len(self.settings) - len(shown):
            yield f"{ROLES['strategy']}: {hidden} parameters (--verbose lists them)."
        yield from self.notes()

    def _repr_html_(self) -> str:
        """The text and the tables, for a notebook."""
        return "".join(
            html_page.table_html(part)
            if isinstance(part, Table)
            else f"<p>{html_page.inline(part)}</p>"
            for part in self.parts(verbose=True)
        )
