"""Whether somebody wants the run to stop: SIGTERM, agreed on by all processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Whether SIGTERM came; the loop asks before each step.

    With several processes JAX's own service listens, and names one step for all of them: each is
    told to stop there, whichever of them was signalled.
    """

    def __init__(self) -> None:
        self._came = False

    def came(self, step: int) -> bool:
        """Whether to stop before the step after `step`; the same answer in every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._came

    def _note(self, *_: Any) -> None:
        self._came = True

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopSignal]:
        """Notes SIGTERM instead of dying from it."""
        if jax.process_count() > 1:
            yield self
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)
