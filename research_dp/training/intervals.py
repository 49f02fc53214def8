"""The steps at which a run records, evaluates, saves, compares replicas and profiles."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from research_dp.errors import binding_error

_PROFILED_STEPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The parameters of `train` that say when; UsageError if one of them has no effect."""

    num_steps: int
    log_every: int
    eval_every: int | None
    checkpoint_every: int | None
    keep_period: int | None
    profile_at: int | None
    check_replicas_every: int | None = None

    def __post_init__(self) -> None:
        if self.profile_at is not None and self.profile_at >= self.num_steps:
            problem = f" = {self.profile_at} is never passed: train.num_steps is {self.num_steps}"
            raise binding_error("train.profile_at", f"{problem}. Bind less, or None.")
        every, period = self.checkpoint_every, self.keep_period
        if period is not None and (every is None or period % every):
            problem = f" = {period} is no multiple of train.checkpoint_every = {every}"
            raise binding_error("train.keep_period", f"{problem}: those steps are not saved.")

    def logs(self, step: int) -> bool:
        return _divides(self.log_every, step) or step == self.num_steps

    def evaluates(self, step: int) -> bool:  # the end always does
        return _divides(self.eval_every, step) and step < self.num_steps

    def compares(self, step: int) -> bool:
        return _divides(self.check_replicas_every, step)

    def saves(self, step: int) -> bool:  # the end always does
        return _divides(self.checkpoint_every, step)


class ProfilerTrace:
    """Traces the steps after `at` (None: none) with JAX's profiler, for TensorBoard or Perfetto."""

    def __init__(self, at: int | None, folder: Path):
        self._at, self._folder, self._tracing = at, folder, False

    def step(self, step: int) -> None:
        """Starts or stops the trace, after a step."""
        if step == self._at:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._at is not None and step >= self._at + _PROFILED_STEPS:
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
