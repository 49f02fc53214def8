"""The loop: one story from a configuration to a summary. No strategy, model or data set by name."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import gin
import jax
import optax

from research_dp.distributed.data_set import DataSet
from research_dp.distributed.errors import UsageError, check_count
from research_dp.distributed.trainable import TrainableModel
from research_dp.strategies import Recipe, TrainSpec
from research_dp.training import optim, report  # noqa: F401  (optim registers Optax with gin)
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.metrics import drop_after
from research_dp.training.progress import Profile
from research_dp.training.run import Run, StopSignal

DONE, STOPPED = 0, 143


@gin.configurable(denylist=["workdir", "dry_run", "started"])
def train(
    *,
    model: TrainableModel = gin.REQUIRED,
    data: DataSet = gin.REQUIRED,
    strategy: Recipe = gin.REQUIRED,
    optimizer: optax.GradientTransformation = gin.REQUIRED,
    num_steps: int = gin.REQUIRED,
    batch_size: int = gin.REQUIRED,
    seed: int = 0,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    eval_every: int | None = None,
    checkpoint_every: int | None = None,
    log_every: int = 100,
    profile_at: int | None = None,
    workdir: str | None = None,
    dry_run: bool = False,
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
        dry_run: Show the configuration and the layout, train nothing.
        started: `time.perf_counter()` when the command started.

    Returns:
        Exit status: 0 when done, 143 when stopped by SIGTERM, after saving.

    Raises:
        UsageError: Something in the configuration, the data or the workdir is wrong.
    """
    # ---- What is to be done ----
    _check_counts(
        num_steps=(num_steps, 0),
        seed=(seed, 0),
        log_every=(log_every, 1),
        eval_every=(eval_every, 1),
        checkpoint_every=(checkpoint_every, 1),
    )
    _check_fits(model, data)
    built = strategy.build(
        TrainSpec(
            model=model,
            optimizer=optimizer,
            example=data.example,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
    )
    if dry_run or workdir is None:
        print(gin.config_str())
        report.print_layout(built)
        return DONE

    # ---- Where it stands ----
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.gin").write_text(gin.config_str())
    (folder / "operative_config.gin").write_text(gin.operative_config_str())
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.restore(built.abstract_state)
    if state is None:
        state = built.init(jax.random.key(seed))
    first_step = step = int(state.step)
    drop_after(folder, first_step)

    # ---- Steps ----
    run = Run(
        built,
        data,
        folder,
        batch_size=batch_size,
        seed=seed,
        first_step=first_step,
        num_steps=num_steps,
        started=time.perf_counter() if started is None else started,
    )
    run.progress.say(report.one_line(built))
    if first_step:
        run.progress.say(f"Continuing from step {first_step} in {folder}")
    profile = Profile(profile_at, folder / "profile")
    with contextlib.closing(run), contextlib.closing(profile), StopSignal().listen() as stop:
        batches = run.batches()
        while step < num_steps and not stop.came:
            state, metrics = built.train_step(state, next(batches))
            step += 1
            run.dispatched(step, metrics)
            if step % log_every == 0 or step == num_steps:
                run.log(step)
            if eval_every and step % eval_every == 0 and step < num_steps:
                run.evaluate(state, step)
            if checkpoint_every and step % checkpoint_every == 0:
                run.save(checkpoints, state, step)
            profile.step(step)

        # ---- The end ----
        run.save(checkpoints, state, step)
        if step >= num_steps:
            run.summarize(state, step, run.evaluate(state, step))
        checkpoints.close()
        if step < num_steps:
            run.progress.say(f"Stopped by SIGTERM; step {step} is saved in {folder}")
            return STOPPED
    return DONE


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (value, least) in counts.items():
        if value is not None or name not in ("eval_every", "checkpoint_every"):
            check_count(f"train.{name}", value, least)


def _check_fits(model: TrainableModel, data: DataSet) -> None:
    """Compares what the model was built for with what the data set is."""
    for name, wanted in model.config.items():
        if name in data.info and data.info[name] != wanted:
            raise UsageError(
                f"{name} is {wanted} in train.model but {data.info[name]} in {data.name}.",
                binding="train.model",
            )
