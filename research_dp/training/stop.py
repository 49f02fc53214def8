"""Whether somebody wants the run to stop: SIGTERM or SIGINT, agreed on by all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

INTERRUPTED = 130


class StopSignal:
    """Whether SIGTERM or SIGINT came; the loop asks before each step.

    With several processes JAX's own service listens for SIGTERM, and names one step for all of
    them: each is told to stop there, whichever of them was signalled. SIGINT is passed on to it. A
    second SIGINT ends this process at once, also while its main thread waits in C++.
    """

    def __init__(self) -> None:
        self._came = False
        self._together = jax.process_count() > 1

    def came(self, step: int) -> bool:
        """Whether to stop before the step after `step`; the same answer in every process."""
        if self._together:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._came

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopSignal]:
        """Notes signals instead of dying from them; in a thread that is not the main one: nothing.

        Python runs handlers between instructions of the main thread, which may be waiting for the
        devices. So a thread of its own is told of each signal as it comes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        told, teller = socket.socketpair()
        teller.setblocking(False)
        thread = threading.Thread(target=self._follow, args=(told,), name="signals", daemon=True)
        numbers = (signal.SIGINT,) if self._together else (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, self._note) for number in numbers}
        before = signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            teller.close()
            thread.join()
            told.close()

    def _note(self, number: int, _: Any = None) -> None:
        first, self._came = not self._came, True
        if first and self._together and number == signal.SIGINT:
            os.kill(os.getpid(), signal.SIGTERM)

    def _follow(self, told: socket.socket) -> None:
        interrupts = 0
        while numbers := told.recv(16):
            for number in numbers:
                interrupts += number == signal.SIGINT
                self._note(number)
            if interrupts == 1 and signal.SIGINT in numbers:
                print(
                    "SIGINT: the run saves and stops; again: it stops at once",
                    file=sys.stderr,
                    flush=True,
                )
            if interrupts > 1:
                print("SIGINT again: stopped at once, nothing saved", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
