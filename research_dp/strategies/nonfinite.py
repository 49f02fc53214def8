"""What is done with a step whose loss or gradients are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from research_dp.strategies.strategy import NONFINITE, SKIPPED, TrainSpec, TrainState

Metrics = dict[str, jax.Array]


def settle(
    spec: TrainSpec,
    old: TrainState,
    new: TrainState,
    norm: jax.Array,
    nonfinite: jax.Array,
    sums: Metrics,
) -> tuple[TrainState, Metrics]:
    """The state that a step leaves, and its metrics; see `Strategy`.

    Args:
        spec: Whether losses are scaled, and whether a step that went wrong is left out.
        old: The state before the step.
        new: What the step made of it.
        norm: Global norm of the gradients.
        nonfinite: float32 (parameters,), above 0 where a gradient is not finite.
        sums: Metrics of the loss, summed over devices.
    """
    metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
    loss_is_wrong = ~jnp.isfinite(sums["loss"][0])
    wrong = ~jnp.isfinite(norm) | loss_is_wrong
    if spec.loss_scale is not None:
        new, metrics = _unless_overflown(spec, old, new, norm, metrics)
        # Gradients that overflow are scaled down next time; a scale of 1 is not scaled down.
        wrong = ~jnp.isfinite(norm) & (old.loss_scale.scale <= 1.0) | loss_is_wrong
    if spec.skip_nonfinite:
        new, metrics = _unless_wrong(wrong, old, new, metrics)
    return new, {**metrics, NONFINITE: jnp.stack([wrong, *nonfinite])}


def _unless_overflown(
    spec: TrainSpec, old: TrainState, new: TrainState, norm: jax.Array, metrics: Metrics
) -> tuple[TrainState, Metrics]:
    """The new state with its loss scale adapted; the old one if gradients overflowed."""
    assert spec.loss_scale is not None
    finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    adapted = spec.loss_scale.adapt(old.loss_scale, finite)
    metrics = {
        **metrics,
        # A norm that is not a number would hide all others of the record.
        "grad_norm": jnp.stack([jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)]),
        "loss_scale": jnp.stack([old.loss_scale.scale, jnp.ones_like(norm)]),
    }
    return kept._replace(step=new.step, loss_scale=adapted), metrics


def _unless_wrong(
    wrong: jax.Array, old: TrainState, new: TrainState, metrics: Metrics
) -> tuple[TrainState, Metrics]:
    """The new state and its metrics; the old state and none if the step went wrong."""
    kept = jax.tree.map(lambda a, b: jnp.where(wrong, b, a), new, old)
    kept = kept._replace(step=new.step, loss_scale=new.loss_scale)
    metrics = {name: jnp.where(wrong, 0.0, pair) for name, pair in metrics.items()}
    return kept, {**metrics, SKIPPED: jnp.stack([wrong.astype(jnp.float32), jnp.ones(())])}
