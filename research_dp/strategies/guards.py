"""A step that went wrong leaves the state as it was: decided inside the compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from research_dp.distributed.loss_scale import LossScale
from research_dp.strategies.strategy import SKIPPED, TrainState

Stepped = tuple[TrainState, dict[str, jax.Array]]


def unless_overflown(
    scaling: LossScale,
    norm: jax.Array,
    old: TrainState,
    new: TrainState,
    metrics: dict[str, jax.Array],
) -> Stepped:
    """The new state with its loss scale adapted; the old one if gradients overflowed."""
    finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    adapted = scaling.adapt(old.loss_scale, finite)
    metrics = {
        **metrics,
        # A norm that is not a number would hide all others of the record.
        "grad_norm": jnp.stack([jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)]),
        "loss_scale": jnp.stack([old.loss_scale.scale, jnp.ones_like(norm)]),
    }
    return kept._replace(step=new.step, loss_scale=adapted), metrics


def unless_wrong(
    wrong: jax.Array, old: TrainState, new: TrainState, metrics: dict[str, jax.Array]
) -> Stepped:
    """The new state and its metrics; the old state and none if the step went wrong."""
    kept = jax.tree.map(lambda a, b: jnp.where(wrong, b, a), new, old)
    kept = kept._replace(step=new.step, loss_scale=new.loss_scale)
    metrics = {name: jnp.where(wrong, 0.0, pair) for name, pair in metrics.items()}
    return kept, {**metrics, SKIPPED: jnp.stack([wrong.astype(jnp.float32), jnp.ones(())])}
