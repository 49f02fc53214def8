"""Metrics of a run: sums and counts become means (CLU), counted steps become rates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from clu.metrics import Average

from research_dp.types import Work

RATES = ("steps_per_second", "examples_per_second", "tokens_per_second", "mfu")

# name -> (sum, count), on the host.
Sums = dict[str, tuple[float, float]]


def accumulate(sums: Sums, steps: Iterable[Mapping[str, Any]]) -> Sums:
    """Adds arrays (2,) of sum and count to sums on the host, in order and in float64."""
    result = dict(sums)
    for step in jax.device_get(list(steps)):
        for name, (total, count) in step.items():
            before = result.get(name, (0.0, 0.0))
            result[name] = before[0] + float(total), before[1] + float(count)
    return result


def means(sums: Sums) -> dict[str, float]:
    """Means over examples, never means of means."""
    # Not CLU's `create_collection`: each call makes a class, which JAX keeps for ever.
    return {
        name: float(Average(total=np.float32(total), count=np.float32(count)).compute())
        for name, (total, count) in sums.items()
    }


class Throughput:
    """Counts steps and their time, without compilation, evaluation and saving.

    `work` is an example's, `peak` the FLOP/s of all devices together, where they are known.
    """

    def __init__(self, batch_size: int, work: Work | None = None, peak: float | None = None):
        self._batch_size, self._work, self._peak = batch_size, work, peak
        self._steps, self._seconds = 0, 0.0
        self._reported = 0, 0.0  # of them, at the last call of `rates`
        self._running_since: float | None = None

    def start(self) -> None:
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def count_step(self) -> None:
        """Counts a step, if the clock runs."""
        self._steps += self._running_since is not None

    def rates(self) -> dict[str, float]:
        """Those of `RATES` that are known, since the last call; empty if no step was counted.

        `mfu` (Chowdhery et al., arXiv 2204.02311) is the fraction of the devices' peak that the
        model's own operations take.
        """
        if self._running_since is not None:
            self.stop()
            self.start()
        steps, seconds = self._steps - self._reported[0], self._seconds - self._reported[1]
        if not steps:
            return {}
        self._reported = self._steps, self._seconds
        examples = steps / seconds * self._batch_size
        rates = {"steps_per_second": steps / seconds, "examples_per_second": examples}
        if self._work:
            rates["tokens_per_second"] = examples * self._work.tokens
            if self._peak:
                rates["mfu"] = examples * self._work.flops / self._peak
        return rates

    def overall(self) -> float | None:
        """Steps a second of the run so far."""
        return self._steps / self._seconds if self._steps else None
