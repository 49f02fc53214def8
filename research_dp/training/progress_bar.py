"""The console of a run: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import jax
from rich import progress as rich_progress
from rich.console import Console

from research_dp.training.metrics import RATES


def say(text: str) -> None:
    """Prints a line in process 0, before there is a bar."""
    if jax.process_index() == 0:
        print(text, flush=True)


class ProgressBar:
    """Shows steps, rate, time left and the newest metrics; only process 0 prints."""

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
        self._console.print(text, markup=False)

    def step(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def metrics(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Prints metrics of a split, with rate and time left where the scalars have a rate."""
        parts = [f"{name} {x:.4g}" for name, x in scalars.items() if name not in RATES]
        rate = scalars.get("steps_per_second")
        if rate:
            unit = "tokens" if "tokens_per_second" in scalars else "examples"
            parts += [f"{rate:.1f} steps/s", f"{scalars[f'{unit}_per_second']:,.0f} {unit}/s"]
            if "mfu" in scalars:
                parts.append(f"{scalars['mfu']:.1%} MFU")
            if self._bar:
                self._bar.update(self._task, rate=f"{rate:.1f} steps/s")
            seconds = round((self._num_steps - step) / rate)
            parts.append(f"{datetime.timedelta(seconds=seconds)} left")
        self.say(f"{split:5s} step {step}/{self._num_steps}  " + "  ".join(parts))

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
