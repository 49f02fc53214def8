"""The watchdog: ends a process that makes no progress, and says where it stood."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from research_dp.distributed.errors import check_limit
from research_dp.distributed.kinds import Above
from research_dp.training import recorder as recorder_lib
from research_dp.training.recorder import Recorder

# How much longer than `seconds` a phase may take without a note: compilation, a first restore and
# libraries that are closed take their time. Preparing data sets, and the first read, may take any.
_PATIENCE = {"start": None, "test": 10.0, "restore": 10.0, "compile": 10.0, "close": 10.0}
# A process that waits for another one lets it speak first; the last word is the fault handler's.
_WAITING, _BACKSTOP = 1.4, 1.7
_STDERR = 2
_SECONDS_TO_READ = 5.0


@contextlib.contextmanager
def keep_watch(folder: Path, seconds: float | None) -> Iterator[Recorder]:
    """Records what this process does in a run's folder, and watches it if `seconds` are given.

    Raises:
        UsageError: They are no positive number.
    """
    if seconds is not None:
        check_limit("train.watchdog_seconds", seconds, Above(0))
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
    lock in C++, Python's fault handler, which needs none, writes the stacks and ends the process a
    little later; what it did is in the flight record then.

    Args:
        recorder: This process's.
        seconds: A process that notes nothing for so long is stuck; longer where it compiles.
    """

    def __init__(self, recorder: Recorder, seconds: float):
        self._recorder, self._seconds = recorder, seconds
        self._done = threading.Event()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watches while the context is open."""
        thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._done.wait(min(1.0, self._seconds / 8)):
            self.look_once()

    def look_once(self) -> None:
        """Ends the process if it made no progress; winds the fault handler's clock if it did."""
        phase, step, since = self._recorder.now
        patience = _PATIENCE.get(phase, 1.0)
        if patience is None:
            faulthandler.cancel_dump_traceback_later()
            return
        waited, limit = time.monotonic() - since, patience * self._seconds
        if waited > limit and (waited > limit * _WAITING or not self._waits_for_another()):
            self._end(phase, step, waited)
        later = max(limit * _BACKSTOP - waited, 0.1)
        faulthandler.dump_traceback_later(later, exit=True, file=_STDERR)

    def _waits_for_another(self) -> bool:
        suspect = recorder_lib.behind(self._recorder.notes())
        return suspect is not None and suspect.process != self._recorder.process

    def _end(self, phase: str, step: int, waited: float) -> None:
        """Writes all stacks, says who is behind, ends the process."""
        faulthandler.cancel_dump_traceback_later()
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
