"""`train`: from a configuration to a finished run. No strategy, model or data set by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect as inspect_module
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np
import optax

import research_dp.training.muon  # noqa: F401  (registers it and Optax with gin)
from research_dp.argument_checks import annotation_of, check_arguments, checked
from research_dp.argument_types import Count, Positive, Seed, Steps
from research_dp.errors import UsageError, at_end
from research_dp.runs import files, resume
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.facts import RunFacts
from research_dp.runs.manifest import origin
from research_dp.runs.workdir import locked_workdir
from research_dp.strategies import StrategyConfig, TrainSpec, TrainState
from research_dp.strategies.strategy import LossOver
from research_dp.training import python_objects
from research_dp.training.initial import InitialParams
from research_dp.training.input_checks import check_memory
from research_dp.training.intervals import Schedule
from research_dp.training.metric_log import say
from research_dp.training.nonfinite import OnNonfinite
from research_dp.training.preemption import STOPPED
from research_dp.training.preflight import preflight
from research_dp.training.sharding_table import sizes_by_part
from research_dp.training.trainer import Trainer
from research_dp.training.watchdog import monitored
from research_dp.training.writers import MetricWriter, Writers
from research_dp.types import Bound, DataSet, TrainableModel

DONE = 0


@gin.configurable(denylist=["workdir", "inspect", "started", "bound"])
@checked
def train(
    *,
    model: TrainableModel = gin.REQUIRED,
    data: DataSet = gin.REQUIRED,
    strategy: StrategyConfig = gin.REQUIRED,
    optimizer: optax.GradientTransformation = gin.REQUIRED,
    num_steps: Steps = gin.REQUIRED,
    batch_size: Count = gin.REQUIRED,
    seed: Seed = 0,
    initial: InitialParams | None = None,
    accumulation_steps: Count = 1,
    max_grad_norm: Positive | None = None,
    eval_every: Count | None = None,
    checkpoint_every: Count | None = None,
    keep: Count = 3,
    keep_period: Count | None = None,
    log_every: Count = 100,
    profile_at: Count | None = None,
    watchdog_seconds: Positive | None = None,
    on_nonfinite: OnNonfinite = "stop",
    loss_over: LossOver = "batch",
    frozen: str | Sequence[str] = (),
    check_replicas_every: Count | None = None,
    writers: Sequence[Callable[[Path], MetricWriter]] = (),
    on_record: Callable[[Mapping[str, Any]], Any] | None = None,
    workdir: str | None = None,
    inspect: Callable[[StrategyConfig, TrainSpec], None] | None = None,
    started: float | None = None,
    bound: Mapping[str, Bound] | None = None,
) -> int:
    """Trains a model on data under a strategy; resumes the run that is in the workdir.

    Args:
        model: The model and its loss.
        data: Training and evaluation examples.
        strategy: How a step is laid out on the devices.
        optimizer: An Optax optimizer.
        num_steps: Step at which training ends.
        batch_size: Examples a step, over all devices.
        seed: Seed of initial parameters, of the order of examples, and of dropout.
        initial: Where a new run's parameters come from, `@initial_params()`; None: from the seed.
        accumulation_steps: Micro-batches that a batch is cut into.
        max_grad_norm: Gradients are scaled down to this global L2 norm; None: never.
        eval_every: Evaluate each so many steps; None: at the end only.
        checkpoint_every: Save each so many steps; None: at the end only.
        keep: How many of the newest checkpoints are kept.
        keep_period: Those of steps that it divides are kept too; None: no others.
        log_every: Record training metrics each so many steps.
        profile_at: Step after which the profiler traces a few steps; None: never.
        watchdog_seconds: A process without progress for so long writes its stacks and ends the run;
            ten times as long while it compiles. A save must fit in it. None: it may take any time.
        on_nonfinite: What happens where a loss or a gradient is not finite: 'stop' ends the run
            with the last checkpoint untouched; 'skip' leaves the step out, and counts it.
        loss_over: What a loss that mixes examples is taken over. 'batch' refuses one that takes
            each device's part; 'device' accepts it, as another algorithm on other devices.
        frozen: Regular expressions that match the full paths of parameters that are not trained.
            These have no gradient and no optimizer state.
        check_replicas_every: Compare the replicas of the state each so many steps too; a difference
            ends the run. None: after the first step and before each save alone.
        writers: Where records go besides `metrics.jsonl` and TensorBoard: `[@wandb, @mlflow]`, or a
            writer of yours. Process 0 calls each with the run's folder; it returns a `MetricWriter`
            as CLU has it.
        on_record: Called in process 0 with each record, as `metrics.jsonl` has it. An error that it
            raises ends the run.
        workdir: Folder of the run's results.
        inspect: Called with the strategy, and what it is to be built for, instead of training.
        started: `time.perf_counter()` when the command started.
        bound: The bindings of the run by name; None: those of gin, whose places are not known.

    Returns:
        Exit status: 0 when done, 143 when stopped by SIGTERM or SIGINT, after saving.

    Raises:
        UsageError: Something in the configuration, the data or the workdir is wrong.
    """
    settings = locals()
    schedule = Schedule(**{x.name: settings[x.name] for x in dataclasses.fields(Schedule)})
    spec = spec_of(settings)
    config, sinks = strategy.resolve(spec), Writers(writers, on_record)
    if inspect is not None:
        inspect(config, spec)
        return DONE
    check_memory(spec)
    built = config.build(spec)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(locked_workdir(workdir))
        recorder = stack.enter_context(monitored(folder, watchdog_seconds))
        recorder.note("test", 0)
        built = preflight(config, spec, built, say)

        recorder.note("restore", 0)
        checkpoints = Checkpoints(folder / files.CHECKPOINTS, keep, keep_period, say)
        stack.enter_context(at_end(checkpoints.close))
        run: dict[str, Any] = {"folder": folder, "num_steps": num_steps, "spec": spec, "data": data}
        run["objects"] = python_objects.REFERENCES
        check = functools.partial(resume.check_resumable, **run)
        restore = functools.partial(checkpoints.restore, built, check)
        restored = restore()
        saved = restored[1] if restored else None
        first_step = saved.step if saved else 0
        if saved:
            for line in resume.changes(saved.origin, origin(config=gin.config_str()), bound):
                say(f"Changed since step {first_step}: {line}")
        else:
            resume.check_new(folder, gin.config_str())

        if first_step == num_steps and resume.is_finished(folder, num_steps):
            say(f"Done already, at step {num_steps}: {files.shown(folder / files.SUMMARY)}")
            recorder.closing()
            return DONE

        stack.enter_context(at_end(sinks.end))
        sinks.open(folder)

        def make_state() -> TrainState:
            if saved is not None:
                return (restored or restore())[0]  # type: ignore[index]
            return built.init(np.uint32(seed), initial.arrays(built, say) if initial else None)

        started = time.perf_counter() if started is None else started
        facts = RunFacts(
            *(folder, built, bound, first_step),
            ends=first_step == num_steps,
            bytes_per_device={part: here for part, (here, _) in sizes_by_part(built).items()},
            say=say,
        )
        trainer = Trainer(
            *(spec, built, data, folder, schedule, checkpoints, recorder, saved, started, facts),
            writers=sinks,
        )
        if trainer.judges:
            restored = None  # there is memory for one state
        stack.enter_context(at_end(trainer.close))
        return DONE if trainer.run(make_state) == num_steps else STOPPED


def configured() -> tuple[StrategyConfig, TrainSpec, DataSet, InitialParams | None]:
    """The run of gin's bindings: strategy, what that is built for, data, first parameters."""
    parameters = inspect_module.signature(inspect_module.unwrap(train)).parameters
    bound = gin.get_bindings("train")
    settings = {name: bound.get(name, p.default) for name, p in parameters.items()}
    spec = spec_of(settings)
    return settings["strategy"].resolve(spec), spec, settings["data"], settings["initial"]


class _Spec(TrainSpec):
    """A spec whose fields are parameters of `train`."""

    gin_name = "train"


def spec_of(settings: Mapping[str, Any]) -> TrainSpec:
    """What a strategy is built for, from `train`'s parameters; UsageError if they do not fit."""
    shared = (
        *("model", "optimizer", "batch_size", "accumulation_steps", "max_grad_norm", "seed"),
        *("loss_over", "frozen"),
    )
    names = ("model", "data", *shared[1:], "on_nonfinite")
    check_arguments("train", settings, {name: annotation_of(train, name) for name in names})
    data: DataSet = settings["data"]
    for name, expected in settings["model"].config.items():
        if name in data.info and data.info[name] != expected:
            raise UsageError(
                f"{name} is {expected} in train.model but {data.info[name]} in {data.name}.",
                binding="train.model",
            )
    return _Spec(
        example=data.example,
        skip_nonfinite=settings["on_nonfinite"] == "skip",
        **{name: settings[name] for name in shared},
    )
