"""Metrics of a run: sums and counts become means (CLU), counted steps become rates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from clu.metrics import Average

from research_dp.distributed.mesh import texts_of_all
from research_dp.types import HostSums, Work

_PARTS = ("data_wait", "dispatch", "device_wait")  # of the time of steps; the loop has the rest
_PAUSES = ("eval", "save")
# Names in `summary.json` -> parts of `Throughput.seconds`; in records they end with `_seconds`.
SECONDS = {
    **{"data": "data_wait", "dispatch": "dispatch", "device": "device_wait"},
    **{"evaluation": "eval", "saves": "save"},
}


def accumulate(
    sums: HostSums, steps: Iterable[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    """Adds arrays (2,) of sum and count to sums on the host, in order and in float64.

    Those of replicas, (replicas, 2), are added up; one collective, where processes have parts.
    """
    result, of_parts, steps = dict(sums), dict[str, tuple[float, float]](), list(steps)
    # All arrays together: to read one after the other waits for each.
    held = jax.device_get([{name: _held(x) for name, x in step.items()} for step in steps])
    for step, own in zip(steps, held, strict=True):
        for name, x in step.items():
            into = result if x.ndim == 1 or x.is_fully_addressable else of_parts
            before, rows = into.get(name, (0.0, 0.0)), [np.reshape(y, (-1, 2)) for y in own[name]]
            total, count = np.sum([y.sum(0, dtype=np.float64) for y in rows], 0).tolist()
            into[name] = before[0] + total, before[1] + count
    for part in map(json.loads, texts_of_all(json.dumps(of_parts)) if of_parts else ()):
        for name, (total, count) in part.items():
            before = result.get(name, (0.0, 0.0))
            result[name] = before[0] + total, before[1] + count
    return result


def _held(x: Any) -> list[Any]:
    """An array, or those of its rows that this process has, each once."""
    if x.ndim == 1 or x.is_fully_addressable:
        return [x]
    return [s.data for s in x.addressable_shards if s.replica_id == 0] or [np.zeros((1, 2))]


def means(sums: HostSums) -> dict[str, float]:
    """Means over examples, never means of means."""
    # Not CLU's `create_collection`: each call makes a class, which JAX keeps for ever.
    with np.errstate(invalid="ignore"):  # a metric that counted nothing is NaN
        return {
            name: float(Average(total=np.float32(total), count=np.float32(count)).compute())
            for name, (total, count) in sums.items()
        }


class Throughput:
    """Counts steps and their time, without compilation, evaluation and saving; and where it goes.

    `work` is an example's, `peak` the FLOP/s of all devices together, where they are known.

    Attributes:
        seconds: Of this start: in 'steps', of which are 'data_wait' (the devices had nothing to do
            while a batch was read), 'dispatch' (of steps), 'device_wait' (the devices computed,
            and the host waited or read what they did not wait for); also in 'eval' and 'save'.
    """

    def __init__(self, batch_size: int, work: Work | None = None, peak: float | None = None):
        self._batch_size, self._work, self._peak = batch_size, work, peak
        self._steps = 0
        self.seconds = dict.fromkeys(("steps", *_PARTS, *_PAUSES), 0.0)
        self._reported = 0, dict(self.seconds)  # at the last call of `rates`
        self._running_since: float | None = None

    def start(self) -> None:
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        if self._running_since is not None:
            self.seconds["steps"] += time.perf_counter() - self._running_since
            self._running_since = None

    def count_step(self) -> None:
        """Counts a step, if the clock runs."""
        self._steps += self._running_since is not None

    def spend(self, part: str, since: float) -> None:
        """Adds the time since `since` (`time.perf_counter()`), if the clock runs or in a pause."""
        if self._running_since is not None or part in _PAUSES:
            self.seconds[part] += time.perf_counter() - since

    def spend_on_batch(self, since: float, idle_since: float | None) -> None:
        """Adds the time since `since`, in which a batch was read, to the part that it is of.

        The devices ended at `idle_since`, or are still busy (None): then they did not wait for it.
        """
        now = time.perf_counter()
        idle_from = now if idle_since is None else min(max(since, idle_since), now)
        if self._running_since is not None:
            self.seconds["data_wait"] += now - idle_from
            self.seconds["device_wait"] += idle_from - since

    def wait(self, wait: Callable[..., Any], *args: Any, part: str = "device_wait") -> None:
        """Calls a function that waits, and adds its time to a part."""
        since = time.perf_counter()
        wait(*args)
        self.spend(part, since)

    def rates(self) -> dict[str, float]:
        """Those of `MEASURED` that it knows, since the last call; empty if no step was counted.

        `mfu` (Chowdhery et al., arXiv 2204.02311) is the fraction of the devices' peak that the
        model's own operations take.
        """
        if self._running_since is not None:
            self.stop()
            self.start()
        steps = self._steps - self._reported[0]
        if not steps:
            return {}
        spent = {part: total - self._reported[1][part] for part, total in self.seconds.items()}
        self._reported = self._steps, dict(self.seconds)
        seconds = spent["steps"]
        examples = steps / seconds * self._batch_size
        rates = {"steps_per_second": steps / seconds, "examples_per_second": examples}
        if self._work:
            rates["tokens_per_second"] = examples * self._work.tokens
            if self._peak and self._work.flops:
                rates["mfu"] = examples * self._work.flops / self._peak
        rates |= {f"{part}_seconds": spent[part] for part in _PARTS}
        rates["data_wait_fraction"] = spent["data_wait"] / seconds
        return rates | ({"save_seconds": spent["save"]} if spent["save"] else {})

    def overall(self) -> float | None:
        """Steps a second of the run so far."""
        return self._steps / self.seconds["steps"] if self._steps else None

    def summary(self, started: float) -> dict[str, float]:
        """Where the time of this start went, for the run's summary."""
        total = time.perf_counter() - started
        return {**{name: self.seconds[part] for name, part in SECONDS.items()}, "total": total}


def device_memory() -> dict[str, float]:
    """Bytes in use on the fullest device of this process, where devices report them."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [x["bytes_in_use"] for x in stats if "bytes_in_use" in x]
    return {"device_memory_bytes": float(max(used))} if used else {}
