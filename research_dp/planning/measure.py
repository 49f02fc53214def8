"""How long a planned step takes on devices that are there."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from research_dp.planning.estimate import Compiled
from research_dp.strategies.rng import init_key

_STEPS = 5


def measure(made: Compiled) -> None:
    """Runs a step and tells its row how long it takes, or why it cannot be run.

    The median of five, after one that does not count. The state is a run's first; the examples are
    zeros, which no dense computation minds.

    Args:
        made: A strategy that fits, its program compiled for devices that are present.
    """
    try:
        made.row.take(_seconds(made))
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        # What the compiler does not count is on the device too: other programs, buffers of links.
        made.row.fits = made.row.fits and "RESOURCE_EXHAUSTED" not in line
        made.row.problem = f"cannot be run here: {line}"


def _seconds(made: Compiled) -> float:
    built, row = made.strategy, made.row
    assert row.batch_size is not None
    shapes = built.abstract_batch.examples
    # Without the dims that say which device, micro-batch and row: those of an example.
    leading = built.abstract_batch.position.ndim
    zeros = {
        name: np.zeros((len(built.train_rows), *x.shape[leading:]), x.dtype)
        for name, x in shapes.items()
    }
    batch = built.place_batch(zeros)
    state = built.init(init_key(0))
    took = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        state, metrics = made.program(state, batch)
        jax.block_until_ready((state, metrics))
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])
