"""The metric log of a run: step metrics become window means, records, and console lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research_dp.strategies import SKIPPED
from research_dp.training import files, metric_writer
from research_dp.training.manifest import Progress
from research_dp.training.metric_writer import MetricWriter
from research_dp.training.metrics import RATES, Sums, Throughput, accumulate, means
from research_dp.training.progress_bar import ProgressBar


class MetricLog:
    """Records metrics; training metrics one step late, so that no step waits for them.

    Attributes:
        train: Means of the newest training record.
        skipped_steps: Steps that were skipped so far.
    """

    def __init__(self, saved: Progress | None, throughput: Throughput, console: ProgressBar):
        self._throughput, self._console = throughput, console
        self._window: Sums = saved.window if saved else {}
        self._records_saved = saved.records if saved else 0
        self._unread: list[Mapping[str, Any]] = []
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._writer: MetricWriter | None = None
        self.train: dict[str, float] = {}
        self.skipped_steps = 0

    def open(self, folder: Path, step: int, *, evaluates_again: bool) -> None:
        """Continues the records of a run that resumes from a step; reports missing ones."""
        say, path = self._console.say, folder / files.RECORDS
        # Without records, events may be those of another run, whose records a user moved away.
        has_records = files.has_content(path)
        kept = metric_writer.truncate_records(path, step, evaluates_again=evaluates_again, say=say)
        missing = self._records_saved - metric_writer.count_train(kept)
        if missing > 0:
            say(
                f"{missing} of the {self._records_saved} training records that were written before "
                f"step {step} was saved are not in {path}; older TensorBoard events stay"
            )
        for record in kept:
            scalars = metric_writer.scalars_of(record)
            if record["split"] == "train":
                self.train = {name: x for name, x in scalars.items() if name not in RATES}
        self.skipped_steps = int(sum(record.get(SKIPPED) or 0 for record in kept))
        self._writer = MetricWriter(folder, kept, complete=has_records and missing <= 0)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics, which the devices may still be computing."""
        self._unread.append(metrics)

    def mark(self, step: int) -> None:
        """Ends a window at this step; `flush` records it."""
        self._due, self._unread = (step, self._unread), []

    def flush(self) -> None:
        """Reads and records the window that `mark` ended."""
        if self._due is None:
            return
        (step, metrics), self._due = self._due, None
        sums, self._window = accumulate(self._window, metrics), {}
        skipped = {SKIPPED: sums.pop(SKIPPED)[0]} if SKIPPED in sums else {}
        self.skipped_steps += int(sum(skipped.values()))
        self.train = means(sums)
        self.write("train", step, {**self.train, **skipped, **self._throughput.rates()})

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split."""
        if self._writer:
            self._writer.write(split, step, scalars)
        self._console.metrics(split, step, scalars)

    def window(self) -> Sums:
        """Sums of the metrics that are not recorded yet."""
        self._window, self._unread = accumulate(self._window, self._unread), []
        return self._window

    def sync(self) -> int:
        """Flushes the records to the disk; returns the number of training records."""
        return self._writer.sync() if self._writer else 0

    def close(self) -> None:
        if self._writer:
            self._writer.close()
