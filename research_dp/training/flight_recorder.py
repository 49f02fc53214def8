"""The flight recorder: what each process is doing, in a file that survives its end.

A process may be killed, or aborted by a library, without a message. So each writes step, phase
and time as it goes, for the watchdog, the launcher, a person.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from research_dp.training import files

# In the order of a step: of two processes at one step, the one in an earlier phase is behind.
Phase = Literal[
    "start", "test", "restore", "data", "compile", "step", "eval", "save", "close", "end"
]
_ORDER: tuple[str, ...] = get_args(Phase)
# Phases in which a process may wait for the others. `compile` is the first step, comparison,
# evaluation or save, and making the first state.
_COLLECTIVE = ("test", "restore", "compile", "step", "eval", "save")

_LINE = 64
_YEAR_3000 = 32503680000  # seconds
_LINES = 64  # a header, and a ring of the newest 63 notes


class Note(NamedTuple):
    """The phase of a process in a step (they count from 1), and since when by its host's clock."""

    process: int
    pid: int
    host: str
    step: int
    phase: str
    time: float

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.time))
        return (
            f"process {self.process}, step {self.step}, phase {self.phase}, since {since}, "
            f"pid {self.pid} on {self.host}"
        )


class Recorder:
    """Writes what this process is doing; a note costs a few microseconds.

    Each note is one system call, so it survives the process. Leaving the context without an error
    notes `end`.

    Attributes:
        now: (phase, step, `time.monotonic()`) of the newest note; replaced as one object, because
            the watchdog's thread reads it.
    """

    def __init__(self, folder: Path, process: int = 0, processes: int = 1):
        self.folder, self.process, self.processes = folder, process, processes
        path = note_file(folder, process)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file = files.create(path)
        host = socket.gethostname().split(".")[0][:20]
        header = _line(f"process {process} {os.getpid()} {host}")
        # The file has its full size from the start: a note needs no room on a full disk.
        os.pwrite(self._file, header + _line("") * (_LINES - 1), 0)
        self._count = 0
        self.note("start", 0)

    def note(self, phase: Phase, step: int) -> None:
        """Writes what this process does from now on; repeating a note shows that it is alive."""
        slot = 1 + self._count % (_LINES - 1)
        self._count += 1
        self.now = (phase, step, time.monotonic())
        text = f"{self._count} {step} {phase} {time.time():.6f}"
        os.pwrite(self._file, _line(text), slot * _LINE)

    def closing(self) -> None:
        """Informs the watchdog's thread that libraries are being closed, which takes its time.

        Not the file: after a failure it says where the failure was.
        """
        self.now = ("close", self.now[1], time.monotonic())

    def notes(self) -> list[Note]:
        """The newest note of each process of this run."""
        return [note for note in last_notes(self.folder) if note.process < self.processes]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.note("end", self.now[1])
        os.close(self._file)


def note_file(folder: Path, process: int) -> Path:
    """The notes of a process."""
    return folder / files.FLIGHT / f"process_{process}.txt"


def last_notes(folder: Path) -> list[Note]:
    """The newest note of each process of a run, by process."""
    notes = map(_newest_note, (folder / files.FLIGHT).glob("process_*.txt"))
    return sorted(filter(None, notes))


def straggler(notes: list[Note]) -> Note | None:
    """The process that the others wait for; None if all are at the same place.

    It is the one at the lowest step, in the earliest phase there: no clocks are compared.
    """
    if not notes:
        return None

    def place(note: Note) -> tuple[int, int]:
        return note.step, _ORDER.index(note.phase)

    first = min(notes, key=place)
    is_behind = any(place(note) != place(first) for note in notes)
    return first if is_behind or len(notes) == 1 or first.phase not in _COLLECTIVE else None


def post_mortem(notes: list[Note]) -> list[str]:
    """Which process was behind, and where each one was; a line each."""
    head = "all processes are at the same place: a collective, or a device, does not end"
    if suspect := straggler(notes):
        head = f"process {suspect.process} is behind: step {suspect.step}, phase {suspect.phase}"
    return [head, *(f"  {note}" for note in notes)]


def _line(text: str) -> bytes:
    return text.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n"


def _newest_note(path: Path) -> Note | None:
    if not path.is_file():  # a FIFO would block
        return None
    try:
        header, *lines = path.read_text().splitlines()
        _, process, pid, host = header.split()
        newest = max(filter(None, map(_parse, lines)), default=None)
        return Note(int(process), int(pid), host, *newest[1:]) if newest else None
    except (OSError, ValueError):
        return None  # it was just created, or is damaged


def _parse(line: str) -> tuple[int, int, str, float] | None:
    """Number, step, phase and time of a note; None: the line is empty or damaged."""
    try:
        number, step, phase, since = line.split()
        note = int(number), int(step), phase, float(since)
    except ValueError:
        return None
    return note if phase in _ORDER and 0 <= note[3] < _YEAR_3000 else None
