"""What a run prints: lines, and a bar on a terminal. Only process 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import jax
from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from research_dp.console import Progress, filled
from research_dp.types import MEASURED


def say(text: str) -> None:
    """Prints a line in process 0, before there is a bar."""
    if jax.process_index() == 0:
        print(text, flush=True)


class ProgressBar(Progress):
    """Shows steps, rate, time left and the newest metrics, or what else is being done."""

    _repeats = False

    def __init__(self, num_steps: int, first_step: int):
        super().__init__(stream=sys.stdout, quiet=jax.process_index() != 0)
        self._num_steps, self._step, self._rate = num_steps, first_step, 0.0
        self.__enter__()

    def doing(self, activity: str, *, at_once: bool = False) -> None:
        """Shows what is done instead of steps, and for how long; '' shows steps again."""
        self(activity, at_once=at_once)

    def step(self, step: int) -> None:
        self._step = step

    def metrics(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Prints metrics of a split, with rate and time left where the scalars have a rate."""
        parts = [f"{split:5s} step {step}/{self._num_steps}", *metric_words(scalars)]
        if rate := scalars.get("steps_per_second"):
            self._rate = rate
            unit = "tokens" if "tokens_per_second" in scalars else "examples"
            parts += [f"{rate:.1f} steps/s", f"{scalars[f'{unit}_per_second']:,.0f} {unit}/s"]
            if "mfu" in scalars:
                parts.append(f"{scalars['mfu']:.1%} MFU")
            parts += self._time_left(step)
        for line in filled(map(Text, parts), self.width):
            self.say(str(line))

    def close(self) -> None:
        """Ends the bar; more lines may be printed."""
        self.__exit__()

    def _line(self) -> RenderableType:
        """What else is being done, or the steps."""
        if self._activity:
            return super()._line()
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [f"step {self._step}/{self._num_steps}"]
        cells.append(Bar(self._num_steps, self._step, width=20))
        cells += [f"{self._rate:.1f} steps/s"] if self._rate else []
        cells += self._time_left(self._step)
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        return grid

    def _time_left(self, step: int) -> list[str]:
        """The time that the steps left take, in words, if a rate is known."""
        if not self._rate or step >= self._num_steps:
            return []
        return [f"{_duration((self._num_steps - step) / self._rate)} left"]


def metric_words(scalars: Mapping[str, float]) -> list[str]:
    """'loss 0.31' and the like, without what the run measures."""
    return [f"{name} {x:.4g}" for name, x in scalars.items() if name not in MEASURED]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
