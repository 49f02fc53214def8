"""What the devices work at, and who looks at it once it is over."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax


class InFlight:
    """Programs that were dispatched, the oldest first."""

    def __init__(self) -> None:
        self._programs: collections.deque[tuple[Any, Callable[[], None]]] = collections.deque()

    def add(self, results: Any, look: Callable[[], None] = lambda: None) -> None:
        """Keeps what a program gives; `look` is called as soon as that is known to be there."""
        self._programs.append((results, look))

    def wait_for_room(self) -> None:
        """Waits for the oldest until another one may be dispatched."""
        while len(self._programs) >= _most():
            self._wait_for_oldest()

    def wait_for_all(self) -> None:
        """Waits until none is left."""
        while self._programs:
            self._wait_for_oldest()

    def is_at_work(self) -> bool:
        """Whether the newest is still under way."""
        newest = jax.tree.leaves([results for results, _ in list(self._programs)[-1:]])
        return bool(newest) and not newest[0].is_ready()

    def _wait_for_oldest(self) -> None:
        results, look = self._programs.popleft()
        jax.block_until_ready(results)
        look()


def _most() -> int:
    """How many may be under way.

    Two keep an accelerator busy. On a split CPU the devices share a pool of threads, and a step
    that waits in a collective can hold the threads that the step before it needs to end: with
    many steps under way XLA deadlocks.
    """
    return 1 if jax.default_backend() == "cpu" else 2
