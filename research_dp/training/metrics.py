"""Sums and counts become means (CLU), and means become records: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from clu import metrics as clu_metrics

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
    collection = clu_metrics.Collection.create_collection(**averages)
    return {name: float(value) for name, value in collection.compute().items()}


def as_json(value: Any) -> Any:
    """The same with what JSON cannot say (not a number, infinite) as null."""
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Records:
    """Writes scalars to `metrics.jsonl` at once and to TensorBoard now and then.

    TensorBoard's writer (CLU's) imports TensorFlow, which takes seconds: that is done in a thread,
    once the run is a minute old or over.

    Args:
        workdir: Folder of the run.
        kept: Records of the run that is continued. TensorBoard's are written anew from them: a
            killed run may have written fewer, or some that are written again.
        flush_seconds: How often TensorBoard's events are written.
    """

    def __init__(
        self, workdir: Path, kept: Sequence[Mapping[str, Any]] = (), flush_seconds: float = 60.0
    ):
        self._workdir, self._flush_seconds = workdir, flush_seconds
        shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
        self._file = (workdir / "metrics.jsonl").open("a", buffering=1)
        self._waiting = [(r["split"], r["step"], _scalars(r)) for r in kept]
        self._writers: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, "tensorboard")
        self._writing: Future[None] | None = None
        self._flushed = time.monotonic()

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        record = as_json({"split": split, "step": step, **scalars})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._waiting.append((split, step, dict(scalars)))
        busy = self._writing is not None and not self._writing.done()
        if time.monotonic() - self._flushed > self._flush_seconds and not busy:
            self._flush()

    def close(self) -> None:
        """Writes what is left; raises what went wrong in the thread."""
        self._file.close()
        self._flush()
        self._thread.shutdown()
        assert self._writing is not None
        self._writing.result()
        for writer in self._writers.values():
            writer.close()

    def _flush(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._flushed, waiting, self._waiting = time.monotonic(), self._waiting, []
        self._writing = self._thread.submit(self._to_tensorboard, waiting)

    def _to_tensorboard(self, waiting: Sequence[tuple[str, int, dict[str, float]]]) -> None:
        if not waiting:
            return
        from clu import metric_writers

        for split, step, scalars in waiting:
            if split not in self._writers:
                folder = str(self._workdir / "tensorboard" / split)
                self._writers[split] = metric_writers.SummaryWriter(folder)
            self._writers[split].write_scalars(step, scalars)
        for writer in self._writers.values():
            writer.flush()


def last_train_means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics, without rates, of the newest record of training."""
    newest = [_scalars(r) for r in records if r["split"] == "train"][-1:]
    return {name: value for means in newest for name, value in means.items() if name not in RATES}


def drop_unsaved(workdir: Path, step: int, *, evaluates_again: bool) -> list[dict[str, Any]]:
    """Drops from `metrics.jsonl` what a run continued from a step writes again.

    Args:
        workdir: Folder of the run.
        step: Everything beyond it is dropped.
        evaluates_again: Whether the evaluation at the step itself is to be dropped too.

    Returns:
        What is kept.
    """
    path = workdir / "metrics.jsonl"
    again = (step, "eval") if evaluates_again else None
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line of a killed run may be half a line.
    records = [record for record in map(read_json, lines) if record]
    kept = [r for r in records if r["step"] <= step and (r["step"], r["split"]) != again]
    write_at_once(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def read_json(text: str) -> dict[str, Any]:
    """An object; empty if the text is not whole."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def write_at_once(path: Path, text: str) -> None:
    """Writes a file so that it is never seen half written."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record without what it is of; a null was not a number."""
    told = ("split", "step")
    values = {name: value for name, value in record.items() if name not in told}
    return {name: math.nan if value is None else value for name, value in values.items()}
