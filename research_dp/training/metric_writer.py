"""Records of metrics: lines of `metrics.jsonl` and TensorBoard events, also of a resumed run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from research_dp.training import files

if TYPE_CHECKING:
    from research_dp.training.tensorboard import EventFile


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
        self._workdir, self._count = workdir, count_train(kept)
        self._file = os.fdopen(files.append(workdir / files.RECORDS), "ab")
        self._events: dict[str, EventFile] = {}
        for record in kept:
            self._events_of(record["split"]).write(record["step"], scalars_of(record))
        # Also of a split without records: its events are of steps that the run repeats.
        for split in files.SPLITS if complete else ():
            if (workdir / files.TENSORBOARD / split).is_dir():
                self._events_of(split).remove_older()

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        record = as_json({"split": split, "step": step, **scalars})
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        self._file.flush()
        self._events_of(split).write(step, scalars)
        self._count += split == "train"

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records."""
        os.fsync(self._file.fileno())
        for events in self._events.values():
            events.sync()
        return self._count

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            for events in self._events.values():
                stack.callback(events.close)

    def _events_of(self, split: str) -> EventFile:
        if split not in self._events:
            from research_dp.training.tensorboard import EventFile

            self._events[split] = EventFile(self._workdir / files.TENSORBOARD / split)
        return self._events[split]


def count_train(records: Sequence[Mapping[str, Any]]) -> int:
    """The number of training records."""
    return sum(record["split"] == "train" for record in records)


def truncate_records(
    path: Path, step: int, *, evaluates_again: bool, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Drops the records that a run resumed from a step writes again; returns the others.

    Lines that are not records are dropped too; a copy of the file is kept then.

    Args:
        path: The file.
        step: Later records are dropped.
        evaluates_again: Whether the evaluation at the step itself is dropped too.
        say: Prints a line.
    """
    again = (step, "eval") if evaluates_again else None
    content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")
    records = [read_json(line) for line in lines]
    # The last line may be unfinished: the run was killed while it wrote.
    bad = sum(not _is_record(record) for record in records[:-1])
    if bad:
        aside = files.free_name(path)
        files.replace(aside, content)
        say(
            f"{bad} of {len(lines) - 1} lines of {path} are not records and were dropped; {aside} "
            "has them"
        )
    records = [record for record in records if _is_record(record)]
    kept = [r for r in records if r["step"] <= step and (r["step"], r["split"]) != again]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def as_json(value: Any) -> Any:
    """Replaces numbers that JSON lacks (NaN, infinities) by null."""
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object; empty if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
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
