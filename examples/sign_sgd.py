"""signSGD by majority vote: devices send signs, and each parameter goes by the sign of most.

Bernstein et al., 2018, arXiv 1810.05291. The strategy has an optimizer of its own.
"""

import math

import gin
import jax
import jax.numpy as jnp
import optax

from research_dp import PLAIN, UsageError
from research_dp.distributed.boxed import is_box
from research_dp.distributed.collectives import takes


@gin.register
@takes("reduction", "devices", "report")
def majority_vote(grads, axis_names, *, devices, report, reduction=PLAIN):
    """Gradients of a device -> 1, -1, or 0 for a draw; sums of signs are sent in int8.

    It reports the part of its own signs in which a device agrees with most, averaged over arrays.
    """
    if any(map(is_box, jax.tree.leaves(grads, is_leaf=is_box))):
        raise UsageError("majority_vote sums signs of unsharded gradients: use it with ddp.")
    dtype = jnp.int8 if _voters(devices) < 128 else jnp.int32
    signs = jax.tree.map(lambda x: jnp.sign(x).astype(dtype), grads)
    most = jax.tree.map(lambda x: jnp.sign(reduction.all_reduce(x, axis_names)), signs)
    agree = [jnp.mean(a == b) for a, b in zip(*map(jax.tree.leaves, (signs, most)), strict=True)]
    report("agreement", sum(agree) / len(agree))
    # A sign of what is not finite would hide it.
    wrong = sum(jnp.sum(~jnp.isfinite(x)) for x in jax.tree.leaves(grads))
    nobody = reduction.all_reduce(wrong.astype(jnp.float32), axis_names) == 0
    return jax.tree.map(lambda x, g: jnp.where(nobody, x, jnp.nan).astype(g.dtype), most, grads)


def _voters(devices):
    return math.prod(devices.values())


@takes("devices")
def wire_bytes(shape, dtype, *, devices):
    """Bytes of the signs of a gradient."""
    return math.prod(shape) * (1 if _voters(devices) < 128 else 4)


majority_vote.wire_bytes = wire_bytes
majority_vote.algorithm = "parameters go by the sign of most gradients"


@gin.register
def sign_descent(optimizer, learning_rate=1e-3):
    """Steps of one size, in place of the run's optimizer: however a sign was scaled or clipped."""
    del optimizer

    def signs(grads, params):
        del params
        return jax.tree.map(jnp.sign, grads)

    return optax.chain(optax.stateless(signs), optax.scale_by_learning_rate(learning_rate))


sign_descent.algorithm = "it is descent by signs, not the run's optimizer"
