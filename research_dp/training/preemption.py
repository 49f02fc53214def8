"""Whether somebody wants the run to stop: SIGTERM, SIGHUP or SIGINT, agreed on by all processes."""

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
_steps_began = threading.Event()  # in this process; see `before_steps`


class StopSignal:
    """Whether SIGTERM, SIGHUP or SIGINT came; the loop asks before each step.

    With several processes JAX's own service listens for SIGTERM, and names one step for all of
    them: each is told to stop there, whichever of them was signalled. The others are passed on to
    it. A second SIGINT ends this process at once, also while its main thread waits in C++.
    """

    def __init__(self) -> None:
        self._came, self._interrupts = False, 0
        self._together = jax.process_count() > 1

    def came(self, step: int) -> bool:
        """Whether to stop before the step after `step`; the same answer in every process."""
        if self._together:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._came

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopSignal]:
        """Notes signals instead of dying from them; in a thread that is not the main one: nothing.

        A second SIGINT is noticed also while the main thread waits for the devices.
        """
        numbers = (*_hangup(), signal.SIGINT, *(() if self._together else (signal.SIGTERM,)))
        _steps_began.set()
        with _handled(numbers, self._note, self._follow):
            yield self

    def _note(self, number: int, _: Any = None) -> None:
        first, self._came = not self._came, True
        if first and self._together and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)

    def _follow(self, number: int) -> None:
        self._interrupts += number == signal.SIGINT
        self._note(number)
        if number != signal.SIGINT:
            return
        if self._interrupts > 1:
            print("SIGINT again: stopped at once, nothing saved", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        print("SIGINT: the run saves and stops; again: it stops at once", file=sys.stderr)


@contextlib.contextmanager
def before_steps() -> Iterator[None]:
    """Exits with status 143 at SIGTERM or SIGHUP, while there is nothing to save.

    What is open is closed: a data set that is being prepared leaves nothing behind. If the main
    thread waits in C, for other processes or a compiler, the process ends after a few seconds.

    Once `StopSignal.listen` was called these signals change nothing: when it returns the run is
    ending, and what it saves in the background is completed.
    """

    def leave(number: int, _: Any = None) -> None:
        if not _steps_began.is_set():
            raise SystemExit(STOPPED)

    def end() -> None:
        if not _steps_began.is_set():
            os._exit(STOPPED)

    def say(number: int) -> None:
        if number not in handled:
            return
        name = signal.Signals(number).name
        if _steps_began.is_set():
            print(f"{name}: the run is ending already", file=sys.stderr, flush=True)
            return
        print(f"{name}: stopped; there was nothing to save", file=sys.stderr, flush=True)
        ending = threading.Timer(_SECONDS_TO_LEAVE, end)
        ending.daemon = True
        ending.start()

    _steps_began.clear()
    handled = (*_hangup(), signal.SIGTERM)
    with _handled(handled, leave, say):
        yield


def _hangup() -> tuple[signal.Signals, ...]:
    """The signal of a terminal that closes, unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return () if ignored else (signal.SIGHUP,)


@contextlib.contextmanager
def _handled(
    numbers: Sequence[int], handler: Callable[[int, Any], None], at_once: Callable[[int], None]
) -> Iterator[None]:
    """Handles signals; in a thread that is not the main one: nothing.

    Python calls `handler` between instructions of the main thread, which may be waiting for the
    devices. So a thread of its own calls `at_once` with each signal as it comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def follow() -> None:
        while received := receiver.recv(16):
            for number in received:
                at_once(number)

    thread = threading.Thread(target=follow, name="signals", daemon=True)
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
