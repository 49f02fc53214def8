"""Optax's optimizers and schedules under gin names, module `optax`."""

from __future__ import annotations

from typing import Any

import gin
import jax
import optax

from research_dp.argument_checks import check_arguments, checked
from research_dp.argument_types import Fraction, Steps
from research_dp.errors import UsageError
from research_dp.training.learning_rate import remembering_rate

for _name in ("adafactor", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd"):
    gin.register(remembering_rate(getattr(optax, _name)), module="optax")
for _name in (
    *("cosine_decay_schedule", "linear_schedule"),
    *("warmup_constant_schedule", "warmup_cosine_decay_schedule"),
):
    gin.register(getattr(optax, _name), module="optax")


@gin.register(module="optim")
@checked
def warmup_cosine(
    peak_value: float, *, warmup_fraction: Fraction = 0.05, end_fraction: Fraction = 0.0
) -> optax.Schedule:
    """A linear warm-up and a cosine decay over all of a run's `train.num_steps`.

    Args:
        peak_value: The learning rate at the end of the warm-up.
        warmup_fraction: Part of the run that the warm-up takes.
        end_fraction: Part of `peak_value` that is left at the end.
    """
    try:  # with another length the schedule would end silently
        num_steps = gin.query_parameter("train.num_steps")
    except ValueError as error:
        raise UsageError(
            "train.num_steps is bound nowhere, and warmup_cosine takes its length from it."
        ) from error
    if isinstance(num_steps, gin.config.ConfigurableReference):  # a macro
        num_steps = num_steps.scoped_configurable_fn()
    check_arguments("train", {"num_steps": num_steps}, {"num_steps": Steps})
    decay_steps = max(num_steps, 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak_value,
        warmup_steps=min(round(warmup_fraction * decay_steps), decay_steps - 1),
        decay_steps=decay_steps,
        end_value=end_fraction * peak_value,
    )


@gin.register(module="optim")
def matrices_only(params: Any) -> Any:
    """A mask for weight decay: True for parameters of two dims and more.

    Args:
        params: The parameters, or their shapes.
    """
    return jax.tree.map(lambda x: x.ndim > 1, params)
