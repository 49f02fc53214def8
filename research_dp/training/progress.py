"""What a person sees while a run runs: a bar on a terminal, lines elsewhere; and the profiler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import jax
from rich import progress as rich_progress
from rich.console import Console

from research_dp.training.metrics import RATES
from research_dp.types import Work

_PROFILED_STEPS = 5


class Clock:
    """Counts steps and the time they took, without compilation, evaluation and saving.

    Args:
        batch_size: Examples a step.
        work: What an example is, if the model says so.
        peak: FLOP/s of all devices together, if it is known.
    """

    def __init__(self, batch_size: int, work: Work | None = None, peak: float | None = None):
        self._batch_size, self._work, self._peak = batch_size, work, peak
        self._steps = self._all_steps = 0
        self._seconds = self._all_seconds = 0.0
        self._running_since: float | None = None

    def start(self) -> None:
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        if self._running_since is not None:
            passed = time.perf_counter() - self._running_since
            self._seconds, self._all_seconds = self._seconds + passed, self._all_seconds + passed
            self._running_since = None

    def count_step(self) -> None:
        """Counts a step, if the clock runs."""
        if self._running_since is not None:
            self._steps, self._all_steps = self._steps + 1, self._all_steps + 1

    def rates(self) -> dict[str, float]:
        """Rates since the last call; nothing if no step was counted.

        Returns:
            `steps_per_second`, `examples_per_second`; for a model that says what an example is
            `tokens_per_second`, and on known devices `mfu` (Chowdhery et al., arXiv 2204.02311):
            the share of their peak that the model's own operations take.
        """
        if self._running_since is not None:
            self.stop()
            self.start()
        if not self._steps:
            return {}
        rate = self._steps / self._seconds
        self._steps, self._seconds = 0, 0.0
        examples = rate * self._batch_size
        rates = {"steps_per_second": rate, "examples_per_second": examples}
        if self._work:
            rates["tokens_per_second"] = examples * self._work.tokens
            if self._peak:
                rates["mfu"] = examples * self._work.flops / self._peak
        return rates

    def overall(self) -> float | None:
        """Steps a second of the whole run so far."""
        return self._all_steps / self._all_seconds if self._all_steps else None


def say(text: str) -> None:
    """Prints a line, in process 0, before there is a bar."""
    if jax.process_index() == 0:
        print(text, flush=True)


class ProgressBar:
    """Shows steps, rate, time left and the newest metrics; only process 0 prints.

    Args:
        num_steps: Step at which the run ends.
        first_step: Step at which it begins.
    """

    def __init__(self, num_steps: int, first_step: int):
        self._num_steps = num_steps
        self._console = Console(quiet=jax.process_index() != 0, soft_wrap=True, highlight=False)
        self._bar: rich_progress.Progress | None = None
        if self._console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("step {task.completed}/{task.total}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.fields[rate]}"),
                rich_progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step, rate="")
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False)

    def step(self, step: int) -> None:
        """Moves the bar, if there is one."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def metrics(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Prints metrics of a split, with rate and time left where the scalars have a rate."""
        shown = {name: value for name, value in scalars.items() if name not in RATES}
        parts = [f"{name} {value:.4g}" for name, value in shown.items()]
        rate = scalars.get("steps_per_second")
        if rate:
            left = (self._num_steps - step) / rate
            what = "tokens" if "tokens_per_second" in scalars else "examples"
            parts += [f"{rate:.1f} steps/s", f"{scalars[f'{what}_per_second']:,.0f} {what}/s"]
            if "mfu" in scalars:
                parts.append(f"{scalars['mfu']:.1%} MFU")
            if self._bar:
                self._bar.update(self._task, rate=f"{rate:.1f} steps/s")
            parts.append(f"{_duration(left)} left")
        self.say(f"{split:5s} step {step}/{self._num_steps}  " + "  ".join(parts))

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


class Profile:
    """Traces a few steps with JAX's profiler, for TensorBoard or Perfetto.

    Args:
        at: Step after which to begin; None: never.
        folder: Where the trace goes.
    """

    def __init__(self, at: int | None, folder: Path):
        self._at, self._folder = at, folder
        self._tracing = False

    def step(self, step: int) -> None:
        """Starts or stops the trace, after a step."""
        if self._at is None:
            return
        if step == self._at:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif step >= self._at + _PROFILED_STEPS:
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
