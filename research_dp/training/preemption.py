"""SIGTERM, SIGHUP and SIGINT: noted while a run trains, agreed on by all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

INTERRUPTED, STOPPED = 130, 143
_SECONDS_TO_LEAVE = 10.0
_training_began = threading.Event()  # in this process; see `exit_on_signals`


class StopSignal:
    """Whether a signal asked the run to stop; the loop asks before each step.

    With several processes JAX's preemption service listens for SIGTERM and names one step at
    which all of them stop, whichever was signalled. Other signals are forwarded to it as SIGTERM.
    A second SIGINT ends this process at once, also while its main thread waits in C++.
    """

    def __init__(self) -> None:
        self._requested, self._interrupts = False, 0
        self._several = jax.process_count() > 1

    def requested(self, step: int) -> bool:
        """Whether to stop before the step after `step`; the same answer in every process."""
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._requested

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopSignal]:
        """Notes signals instead of dying from them; only in the main thread."""
        numbers = (*_hangup(), signal.SIGINT, *(() if self._several else (signal.SIGTERM,)))
        _training_began.set()
        with _handled(numbers, self._note, self._note_at_once):
            yield self

    def _note(self, number: int, _: Any = None) -> None:
        first, self._requested = not self._requested, True
        if first and self._several and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note_at_once(self, number: int) -> None:
        self._note(number)
        if number != signal.SIGINT:
            return
        self._interrupts += 1
        if self._interrupts > 1:
            for stream in filter(os.isatty, (1, 2)):  # a progress bar has hidden the cursor
                os.write(stream, b"\x1b[?25h")
            print("SIGINT again: stopped at once, nothing saved", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        print("SIGINT: the run saves and stops; again: it stops at once", file=sys.stderr)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exits with status 143 at SIGTERM or SIGHUP, until `StopSignal.listen` takes over.

    There is nothing to save yet, but contexts are closed: a data set that is being prepared
    leaves nothing behind. A process whose main thread waits in C ends after a few seconds. After
    `listen` these signals change nothing: the run is ending, and its last save completes.
    """

    def leave(leave_by: Callable[[int], object]) -> None:
        if not _training_began.is_set():
            leave_by(STOPPED)

    def report(number: int) -> None:
        if number not in numbers or reported.is_set():
            return
        began = _training_began.is_set()
        state = "the run is ending already" if began else "stopped; there was nothing to save"
        print(f"{signal.Signals(number).name}: {state}", file=sys.stderr, flush=True)
        if not began:
            reported.set()
            timer = threading.Timer(_SECONDS_TO_LEAVE, leave, [os._exit])
            timer.daemon = True
            timer.start()

    def raise_again(ignored: Any) -> None:
        if not (isinstance(ignored.exc_value, SystemExit) and ignored.exc_value.code == STOPPED):
            return ignored_before(ignored)
        # Python drops what a callback of its garbage collection raises; JAX registers one.
        cancel()
        raised_again[:] = [threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM])]
        raised_again[0].start()

    def cancel() -> None:
        for timer in raised_again:
            timer.cancel()

    _training_began.clear()
    reported = threading.Event()
    numbers, raised_again = (*_hangup(), signal.SIGTERM), list[threading.Timer]()
    ignored_before, sys.unraisablehook = sys.unraisablehook, raise_again
    with _handled(numbers, lambda number, _: leave(sys.exit), report):
        try:
            yield
        finally:
            cancel()
            sys.unraisablehook = ignored_before


def _hangup() -> tuple[signal.Signals, ...]:
    """The signal of a terminal that closes, unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return () if ignored else (signal.SIGHUP,)


@contextlib.contextmanager
def _handled(
    numbers: Sequence[int], handler: Callable[[int, Any], None], at_once: Callable[[int], None]
) -> Iterator[None]:
    """Handles signals; only in the main thread.

    Python calls `handler` between instructions of the main thread, which may be waiting in C++.
    So a second thread calls `at_once` with each signal when it arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def receive() -> None:
        while received := receiver.recv(16):
            for number in received:
                at_once(number)

    thread = threading.Thread(target=receive, name="signals", daemon=True)
    handlers = {number: signal.signal(number, handler) for number in numbers}
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, former in handlers.items():
            signal.signal(number, former)
        sender.close()
        thread.join()
        receiver.close()
