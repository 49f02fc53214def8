"""The trainer: the loop over steps, and what happens between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gin
import jax
import numpy as np

from research_dp.distributed.placement import fingerprint
from research_dp.strategies import NONFINITE, Strategy, TrainSpec, TrainState
from research_dp.training import files, metrics, sharding_table
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.dispatch import InFlight, prefetch
from research_dp.training.flight_recorder import Phase, Recorder
from research_dp.training.input_checks import checked_batches, shared_identity
from research_dp.training.intervals import ProfilerTrace, Schedule
from research_dp.training.manifest import Manifest, Progress, origin
from research_dp.training.metric_log import MetricLog
from research_dp.training.metric_writer import as_json
from research_dp.training.nonfinite import NonfiniteCheck
from research_dp.training.preemption import StopSignal
from research_dp.training.progress_bar import ProgressBar
from research_dp.training.replica_check import ReplicaCheck, split_dependence
from research_dp.training.resume import check_same_data
from research_dp.types import DataIdentity, DataSet, EvalOrder, TrainOrder


class Trainer:
    """Trains a strategy on data, from a first step to a last.

    Args:
        spec: What the strategy was built for.
        strategy: The built strategy.
        data: Training and evaluation examples.
        folder: Folder of the run's results; process 0 writes there.
        saved: The checkpoint of a run that is resumed.
        started: `time.perf_counter()` when the command started.
    """

    def __init__(
        self,
        spec: TrainSpec,
        strategy: Strategy,
        data: DataSet,
        folder: Path,
        *,
        schedule: Schedule,
        checkpoints: Checkpoints,
        recorder: Recorder,
        saved: Manifest | None,
        started: float,
    ):
        self._spec, self._strategy, self._data, self._folder = spec, strategy, data, folder
        self._schedule, self._checkpoints, self._recorder = schedule, checkpoints, recorder
        self._saved, self._started = saved.progress if saved else None, started
        self._first_step = self._step = first_step = saved.step if saved else 0
        self._compiled = set[Phase]()
        self._writes = jax.process_index() == 0
        self._identity: DataIdentity | None = None
        self._is_split_checked = False
        self._in_flight = InFlight()
        self._facts: dict[str, Any] = {"seconds_to_first_step": None}  # for the summary
        self._throughput = metrics.throughput_of(spec, strategy.mesh)
        self._console = ProgressBar(schedule.num_steps, first_step)
        self._metrics = MetricLog(self._saved, self._throughput, self._console)
        self._replicas = ReplicaCheck(strategy) if schedule.check_replicas_every else None
        self._nonfinite = NonfiniteCheck(
            [leaf.path for leaf in jax.tree.leaves(strategy.shardings.params)],
            "skip" if spec.skip_nonfinite else "stop",
            f"The checkpoints in {folder} are as they were.",
            self._console.say,
        )

    def run(self, state: TrainState) -> int:
        """Trains, evaluates and saves; returns the step at which it stopped."""
        step, schedule = self._first_step, self._schedule
        self._begin()
        trace = ProfilerTrace(schedule.profile_at, self._folder / "profile")
        with contextlib.closing(trace), StopSignal().listen() as stop:
            batches = self._batches()
            while step < schedule.num_steps and not stop.requested(step):
                state, step_metrics = self._strategy.train_step(state, next(batches))
                step += 1
                self._dispatched(step, state, step_metrics)
                if schedule.logs(step):
                    self._metrics.mark(step)
                if schedule.compares(step):
                    self._compare_replicas(state, step)
                if schedule.evaluates(step):
                    self._evaluate(state, step)
                if schedule.saves(step):
                    self._save(state, step)
                trace.step(step)

            self._save(state, step)
            if step == schedule.num_steps:
                self._summarize(state, step, self._evaluate(state, step))
            else:
                self._wait_for_save(step)
                self._console.say(f"Stopped by a signal; step {step} is saved in {self._folder}")
        return step

    def close(self) -> None:
        self._recorder.closing()
        self._console.close()
        self._metrics.close()

    def _begin(self) -> None:
        """Prepares and compares the data, writes the configuration, opens the records."""
        # This phase, with the first batches, has no time limit.
        self._recorder.note("start", self._first_step)
        self._data.prepare()
        self._identity = shared_identity(self._data)
        if self._saved:
            check_same_data(self._identity, self._saved.data, f"the run in {self._folder}")
        if self._writes:
            if not self._first_step:
                self._checkpoints.begin()
            files.replace(self._folder / files.CONFIG, gin.config_str())
            self._write_operative_config()
            at_end = self._first_step == self._schedule.num_steps
            self._metrics.open(self._folder, self._first_step, evaluates_again=at_end)
        say, step = self._console.say, self._first_step
        say(sharding_table.summary_line(self._strategy))
        if self._identity:
            say(f"Data: {self._identity}")
            if self._saved and not self._saved.data:
                say("The checkpoint does not record its data; this data is assumed")
        if step:
            say(f"Continuing from step {step} in {self._folder}")
            if self._data.rereads:
                say(
                    f"Reading {step * self._spec.batch_size:,} examples of {self._data.name} again "
                    "to find the place: this reader cannot seek"
                )

    def _batches(self) -> Iterator[Any]:
        """Training batches on the devices, prefetched."""
        order = TrainOrder(
            seed=self._spec.seed,
            batch_size=self._spec.batch_size,
            rows=self._strategy.train_rows,
            first_step=self._first_step,
            num_steps=self._schedule.num_steps,
        )
        if self._first_step < self._schedule.num_steps:
            self._console.say("Compiling the training step")
        source = checked_batches(self._data, order, self._spec.model)
        for batch in prefetch(self._strategy.place_batch, source, self._in_flight.is_busy):
            # Placing the next batch overlapped with the steps in flight, which end now.
            is_first = self._step == self._first_step
            self._recorder.note("compile" if is_first else "step", self._step + 1)
            self._in_flight.wait_for_room()
            yield batch

    def _dispatched(self, step: int, state: TrainState, step_metrics: Mapping[str, Any]) -> None:
        """While a step runs: registers its metrics, and records the window before it."""
        self._step, is_first = step, step == self._first_step + 1
        self._checkpoints.check()
        self._metrics.flush()
        flags = step_metrics[NONFINITE]
        values = {name: x for name, x in step_metrics.items() if name != NONFINITE}
        self._metrics.add(values)
        self._in_flight.add(values, functools.partial(self._nonfinite.check, step, flags))
        self._throughput.count_step()
        self._console.step(step)
        if is_first:
            jax.block_until_ready(values)
            seconds = time.perf_counter() - self._started
            self._facts["seconds_to_first_step"] = seconds
            self._console.say(f"First step done {seconds:.1f} s after the start")
            self._write_operative_config()
        # A skipped step changes no state: the check waits for one that does.
        if not self._is_split_checked and np.asarray(values["grad_norm"])[1]:
            self._warn_of_split_dependence(state)
        if is_first:
            self._throughput.start()
        self._recorder.note("data", step + 1)

    def _warn_of_split_dependence(self, state: TrainState) -> None:
        """Reports, once, why this run's numbers may differ from those of one device."""
        self._is_split_checked = True
        self._recorder.note("compile", self._step)
        for reason in split_dependence(self._spec, self._strategy, state):
            warning = f"Numbers may differ from those of one device: {reason}."
            self._console.say(f"Warning: {warning}")
            self._facts.setdefault("warnings", []).append(warning)

    def _compare_replicas(self, state: TrainState, step: int) -> None:
        """Compares replicas on the devices; a difference ends the run a step or two later."""
        assert self._replicas is not None
        self._in_flight.wait_for_room()
        self._note("step", step)
        checksums = self._replicas.checksums(state)
        self._in_flight.add(checksums, functools.partial(self._replicas.check, step, checksums))
        self._compiled.add("step")
        self._recorder.note("data", step + 1)

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Metrics over the evaluation split, each example counted once."""
        self._settle(state)
        self._note("eval", step)
        order = EvalOrder(batch_size=self._strategy.eval_batch_size, rows=self._strategy.eval_rows)
        source = checked_batches(self._data, order, self._spec.model)
        batches = prefetch(self._strategy.place_eval_batch, source, self._in_flight.is_busy)
        means = metrics.means(metrics.accumulate({}, self._eval_steps(state, batches)))
        self._compiled.add("eval")
        self._metrics.write("eval", step, means)
        self._resume(step)
        return means

    def _eval_steps(self, state: TrainState, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            sums = self._strategy.eval_step(state, batch)
            self._note("eval", self._step)
            self._in_flight.add(sums)
            self._in_flight.wait_for_room()
            yield sums

    def _save(self, state: TrainState, step: int) -> None:
        """Saves the state in the background."""
        self._settle(state)
        self._note("save", step)
        self._nonfinite.check_state(step, state)
        progress = Progress(
            batch_size=self._spec.batch_size,
            seed=self._spec.seed,
            order=self._data.order,
            window=self._metrics.window(),
            data=self._identity,
            records=self._metrics.sync(),
        )
        strategy, mesh = self._strategy.name, dict(self._strategy.mesh.shape)
        written_by = origin(strategy=strategy, mesh=mesh, config=gin.config_str())
        self._checkpoints.save(state, step, progress, written_by)
        self._compiled.add("save")
        self._resume(step)

    def _note(self, phase: Phase, step: int) -> None:
        """Notes a phase; its first run counts as compilation, also if another process compiles."""
        self._recorder.note(phase if phase in self._compiled else "compile", step)

    def _settle(self, state: TrainState) -> None:
        """Waits for the last step, stops the clock, and records what is due."""
        self._in_flight.wait_for_all()
        jax.block_until_ready(state)
        self._throughput.stop()
        self._metrics.flush()

    def _resume(self, step: int) -> None:
        self._recorder.note("data", step + 1)
        if step > self._first_step:
            self._throughput.start()

    def _wait_for_save(self, step: int) -> None:
        self._recorder.note("save", step)
        self._checkpoints.wait()

    def _summarize(self, state: TrainState, step: int, final: Mapping[str, float]) -> None:
        """Writes `summary.json`, once the state is saved."""
        self._wait_for_save(step)
        mesh = self._strategy.mesh
        summary = {
            "step": step,
            "examples_seen": step * self._spec.batch_size,
            "train": self._metrics.train,
            "skipped_steps": self._metrics.skipped_steps,
            **self._facts,
            "eval": dict(final),
            "data": dataclasses.asdict(self._identity) if self._identity else None,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
            "strategy": self._strategy.name,
            "steps_per_second": self._throughput.overall(),
            "params_fingerprint": fingerprint(
                state.params, lambda: self._recorder.note("save", step)
            ),
        }
        if self._writes:
            self._metrics.sync()
            text = json.dumps(as_json(summary), indent=2, allow_nan=False) + "\n"
            files.replace(self._folder / files.SUMMARY, text)
            self._write_operative_config()
        self._console.say(f"Done: {self._folder / files.SUMMARY}")

    def _write_operative_config(self) -> None:
        # Written more than once: gin knows a parameter's value only after its function was called.
        if self._writes:
            files.replace(self._folder / files.OPERATIVE_CONFIG, gin.operative_config_str())
