"""The optimizer of one step: scales, clips and applies averaged gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from research_dp.distributed.collectives import cast_dtype
from research_dp.distributed.norms import clip_factor
from research_dp.distributed.sharding import path_name
from research_dp.errors import UsageError
from research_dp.strategies.strategy import TrainState

if TYPE_CHECKING:
    from research_dp.strategies.step import Step

PyTree = Any


class StepOptimizer:
    """The optimizer of one step, as `update` calls it: scales, clips, applies.

    It is given averaged gradients, so whoever averages them last calls it: `update` may.

    Attributes:
        state: The optimizer's new state, once it was applied.
        norm: Global norm of the scaled gradients, 0-d float32.
        nonfinite: float32 (parameters,), above 0 where a gradient is not finite.
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
        norm, self.nonfinite = step.norm(gradients, before.step)
        self.norm = self._scale * norm
        scale = self._scale * clip_factor(self.norm, step.spec.max_grad_norm)
        same = step.spec.param_dtype is None  # otherwise the optimizer's parameters are wider

        def scaled(g: jax.Array, p: jax.Array) -> jax.Array:
            return (g * scale).astype(p.dtype if same else cast_dtype(p.dtype, jnp.float32))

        gradients = jax.tree.map(scaled, gradients, parameters)
        parameters, self.state = step.apply(gradients, parameters, before)
        return parameters


def check_shapes(slot: str, what: str, tree: PyTree, like: PyTree) -> None:
    """Raises UsageError if a slot's function returned arrays of other shapes than `like`."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), expected in zip(flat, jax.tree.leaves(like), strict=True):
        shape = getattr(expected, "local_shape", expected.shape)
        if x.shape != shape:
            raise UsageError(
                f"data_parallel.{slot} leaves {what} {path_name(path)} with shape {x.shape} on a "
                f"device, not {shape}. The four slots must fit each other.",
                binding=f"data_parallel.{slot}",
            )
