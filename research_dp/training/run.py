"""What happens around the steps of a run: batches, records, evaluation, saving, the summary."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from research_dp.distributed.data_set import DataSet, EvalOrder, TrainOrder
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import Strategy, TrainState
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.metrics import Records, means
from research_dp.training.progress import Clock, Progress

_PREFETCH = 2  # batches placed on the devices ahead of the step that takes them


class Run:
    """A run of a strategy on data, from a first step to a last.

    Args:
        strategy: The built strategy.
        data: The data set.
        folder: Folder of the run's results.
        batch_size: Examples a step.
        seed: Seed of the order of examples.
        first_step: Steps that are done already.
        num_steps: Step at which the run ends.
        started: `time.perf_counter()` when the command started.
    """

    def __init__(
        self,
        strategy: Strategy,
        data: DataSet,
        folder: Path,
        *,
        batch_size: int,
        seed: int,
        first_step: int,
        num_steps: int,
        started: float,
    ):
        self._strategy, self._data, self._folder = strategy, data, folder
        self._batch_size, self._seed, self._started = batch_size, seed, started
        self._first_step, self._num_steps = first_step, num_steps
        self._since_log: list[Mapping[str, Any]] = []
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._summary: dict[str, Any] = {"train": {}, "seconds_to_first_step": None}
        self._records = Records(folder)
        self._clock = Clock(batch_size)
        self.progress = Progress(num_steps, first_step)

    def batches(self) -> Iterator[Any]:
        """Training batches on the devices, a few ahead."""
        order = TrainOrder(
            seed=self._seed,
            batch_size=self._batch_size,
            rows=self._strategy.train_rows,
            first_step=self._first_step,
            num_steps=self._num_steps,
        )
        if self._first_step < self._num_steps:
            self.progress.say("Compiling the training step")
        for batch in _ahead(self._strategy.place_batch, self._data.train(order)):
            # The next batch was placed while the last step ran; now that step is to be over.
            _one_at_a_time(self._since_log[-1:])
            yield batch

    def dispatched(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keeps a step's metrics; fetches and records what was due before it, while it runs."""
        self._write_due()
        self._since_log.append(metrics)
        self._clock.count_step()
        self.progress.step(step)
        if step == self._first_step + 1:
            jax.block_until_ready(metrics)
            seconds = time.perf_counter() - self._started
            self._summary["seconds_to_first_step"] = seconds
            self.progress.say(f"First step done {seconds:.1f} s after the start")
            self._clock.start()

    def log(self, step: int) -> None:
        """Marks the metrics since the last call for the record; see `dispatched`."""
        self._due, self._since_log = (step, self._since_log), []

    def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Metrics over the whole evaluation split, each example counted once."""
        self.settle(state)
        order = EvalOrder(batch_size=self._strategy.eval_batch_size, rows=self._strategy.eval_rows)
        batches = _ahead(self._strategy.place_eval_batch, self._data.evaluate(order))
        metrics = means(self._eval_steps(state, batches))
        self._record("eval", step, metrics)
        self._resume(step)
        return metrics

    def _eval_steps(self, state: TrainState, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            sums = self._strategy.eval_step(state, batch)
            _one_at_a_time(sums)
            yield sums

    def save(self, checkpoints: Checkpoints, state: TrainState, step: int) -> None:
        """Saves the state, in the background."""
        self.settle(state)
        checkpoints.save(state, step)
        self._resume(step)

    def settle(self, state: TrainState) -> None:
        """Waits for the last step, records what is due, and stops the clock."""
        jax.block_until_ready(state)
        self._clock.stop()
        self._write_due()

    def summarize(self, state: TrainState, step: int, final: Mapping[str, float]) -> None:
        """Writes `summary.json`."""
        mesh = self._strategy.mesh
        summary = {
            "step": step,
            "examples_seen": step * self._batch_size,
            **self._summary,
            "eval": dict(final),
            "devices": mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
            "strategy": self._strategy.name,
            "steps_per_second": self._clock.overall(),
            "params_fingerprint": fingerprint(state.params),
        }
        if jax.process_index() == 0:
            text = json.dumps(summary, indent=2) + "\n"
            (self._folder / "summary.json").write_text(text)
        self.progress.say(f"Done: {self._folder / 'summary.json'}")

    def close(self) -> None:
        self.progress.close()
        self._records.close()

    def _resume(self, step: int) -> None:
        if step > self._first_step:
            self._clock.start()

    def _write_due(self) -> None:
        if self._due is None:
            return
        (step, steps), self._due = self._due, None
        metrics = means(steps)
        self._summary["train"] = metrics
        self._record("train", step, {**metrics, **self._clock.rates()})

    def _record(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        self._records.write(split, step, scalars)
        self.progress.metrics(split, step, scalars)


def _one_at_a_time(outputs: Any) -> None:
    """Waits for a step on a split CPU; accelerators run ahead.

    There the devices share a pool of threads, and a step that waits in a collective can hold the
    threads that the step before it needs to end: with many steps under way XLA deadlocks.
    """
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.block_until_ready(outputs)


class StopSignal:
    """Whether SIGTERM came; the loop asks after each step."""

    def __init__(self) -> None:
        self.came = False

    def _note(self, *_: Any) -> None:
        self.came = True

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopSignal]:
        """Notes SIGTERM instead of dying from it."""
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)


def _ahead(place: Callable[[Any], Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Places batches on the devices a few ahead of their use."""
    source, placed = iter(batches), collections.deque[Any]()
    placed.extend(place(batch) for batch in itertools.islice(source, _PREFETCH))
    while placed:
        yield placed.popleft()
        placed.extend(place(batch) for batch in itertools.islice(source, 1))
