"""Records of a run: `metrics.jsonl` and its TensorBoard events; process 0 writes them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.errors import RunFailure
from research_dp.runs import files

_EVENTS = "events.out.tfevents."
# Metric -> its values at the records of a split, float64; NaN where a record lacks it.
Columns = Mapping[str, np.ndarray]


class Records:
    """Writes records, and the same as TensorBoard events; continues those of a resumed run."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._folder, self._path, self._say = folder, folder / files.RECORDS, say
        self._folder_then = folder.stat()
        self._events: dict[str, EventFile] = {}
        self._opened = contextlib.ExitStack()
        self._count = 0  # of training records

    def resume(self, step: int, saved: int, *, evaluates_again: bool) -> list[dict[str, Any]]:
        """Returns the records until a step, at which `saved` training records were written."""
        # Without records, events may be those of another run, whose records a user moved away.
        has_records = files.has_content(self._path)
        kept = truncate_records(self._path, step, evaluates_again=evaluates_again, say=self._say)
        self._open()
        for record in kept:
            self._events_of(record["split"]).write(record["step"], scalars_of(record))
            self._count += record["split"] == "train"
        missing = saved - self._count
        if missing > 0:
            self._say(
                f"{missing} of the {saved} training records that were written before step {step} "
                f"was saved are not in {files.shown(self._path)}; older TensorBoard events stay"
            )
        # Also of a split without records: its events are of steps that the run repeats.
        for split in files.SPLITS if has_records and missing <= 0 else ():
            if (self._folder / files.TENSORBOARD / split).is_dir():
                self._events_of(split).remove_older()
        return kept

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> dict[str, Any]:
        """Records scalars of a split ('train', 'eval') at a step; returns the record."""
        record = files.as_json({"split": split, "step": step, **scalars})
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        self._file.flush()
        self._events_of(split).write(step, scalars)
        self._count += split == "train"
        return record

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records.

        They are written anew if another program removed or replaced their file. RunFailure: the
        run's folder is not where it was.
        """
        self._put_back()
        for file in (self._file, *(events.file for events in self._events.values())):
            os.fsync(file.fileno())
        return self._count

    def _put_back(self) -> None:
        if not files.is_same(self._folder, self._folder_then):
            raise RunFailure(
                f"{files.shown(self._folder)} was moved or removed while the run wrote to it. Put "
                "it back, and the same command continues from the last step that was saved."
            )
        if files.is_same(self._path, os.fstat(self._file.fileno())):
            return
        self._file.seek(0)
        content, there = self._file.read(), ""
        if os.path.lexists(self._path):
            aside = self._path.rename(files.free_name(self._path))
            there = f"; what was there is {files.shown(aside)}"
        files.replace(self._path, content)
        self._file.close()
        self._open()
        self._say(
            f"{files.shown(self._path)} was removed or replaced while the run wrote to it; all "
            f"records are in it again{there}"
        )

    def close(self) -> None:
        self._opened.close()

    def _open(self) -> None:
        self._file = self._opened.enter_context(os.fdopen(files.append(self._path), "a+b"))

    def _events_of(self, split: str) -> EventFile:
        if split not in self._events:
            self._events[split] = EventFile(self._folder / files.TENSORBOARD / split)
            self._opened.enter_context(self._events[split].file)
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


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's metrics; null means NaN."""
    values = {name: value for name, value in record.items() if name not in ("split", "step")}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object is a record of `Records` that TensorBoard can represent."""
    step = value.get("step")
    if value.get("split") not in files.SPLITS or type(step) is not int or not 0 <= step < 2**63:
        return False
    scalars = {name: x for name, x in value.items() if name not in ("split", "step")}
    return all(map(files.is_utf8, scalars)) and all(
        x is None or (type(x) in (int, float) and abs(x) <= sys.float_info.max)
        for x in scalars.values()
    )


def read_columns(folder: Path) -> dict[str, Columns]:
    """The records of each split, in a folder that a run may be writing to, as columns.

    'step' is among them, in increasing order. What is damaged is left out.
    """
    file = folder / files.RECORDS
    content = file.read_bytes() if file.is_file() else b""
    records: dict[str, list[dict[str, Any]]] = {split: [] for split in files.SPLITS}
    for record in _objects(content):
        split, step = record.get("split"), record.get("step")
        if isinstance(split, str) and split in records and type(step) is int and 0 <= step < 2**63:
            records[split].append(record)
    return {split: _columns(found) for split, found in records.items() if found}


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of lines; a line that a run is writing, or a damaged one, is left out."""
    lines = content.splitlines()
    try:  # all at once, which is several times faster
        objects = json.loads((b"[" + b",".join(lines) + b"]").decode())
    except (ValueError, RecursionError):
        objects = map(files.read_json, lines)
    yield from (one for one in objects if isinstance(one, dict))


def _columns(records: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for record in records for name in record if name != "split")
    columns = {name: np.array([_number(r.get(name)) for r in records]) for name in names}
    order = np.argsort(columns["step"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def _number(value: Any) -> float:
    # An integer may be too large for a float.
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan
