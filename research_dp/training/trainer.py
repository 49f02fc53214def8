"""What happens around the steps of a run: batches, records, evaluation, saving, the summary."""

from __future__ import annotations

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

from research_dp.distributed.hardware import peak_of_mesh
from research_dp.distributed.multihost import of_the_first
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import NONFINITE, SKIPPED, Strategy, TrainSpec, TrainState
from research_dp.training import files, sharding_table
from research_dp.training import metrics as metrics_lib
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.dispatch import InFlight
from research_dp.training.flight_recorder import Phase, Recorder
from research_dp.training.input_checks import check_same_data, checked_batches, shared_identity
from research_dp.training.intervals import Schedule
from research_dp.training.manifest import Progress, origin
from research_dp.training.nonfinite import Nonfinite
from research_dp.training.prefetch import placed_ahead
from research_dp.training.progress import Clock, ProgressBar
from research_dp.training.replica_check import ReplicaCheck, split_dependence
from research_dp.types import DataIdentity, DataSet, EvalOrder, TrainOrder


class Run:
    """A run of a strategy on data, from a first step to a last.

    Args:
        spec: What the strategy was built for.
        strategy: The built strategy.
        data: The data set.
        folder: Folder of the run's results; process 0 writes there.
        schedule: When what happens.
        checkpoints: Where the state is saved.
        recorder: Where this process notes what it is doing.
        first_step: Steps that are done already.
        saved: Where the run stood when it was saved; None: it begins.
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
        first_step: int,
        saved: Progress | None,
        started: float,
    ):
        self._spec, self._strategy, self._data, self.folder = spec, strategy, data, folder
        self._schedule, self._checkpoints, self._first_step = schedule, checkpoints, first_step
        self._window = saved.window if saved else {}
        self._saved, self._started, self._recorder = saved, started, recorder
        self._identity: DataIdentity | None = None
        self._step, self._done_once = first_step, set[Phase]()
        self._writes = jax.process_index() == 0
        self._unread: list[Mapping[str, Any]] = []
        self._is_compared = False
        self._due: tuple[int, list[Mapping[str, Any]]] | None = None
        self._in_flight = InFlight()
        self._summary: dict[str, Any] = {"train": {}, "skipped_steps": 0}
        self._summary["seconds_to_first_step"] = None
        self._records: metrics_lib.Records | None = None
        work = spec.model.work(spec.example) if spec.model.work else None
        self._clock = Clock(
            spec.batch_size, work, peak_of_mesh(strategy.mesh, work.dtype) if work else None
        )
        self._progress = ProgressBar(schedule.num_steps, first_step)
        self._replicas = ReplicaCheck(strategy) if schedule.check_replicas_every else None
        self._nonfinite = Nonfinite(
            [placement.path for placement in jax.tree.leaves(strategy.shardings.params)],
            "skip" if spec.skip_nonfinite else "stop",
            f"The checkpoints in {folder} are as they were.",
            self._progress.say,
        )

    # ---- Beginning ----

    def is_done_already(self) -> bool:
        """Whether an earlier command ended this run; says so."""
        path = self.folder / files.SUMMARY
        done = self._first_step == self._schedule.num_steps and path.exists()
        done = done and metrics_lib.read_json(path.read_bytes()).get("step") == self._first_step
        # Not every process need see the file yet, or see it whole.
        done = bool(of_the_first(int(done)))
        if done:
            self._progress.say(f"Done already, at step {self._first_step}: {path}")
        return done

    def begin(self) -> None:
        """Compares the data, writes the configuration, drops records to be written again."""
        # As long as it may take: this, and the first batches.
        self._recorder.note("start", self._first_step)
        self._data.prepare()
        self._identity = shared_identity(self._data)
        if self._saved:
            check_same_data(self._identity, self._saved.data, f"the run in {self.folder}")
        if self._writes:
            if not self._first_step:
                self._checkpoints.begin()
            files.replace(self.folder / files.CONFIG, gin.config_str())
            self._write_operative_config()
            self._open_records()
        self._progress.say(sharding_table.one_line(self._strategy))
        if self._identity:
            self._progress.say(f"Data: {self._identity}")
            if self._saved and not self._saved.data:
                self._progress.say("The checkpoint does not record its data; this is assumed")
        if self._first_step:
            self._progress.say(f"Continuing from step {self._first_step} in {self.folder}")
            if self._data.rereads:
                seen = self._first_step * self._spec.batch_size
                self._progress.say(
                    f"Reading {seen:,} examples of {self._data.name} again to find the place: this "
                    "reader cannot jump there"
                )

    def _open_records(self) -> None:
        """Continues the records of the run, and says if some that it had are missing."""
        last = self._first_step == self._schedule.num_steps
        say, path = self._progress.say, self.folder / files.RECORDS
        # Without any, events may be those of another run, whose records a user moved away.
        has_records = files.has_content(path)
        kept = metrics_lib.drop_unsaved(path, self._first_step, evaluates_again=last, say=say)
        before = self._saved.records if self._saved else 0
        missing = before - metrics_lib.count_train(kept)
        if missing > 0:
            say(
                f"{missing} of the {before} records of training that were written before "
                f"step {self._first_step} was saved are not in {path}; older TensorBoard events "
                "stay"
            )
        self._summary["train"] = metrics_lib.last_train_means(kept)
        self._summary["skipped_steps"] = int(sum(r.get(SKIPPED) or 0 for r in kept))
        self._records = metrics_lib.Records(
            self.folder, kept, complete=has_records and missing <= 0
        )

    def batches(self) -> Iterator[Any]:
        """Training batches on the devices, a few ahead."""
        order = TrainOrder(
            seed=self._spec.seed,
            batch_size=self._spec.batch_size,
            rows=self._strategy.train_rows,
            first_step=self._first_step,
            num_steps=self._schedule.num_steps,
        )
        if self._first_step < self._schedule.num_steps:
            self._progress.say("Compiling the training step")
        source = checked_batches(self._data, order, self._spec.model)
        for batch in placed_ahead(self._strategy.place_batch, source, self._in_flight.is_at_work):
            # The next batch was placed while the last steps ran; now they are to be over.
            first = self._step == self._first_step
            self._recorder.note("compile" if first else "step", self._step + 1)
            self._in_flight.wait_for_room()
            yield batch

    # ---- Steps ----

    def dispatched(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Keeps a step's metrics; fetches and records what was due before it, while it runs."""
        self._step = step
        self._checkpoints.check()
        self._write_due()
        flags, metrics = metrics[NONFINITE], {k: x for k, x in metrics.items() if k != NONFINITE}
        self._unread.append(metrics)
        self._in_flight.add(metrics, functools.partial(self._nonfinite.look, step, flags))
        self._clock.count_step()
        self._progress.step(step)
        first = step == self._first_step + 1
        if first:
            jax.block_until_ready(metrics)
            seconds = time.perf_counter() - self._started
            self._summary["seconds_to_first_step"] = seconds
            self._progress.say(f"First step done {seconds:.1f} s after the start")
            self._write_operative_config()
        # A step that was left out changes no state: the comparison waits for one that does.
        if not self._is_compared and np.asarray(metrics["grad_norm"])[1]:
            self._warn_of_split(state)
        if first:
            self._clock.start()
        self._recorder.note("data", step + 1)

    def _warn_of_split(self, state: TrainState) -> None:
        """Reports, once, why this run's numbers may differ from those of one device."""
        self._is_compared = True
        self._recorder.note("compile", self._step)
        for reason in split_dependence(self._spec, self._strategy, state):
            text = f"Numbers may differ from those of one device: {reason}."
            self._progress.say(f"Warning: {text}")
            self._summary.setdefault("warnings", []).append(text)

    def log(self, step: int) -> None:
        """Marks the metrics since the last call for the record; see `dispatched`."""
        self._due, self._unread = (step, self._unread), []

    def compare_replicas(self, state: TrainState, step: int) -> None:
        """Has the devices compare what they hold; a difference ends the run a step or two later."""
        assert self._replicas is not None
        self._in_flight.wait_for_room()
        self._note("step", step)
        checksums = self._replicas.start(state)
        self._in_flight.add(checksums, functools.partial(self._replicas.look, step, checksums))
        self._done_once.add("step")
        self._recorder.note("data", step + 1)

    def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Metrics over the whole evaluation split, each example counted once."""
        self._settle(state)
        self._note("eval", step)
        order = EvalOrder(batch_size=self._strategy.eval_batch_size, rows=self._strategy.eval_rows)
        source = checked_batches(self._data, order, self._spec.model)
        place = self._strategy.place_eval_batch
        batches = placed_ahead(place, source, self._in_flight.is_at_work)
        metrics = metrics_lib.means(metrics_lib.add_up({}, self._eval_steps(state, batches)))
        self._done_once.add("eval")
        self._record("eval", step, metrics)
        self._resume(step)
        return metrics

    def _eval_steps(self, state: TrainState, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            sums = self._strategy.eval_step(state, batch)
            self._note("eval", self._step)
            self._in_flight.add(sums)
            self._in_flight.wait_for_room()
            yield sums

    def save(self, state: TrainState, step: int) -> None:
        """Saves the state, in the background."""
        self._settle(state)
        self._note("save", step)
        self._nonfinite.check_state(step, state)
        self._window = metrics_lib.add_up(self._window, self._unread)
        self._unread = []
        progress = Progress(
            batch_size=self._spec.batch_size,
            seed=self._spec.seed,
            order=self._data.order,
            window=self._window,
            data=self._identity,
            records=self._records.sync() if self._records else 0,
        )
        made = origin(
            strategy=self._strategy.name,
            mesh=dict(self._strategy.mesh.shape),
            config=gin.config_str(),
        )
        self._checkpoints.save(state, step, progress, made)
        self._done_once.add("save")
        self._resume(step)

    # ---- The end ----

    def stopped(self, step: int) -> None:
        """Says, once it is so, that a run which was told to stop is saved."""
        self._recorder.note("save", step)
        self._checkpoints.wait()
        self._progress.say(f"Stopped by a signal; step {step} is saved in {self.folder}")

    def summarize(self, state: TrainState, step: int, final: Mapping[str, float]) -> None:
        """Writes `summary.json`, once the state is saved."""
        self._recorder.note("save", step)
        self._checkpoints.wait()
        mesh = self._strategy.mesh
        summary = {
            "step": step,
            "examples_seen": step * self._spec.batch_size,
            **self._summary,
            "eval": dict(final),
            "data": dataclasses.asdict(self._identity) if self._identity else None,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
            "strategy": self._strategy.name,
            "steps_per_second": self._clock.overall(),
            "params_fingerprint": fingerprint(
                state.params, lambda: self._recorder.note("save", step)
            ),
        }
        if self._writes:
            text = json.dumps(metrics_lib.as_json(summary), indent=2, allow_nan=False) + "\n"
            if self._records:
                self._records.sync()
            files.replace(self.folder / files.SUMMARY, text)
            self._write_operative_config()
        self._progress.say(f"Done: {self.folder / files.SUMMARY}")

    def close(self) -> None:
        self._recorder.closing()
        self._progress.close()
        if self._records:
            self._records.close()

    # ---- Inside ----

    def _note(self, phase: Phase, step: int) -> None:
        """Notes what begins: the first time it compiles, as others do that this one waits for."""
        self._recorder.note(phase if phase in self._done_once else "compile", step)

    def _settle(self, state: TrainState) -> None:
        """Waits for the last step, records what is due, and stops the clock."""
        self._in_flight.wait_for_all()
        jax.block_until_ready(state)
        self._clock.stop()
        self._write_due()

    def _resume(self, step: int) -> None:
        self._recorder.note("data", step + 1)
        if step > self._first_step:
            self._clock.start()

    def _write_due(self) -> None:
        if self._due is None:
            return
        (step, steps), self._due = self._due, None
        sums, self._window = metrics_lib.add_up(self._window, steps), {}
        skipped = {SKIPPED: sums.pop(SKIPPED)[0]} if SKIPPED in sums else {}
        self._summary["skipped_steps"] += int(sum(skipped.values()))
        self._summary["train"] = metrics_lib.means(sums)
        self._record("train", step, {**self._summary["train"], **skipped, **self._clock.rates()})

    def _record(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        if self._records:
            self._records.write(split, step, scalars)
        self._progress.metrics(split, step, scalars)

    def _write_operative_config(self) -> None:
        # Gin knows a parameter's value once its function was called: written more than once.
        if self._writes:
            files.replace(self.folder / files.OPERATIVE_CONFIG, gin.operative_config_str())
