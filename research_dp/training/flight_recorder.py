"""The flight recorder: what each process is doing, in a file that survives its end.

A process may be killed, or aborted by a library, without a word. So each writes step, phase and
time as it goes, and whoever is left reads them: the watchdog, the launcher, a person.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from research_dp.training import files

Phase = Literal[
    "start", "test", "restore", "data", "compile", "step", "eval", "save", "close", "end"
]
# In the order of a step: of two processes at one step, the one in an earlier phase is behind.
_ORDER: tuple[str, ...] = get_args(Phase)
# Phases in which a process may be waiting for the others. `compile` is the first of a kind: step,
# comparison, evaluation or save; and making the first state.
_TOGETHER = ("test", "restore", "compile", "step", "eval", "save")

_LINE = 64
_YEAR_3000 = 32503680000  # seconds
_LINES = 64  # the head, and the newest 63 notes, in turn


class Note(NamedTuple):
    """What a process did last.

    Attributes:
        process: Its number.
        pid: Its process id.
        host: Its machine.
        step: The step that it worked on; steps count from 1.
        phase: What it did for it.
        time: Since when; seconds since 1970 on its machine.
    """

    process: int
    pid: int
    host: str
    step: int
    phase: str
    time: float

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.time))
        where = f"pid {self.pid} on {self.host}"
        return (
            f"process {self.process}, step {self.step}, phase {self.phase}, since {since}, {where}"
        )


class Recorder:
    """Writes what this process is doing; a note costs a few microseconds.

    Each note is written into the file by one system call, so it is there when the process is not.
    A full file begins again behind its head. Leaving the context without an error notes `end`.

    Args:
        folder: Folder of the run; the file is `flight/process_I.txt` in it.
        process: Number of this process.
        processes: How many there are.
    """

    def __init__(self, folder: Path, process: int = 0, processes: int = 1):
        self.folder, self.process, self.processes = folder, process, processes
        path = flight(folder, process)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file = files.create(path)
        host = socket.gethostname().split(".")[0][:20]
        head = _line(f"process {process} {os.getpid()} {host}")
        # All of it now: a note needs no room on a disk that has become full.
        os.pwrite(self._file, head + _line("") * (_LINES - 1), 0)
        self._count = 0
        self.note("start", 0)

    def note(self, phase: Phase, step: int) -> None:
        """Writes what is done from now on; the same again is a sign of life."""
        place = 1 + self._count % (_LINES - 1)
        self._count += 1
        # One tuple, which the watchdog's thread reads whole.
        self.now = (phase, step, time.monotonic())
        os.pwrite(
            self._file, _line(f"{self._count} {step} {phase} {time.time():.6f}"), place * _LINE
        )

    def closing(self) -> None:
        """Says to the watchdog that libraries are closed, which may import and write a lot.

        Not to the file: after a failure that says where the failure was.
        """
        self.now = ("close", self.now[1], time.monotonic())

    def notes(self) -> list[Note]:
        """The newest note of each process of this run."""
        return [note for note in last_notes(self.folder) if note.process < self.processes]

    def remove_others(self) -> None:
        """Removes what an earlier run of more processes left; for one process that holds the lock.

        A person who looks back would take it for this run's.
        """
        for note in last_notes(self.folder):
            if note.process >= self.processes:
                flight(self.folder, note.process).unlink(missing_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.note("end", self.now[1])
        os.close(self._file)


def flight(folder: Path, process: int) -> Path:
    """Where a process writes."""
    return folder / files.FLIGHT / f"process_{process}.txt"


def last_notes(folder: Path) -> list[Note]:
    """The newest note of each process of a run, by process."""
    found = (_read(path) for path in (folder / files.FLIGHT).glob("process_*.txt"))
    return sorted(note for note in found if note)


def behind(notes: list[Note]) -> Note | None:
    """The process that the others wait for; None if all are at the same place.

    That is the one at the lowest step, there in the earliest phase: no clock is compared.
    """
    if not notes:
        return None

    def place(note: Note) -> tuple[int, int]:
        return note.step, _ORDER.index(note.phase)

    first = min(notes, key=place)
    alone = sum(place(note) == place(first) for note in notes) < len(notes)
    return first if alone or len(notes) == 1 or first.phase not in _TOGETHER else None


def post_mortem(notes: list[Note]) -> list[str]:
    """Who was behind, and where each process was; a line each."""
    suspect = behind(notes)
    if suspect:
        head = f"process {suspect.process} is behind: step {suspect.step}, phase {suspect.phase}"
    else:
        head = "all processes are at the same place: a collective, or a device, does not end"
    return [head, *(f"  {note}" for note in notes)]


def _line(text: str) -> bytes:
    return text.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n"


def _read(path: Path) -> Note | None:
    """The newest note in a file; None if it has none."""
    if not path.is_file():  # a FIFO, which would be waited for
        return None
    try:
        head, *lines = path.read_text().splitlines()
        _, process, pid, host = head.split()
        newest = max((note for note in map(_note, lines) if note), default=None)
        return Note(int(process), int(pid), host, *newest[1:]) if newest else None
    except (OSError, ValueError):
        return None  # it was just begun, or is damaged


def _note(line: str) -> tuple[int, int, str, float] | None:
    """Number, step, phase and time of a line; None if it is empty or damaged."""
    try:
        count, step, phase, since = line.split()
        note = int(count), int(step), phase, float(since)
    except ValueError:
        return None
    return note if phase in _ORDER and 0 <= note[3] < _YEAR_3000 else None
