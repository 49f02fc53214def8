"""The metric log: means over windows of steps, as records and as lines of the console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research_dp.runs.manifest import Progress
from research_dp.runs.records import Records, scalars_of
from research_dp.strategies import SKIPPED
from research_dp.training import throughput
from research_dp.training.optimizers import LearningRate
from research_dp.training.progress_bar import ProgressBar
from research_dp.types import MEASURED, HostSums


class MetricLog:
    """Records metrics; training metrics one step late, so that no step waits for them."""

    def __init__(
        self,
        saved: Progress | None,
        clock: throughput.Throughput,
        console: ProgressBar,
        rate: LearningRate | None = None,
    ):
        self._throughput, self._console, self._rate = clock, console, rate
        self._window: HostSums = saved.window if saved else {}
        self._records_saved = saved.records if saved else 0
        self._unread: list[Mapping[str, Any]] = []
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._records: Records | None = None  # of process 0
        self.train: dict[str, float] = {}  # means of the newest training record
        self.skipped_steps = 0
        self.updates = 0  # of the optimizer, until the newest record

    def open(self, folder: Path, step: int, *, evaluates_again: bool) -> None:
        """Continues the records of a run that resumes from a step; process 0 calls it."""
        self._records = Records(folder, self._console.say)
        saved = self._records_saved
        for record in self._records.resume(step, saved, evaluates_again=evaluates_again):
            self.skipped_steps += int(record.get(SKIPPED) or 0)  # null is no number
            if record["split"] == "train":
                means = scalars_of(record).items()
                self.train = {name: x for name, x in means if name not in MEASURED}

    def begin(self, updates: int) -> None:
        """Takes the number of the optimizer's updates at the step from which the run goes on."""
        self.updates = updates - int(self._window.get("grad_norm", (0, 0))[1])

    def add(self, step_metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics, which the devices may still be computing."""
        self._unread.append(step_metrics)

    def mark(self, step: int) -> None:
        """Ends a window at this step; `flush` records it."""
        self._due, self._unread = (step, self._unread), []

    def flush(self) -> None:
        """Reads and records the window that `mark` ended."""
        if self._due is None:
            return
        (step, steps), self._due = self._due, None
        sums, self._window = throughput.accumulate(self._window, steps), {}
        skipped = {SKIPPED: sums.pop(SKIPPED)[0]} if SKIPPED in sums else {}
        self.skipped_steps += int(sum(skipped.values()))
        self.train = throughput.means(sums)
        self.updates += int(sums.get("grad_norm", (0, 0))[1])  # not counted where it is not finite
        rate = self._rate.after(self.updates) if self._rate else None
        measured = {
            **self._throughput.rates(),
            **({} if rate is None else {"learning_rate": rate}),
            **throughput.device_memory(),
        }
        self.write("train", step, {**self.train, **skipped, **measured})

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        if self._records:
            self._records.write(split, step, scalars)
        self._console.metrics(split, step, scalars)

    def window(self) -> HostSums:
        """Sums of the metrics that are not recorded yet."""
        self._window, self._unread = throughput.accumulate(self._window, self._unread), []
        return self._window

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records."""
        return self._records.sync() if self._records else 0

    def close(self) -> None:
        if self._records:
            self._records.close()
