"""The largest batch that fits: a secant through the memory of a few compiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from research_dp.distributed.mesh import batch_devices
from research_dp.planning.row import Row
from research_dp.strategies import Recipe, TrainSpec

_TRIES = 4

# Compiles the run with this many examples a step, in so many micro-batches.
Try = Callable[[TrainSpec], Row]


def largest(recipe: Recipe, spec: TrainSpec, row: Row, attempt: Try) -> Row:
    """The most examples a device that fit at a time, found in at most four compilations.

    Args:
        recipe: The strategy.
        spec: The run; its micro-batches stay as many.
        row: Its row, which fits.
        attempt: Compiles it with another batch.

    Returns:
        The row of the largest batch that was compiled and fits; `row` itself if none larger does.
    """
    step = batch_devices(recipe.mesh) * spec.accumulation_steps
    known = {spec.batch_size // step: row}
    each = 2 * (spec.batch_size // step)
    for _ in range(_TRIES):
        found = attempt(dataclasses.replace(spec, batch_size=each * step))
        if found.needed_bytes is None:
            break
        known[each] = found
        following = _next(known)
        if following in known or _nearly_full(found):
            break
        each = following
    return known[max(n for n, found in known.items() if found.fits)]


def _nearly_full(row: Row) -> bool:
    """Whether a row fits and leaves so little that another compilation is not worth it."""
    assert row.needed_bytes is not None and row.available_bytes is not None
    return row.fits and row.needed_bytes > 0.97 * row.available_bytes


def _next(known: dict[int, Row]) -> int:
    """Where the line through the two known sizes next to the limit meets it, rounded down."""
    sizes = sorted(known)
    above = next((i for i, size in enumerate(sizes) if not known[size].fits), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    first, second = known[low], known[high]
    assert first.needed_bytes and second.needed_bytes and first.available_bytes
    slope = max(1.0, (second.needed_bytes - first.needed_bytes) / (high - low))
    meets = int(low + (first.available_bytes - first.needed_bytes) / slope)
    if not second.fits:
        # A size that is known not to fit bounds it; a miss by rounding must not end the search.
        return max(low, min(meets, high - 1))
    return max(high, meets)


def smallest_steps(recipe: Recipe, spec: TrainSpec, row: Row, attempt: Try) -> Row | None:
    """The same batch in more micro-batches, until it fits; None if it does not.

    Args:
        recipe: The strategy, whose state fits.
        spec: The run.
        row: Its row, which does not fit.
        attempt: Compiles it with more micro-batches.
    """
    devices = batch_devices(recipe.mesh)
    micros = spec.accumulation_steps
    for _ in range(_TRIES):
        micros *= 2
        if spec.batch_size % (devices * micros):
            return None
        row = attempt(dataclasses.replace(spec, accumulation_steps=micros))
        if row.fits:
            return row
    return None
