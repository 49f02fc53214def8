"""When what happens in a run."""

from __future__ import annotations

import dataclasses

from research_dp.errors import UsageError, check_count

_COUNTS = ("eval_every", "checkpoint_every", "keep_period", "profile_at", "check_replicas_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """At which steps a run records, evaluates, saves and profiles.

    Attributes:
        num_steps: Step at which training ends.
        log_every: Record training metrics each so many steps, and at the end.
        eval_every: Evaluate each so many steps; None: at the end only.
        checkpoint_every: Save each so many steps; None: at the end only.
        keep_period: Checkpoints of steps that it divides are kept for good; None: none are.
        profile_at: Step after which the profiler traces a few steps; None: never.
        check_replicas_every: Compare replicas each so many steps; None: never.

    Raises:
        UsageError: One of them is not a count, or has no effect.
    """

    num_steps: int
    log_every: int
    eval_every: int | None
    checkpoint_every: int | None
    keep_period: int | None
    profile_at: int | None
    check_replicas_every: int | None = None

    def __post_init__(self) -> None:
        check_count("train.num_steps", self.num_steps, 0)
        check_count("train.log_every", self.log_every, 1)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                check_count(f"train.{name}", getattr(self, name), 1)
        if self.profile_at is not None and self.profile_at >= self.num_steps:
            raise UsageError(
                f"train.profile_at = {self.profile_at} is never passed: train.num_steps is "
                f"{self.num_steps}. Bind less, or None.",
                binding="train.profile_at",
            )
        every, period = self.checkpoint_every, self.keep_period
        if period is not None and (every is None or period % every):
            raise UsageError(
                f"train.keep_period = {period} is no multiple of train.checkpoint_every = {every}: "
                "those steps are not saved.",
                binding="train.keep_period",
            )

    def logs(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.num_steps

    def evaluates(self, step: int) -> bool:
        """Whether it evaluates in the middle; the end does so in any case."""
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.num_steps

    def compares(self, step: int) -> bool:
        """Whether replicas are compared."""
        every = self.check_replicas_every
        return every is not None and step % every == 0

    def saves(self, step: int) -> bool:
        """Whether it saves in the middle; the end does so in any case."""
        return self.checkpoint_every is not None and step % self.checkpoint_every == 0
