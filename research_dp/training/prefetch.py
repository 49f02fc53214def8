"""Batches that are placed on the devices before the steps that take them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_FEWEST_AHEAD = 2  # batches placed on the devices before the step that takes them
_MOST_AHEAD = 16
_BYTES_AHEAD = 2**24


def placed_ahead(
    place: Callable[[Any], Any], batches: Iterable[Any], devices_work: Callable[[], bool]
) -> Iterator[Any]:
    """Places batches on the devices ahead of their use, several of them if they are small.

    The second batch of a row costs a third of the first, whose code and data a step has driven
    out of the caches. A row ends with the step that it is to be hidden behind.
    """
    source, placed = iter(batches), collections.deque[Any]()
    while True:
        if len(placed) < _FEWEST_AHEAD:
            for batch in source:
                placed.append(place(batch))
                most = min(_MOST_AHEAD, _BYTES_AHEAD // _bytes(batch))
                if len(placed) >= _FEWEST_AHEAD and (len(placed) >= most or not devices_work()):
                    break
        if not placed:
            return
        yield placed.popleft()


def _bytes(batch: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(batch))
