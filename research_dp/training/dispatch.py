"""Asynchronous dispatch: bounds the programs in flight, and prefetches batches behind them."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_MIN_PREFETCH, _MAX_PREFETCH = 2, 16  # batches on the devices before the step that takes them
_MAX_PREFETCH_BYTES = 2**24


class InFlight:
    """Dispatched programs, the oldest first, each with a callback for when it has finished."""

    def __init__(self) -> None:
        self._programs: collections.deque[tuple[Any, Callable[[], None]]] = collections.deque()
        self._newest: Any = None
        self._ended: tuple[Any, float] = (None, 0.0)  # results, and when they were there
        self._watched: queue.SimpleQueue[Any] | None = None

    def add(self, results: Any, on_done: Callable[[], None] = lambda: None) -> None:
        """Adds a program by its results; `on_done` is called once they are there."""
        self._programs.append((results, on_done))
        if self._watched is not None:
            self._newest = results
            self._watched.put(results)

    def idle_since(self) -> float | None:
        """When the newest program ended, as `time.perf_counter()`; None: it is still running.

        Only programs that are added after the first call are known to it.
        """
        if self._watched is None:
            self._watched = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=(self._watched,), daemon=True).start()
        results, at = self._ended
        return at if results is self._newest else None

    def close(self) -> None:
        """Ends the thread that notes when programs end."""
        if self._watched is not None:
            self._watched.put(None)

    def _watch(self, watched: queue.SimpleQueue[Any]) -> None:
        """Notes when programs end: a thread, for this process may read a batch meanwhile."""
        while (results := watched.get()) is not None:
            with contextlib.suppress(Exception):  # `wait` meets it too, and raises it
                jax.block_until_ready(results)
            self._ended = results, time.perf_counter()

    def wait_for_room(self) -> None:
        """Waits until another one may be dispatched: two keep an accelerator busy.

        On a split CPU a strategy's programs begin one after another anyway (`strategies/engines`).
        """
        self.wait(1 if jax.default_backend() == "cpu" else 2)

    def wait(self, most: int = 1) -> None:
        """Waits for the oldest while `most` are in flight."""
        while len(self._programs) >= most:
            results, on_done = self._programs.popleft()
            jax.block_until_ready(results)
            on_done()

    def is_busy(self) -> bool:
        """Whether the newest program is still running."""
        newest = jax.tree.leaves([results for results, _ in list(self._programs)[-1:]])
        return bool(newest) and not newest[0].is_ready()


def prefetch(
    place: Callable[[Any], Any], batches: Iterable[Any], is_busy: Callable[[], bool]
) -> Iterator[Any]:
    """Places batches on the devices ahead of their use, in bursts while the devices are busy.

    The first batch after a step finds cold caches and costs three times the next.
    """
    source, placed = iter(batches), collections.deque[Any]()
    while True:
        if len(placed) < _MIN_PREFETCH:
            for batch in source:
                placed.append(place(batch))
                nbytes = sum(x.nbytes for x in jax.tree.leaves(batch))
                most = min(_MAX_PREFETCH, _MAX_PREFETCH_BYTES // nbytes)
                if len(placed) >= _MIN_PREFETCH and (len(placed) >= most or not is_busy()):
                    break
        if not placed:
            return
        yield placed.popleft()
