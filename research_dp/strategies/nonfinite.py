"""What a step leaves where a loss or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from research_dp.strategies import strategy
from research_dp.strategies.strategy import TrainSpec, TrainState
from research_dp.types import PyTree

# Gradients that are to be scaled up by more, or their squares, may be 0 in their dtype.
_MOST_SCALE, _MOST_SCALE_F16 = 1e12, 1e5


def without_nonfinite(
    spec: TrainSpec,
    old: TrainState,
    new: TrainState,
    sums: Mapping[str, jax.Array],
    norm: jax.Array,
    nonfinite: jax.Array,
    scale: jax.Array,
    is_empty: jax.Array | None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state that a step leaves, of the old and the computed one, and the step's metrics.

    `norm`, 0-d float32, is that of gradients before clipping, which were multiplied by `scale`;
    `nonfinite`, float32 (leaves,), is above 0 where a gradient is not finite. Parts of the old
    state are kept where gradients overflow under a loss scale, where a step that is not finite is
    skipped, and where a batch `is_empty` (None: it never is): momentum moves parameters without a
    gradient too.
    """
    metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
    is_lost = scale > (_MOST_SCALE if spec.loss_scale is None else _MOST_SCALE_F16)
    loss_is_wrong = ~jnp.isfinite(sums["loss"]).all() | is_lost
    wrong = ~jnp.isfinite(norm) | loss_is_wrong
    if spec.loss_scale is not None:
        finite = jnp.isfinite(norm)
        adapted = spec.loss_scale.adapt(old.loss_scale, finite)
        new = kept_where(~finite, old, new)._replace(step=new.step, loss_scale=adapted)
        # A norm that is not a number would hide all others of the record.
        shown = [jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)]
        metrics["grad_norm"] = jnp.stack(shown)
        own = {name: x for name, x in metrics.items() if name.startswith(strategy.OF_SYNC)}
        metrics |= {name: jnp.where(finite, pair, 0.0) for name, pair in own.items()}
        metrics["loss_scale"] = jnp.stack([old.loss_scale.scale, jnp.ones_like(norm)])
        # Gradients that overflow are scaled down next time; a scale of 1 is not scaled down.
        wrong = ~jnp.isfinite(norm) & (old.loss_scale.scale <= 1.0) | loss_is_wrong
    flag = wrong.astype(jnp.float32)
    if spec.skip_nonfinite or is_empty is not None:
        empty = jnp.zeros((), bool) if is_empty is None else is_empty
        skipped = empty | wrong if spec.skip_nonfinite else empty
        scale_state = kept_where(empty, old.loss_scale, new.loss_scale)
        new = kept_where(skipped, old, new)._replace(step=new.step, loss_scale=scale_state)
        metrics = {name: jnp.where(skipped, 0.0, pair) for name, pair in metrics.items()}
        # The count says whether a record has it.
        said = skipped | spec.skip_nonfinite
        metrics[strategy.SKIPPED] = jnp.stack([skipped, said]).astype(jnp.float32)
    flag = jnp.where(is_lost, strategy.WEIGHTLESS, flag)
    if is_empty is not None:
        flag = jnp.where(is_empty, strategy.NO_WEIGHT, flag)
    return new, {**metrics, strategy.NONFINITE: jnp.stack([flag, *nonfinite])}


def kept_where(condition: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """The old tree where a 0-d condition holds, otherwise the new one."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), old, new)
