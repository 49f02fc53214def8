"""What a run says: means over windows of steps, as records, lines and a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from research_dp.console import Progress, filled
from research_dp.runs import manifest
from research_dp.runs.records import Records, scalars_of
from research_dp.strategies import SKIPPED
from research_dp.training import throughput
from research_dp.training.optimizers import LearningRate
from research_dp.training.writers import Writers
from research_dp.types import MEASURED, HostSums


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


class MetricLog:
    """Records metrics; training metrics one step late, so that no step waits for them."""

    def __init__(
        self,
        saved: manifest.Progress | None,
        clock: throughput.Throughput,
        console: ProgressBar,
        rate: LearningRate | None = None,
        writers: Writers | None = None,
    ):
        self._throughput, self._console, self._rate = clock, console, rate
        self._writers = writers or Writers()
        self._window: HostSums = saved.window if saved else {}
        self._records_saved = saved.records if saved else 0
        self._unread: list[Mapping[str, Any]] = []
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._records: Records | None = None  # of process 0
        self._untold: list[tuple[Mapping[str, Any], Mapping[str, float]]] = []
        self.train: dict[str, float] = {}  # means of the newest training record
        self.skipped_steps = 0
        self.updates = 0  # of the optimizer, until the newest record

    def open(self, folder: Path, step: int, *, evaluates_again: bool) -> None:
        """Continues the records of a run that resumes from a step; process 0 calls it."""
        self._records = Records(folder, self._console.say)
        saved = self._records_saved
        for record in self._records.resume(step, saved, evaluates_again=evaluates_again):
            self.skipped_steps += int(record.get(SKIPPED) or 0)  # null is no number
            if record["split"] == "train":
                means = scalars_of(record).items()
                self.train = {name: x for name, x in means if name not in MEASURED}

    def begin(self, updates: int) -> None:
        """Takes the number of the optimizer's updates at the step from which the run goes on."""
        self.updates = updates - round(self._window.get("grad_norm", (0, 0))[1])

    def add(self, step_metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics, which the devices may still be computing."""
        self._unread.append(step_metrics)

    def mark(self, step: int) -> None:
        """Ends a window at this step; `flush` records it."""
        self._due, self._unread = (step, self._unread), []

    def flush(self, wait: Callable[[], None] = lambda: None) -> None:
        """Reads and records the window that `mark` ended, after a `wait` that checks its steps."""
        if self._due is None:
            return
        wait()
        (step, steps), self._due = self._due, None
        sums, self._window = throughput.accumulate(self._window, steps), {}
        steps_left_out, is_said = sums.pop(SKIPPED, (0.0, 0.0))
        skipped = {SKIPPED: steps_left_out} if is_said else {}
        self.skipped_steps += int(sum(skipped.values()))
        self.train = throughput.means(sums)
        self.updates += round(
            sums.get("grad_norm", (0, 0))[1]
        )  # not counted where it is not finite
        rate = self._rate.after(self.updates) if self._rate else None
        measured = {
            **self._throughput.rates(),
            **({} if rate is None else {"learning_rate": rate}),
            **throughput.device_memory(),
        }
        self.write("train", step, {**self.train, **skipped, **measured})

    def write(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars of a split ('train', 'eval') at a step; `tell` tells the writers."""
        if self._records:
            self._untold.append((self._records.write(split, step, scalars), scalars))
        self._console.metrics(split, step, scalars)

    def tell(self, *, saved: bool) -> None:
        """Gives the writers the new records, after the save: one that raises loses no work."""
        untold, self._untold = self._untold, []
        for record in untold:
            self._writers.write(*record)
        if saved:
            self._writers.end("flush")

    def window(self) -> HostSums:
        """Sums of the metrics that are not recorded yet."""
        self._window, self._unread = throughput.accumulate(self._window, self._unread), []
        return self._window

    def sync(self) -> int:
        """Flushes all records to the disk; returns the number of training records."""
        return self._records.sync() if self._records else 0

    def close(self) -> None:
        if self._records:
            self._records.close()
