"""TensorBoard's event files, written without TensorFlow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from research_dp.training import files

_PREFIX = "events.out.tfevents."


class EventFile:
    """A new event file; each write survives a kill of the process.

    Args:
        folder: Folder of the event files of one split.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._older = [p for p in folder.iterdir() if p.name.startswith(_PREFIX)]
        name = f"{_PREFIX}{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._file = os.fdopen(files.create(folder / name), "wb")
        self._records = RecordWriter(self._file)
        self._put(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars of a step."""
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
        ]
        summary = summary_pb2.Summary(value=values)
        self._put(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def remove_older(self) -> None:
        """Removes the event files that the folder had before this one."""
        self.sync()
        for path in self._older:
            if path.is_file() or path.is_symlink():
                path.unlink()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _put(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
