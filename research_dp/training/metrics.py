"""Sums and counts become means (CLU), and means become records: JSON lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from clu import metrics as clu_metrics

from research_dp.training import files

if TYPE_CHECKING:
    from research_dp.training.tensorboard import Events

RATES = ("steps_per_second", "examples_per_second", "tokens_per_second", "mfu")

# name -> (sum, count), on the host.
Sums = dict[str, tuple[float, float]]


def add_up(sums: Sums, steps: Iterable[Mapping[str, Any]]) -> Sums:
    """Adds steps' metrics, arrays (2,) of sum and count on the devices, to sums on the host.

    One after another, in float64: a sum that was saved and is continued has the same bits as one
    that was not.
    """
    added = dict(sums)
    for step in jax.device_get(list(steps)):
        for name, (total, count) in step.items():
            before = added.get(name, (0.0, 0.0))
            added[name] = (before[0] + float(total), before[1] + float(count))
    return added


def means(sums: Sums) -> dict[str, float]:
    """Means over examples, never means of means."""
    averages = {
        name: clu_metrics.Average(total=np.float32(total), count=np.float32(count))
        for name, (total, count) in sums.items()
    }
    # Not CLU's `create_collection`: each call makes a class, which JAX keeps for ever.
    return {name: float(average.compute()) for name, average in averages.items()}


def as_json(value: Any) -> Any:
    """The same with what JSON cannot say (not a number, infinite) as null."""
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Records:
    """Writes scalars to `metrics.jsonl` and to TensorBoard, both at once.

    Args:
        workdir: Folder of the run.
        kept: Records of the run that is continued; TensorBoard's are written anew from them.
        complete: Whether they are all that the run had; if so, older event files are removed.
    """

    def __init__(
        self, workdir: Path, kept: Sequence[Mapping[str, Any]] = (), complete: bool = True
    ):
        self._workdir, self._count = workdir, count_train(kept)
        self._file = os.fdopen(files.append(workdir / files.RECORDS), "ab")
        self._events: dict[str, Events] = {}
        for record in kept:
            self._events_of(record["split"]).write(record["step"], _scalars(record))
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
        """Writes all records to the disk, and returns how many of training there are."""
        os.fsync(self._file.fileno())
        for events in self._events.values():
            events.sync()
        return self._count

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            for events in self._events.values():
                stack.callback(events.close)

    def _events_of(self, split: str) -> Events:
        if split not in self._events:
            from research_dp.training.tensorboard import Events

            self._events[split] = Events(self._workdir / files.TENSORBOARD / split)
        return self._events[split]


def count_train(records: Sequence[Mapping[str, Any]]) -> int:
    """How many records of training there are."""
    return sum(record["split"] == "train" for record in records)


def last_train_means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics, without rates, of the newest record of training."""
    newest = [_scalars(r) for r in records if r["split"] == "train"][-1:]
    return {name: value for means in newest for name, value in means.items() if name not in RATES}


def drop_unsaved(
    path: Path, step: int, *, evaluates_again: bool, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Drops from `metrics.jsonl` what a run continued from a step writes again.

    Lines that are no records are dropped too; the file is kept under another name then.

    Args:
        path: The file.
        step: Everything beyond it is dropped.
        evaluates_again: Whether the evaluation at the step itself is to be dropped too.
        say: Prints a line.

    Returns:
        What is kept.
    """
    again = (step, "eval") if evaluates_again else None
    content = path.read_bytes() if path.exists() else b""
    *lines, unfinished = content.split(b"\n")
    # A run that was killed may have written half of its last line.
    records = [read_json(line) for line in (*lines, unfinished)]
    bad = sum(not _is_record(record) for record in records[:-1])
    if bad:
        aside = files.free_name(path)
        files.replace(aside, content)
        say(f"{bad} of {len(lines)} lines of {path} are no records: left out; {aside} has them")
    records = [record for record in records if _is_record(record)]
    kept = [r for r in records if r["step"] <= step and (r["step"], r["split"]) != again]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object; empty if the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object is what `Records` writes, and TensorBoard's events can have."""
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


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's metrics; a null was not a number."""
    values = {name: value for name, value in record.items() if name not in ("split", "step")}
    return {name: math.nan if value is None else value for name, value in values.items()}
