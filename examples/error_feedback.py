"""Gradients all-reduced in bfloat16, with error feedback: a slot `sync` that carries state.

What rounding takes from a gradient is added to the next one (Seide et al., 2014; Karimireddy et
al., 2019, arXiv 1901.09847), so that the sum of what was communicated follows the sum of the
gradients. The strategy is in examples/ddp_error_feedback.gin.
"""

import gin
import jax
import jax.numpy as jnp

from research_dp import PLAIN, UsageError, sync_gradients
from research_dp.distributed.collectives import takes


@gin.register
class ErrorFeedback:
    """`sync_gradients` in a narrow dtype, whose rounding errors each device adds to the next step.

    Args:
        dtype: dtype on the wire.
        by_unit: Whether gradients are sent as soon as those of a unit are ready, which takes the
            memory of the errors once more.
    """

    differs_over = ("data", "fsdp")  # each device rounds its own gradients

    def __init__(self, dtype: str = "bfloat16", by_unit: bool = False):
        self.dtype, self.by_unit = dtype, by_unit

    def init(self, params):
        """No error yet: zeros like the parameters."""
        return {"error": jax.tree.map(jnp.zeros_like, params)}

    @takes("reduction")
    def apply(self, grads, axis_names, *, state, reduction=PLAIN):
        """(mean gradients in the dtype of sums, new errors in that of the parameters)."""
        old = state["error"]
        if jax.tree.structure(grads) != jax.tree.structure(old):  # boxes of sharded gradients
            raise UsageError("ErrorFeedback keeps no errors of sharded gradients; use it with ddp.")
        exact = jax.tree.map(jnp.add, grads, old)
        rounded = jax.tree.map(lambda x: x.astype(self.dtype), exact)
        errors = jax.tree.map(lambda x, r, e: (x - r).astype(e.dtype), exact, rounded, old)
        mean = sync_gradients(rounded, axis_names, reduction=reduction)
        return jax.tree.map(lambda m, x: m.astype(x.dtype), mean, exact), {"error": errors}

    def pending(self, state):
        """What of the mean gradient was not sent yet, given the errors of all devices."""
        return jax.tree.map(lambda x: x.mean(0), state["error"])

    def resize(self, state, devices):
        """The mean error on each device: what is still to be added to the mean gradient stays."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), (devices, *x.shape[1:])), state)
