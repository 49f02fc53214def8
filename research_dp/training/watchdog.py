"""The watchdog: ends a process that makes no progress, and says where it stood."""

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

from research_dp.argument_types import above
from research_dp.errors import check_limit
from research_dp.training import flight_recorder as recorder_lib
from research_dp.training.flight_recorder import Recorder

# How much longer than `seconds` a phase may take without a note: compilation, a first restore and
# libraries that are closed take their time. Preparing data sets, and the first read, may take any.
_PATIENCE = {"start": None, "test": 10.0, "restore": 10.0, "compile": 10.0, "close": 10.0}
# A process that waits for another one lets it speak first; the last word is the helper's.
_WAITING, _BACKSTOP = 1.4, 1.7
_STDERR = 2
_SECONDS_TO_READ = 5.0
# Aborts the process if it is not heard of for as long as it said last, by its own ticks: a job
# that is suspended does not tick, and a process that is stopped alone is no reason.
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
        said = os.read(0, 4096).split()
        if not said:
            sys.exit()
        left = float(said[-1])
    elif not is_stopped():
        left -= tick
os.kill(int(pid), signal.SIGABRT)
"""


@contextlib.contextmanager
def keep_watch(folder: Path, seconds: float | None) -> Iterator[Recorder]:
    """Records what this process does in a run's folder, and watches it if `seconds` are given.

    Raises:
        UsageError: They are no positive number.
    """
    if seconds is not None:
        check_limit("train.watchdog_seconds", seconds, above(0))
    with contextlib.ExitStack() as stack:
        recorder = Recorder(folder, jax.process_index(), jax.process_count())
        if recorder.process == 0:
            recorder.remove_others()
        stack.enter_context(recorder)
        if seconds:
            stack.enter_context(Watchdog(recorder, seconds).watch())
        yield recorder


class Watchdog:
    """Watches the notes of a recorder from a thread of its own.

    The thread runs while the main one waits in C++. Where the main thread keeps the interpreter's
    lock in C++, a helper process aborts this one a little later, and Python's fault handler, which
    needs no lock, writes the stacks; what it did is in the flight record then. Time in which the
    process was suspended does not count: both count their own ticks.

    Args:
        recorder: This process's.
        seconds: A process that notes nothing for so long is stuck; longer where it compiles.
    """

    def __init__(self, recorder: Recorder, seconds: float):
        self._recorder, self._seconds = recorder, seconds
        self._tick = min(1.0, seconds / 8)
        self._done = threading.Event()
        self._seen, self._waited, self._looked = recorder.now, 0.0, time.monotonic()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watches while the context is open."""
        if not faulthandler.is_enabled():
            faulthandler.enable(_STDERR)
        words = [sys.executable, "-ISc", _HELPER, str(os.getpid()), str(self._tick)]
        null = subprocess.DEVNULL
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null) as helper:
            assert helper.stdin is not None
            os.set_blocking(helper.stdin.fileno(), False)
            thread = threading.Thread(
                target=self._look, args=(helper.stdin.fileno(),), name="watchdog", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                self._done.set()
                thread.join()

    def _look(self, helper: int) -> None:
        while not self._done.wait(self._tick):
            left = self.look_once()
            with contextlib.suppress(OSError):  # whoever killed the helper gets no stacks
                os.write(helper, f"{left}\n".encode())

    def look_once(self) -> float:
        """Ends the process if it made no progress; returns for how long it need not be heard of."""
        phase, step, since = now = self._recorder.now
        looked, self._looked = self._looked, time.monotonic()
        if now is not self._seen:
            self._seen, self._waited, looked = now, 0.0, max(looked, since)
        # More than that from tick to tick is time in which this process did not run.
        self._waited += min(self._looked - looked, 2 * self._tick)
        patience = _PATIENCE.get(phase, 1.0)
        if patience is None:
            return math.inf
        waited, limit = self._waited, patience * self._seconds
        if waited > limit and (waited > limit * _WAITING or not self._waits_for_another()):
            self._end(phase, step, waited)
        return max(limit * _BACKSTOP - waited, 0.1)

    def _waits_for_another(self) -> bool:
        suspect = recorder_lib.behind(self._recorder.notes())
        return suspect is not None and suspect.process != self._recorder.process

    def _end(self, phase: str, step: int, waited: float) -> None:
        """Writes all stacks, says who is behind, ends the process."""
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        # The folder of the notes may be what hangs.
        faulthandler.dump_traceback_later(_SECONDS_TO_READ, exit=True, file=_STDERR)
        lines = recorder_lib.post_mortem(self._recorder.notes())
        text = "\n".join(
            [
                f"error: process {self._recorder.process} made no progress for {waited:.1f} s in "
                f"step {step}, phase {phase} (train.watchdog_seconds = {self._seconds:g}); its "
                "stacks are above",
                *(lines if self._recorder.processes > 1 else []),
            ]
        )
        try:
            os.write(_STDERR, f"{text}\n".encode(errors="replace"))
        finally:  # also where nobody can be told
            os._exit(1)
