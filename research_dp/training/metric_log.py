"""The metric log: window means as `metrics.jsonl`, TensorBoard events and console lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from research_dp.errors import RunFailure
from research_dp.runs import files
from research_dp.runs.manifest import Progress
from research_dp.strategies import SKIPPED
from research_dp.training import metrics
from research_dp.training.learning_rate import LearningRate
from research_dp.training.progress_bar import ProgressBar
from research_dp.types import MEASURED, HostSums

_EVENTS = "events.out.tfevents."


class MetricLog:
    """Records metrics; training metrics one step late, so that no step waits for them."""

    def __init__(
        self,
        saved: Progress | None,
        throughput: metrics.Throughput,
        console: ProgressBar,
        rate: LearningRate | None = None,
    ):
        self._throughput, self._console, self._rate = throughput, console, rate
        self._window: HostSums = saved.window if saved else {}
        self._records_saved, self._count = saved.records if saved else 0, 0
        self._unread: list[Mapping[str, Any]] = []
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._records: IO[bytes] | None = None
        self._events: dict[str, EventFile] = {}
        self.train: dict[str, float] = {}  # means of the newest training record
        self.skipped_steps = 0
        self.updates = 0  # of the optimizer, until the newest record

    def open(self, folder: Path, step: int, *, evaluates_again: bool) -> None:
        """Continues the records, and their events, of a run that resumes from a step."""
        say, path = self._console.say, folder / files.RECORDS
        # Without records, events may be those of another run, whose records a user moved away.
        has_records = files.has_content(path)
        kept = truncate_records(path, step, evaluates_again=evaluates_again, say=say)
        self._records, self._folder = os.fdopen(files.append(path), "a+b"), folder
        self._folder_then = folder.stat()
        for record in kept:
            split, scalars = record["split"], _scalars_of(record)
            self._events_of(split).write(record["step"], scalars)
            self.skipped_steps += int(record.get(SKIPPED) or 0)  # null is no number
            if split == "train":
                self._count += 1
                self.train = {name: x for name, x in scalars.items() if name not in MEASURED}
        missing = self._records_saved - self._count
        if missing > 0:
            say(
                f"{missing} of the {self._records_saved} training records that were written before "
                f"step {step} was saved are not in {files.shown(path)}; older "
                "TensorBoard events stay"
            )
        # Also of a split without records: its events are of steps that the run repeats.
        for split in files.SPLITS if has_records and missing <= 0 else ():
            if (folder / files.TENSORBOARD / split).is_dir():
                self._events_of(split).remove_older()

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
        sums, self._window = dict(metrics.accumulate(self._window, steps)), {}
        skipped = {SKIPPED: sums.pop(SKIPPED)[0]} if SKIPPED in sums else {}
        self.skipped_steps += int(sum(skipped.values()))
        self.train = metrics.means(sums)
        self.updates += int(sums.get("grad_norm", (0, 0))[1])  # not counted where it is not finite
        rate = self._rate.after(self.updates) if self._rate else None
        measured = {
            **self._throughput.rates(),
            **({} if rate is None else {"learning_rate": rate}),
            **metrics.device_memory(),
        }
        self.write("train", step, {**self.train, **skipped, **measured})

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        if self._records:
            record = files.as_json({"split": split, "step": step, **scalars})
            self._records.write((json.dumps(record, allow_nan=False) + "\n").encode())
            self._records.flush()
            self._events_of(split).write(step, scalars)
            self._count += split == "train"
        self._console.metrics(split, step, scalars)

    def window(self) -> HostSums:
        """Sums of the metrics that are not recorded yet."""
        self._window, self._unread = metrics.accumulate(self._window, self._unread), []
        return self._window

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records.

        They are written anew if another program removed or replaced their file. RunFailure: the
        run's folder is not where it was.
        """
        self._put_back()
        for file in self._files():
            os.fsync(file.fileno())
        return self._count

    def _put_back(self) -> None:
        if self._records is None:
            return
        if not files.is_same(self._folder, self._folder_then):
            raise RunFailure(
                f"{files.shown(self._folder)} was moved or removed while the run wrote to it. Put "
                "it back, and the same command continues from the last step that was saved."
            )
        path = self._folder / files.RECORDS
        if files.is_same(path, os.fstat(self._records.fileno())):
            return
        self._records.seek(0)
        content, there = self._records.read(), ""
        if os.path.lexists(path):
            aside = path.rename(files.free_name(path))
            there = f"; what was there is {files.shown(aside)}"
        files.replace(path, content)
        self._records.close()
        self._records = os.fdopen(files.append(path), "a+b")
        self._console.say(
            f"{files.shown(path)} was removed or replaced while the run wrote to it; all records "
            f"are in it again{there}"
        )

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._files():
                stack.callback(file.close)

    def _files(self) -> list[IO[bytes]]:
        events = [event_file.file for event_file in self._events.values()]
        return [self._records, *events] if self._records else []

    def _events_of(self, split: str) -> EventFile:
        if split not in self._events:
            self._events[split] = EventFile(self._folder / files.TENSORBOARD / split)
        return self._events[split]


class EventFile:
    """A new TensorBoard event file, written without TensorFlow; a kill loses no write."""

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
    # The last line may be unfinished: the run was killed while it wrote.
    *lines, last = map(files.read_json, content.split(b"\n"))
    records = [line for line in lines if _is_record(line)]
    if bad := len(lines) - len(records):
        aside = files.free_name(path)
        files.replace(aside, content)
        say(
            f"{bad} of {len(lines)} lines of {files.shown(path)} are not records and were dropped; "
            f"{files.shown(aside)} has them"
        )
    records += [last] if _is_record(last) else []
    kept = [r for r in records if r["step"] <= step and (r["step"], r["split"]) != again]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def _scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's metrics; null means NaN."""
    values = {name: value for name, value in record.items() if name not in ("split", "step")}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object is a record of `MetricLog` that TensorBoard can represent."""
    step = value.get("step")
    if value.get("split") not in files.SPLITS or type(step) is not int or not 0 <= step < 2**63:
        return False
    scalars = {name: x for name, x in value.items() if name not in ("split", "step")}
    return all(map(files.is_utf8, scalars)) and all(
        x is None or (type(x) in (int, float) and abs(x) <= sys.float_info.max)
        for x in scalars.values()
    )
