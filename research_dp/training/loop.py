"""The loop: one story from a configuration to a summary. No strategy, model or data set by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import gin
import optax

from research_dp.distributed.data_set import DataSet
from research_dp.distributed.errors import UsageError, check_count, check_kind
from research_dp.distributed.kinds import Count, CountOrZero, Positive
from research_dp.distributed.trainable import TrainableModel
from research_dp.strategies import Recipe, Strategy, TrainSpec, TrainState
from research_dp.strategies.keys import init_key
from research_dp.training import optim  # noqa: F401  (registers Optax with gin)
from research_dp.training.checkpoint import Checkpoints, Progress
from research_dp.training.progress import Profile
from research_dp.training.run import Run
from research_dp.training.schedule import Schedule
from research_dp.training.stop import StopSignal

DONE, STOPPED = 0, 143


@gin.configurable(denylist=["workdir", "look", "started"])
def train(
    *,
    model: TrainableModel = gin.REQUIRED,
    data: DataSet = gin.REQUIRED,
    strategy: Recipe = gin.REQUIRED,
    optimizer: optax.GradientTransformation = gin.REQUIRED,
    num_steps: CountOrZero = gin.REQUIRED,
    batch_size: Count = gin.REQUIRED,
    seed: CountOrZero = 0,
    accumulation_steps: Count = 1,
    max_grad_norm: Positive | None = None,
    eval_every: Count | None = None,
    checkpoint_every: Count | None = None,
    log_every: Count = 100,
    profile_at: Count | None = None,
    workdir: str | None = None,
    look: Callable[[Strategy], None] | None = None,
    started: float | None = None,
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
        log_every: Record training metrics each so many steps.
        profile_at: Step after which the profiler traces a few steps; None: never.
        workdir: Folder of the run's results.
        look: Called with the built strategy instead of training.
        started: `time.perf_counter()` when the command started.

    Returns:
        Exit status: 0 when done, 143 when stopped by SIGTERM, after saving.

    Raises:
        UsageError: Something in the configuration, the data or the workdir is wrong.
    """
    # ---- What is to be done ----
    schedule = Schedule(
        num_steps=num_steps,
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        profile_at=profile_at,
    )
    check_kind("train.strategy", strategy, Recipe, "@data_parallel()")
    spec = spec_of(
        model=model,
        data=data,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        seed=seed,
    )
    if look is None:
        folder = _open_folder(workdir)
    built = strategy.build(spec)
    if look is not None:
        look(built)
        return DONE

    # ---- Where it stands ----
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        restored = checkpoints.restore(built.abstract_state)
        first_step = int(restored.state.step) if restored else 0
        if restored:
            _check_continues(folder, first_step, num_steps, restored.progress, spec)
        state = restored.state if restored else built.init(init_key(seed))
        run = Run(
            spec,
            built,
            data,
            folder,
            schedule=schedule,
            checkpoints=checkpoints,
            first_step=first_step,
            window=restored.progress.window if restored else {},
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
) -> TrainSpec:
    """What a strategy is built for, from `train`'s parameters.

    Raises:
        UsageError: One of them is of another kind, or the model does not fit the data.
    """
    check_count("train.seed", seed, 0)
    check_kind("train.model", model, TrainableModel, "@convnet()")
    check_kind("train.data", data, DataSet, "@tfds_data()")
    check_kind("train.optimizer", optimizer, optax.GradientTransformation, "@optax.adamw()")
    _check_fits(model, data)
    return TrainSpec(
        model=model,
        optimizer=optimizer,
        example=data.example,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        seed=seed,
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
            run.dispatched(step, metrics)
            if schedule.logs(step):
                run.log(step)
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


def _open_folder(workdir: str | None) -> Path:
    """Makes the folder of the results."""
    if workdir is None:
        raise UsageError("train needs a workdir: results and checkpoints go there.")
    if "://" in workdir:
        raise UsageError(f"--workdir={workdir}: give a folder of this machine, or a mounted one.")
    folder = Path(workdir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--workdir={workdir} cannot be made: {error.strerror}.") from error
    return folder


def _check_continues(
    folder: Path, step: int, num_steps: int, saved: Progress, spec: TrainSpec
) -> None:
    """Refuses to continue a run as another one."""
    if step > num_steps:
        raise UsageError(
            f"the run in {folder} is at step {step}, past train.num_steps = {num_steps}. "
            "Use another --workdir, or raise train.num_steps.",
            binding="train.num_steps",
        )
    for name in ("batch_size", "seed"):
        before, now = getattr(saved, name), getattr(spec, name)
        if before != now:
            raise UsageError(
                f"the run in {folder} has train.{name} = {before}, not {now}: its order of "
                "examples would break. Use another --workdir, or the same value.",
                binding=f"train.{name}",
            )


def _check_fits(model: TrainableModel, data: DataSet) -> None:
    """Compares what the model was built for with what the data set is."""
    for name, wanted in model.config.items():
        if name in data.info and data.info[name] != wanted:
            raise UsageError(
                f"{name} is {wanted} in train.model but {data.info[name]} in {data.name}.",
                binding="train.model",
            )
