"""The flight recorder: step, phase and time of each process, in a file that survives it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from research_dp.runs import files

# In the order of a step: of two processes at one step, the one in an earlier phase is behind.
Phase = Literal[
    "start", "test", "restore", "data", "compile", "step", "eval", "save", "close", "end"
]
_ORDER: tuple[str, ...] = get_args(Phase)
# Phases in which a process may wait for the others. `compile` is the first step, comparison,
# evaluation or save, and making the first state.
_COLLECTIVE = ("test", "restore", "compile", "step", "eval", "save")

_LINE, _LINES = 64, 64  # bytes; a header, and a ring of the newest 63 notes
_YEAR_3000 = 32503680000  # seconds


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
    """Writes what this process is doing: a note is one system call of a few microseconds."""

    def __init__(self, folder: Path, process: int = 0, processes: int = 1):
        self.folder, self.process, self.processes = folder, process, processes
        path = note_file(folder, process)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file, self._count = files.create(path), 0
        header = _line(f"process {process} {os.getpid()} {_host()}")
        # The file has its full size from the start: a note needs no room on a full disk.
        os.pwrite(self._file, header + _line("") * (_LINES - 1), 0)
        self.note("start", 0)

    def note(self, phase: Phase, step: int) -> None:
        """Writes what this process does from now on; repeating a note shows that it is alive."""
        slot = 1 + self._count % (_LINES - 1)
        self._count += 1
        self.now = (phase, step, time.monotonic())  # one object, as the watchdog's thread reads it
        text = f"{self._count} {step} {phase} {time.time():.6f}"
        os.pwrite(self._file, _line(text), slot * _LINE)

    def closing(self) -> None:
        """Gives the closing of libraries time, without a note: notes show where a run failed."""
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
    """That which others wait for: a stopped one, or by step and phase; None: all are equal."""
    places = [(not _is_stopped(x), x.step, _ORDER.index(x.phase)) for x in notes]
    if not notes:
        return None
    first = notes[places.index(min(places))]
    if 1 < len(notes) == places.count(min(places)) and first.phase in _COLLECTIVE:
        return None
    return first


def post_mortem(notes: list[Note]) -> list[str]:
    """Which process was behind, and where each one was; a line each."""
    head = "all processes are at the same place: a collective, or a device, does not end"
    if suspect := straggler(notes):
        head = f"process {suspect.process} is behind: step {suspect.step}, phase {suspect.phase}"
    return [head, *(f"  {note}" for note in notes)]


def _host() -> str:
    return socket.gethostname().split(".")[0][:20]


def _is_stopped(note: Note) -> bool:
    """Whether a process of this machine is, as by SIGSTOP."""
    file = Path(f"/proc/{note.pid}/stat")
    stat = file.read_text() if note.host == _host() and file.exists() else ") R"
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _line(text: str) -> bytes:
    return text.encode()[: _LINE - 1].ljust(_LINE - 1) + b"\n"


def _newest_note(path: Path) -> Note | None:
    """None: the file was just created, or is damaged, as single lines may be."""
    if not path.is_file():  # a FIFO would block
        return None
    notes = []
    with contextlib.suppress(OSError, ValueError):
        header, *lines = path.read_text().splitlines()
        _, process, pid, host = header.split()
        for line in lines:
            with contextlib.suppress(ValueError):
                number, step, phase, since = line.split()
                note = Note(int(process), int(pid), host, int(step), phase, float(since))
                if phase in _ORDER and 0 <= note.time < _YEAR_3000:
                    notes.append((int(number), note))
    return max(notes)[1] if notes else None
