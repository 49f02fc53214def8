"""Optax's optimizers and schedules under gin names, module `optax`."""

from __future__ import annotations

from typing import Any

import gin
import jax
import optax

_OPTIMIZERS = (
    optax.adafactor,
    optax.adam,
    optax.adamw,
    optax.lamb,
    optax.lion,
    optax.rmsprop,
    optax.sgd,
)
_SCHEDULES = (
    optax.cosine_decay_schedule,
    optax.linear_schedule,
    optax.warmup_constant_schedule,
    optax.warmup_cosine_decay_schedule,
)

for _function in (*_OPTIMIZERS, *_SCHEDULES):
    gin.register(_function, module="optax")


@gin.register(module="optim")
def matrices_only(params: Any) -> Any:
    """A mask for weight decay: True for parameters of two dims and more."""
    return jax.tree.map(lambda x: x.ndim > 1, params)
