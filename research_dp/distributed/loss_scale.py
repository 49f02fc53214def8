"""Dynamic loss scaling, without which small gradients are zero in float16."""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Positive, above

AboveOne = Annotated[float, above(1)]


class LossScaleState(NamedTuple):
    """What changes from step to step.

    Attributes:
        scale: What the loss is multiplied by; 0-d float32.
        good_steps: Steps since the scale changed or a gradient overflowed; 0-d int32.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the scale is adapted; `dynamic_loss_scale` makes one and says what the fields mean."""

    initial: float
    growth_interval: int
    factor: float

    def init(self) -> LossScaleState:
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0))

    def adapt(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were finite, or were not."""
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
    """Multiplies the loss, and divides the gradients once they are reduced, in float32.

    A step whose gradients overflow changes nothing but the scale (Micikevicius et al., arXiv
    1710.03740).

    Args:
        initial: First scale.
        growth_interval: Steps without an overflow after which the scale grows.
        factor: What it is multiplied by then, and divided by at an overflow.

    Raises:
        UsageError: A number makes no sense.
    """
    return LossScale(initial, growth_interval, factor)
