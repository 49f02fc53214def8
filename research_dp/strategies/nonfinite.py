"""What a step leaves where a loss or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from research_dp.strategies import strategy
from research_dp.strategies.strategy import TrainSpec, TrainState
from research_dp.types import PyTree

# Gradients that are to be scaled up by more, or their squares, may be 0 in their dtype.
_MOST_SCALE, _MOST_SCALE_F16 = 1e12, 1e5


class Applied(NamedTuple):
    """What one step of the optimizer has besides new parameters."""

    opt_state: PyTree
    norm: jax.Array  # global L2 norm of the scaled gradients, before clipping; 0-d float32
    nonfinite: jax.Array  # float32 (leaves,), above 0 where a gradient is not finite


def without_nonfinite(
    spec: TrainSpec,
    old: TrainState,
    new: TrainState,
    sums: Mapping[str, jax.Array],
    applied: Applied,
    scale: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state that a step leaves, of the old and the computed one, and the step's metrics.

    `scale` is what gradients were multiplied by, before clipping. Parts of the old state are kept
    where gradients overflow under a loss scale, and where a step that is not finite is skipped.
    """
    norm = applied.norm
    metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
    is_lost = scale > (_MOST_SCALE if spec.loss_scale is None else _MOST_SCALE_F16)
    loss_is_wrong = ~jnp.isfinite(sums["loss"]).all() | is_lost
    wrong = ~jnp.isfinite(norm) | loss_is_wrong
    if spec.loss_scale is not None:
        finite = jnp.isfinite(norm)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        adapted = spec.loss_scale.adapt(old.loss_scale, finite)
        new = kept._replace(step=new.step, loss_scale=adapted)
        # A norm that is not a number would hide all others of the record.
        shown = [jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)]
        metrics["grad_norm"] = jnp.stack(shown)
        metrics["loss_scale"] = jnp.stack([old.loss_scale.scale, jnp.ones_like(norm)])
        # Gradients that overflow are scaled down next time; a scale of 1 is not scaled down.
        wrong = ~jnp.isfinite(norm) & (old.loss_scale.scale <= 1.0) | loss_is_wrong
    if spec.skip_nonfinite:
        kept = jax.tree.map(lambda a, b: jnp.where(wrong, b, a), new, old)
        new = kept._replace(step=new.step, loss_scale=new.loss_scale)
        metrics = {name: jnp.where(wrong, 0.0, pair) for name, pair in metrics.items()}
        metrics[strategy.SKIPPED] = jnp.stack([wrong.astype(jnp.float32), jnp.ones(())])
    loss_flag = jnp.where(is_lost, strategy.WEIGHTLESS, wrong.astype(jnp.float32))
    return new, {**metrics, strategy.NONFINITE: jnp.stack([loss_flag, *applied.nonfinite])}
