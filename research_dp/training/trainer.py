"""The trainer: the loop over steps, and what happens between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gin
import jax
import numpy as np

from research_dp.distributed.mesh import peak_of_mesh, texts_of_all
from research_dp.distributed.placement import fingerprint
from research_dp.distributed.sharding import cut_shapes
from research_dp.errors import at_end, binding_error
from research_dp.runs import files
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.facts import RunFacts, write_summary
from research_dp.runs.flight_recorder import Phase, Recorder
from research_dp.runs.manifest import Manifest, Progress, origin
from research_dp.runs.resume import check_same_data
from research_dp.strategies import NONFINITE, Strategy, TrainSpec, TrainState
from research_dp.strategies.batch_losses import DIFFERS, check_batch_loss, splits_examples
from research_dp.training import nonfinite, sharding_table, throughput
from research_dp.training.batches import InFlight, evaluation, placed_train_batches, train_order
from research_dp.training.input_checks import nonfinite_example, shared_identity
from research_dp.training.intervals import ProfilerTrace, Schedule
from research_dp.training.metric_log import MetricLog, ProgressBar, metric_words
from research_dp.training.optimizers import LearningRate
from research_dp.training.preemption import StopSignal
from research_dp.training.replica_check import ReplicaCheck, difference_text
from research_dp.training.stream_position import StreamPosition
from research_dp.training.writers import Writers
from research_dp.types import Arrays, DataIdentity, DataSet


@dataclasses.dataclass(eq=False)
class Trainer:
    """Trains a strategy on data, from a first step to a last."""

    spec: TrainSpec
    strategy: Strategy
    data: DataSet
    folder: Path  # process 0 writes to it
    schedule: Schedule
    checkpoints: Checkpoints
    recorder: Recorder
    saved: Manifest | None  # of the run that is resumed
    started: float  # `time.perf_counter()` of the command's start
    run_facts: RunFacts
    writers: Writers

    def __post_init__(self) -> None:
        self._progress = self.saved.progress if self.saved else None
        self._first_step = self._step = self.saved.step if self.saved else 0
        self._compiled = set[Phase]()
        self._writes = jax.process_index() == 0
        self._identity: DataIdentity | None = None
        self._compared = 0  # the first step that changed the state
        self._in_flight = InFlight()
        # Flags of which this process has a part, and their checks.
        self._unchecked: list[tuple[jax.Array, Callable[[], None]]] = []
        saved = self._progress.positions if self._progress else ()
        self._position = StreamPosition(self.data, saved)
        self._read: dict[int, Arrays] = {}  # host batches, by the step that is to take them
        self._facts: dict[str, Any] = {"seconds_to_first_step": None}  # for the summary
        work = self.spec.model.work(self.spec.example) if self.spec.model.work else None
        peak = peak_of_mesh(self.strategy.mesh, work.dtype) if work else None
        self._throughput = throughput.Throughput(self.spec.batch_size, work, peak)
        self._console = ProgressBar(self.schedule.num_steps, self._first_step)
        opt_state = self.strategy.abstract_state.opt_state
        optimizer = self.strategy.config.optimizer_of(self.spec)
        is_of_each = self.strategy.config.outer is not None
        self._rate = LearningRate(
            optimizer, opt_state, self.schedule.num_steps, of_replicas=is_of_each
        )
        self._metrics = MetricLog(
            self._progress, self._throughput, self._console, self._rate, self.writers
        )
        self._nonfinite = nonfinite.NonfiniteCheck(
            [leaf.path for leaf in jax.tree.leaves(self.strategy.shardings.params)],
            "skip" if self.spec.skip_nonfinite else "stop",
            f"The checkpoints in {files.shown(self.folder)} are as they were.",
            self._console.say,
            hint=nonfinite.hint(self.spec),
        )
        self._replicas = ReplicaCheck(self.strategy, self._nonfinite.untouched)
        if self.schedule.check_replicas_every and not self._replicas.leaves:
            problem = " compares devices, but this run has one. Bind None."
            raise binding_error("train.check_replicas_every", problem)

    @property
    def judges(self) -> bool:
        """Whether it splits its batch, and did not so far, with the same `loss_over`."""
        ends = self._first_step == self.schedule.num_steps
        is_new = self._judged_over() != self.spec.loss_over
        return is_new and not ends and splits_examples(self.strategy)

    def _judged_over(self) -> str | None:
        """The `loss_over` with which the run was judged before."""
        return self.saved.origin.get("judged_over") if self.saved else None

    def run(self, make_state: Callable[[], TrainState]) -> int:
        """Trains, evaluates and saves; returns the step at which it stopped.

        Where it `judges` the model, it does so before it makes the state: there is memory for one.
        """
        step, schedule = self._first_step, self.schedule
        self._read_data()
        trace = ProfilerTrace(schedule.profile_at, self.folder / files.PROFILE)
        with at_end(trace.close), StopSignal().listen() as stop:
            batches = self._batches()
            first = [*itertools.islice(batches, 1)]  # reading it has no time limit
            if self.judges and (warning := check_batch_loss(self.strategy, *first)):
                self._warn(warning)
            state = make_state()
            self._placed_at = time.perf_counter()
            batches = itertools.chain(first, batches)
            self._begin()
            self._metrics.begin(self._rate.updates(state.opt_state))
            while step < schedule.num_steps and not stop.requested(step):
                state, step_metrics = self.strategy.train_step(state, next(batches))
                step += 1
                self._dispatched(step, state, step_metrics)
                if schedule.logs(step):
                    self._throughput.wait(self._rate.read, state.opt_state)
                    self._metrics.mark(step)
                if schedule.compares(step) and step != self._compared:
                    self._compare_replicas(state, step)
                if schedule.evaluates(step):
                    self._evaluate(state, step)
                if schedule.saves(step):
                    self._save(state, step)
                self._metrics.tell(saved=schedule.saves(step))
                trace.step(step)

            self._save(state, step)
            final = self._evaluate(state, step) if step == schedule.num_steps else None
            self.recorder.note("save", step)
            self._console.doing("Writing the checkpoint")
            self._throughput.wait(self.checkpoints.wait, part="save")
            self._metrics.tell(saved=True)
            if final is None:
                self._console.close()
                where = files.shown(self.folder)
                self._console.say(f"Stopped by a signal; step {step} is saved in {where}")
            else:
                self._summarize(state, step, final)
        return step

    def close(self) -> None:
        self.recorder.closing()
        self._console.close()
        self._in_flight.close()
        with at_end(self._metrics.close):
            self._metrics.tell(saved=False)  # what was recorded before an error ended the run

    def _warn_of_a_part(self) -> None:
        """Warns of last steps that are in no round: nothing but a checkpoint has them."""
        last, outer = self.schedule.num_steps, self.strategy.config.outer
        if outer is None:
            return
        sent, read = dict[int, int](), dict[int, int]()
        for done in range(max(1, last - 3 * outer.every), last + 1):
            events = outer.events(done)
            if events.send is not None:
                sent[events.send] = done - 1
            if events.receive in sent:
                read[events.receive] = sent[events.receive]
            if events.meet is not None:
                read[events.meet] = done
        first = min(read.values(), default=0)
        if first < last:
            of_part = f"step {first}" if len(read) < 2 else f"steps {first} to {max(read.values())}"
            self._warn(f"what is evaluated at the end is of {of_part}, where replicas met last")

    def _read_data(self) -> None:
        """Prepares and compares the data; says what the run is."""
        say, step = self._console.say, self._first_step
        # This phase, with the first batches, has no time limit.
        self.recorder.note("start", step)
        self._console.doing("Reading the data")
        self.data.prepare()
        self._identity = shared_identity(self.data)
        self._console.doing("")
        if self._progress:
            run = f"the run in {files.shown(self.folder)}"
            check_same_data(self._identity, self._progress.data, run)
        for line in sharding_table.summary(self.strategy):
            say(line)
        self._warn_of_a_part()
        if self._identity:
            say(f"Data: {self._identity}")
            if self._progress and not self._progress.data:
                say("The checkpoint does not record its data; this data is assumed")
        if step:
            say(f"Continuing from step {step} in {files.shown(self.folder)}")
            if self.data.rereads:
                say(
                    f"Reading {step * self.spec.batch_size:,} examples of {self.data.name} again "
                    "to find the place: this reader cannot seek"
                )

    def _begin(self) -> None:
        """Writes the configuration, opens the records."""
        if self._writes:
            step = self._first_step
            if not step:
                self.checkpoints.begin()
            files.replace(self.folder / files.CONFIG, gin.config_str())
            self._write_operative_config()
            is_at_end = step == self.schedule.num_steps
            self._metrics.open(self.folder, step, evaluates_again=is_at_end)
            self.run_facts.begin()

    def _warn(self, text: str) -> None:
        """Says a warning, and notes it for the summary."""
        self._console.say(f"Warning: {text}.")
        self._facts.setdefault("warnings", []).append(f"{text}.")

    def _batches(self) -> Iterator[Any]:
        """Training batches on the devices, prefetched."""
        if self._first_step < self.schedule.num_steps:
            self._console.doing("Compiling the training step", at_once=True)
        steps = self._first_step, self.schedule.num_steps
        since = time.perf_counter()
        for batch in placed_train_batches(
            self.strategy,
            self._position.data,
            *steps,
            self._in_flight.is_busy,
            self._read.__setitem__,
        ):
            self._throughput.spend_on_batch(since, self._in_flight.idle_since())
            # Placing the next batch overlapped with the steps in flight, which end now.
            is_first = self._step == self._first_step
            self.recorder.note("compile" if is_first else "step", self._step + 1)
            self._throughput.wait(self._in_flight.wait_for_room)
            self._placed_at = time.perf_counter()
            yield batch
            since = time.perf_counter()

    def _dispatched(self, step: int, state: TrainState, step_metrics: Mapping[str, Any]) -> None:
        """While a step runs: registers its metrics, and records the window before it."""
        self._throughput.spend("dispatch", self._placed_at)
        self._step, is_first = step, step == self._first_step + 1
        self._position.taken(step)
        self.checkpoints.check()
        self._metrics.flush(functools.partial(self._wait, step_metrics))
        values = dict(step_metrics)
        flags = values.pop(NONFINITE)
        self._metrics.add(values)
        order = train_order(self.strategy, 0, step)
        named = self.data, self.spec.model, order, step - 1, self._read.pop(step)
        find = functools.partial(nonfinite_example, *named)
        check = functools.partial(self._nonfinite.check, step, flags, find)
        if flags.is_fully_addressable or flags.is_fully_replicated:
            self._in_flight.add(values, check)
        else:  # together with the other processes, where they wait for each other
            self._unchecked.append((flags, check))
            self._in_flight.add(values)
        self._throughput.count_step()
        self._console.step(step)
        if is_first:
            jax.block_until_ready(values)
            self._facts["seconds_to_first_step"] = seconds = time.perf_counter() - self.started
            self._console.doing("")
            self._console.say(f"First step done {seconds:.1f} s after the start")
            self._write_operative_config()
            self.run_facts.compiled()
        # A skipped step changes no state: the comparison waits for one that does.
        norm = {"grad_norm": values["grad_norm"]}
        if not self._compared and throughput.accumulate({}, [norm])["grad_norm"][1]:
            self._compared = step
            self._compare_replicas(state, step)
            if accepted := self._replicas.accepted:
                text = difference_text(accepted, self.strategy.config)
                self._warn(f"{DIFFERS}: {text}; one copy is saved")
        if is_first:
            self._throughput.start()
        self.recorder.note("data", step + 1)

    def _wait(self, running: Any = None) -> None:
        """Waits for what is in flight, and for what is `running` where processes then meet."""
        self._in_flight.wait()
        if self.strategy.config.outer is not None and jax.process_count() > 1:
            jax.block_until_ready(running)
        unchecked, self._unchecked = self._unchecked, []
        if unchecked:  # one collective, unless a process has something to say
            own = (shard.data for flags, _ in unchecked for shard in flags.addressable_shards)
            if any(texts_of_all("x" if any(np.asarray(x)[:, 0].any() for x in own) else "")):
                for _, check in unchecked:
                    check()

    def _compare_replicas(self, state: TrainState, step: int) -> None:
        """Waits for the step, and compares replicas; a difference ends the run."""
        self._throughput.wait(self._wait)
        self._note("step", step)
        self._throughput.wait(self._replicas.check, step, state)
        self._compiled.add("step")
        self.recorder.note("data", step + 1)

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Metrics over the evaluation split, each example counted once."""
        with self._paused("eval", state, step) as since:
            means = evaluation(
                self.strategy,
                self.data,
                state,
                self._in_flight,
                lambda: self._note("eval", self._step),
            )
            self._compiled.add("eval")
            seconds = time.perf_counter() - since
            self._metrics.write("eval", step, {**means, "eval_seconds": seconds})
        return means

    def _save(self, state: TrainState, step: int) -> None:
        """Saves the state in the background."""
        mesh = dict(self.strategy.mesh.shape)
        judged = self.spec.loss_over if splits_examples(self.strategy) else self._judged_over()
        named = {"strategy": self.strategy.name, "mesh": mesh, "config": gin.config_str()}
        written_by = origin(**named, judged_over=judged)
        with self._paused("save", state, step):
            self._replicas.check(step, state)  # one of each is saved
            self._nonfinite.check_state(step, state)
            progress = Progress(
                batch_size=self.spec.batch_size,
                seed=self.spec.seed,
                order=self.data.order,
                window=self._metrics.window(),
                data=self._identity,
                records=self._metrics.sync(),
                positions=self._position.of_all(),
            )
            logical = self.strategy.logical_state
            self.checkpoints.save(state, step, progress, written_by, logical)
            self._compiled.add("save")

    def _note(self, phase: Phase, step: int) -> None:
        """Notes a phase; its first run counts as compilation, also if another process compiles."""
        self.recorder.note(phase if phase in self._compiled else "compile", step)

    @contextlib.contextmanager
    def _paused(self, phase: Phase, state: TrainState, step: int) -> Iterator[float]:
        """Waits for the last step and records what is due; gives the time at which a phase starts.

        The clock of the steps stands still in a phase.
        """
        self._throughput.wait(self._wait)
        self._throughput.wait(jax.block_until_ready, state)
        self._throughput.stop()
        self._metrics.flush()
        self._note(phase, step)
        self._console.doing({"eval": "Evaluating", "save": "Saving"}[phase])
        since = time.perf_counter()
        yield since
        self._throughput.spend(phase, since)
        self._console.doing("")
        self.recorder.note("data", step + 1)
        if step > self._first_step:
            self._throughput.start()

    def _summarize(self, state: TrainState, step: int, final: Mapping[str, float]) -> None:
        """Writes `summary.json`, once the state is saved."""
        mesh = self.strategy.mesh
        summary = {
            "step": step,
            "examples_seen": step * self.spec.batch_size,
            "train": self._metrics.train,
            "skipped_steps": self._metrics.skipped_steps,
            **self._facts,
            "eval": dict(final),
            "data": dataclasses.asdict(self._identity) if self._identity else None,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
            "strategy": self.strategy.name,
            "steps_per_second": self._throughput.overall(),
            "seconds": self._throughput.summary(self.started),
            "params_fingerprint": fingerprint(
                state.params,
                lambda: self.recorder.note("save", step),
                cut_shapes(state.params, self.strategy.logical_state.params),
            ),
        }
        if self._writes:
            self._metrics.sync()
            write_summary(self.folder, summary)
            self._write_operative_config()
        self._console.close()
        result = ", ".join([f"step {step}", *metric_words(final)])
        self._console.say(f"Done: {result}, in {files.shown(self.folder / files.SUMMARY)}")

    def _write_operative_config(self) -> None:
        # Written more than once: gin knows a parameter's value only after its function was called.
        if self._writes:
            files.replace(self.folder / files.OPERATIVE_CONFIG, gin.operative_config_str())
