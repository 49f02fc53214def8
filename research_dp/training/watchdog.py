"""The watchdog: ends a process that makes no progress, and reports where it stood."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from research_dp.runs import flight_recorder
from research_dp.runs.flight_recorder import Recorder

# Factors on `seconds` by phase: compilation, a first restore and closing libraries take longer.
# Preparing data sets, and the first read, have no limit.
_PATIENCE = {"start": math.inf, "test": 10.0, "restore": 10.0, "compile": 10.0, "close": 10.0}
# A process that waits for another one lets it report first; the helper comes last.
_PATIENCE_FOR_OTHERS, _HELPER_PATIENCE = 1.4, 1.7
_STDERR = 2
_SECONDS_TO_READ_NOTES = 5.0
# Aborts the process after as many seconds without a message as the last message granted. It counts
# its own ticks: a suspended job does not tick, and a process that only was stopped is spared.
_HELPER = """
import os, select, signal, sys
pid, tick, left = sys.argv[1], float(sys.argv[2]), float("inf")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
def is_stopped():
    path = f"/proc/{pid}/stat"
    return os.path.exists(path) and open(path).read().rpartition(")")[2].split()[0] in "Tt"
while left > 0:
    if os.getppid() != int(pid):
        sys.exit()
    if select.select([0], [], [], tick)[0]:
        words = os.read(0, 4096).split()
        if not words:
            sys.exit()
        left = float(words[-1])
    elif not is_stopped():
        left -= tick
os.kill(int(pid), signal.SIGABRT)
"""


@contextlib.contextmanager
def monitored(folder: Path, seconds: float | None) -> Iterator[Recorder]:
    """Records what this process does in a run's folder, and watches it if `seconds` are given."""
    recorder = Recorder(folder, jax.process_index(), jax.process_count())
    for note in flight_recorder.last_notes(folder):
        # Of an earlier run of more processes; the first process has the lock.
        if recorder.process == 0 and note.process >= recorder.processes:
            flight_recorder.note_file(folder, note.process).unlink(missing_ok=True)
    with recorder, Watchdog(recorder, seconds).watch() if seconds else contextlib.nullcontext():
        yield recorder


class Watchdog:
    """Watches the notes of a recorder: a process without one for `seconds` is stuck.

    A thread of its own runs while the main one waits in C++. If that one keeps the interpreter's
    lock, a helper process aborts this one a little later; Python's fault handler, which needs no
    lock, then writes the stacks. Thread and helper count their own ticks: time in which the process
    was suspended does not count.
    """

    def __init__(self, recorder: Recorder, seconds: float):
        self._recorder, self._seconds = recorder, seconds
        self._tick = min(1.0, seconds / 8)
        self._done = threading.Event()
        self._newest, self._waited, self._checked_at = recorder.now, 0.0, time.monotonic()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        if not faulthandler.is_enabled():
            faulthandler.enable(_STDERR)
        command = [sys.executable, "-ISc", _HELPER, str(os.getpid()), str(self._tick)]
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null) as helper:
            assert helper.stdin is not None
            os.set_blocking(helper.stdin.fileno(), False)
            args = (helper.stdin.fileno(),)
            thread = threading.Thread(target=self._watch, args=args, name="watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._done.set()
                thread.join()

    def _watch(self, helper: int) -> None:
        while not self._done.wait(self._tick):
            left = self.check()
            with contextlib.suppress(OSError):  # whoever killed the helper gets no stacks
                os.write(helper, f"{left}\n".encode())

    def check(self) -> float:
        """Ends the process if it is stuck; returns the seconds that the helper grants it."""
        phase, step, since = now = self._recorder.now
        before, self._checked_at = self._checked_at, time.monotonic()
        if now is not self._newest:
            self._newest, self._waited, before = now, 0.0, max(before, since)
        # A longer pause between ticks is time in which this process did not run.
        self._waited += min(self._checked_at - before, 2 * self._tick)
        waited, limit = self._waited, _PATIENCE.get(phase, 1.0) * self._seconds
        is_patient = limit < waited <= limit * _PATIENCE_FOR_OTHERS
        suspect = flight_recorder.straggler(self._recorder.notes()) if is_patient else None
        if waited > limit and (suspect is None or suspect.process == self._recorder.process):
            self._end(phase, step, waited)
        return max(limit * _HELPER_PATIENCE - waited, 0.1)

    def _end(self, phase: str, step: int, waited: float) -> None:
        """Writes all stacks, reports who is behind, ends the process."""
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        # The folder of the notes may be what hangs.
        faulthandler.dump_traceback_later(_SECONDS_TO_READ_NOTES, exit=True, file=_STDERR)
        lines = [
            f"error: process {self._recorder.process} made no progress for {waited:.1f} s in "
            f"step {step}, phase {phase} (train.watchdog_seconds = {self._seconds:g}); its "
            "stacks are above"
        ]
        if self._recorder.processes > 1:
            lines += flight_recorder.post_mortem(self._recorder.notes())
        try:
            os.write(_STDERR, ("\n".join(lines) + "\n").encode(errors="replace"))
        finally:  # also where standard error is closed
            os._exit(1)
