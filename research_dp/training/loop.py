"""The loop: one story from a configuration to a summary. No strategy, model or data set by name."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import gin
import optax

import research_dp.training.optimizers  # noqa: F401  (registers Optax with gin)
from research_dp.argument_types import SEEDS, Count, CountOrZero, Positive, Seed
from research_dp.errors import UsageError, check_count, check_kind, check_limit
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, TrainState
from research_dp.strategies.rng import init_key
from research_dp.training import files
from research_dp.training.checkpoint import Checkpoints, Restored
from research_dp.training.config_changes import changes
from research_dp.training.intervals import Schedule
from research_dp.training.manifest import Manifest, origin
from research_dp.training.nonfinite import OnNonfinite
from research_dp.training.preemption import STOPPED, StopSignal
from research_dp.training.preflight import tested
from research_dp.training.progress import Profile, say
from research_dp.training.trainer import Run
from research_dp.training.watchdog import keep_watch
from research_dp.training.workdir import check_new, held
from research_dp.types import DataSet, TrainableModel

DONE = 0


@gin.configurable(denylist=["workdir", "look", "started", "bound_at"])
def train(
    *,
    model: TrainableModel = gin.REQUIRED,
    data: DataSet = gin.REQUIRED,
    strategy: StrategyConfig = gin.REQUIRED,
    optimizer: optax.GradientTransformation = gin.REQUIRED,
    num_steps: CountOrZero = gin.REQUIRED,
    batch_size: Count = gin.REQUIRED,
    seed: Seed = 0,
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
    check_replicas_every: Count | None = None,
    workdir: str | None = None,
    look: Callable[[StrategyConfig, TrainSpec], None] | None = None,
    started: float | None = None,
    bound_at: Callable[[str], str | None] | None = None,
) -> int:
    """Trains a model on data under a strategy; continues what is in the workdir.

    Args:
        model: The model and its loss.
        data: Training and evaluation examples.
        strategy: How a step is laid out on the devices.
        optimizer: An Optax optimizer.
        num_steps: Step at which training ends.
        batch_size: Examples a step, over all devices.
        seed: Seed of initial parameters, of the order of examples, and of dropout.
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
        check_replicas_every: Compare what devices hold that should hold the same each so many
            steps; a difference ends the run. None: never.
        workdir: Folder of the run's results.
        look: Called with the strategy, and what it is to be built for, instead of training.
        started: `time.perf_counter()` when the command started.
        bound_at: Name of a parameter -> the file and line that bound it, for messages.

    Returns:
        Exit status: 0 when done, 143 when stopped by SIGTERM or SIGINT, after saving.

    Raises:
        UsageError: Something in the configuration, the data or the workdir is wrong.
    """
    # ---- What is to be done ----
    schedule = Schedule(
        num_steps=num_steps,
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        keep_period=keep_period,
        profile_at=profile_at,
        check_replicas_every=check_replicas_every,
    )
    check_count("train.keep", keep, 1)
    check_kind("train.strategy", strategy, StrategyConfig, "@data_parallel()")
    spec = spec_of(
        model=model,
        data=data,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        seed=seed,
        on_nonfinite=on_nonfinite,
    )
    strategy = strategy.resolve(spec)
    if look is not None:
        look(strategy, spec)
        return DONE
    built = strategy.build(spec)

    # ---- Where it stands ----
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(held(workdir))
        recorder = stack.enter_context(keep_watch(folder, watchdog_seconds))
        recorder.note("test", 0)
        built = tested(strategy, spec, built, say)
        recorder.note("restore", 0)
        checkpoints = Checkpoints(folder / files.CHECKPOINTS, keep, keep_period, say)
        stack.enter_context(contextlib.closing(checkpoints))
        check = functools.partial(_check_continues, folder, num_steps, spec, data)
        restored = _restored(checkpoints, built, check, bound_at)
        if restored is None:
            check_new(folder, checkpoints.saved_nothing(), gin.config_str())
        first_step = int(restored.state.step) if restored else 0
        recorder.note("compile", first_step)
        state = restored.state if restored else built.init(init_key(seed))
        run = Run(
            spec,
            built,
            data,
            folder,
            schedule=schedule,
            checkpoints=checkpoints,
            recorder=recorder,
            first_step=first_step,
            saved=restored.progress if restored else None,
            started=time.perf_counter() if started is None else started,
        )
        del restored  # the state is donated to the first step
        with contextlib.closing(run):
            if run.is_done_already():
                return DONE
            return _steps(run, built, schedule, state, first_step)


def spec_of(
    *,
    model: TrainableModel,
    data: DataSet,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    accumulation_steps: int,
    max_grad_norm: float | None,
    seed: int,
    on_nonfinite: OnNonfinite,
) -> TrainSpec:
    """What a strategy is built for, from `train`'s parameters.

    Raises:
        UsageError: One of them is of another kind, or the model does not fit the data.
    """
    check_limit("train.seed", seed, SEEDS)
    if on_nonfinite not in get_args(OnNonfinite):
        raise UsageError(f"train.on_nonfinite = {on_nonfinite!r}: use 'stop' or 'skip'.")
    check_kind("train.model", model, TrainableModel, "@convnet()")
    check_kind("train.data", data, DataSet, "@tfds_data()")
    check_kind("train.optimizer", optimizer, optax.GradientTransformation, "@optax.adamw()")
    for name, wanted in model.config.items():
        if name in data.info and data.info[name] != wanted:
            raise UsageError(
                f"{name} is {wanted} in train.model but {data.info[name]} in {data.name}.",
                binding="train.model",
            )
    return TrainSpec(
        model=model,
        optimizer=optimizer,
        example=data.example,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        seed=seed,
        skip_nonfinite=on_nonfinite == "skip",
    )


def _steps(
    run: Run, built: Strategy, schedule: Schedule, state: TrainState, first_step: int
) -> int:
    """Trains, evaluates, saves; returns the exit status."""
    step = first_step
    run.begin()
    profile = Profile(schedule.profile_at, run.folder / "profile")
    with contextlib.closing(profile), StopSignal().listen() as stop:
        batches = run.batches()
        while step < schedule.num_steps and not stop.came(step):
            state, metrics = built.train_step(state, next(batches))
            step += 1
            run.dispatched(step, state, metrics)
            if schedule.logs(step):
                run.log(step)
            if schedule.compares(step):
                run.compare_replicas(state, step)
            if schedule.evaluates(step):
                run.evaluate(state, step)
            if schedule.saves(step):
                run.save(state, step)
            profile.step(step)

        run.save(state, step)
        if step < schedule.num_steps:
            run.stopped(step)
            return STOPPED
        run.summarize(state, step, run.evaluate(state, step))
    return DONE


def _restored(
    checkpoints: Checkpoints,
    built: Strategy,
    check: Callable[[Manifest], None],
    bound_at: Callable[[str], str | None] | None,
) -> Restored | None:
    """The newest state that the run may continue; says what changed since it was saved."""
    read: list[Manifest] = []

    def accept(found: Manifest) -> None:
        check(found)
        read.append(found)

    restored = checkpoints.restore(built.abstract_state, accept)
    if restored:
        now = origin(config=gin.config_str())
        for line in changes(read[-1].origin, now, bound_at):
            say(f"Changed since step {read[-1].step}: {line}")
    return restored


def _check_continues(
    folder: Path, num_steps: int, spec: TrainSpec, data: DataSet, found: Manifest
) -> None:
    """Refuses to continue a run as another one."""
    if found.step > num_steps:
        raise UsageError(
            f"the run in {folder} is at step {found.step}, past train.num_steps = {num_steps}. "
            "Use another --workdir, or raise train.num_steps.",
            binding="train.num_steps",
        )
    saved = found.progress
    for name, before, now in (
        ("batch_size", saved.batch_size, spec.batch_size),
        ("seed", saved.seed, spec.seed),
        ("data", saved.order, data.order),
    ):
        if before != now:
            raise UsageError(
                f"the run in {folder} has train.{name} = {before}, not {now}: its order of "
                "examples would break. Use another --workdir, or the same value.",
                binding=f"train.{name}",
            )
