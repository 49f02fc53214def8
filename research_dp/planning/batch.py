"""The largest batch that fits, and the fewest micro-batches: by a few compiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from research_dp.distributed.mesh import batch_devices
from research_dp.planning.estimate import Row
from research_dp.strategies import StrategyConfig, TrainSpec

_TRIES = 4
_GROWTH = 8  # by how much a batch grows at once: what memory says further away is not worth trying
_MOST = 2**31 - 1  # examples: their places in the batch are int32

# Compiles the run with this many examples a step, in so many micro-batches.
Try = Callable[[TrainSpec], Row]


def largest(recipe: StrategyConfig, spec: TrainSpec, row: Row, attempt: Try) -> Row:
    """The most examples a device that fit at a time, found in at most four compilations.

    Args:
        recipe: The strategy.
        spec: The run; its micro-batches stay as many.
        row: Its row, which fits.
        attempt: Compiles it with another batch.

    Returns:
        The row of the largest batch that was compiled and fits. If none larger does, of two batches
        in twice as many micro-batches; `row` itself if that does not either, or has no limit.
    """
    if row.available_bytes is None or 2 * spec.batch_size > _MOST:
        return row
    step = batch_devices(recipe.mesh) * spec.accumulation_steps
    known = {spec.batch_size // step: row}
    each = 2 * (spec.batch_size // step)
    for _ in range(_TRIES):
        found = attempt(dataclasses.replace(spec, batch_size=each * step))
        if found.needed_bytes is None:
            break
        known[each] = found
        following = min(_next(known), _MOST // step)
        if following in known or _nearly_full(found):
            break
        each = following
    most = known[max(n for n, found in known.items() if found.fits)]
    if most is not row:
        return most
    size, micros = 2 * spec.batch_size, 2 * spec.accumulation_steps
    found = attempt(dataclasses.replace(spec, batch_size=size, accumulation_steps=micros))
    return found if found.fits else row


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
    return max(high, min(meets, _GROWTH * high))


def state_fits(row: Row) -> bool:
    """Whether what a strategy holds between steps would fit by itself."""
    limit = row.available_bytes
    return row.state_bytes is not None and (limit is None or row.state_bytes <= limit)


def smallest_steps(recipe: StrategyConfig, spec: TrainSpec, row: Row, attempt: Try) -> Row | None:
    """The same batch in as few micro-batches as fit, found in at most four compilations.

    Args:
        recipe: The strategy, whose state fits.
        spec: The run.
        row: Its row, which does not fit.
        attempt: Compiles it with more micro-batches.

    Returns:
        Their row; if even one example a device at a time does not fit, that row; None if that is
        what `row` is of.
    """
    most = spec.batch_size // batch_devices(recipe.mesh)
    counts = [n for n in range(spec.accumulation_steps + 1, most + 1) if most % n == 0]
    if not counts:
        return None
    best = attempt(dataclasses.replace(spec, accumulation_steps=counts[-1]))
    low, high = 0, len(counts) - 1  # of `counts`, those below `low` do not fit, that at `high` does
    for _ in range(_TRIES - 1):
        if not best.fits or low == high:
            break
        middle = (low + high) // 2
        found = attempt(dataclasses.replace(spec, accumulation_steps=counts[middle]))
        if found.fits:
            best, high = found, middle
        else:
            low = middle + 1
    return best
