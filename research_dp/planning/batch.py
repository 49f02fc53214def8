"""The largest batch that fits, and the fewest micro-batches: by a few compiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from research_dp.distributed.mesh import batch_devices
from research_dp.planning.row import Row
from research_dp.strategies import StrategyConfig, TrainSpec

_MAX_COMPILATIONS = 4
_MAX_GROWTH = 8  # of a batch from one compilation to the next: memory further away is a guess
_MAX_EXAMPLES = 2**31 - 1  # their positions in the batch are int32
_NEARLY_FULL = 0.97  # the part of the memory above which another compilation is not worth it

# Compiles a run with another batch size or number of micro-batches.
Compile = Callable[[TrainSpec], Row]


def largest_batch(config: StrategyConfig, spec: TrainSpec, row: Row, compile_with: Compile) -> Row:
    """The most examples a device that fit at a time, found in at most four compilations.

    The row of the run itself fits; the number of micro-batches stays.

    Returns:
        The row of the largest batch that was compiled and fits. If none larger does: of two batches
        in twice as many micro-batches; `row` itself if that does not fit either, or has no limit.
    """
    limit = row.available_bytes
    if limit is None or 2 * spec.batch_size > _MAX_EXAMPLES:
        return row
    step = batch_devices(config.mesh) * spec.accumulation_steps
    size = spec.batch_size // step  # examples a device and micro-batch
    known = {size: row}
    size *= 2
    for _ in range(_MAX_COMPILATIONS):
        larger = compile_with(dataclasses.replace(spec, batch_size=size * step))
        if larger.needed_bytes is None:
            break
        known[size] = larger
        following = min(_next_size(known, limit), _MAX_EXAMPLES // step)
        nearly_full = larger.fits and larger.needed_bytes > _NEARLY_FULL * limit
        if following in known or nearly_full:
            break
        size = following
    best = known[max(size for size, tried in known.items() if tried.fits)]
    if best is not row:
        return best
    twice = dataclasses.replace(
        spec, batch_size=2 * spec.batch_size, accumulation_steps=2 * spec.accumulation_steps
    )
    larger = compile_with(twice)
    return larger if larger.fits else row


def _next_size(known: dict[int, Row], limit: int) -> int:
    """Where the line through the two known sizes next to the limit meets it, rounded down."""
    sizes = sorted(known)
    above = next((i for i, size in enumerate(sizes) if not known[size].fits), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    needed_low, needed_high = (known[size].needed_bytes or 0 for size in (low, high))
    slope = max(1.0, (needed_high - needed_low) / (high - low))
    meets = int(low + (limit - needed_low) / slope)
    if not known[high].fits:
        # A size that is known not to fit is an upper bound, whatever the rounding.
        return max(low, min(meets, high - 1))
    return max(high, min(meets, _MAX_GROWTH * high))


def fewest_micro_batches(
    config: StrategyConfig, spec: TrainSpec, row: Row, compile_with: Compile
) -> Row | None:
    """The same batch in as few micro-batches as fit, found in at most four compilations.

    The strategy's state fits, but `row` does not. If even one example a device at a time does not
    fit, the row of that; None if `row` is that one already.
    """
    most = spec.batch_size // batch_devices(config.mesh)
    counts = [n for n in range(spec.accumulation_steps + 1, most + 1) if most % n == 0]
    if not counts:
        return None
    best = compile_with(dataclasses.replace(spec, accumulation_steps=counts[-1]))
    low, high = 0, len(counts) - 1  # below `low` none fits; `high` fits
    for _ in range(_MAX_COMPILATIONS - 1):
        if not best.fits or low == high:
            break
        middle = (low + high) // 2
        fewer = compile_with(dataclasses.replace(spec, accumulation_steps=counts[middle]))
        if fewer.fits:
            best, high = fewer, middle
        else:
            low = middle + 1
    return best
