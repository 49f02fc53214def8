"""Sums and counts become means (CLU), and means become records: JSON lines and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from clu import metrics as clu_metrics


def means(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over steps of metrics given as arrays (2,) of sum and count; one device-to-host copy.

    A mean over examples, never a mean of means.
    """
    host = jax.device_get(list(steps))
    averages = {}
    for name in host[0]:
        total, count = np.asarray([step[name] for step in host], np.float64).sum(axis=0)
        averages[name] = clu_metrics.Average(total=np.float32(total), count=np.float32(count))
    collection = clu_metrics.Collection.create_collection(**averages)
    return {name: float(value) for name, value in collection.compute().items()}


class Records:
    """Writes scalars to `metrics.jsonl` at once and to TensorBoard now and then.

    TensorBoard's writer (CLU's) imports TensorFlow, which takes seconds: that is done in a thread,
    once the run is a minute old or over.

    Args:
        workdir: Folder of the run.
        flush_seconds: How often TensorBoard's events are written.
    """

    def __init__(self, workdir: Path, flush_seconds: float = 60.0):
        self._workdir, self._flush_seconds = workdir, flush_seconds
        self._file = (workdir / "metrics.jsonl").open("a", buffering=1)
        self._waiting: list[tuple[str, int, dict[str, float]]] = []
        self._writers: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._flushed = time.monotonic()

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step."""
        self._file.write(json.dumps({"split": split, "step": step, **scalars}) + "\n")
        self._waiting.append((split, step, dict(scalars)))
        if time.monotonic() - self._flushed > self._flush_seconds:
            self._flush()

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()
        if self._thread:
            self._thread.join()
        self._to_tensorboard(self._waiting)
        for writer in self._writers.values():
            writer.close()

    def _flush(self) -> None:
        if self._thread and self._thread.is_alive():
            return
        self._flushed, waiting, self._waiting = time.monotonic(), self._waiting, []
        self._thread = threading.Thread(target=self._to_tensorboard, args=(waiting,))
        self._thread.start()

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


def drop_after(workdir: Path, step: int) -> None:
    """Drops lines of `metrics.jsonl` beyond a step: a continued run writes them again."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed run
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)
