"""How long a planned step takes on devices that are present."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from research_dp.errors import first_line
from research_dp.planning.estimate import Compiled
from research_dp.strategies.rng import init_key

_STEPS = 5


def measure(compiled: Compiled) -> None:
    """Runs a step and records in its row how long it takes, or why it cannot be run.

    The median of five, after one that does not count. The state is a run's first; the examples are
    zeros, which do not change the time of dense computations.

    Args:
        compiled: A strategy that fits, its program compiled for devices that are present.
    """
    row = compiled.row
    try:
        row.set_measured(_median_seconds(compiled))
    except jax.errors.JaxRuntimeError as error:
        # The compiler does not count other programs on the device, or buffers of the links.
        row.fits = row.fits and "RESOURCE_EXHAUSTED" not in first_line(error)
        row.problem = f"cannot be run here: {first_line(error)}"


def _median_seconds(compiled: Compiled) -> float:
    strategy = compiled.strategy
    shapes = strategy.abstract_batch.examples
    # An example has no dims of device, micro-batch and row.
    leading = strategy.abstract_batch.position.ndim
    zeros = {
        name: np.zeros((len(strategy.train_rows), *x.shape[leading:]), x.dtype)
        for name, x in shapes.items()
    }
    batch = strategy.place_batch(zeros)
    state = strategy.init(init_key(0))
    seconds = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        state, metrics = compiled.program(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
