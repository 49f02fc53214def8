"""What a run prints: lines, and a bar on a terminal. Only process 0 prints."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence

import jax
from rich import progress
from rich.text import Text

from research_dp.terminal import console_of, wrapped
from research_dp.types import MEASURED

_PATIENCE = 2.0  # seconds that an activity may take before a pipe gets a line about it


def say(text: str) -> None:
    """Prints a line in process 0, before there is a bar."""
    if jax.process_index() == 0:
        print(text, flush=True)


class ProgressBar:
    """Shows steps, rate, time left and the newest metrics, or what else is being done."""

    def __init__(self, num_steps: int, first_step: int):
        self._num_steps = num_steps
        self._console = console_of(sys.stdout, quiet=jax.process_index() != 0)
        self._timer: threading.Timer | None = None
        self._bar: progress.Progress | None = None
        if self._console.is_terminal:
            rate = progress.TextColumn("{task.fields[rate]}")
            columns = (_Activity(), progress.BarColumn(bar_width=20), rate, _TimeLeft())
            # Transient: the bar is gone when the last lines are printed.
            self._bar = progress.Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(
                "", total=num_steps, completed=first_step, rate="", since=0.0
            )
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a line; a terminal wraps it between words."""
        is_terminal = self._console.is_terminal
        lines = wrapped(Text(text), self._console.width) if is_terminal else [Text(text)]
        self._console.print(*lines, sep="\n", soft_wrap=True)

    def doing(self, activity: str, *, at_once: bool = False) -> None:
        """Shows what is done instead of steps, and for how long; '' shows steps again.

        In a pipe it is a line, printed `at_once` or only if the activity takes long.
        """
        if self._bar:
            self._bar.update(self._task, description=activity, since=time.monotonic())
            return
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if activity and at_once:
            self.say(activity)
        elif activity:
            self._timer = threading.Timer(_PATIENCE, self.say, (f"{activity} ...",))
            self._timer.daemon = True
            self._timer.start()

    def step(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def metrics(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Prints metrics of a split, with rate and time left where the scalars have a rate."""
        parts = [f"{split:5s} step {step}/{self._num_steps}", *metric_words(scalars)]
        if rate := scalars.get("steps_per_second"):
            unit = "tokens" if "tokens_per_second" in scalars else "examples"
            parts += [f"{rate:.1f} steps/s", f"{scalars[f'{unit}_per_second']:,.0f} {unit}/s"]
            if "mfu" in scalars:
                parts.append(f"{scalars['mfu']:.1%} MFU")
            if self._bar:
                self._bar.update(self._task, rate=f"{rate:.1f} steps/s")
            if step < self._num_steps:
                parts.append(f"{_duration((self._num_steps - step) / rate)} left")
        width = self._console.width if self._console.is_terminal else None
        for line in filled(parts, width):
            self.say(line)

    def close(self) -> None:
        """Ends the bar; more lines may be printed."""
        self.doing("")
        if self._bar:
            self._bar.stop()


class _Activity(progress.ProgressColumn):
    """The number of steps, or what else is being done and for how long."""

    def render(self, task: progress.Task) -> Text:
        seconds = time.monotonic() - task.fields["since"]
        steps = f"step {task.completed:.0f}/{task.total or 0:.0f}"
        return Text(f"{task.description} ... {seconds:.0f} s" if task.description else steps)


class _TimeLeft(progress.ProgressColumn):
    """The time that the steps left take, once a rate is known."""

    def render(self, task: progress.Task) -> Text:
        known = task.time_remaining is not None and not task.description
        return Text(f"{_duration(task.time_remaining or 0)} left" if known else "")


def metric_words(scalars: Mapping[str, float]) -> list[str]:
    """'loss 0.31' and the like, without what the run measures."""
    return [f"{name} {x:.4g}" for name, x in scalars.items() if name not in MEASURED]


def filled(parts: Sequence[str], width: int | None) -> list[str]:
    """Parts in lines of at most `width`, none of them broken; later lines are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width is None or len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"      {part}")
    return lines


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
