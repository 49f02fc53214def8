"""The metric log of a run: step metrics become window means, and records of means are written.

Records are lines of `metrics.jsonl`, TensorBoard events and console lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from research_dp.strategies import SKIPPED
from research_dp.training import files, metrics
from research_dp.training.manifest import Progress
from research_dp.training.progress_bar import ProgressBar

_EVENTS = "events.out.tfevents."


class MetricLog:
    """Records metrics; training metrics one step late, so that no step waits for them.

    Attributes:
        train: Means of the newest training record.
        skipped_steps: Steps that were skipped so far.
    """

    def __init__(
        self, saved: Progress | None, throughput: metrics.Throughput, console: ProgressBar
    ):
        self._throughput, self._console = throughput, console
        self._window: metrics.Sums = saved.window if saved else {}
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
        kept = truncate_records(path, step, evaluates_again=evaluates_again, say=say)
        missing = self._records_saved - _count_train(kept)
        if missing > 0:
            say(
                f"{missing} of the {self._records_saved} training records that were written before "
                f"step {step} was saved are not in {path}; older TensorBoard events stay"
            )
        for record in kept:
            if record["split"] == "train":
                scalars = _scalars_of(record).items()
                self.train = {name: x for name, x in scalars if name not in metrics.RATES}
        self.skipped_steps = int(sum(record.get(SKIPPED) or 0 for record in kept))
        self._writer = MetricWriter(folder, kept, complete=has_records and missing <= 0)

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
        sums, self._window = metrics.accumulate(self._window, steps), {}
        skipped = {SKIPPED: sums.pop(SKIPPED)[0]} if SKIPPED in sums else {}
        self.skipped_steps += int(sum(skipped.values()))
        self.train = metrics.means(sums)
        self.write("train", step, {**self.train, **skipped, **self._throughput.rates()})

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer:
            self._writer.write(split, step, scalars)
        self._console.metrics(split, step, scalars)

    def window(self) -> metrics.Sums:
        """Sums of the metrics that are not recorded yet."""
        self._window, self._unread = metrics.accumulate(self._window, self._unread), []
        return self._window

    def sync(self) -> int:
        """Flushes the records to the disk; returns the number of training records."""
        return self._writer.sync() if self._writer else 0

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class MetricWriter:
    """Writes scalars to `metrics.jsonl` and to TensorBoard.

    Args:
        workdir: Folder of the run.
        kept: Records of a run that is resumed; TensorBoard's events are rewritten from them.
        complete: Whether they are all that the run had; if so, older event files are removed.
    """

    def __init__(
        self, workdir: Path, kept: Sequence[Mapping[str, Any]] = (), complete: bool = True
    ):
        self._folder, self._count = workdir / files.TENSORBOARD, _count_train(kept)
        self._file = os.fdopen(files.append(workdir / files.RECORDS), "ab")
        self._events: dict[str, EventFile] = {}
        for record in kept:
            self._events_of(record["split"]).write(record["step"], _scalars_of(record))
        # Also of a split without records: its events are of steps that the run repeats.
        for split in files.SPLITS if complete else ():
            if (self._folder / split).is_dir():
                self._events_of(split).remove_older()

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        record = files.as_json({"split": split, "step": step, **scalars})
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        self._file.flush()
        self._events_of(split).write(step, scalars)
        self._count += split == "train"

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records."""
        for file in (self._file, *(events.file for events in self._events.values())):
            os.fsync(file.fileno())
        return self._count

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in (self._file, *(events.file for events in self._events.values())):
                stack.callback(file.close)

    def _events_of(self, split: str) -> EventFile:
        if split not in self._events:
            self._events[split] = EventFile(self._folder / split)
        return self._events[split]


class EventFile:
    """A new TensorBoard event file of a split, written without TensorFlow.

    Each write survives a kill of the process. TensorBoard is slow to import.
    """

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._older = [p for p in folder.iterdir() if p.name.startswith(_EVENTS)]
        name = f"{_EVENTS}{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self.file = os.fdopen(files.create(folder / name), "wb")
        self._records, self._event = RecordWriter(self.file), event_pb2.Event
        self._put(file_version="brain.Event:2")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._put(step=step, summary={"value": values})

    def remove_older(self) -> None:
        """Removes the event files that the folder had before this one."""
        os.fsync(self.file.fileno())
        for path in self._older:
            if path.is_file() or path.is_symlink():
                path.unlink()

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


def truncate_records(
    path: Path, step: int, *, evaluates_again: bool, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Drops the records that a run resumed from a step writes again; returns the others.

    These are later ones and, if the run `evaluates_again`, the evaluation at the step itself.
    Lines that are not records are dropped too; a copy of the file is kept then.
    """
    again = (step, "eval") if evaluates_again else None
    content = path.read_bytes() if path.exists() else b""
    records = [files.read_json(line) for line in content.split(b"\n")]
    # The last line may be unfinished: the run was killed while it wrote.
    bad = sum(not _is_record(record) for record in records[:-1])
    if bad:
        aside = files.free_name(path)
        files.replace(aside, content)
        say(
            f"{bad} of {len(records) - 1} lines of {path} are not records and were dropped; "
            f"{aside} has them"
        )
    records = [record for record in records if _is_record(record)]
    kept = [r for r in records if r["step"] <= step and (r["step"], r["split"]) != again]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def _count_train(records: Sequence[Mapping[str, Any]]) -> int:
    return sum(record["split"] == "train" for record in records)


def _scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's metrics; null means NaN."""
    values = {name: value for name, value in record.items() if name not in ("split", "step")}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object is a record of `MetricWriter` that TensorBoard can represent."""
    step = value.get("step")
    return (
        value.get("split") in files.SPLITS
        and type(step) is int
        and 0 <= step < 2**63
        and all(
            (x is None or (type(x) in (int, float) and abs(x) <= sys.float_info.max))
            and files.is_utf8(name)
            for name, x in value.items()
            if name not in ("split", "step")
        )
    )
