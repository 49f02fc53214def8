"""Dynamic loss scaling, which keeps small gradients from underflowing in float16."""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Limit, Positive, is_number

AboveOne = Annotated[float, Limit(lambda x: is_number(x) and x > 1, "a number above 1")]


class LossScaleState(NamedTuple):
    """The factor of the loss, and the steps since it changed or a gradient overflowed."""

    scale: jax.Array  # 0-d float32
    good_steps: jax.Array  # 0-d int32


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the scale is adapted: the values of `dynamic_loss_scale`."""

    initial: float
    growth_interval: int
    factor: float

    def init(self) -> LossScaleState:
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0))

    def adapt(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step, by whether its gradients were finite."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grows = good >= self.growth_interval
        scale = jnp.where(finite, state.scale, jnp.maximum(state.scale / self.factor, 1.0))
        scale = jnp.where(grows, jnp.minimum(scale * self.factor, 2.0**24), scale)
        return LossScaleState(scale, jnp.where(grows, 0, good))


@gin.register(module="distributed")
@checked
def dynamic_loss_scale(
    *, initial: Positive = 2.0**15, growth_interval: Count = 2000, factor: AboveOne = 2.0
) -> LossScale:
    """Multiplies the loss by a scale, and divides the reduced gradients by it, in float32.

    The scale is multiplied by `factor` after `growth_interval` steps without an overflow. A step
    whose gradients overflow only divides it by `factor` (Micikevicius et al., arXiv 1710.03740).

    Args:
        initial: The scale of the first step.
        growth_interval: The number of steps without an overflow after which the scale grows.
        factor: By how much the scale grows, and shrinks.
    """
    return LossScale(initial, growth_interval, factor)
