"""The optimizer of one step: scales, clips and applies gradients, and handles non-finite ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from research_dp.distributed.collectives import cast_dtype
from research_dp.distributed.norms import clip_factor
from research_dp.distributed.sharding import path_name
from research_dp.errors import binding_error
from research_dp.strategies.strategy import NONFINITE, SKIPPED, TrainState

if TYPE_CHECKING:
    from research_dp.strategies.step import Step

PyTree = Any
Metrics = dict[str, jax.Array]


class StepOptimizer:
    """The optimizer of one step, as `update` calls it.

    It is given averaged gradients, so whoever averages them last calls it: `update` may. It then
    has the optimizer's new state, and the global norm of the scaled gradients.
    """

    elementwise = True  # the engine has checked it (`state.check_optimizer`)

    def __init__(self, step: Step, state: TrainState, scale: jax.Array):
        self._step, self._before, self._scale = step, state, scale
        self.state: PyTree = None

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree:
        """New parameters; shapes are those of the optimizer's shards."""
        step, before = self._step, self._before
        check_shapes("sync", "gradients", gradients, step.shardings.slices)
        check_shapes("update", "parameters of the optimizer", parameters, gradients)
        norm, self._nonfinite = step.norm(gradients, before.step)
        self._norm = self._scale * norm
        scale = self._scale * clip_factor(self._norm, step.spec.max_grad_norm)
        same = step.spec.param_dtype is None  # otherwise the optimizer's parameters are wider

        def scaled(g: jax.Array, p: jax.Array) -> jax.Array:
            return (g * scale).astype(p.dtype if same else cast_dtype(p.dtype, jnp.float32))

        gradients = jax.tree.map(scaled, gradients, parameters)
        parameters, self.state = step.apply(gradients, parameters, before)
        return parameters

    def settle(self, new: TrainState, sums: Metrics) -> tuple[TrainState, Metrics]:
        """The state that the step leaves, and its metrics; see `Strategy`.

        `new` is the state that the step computed, `sums` the metrics summed over devices.
        """
        spec, old, norm = self._step.spec, self._before, self._norm
        metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
        loss_is_wrong = ~jnp.isfinite(sums["loss"][0])
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
            metrics[SKIPPED] = jnp.stack([wrong.astype(jnp.float32), jnp.ones(())])
        return new, {**metrics, NONFINITE: jnp.stack([wrong, *self._nonfinite])}


def check_shapes(slot: str, what: str, tree: PyTree, like: PyTree) -> None:
    """Raises UsageError if a slot's function returned arrays of other shapes than `like`."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), expected in zip(flat, jax.tree.leaves(like), strict=True):
        shape = getattr(expected, "local_shape", expected.shape)
        if x.shape != shape:
            raise binding_error(
                f"data_parallel.{slot}",
                f" leaves {what} {path_name(path)} with shape {x.shape} on a device, not {shape}. "
                "The four slots must fit each other.",
            )
