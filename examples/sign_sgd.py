"""signSGD by majority vote: devices send signs, and each parameter goes by the sign of most.

Bernstein et al., 2018, arXiv 1810.05291. The strategy has an optimizer of its own.
"""

import math

import gin
import jax
import jax.numpy as jnp
import optax

from research_dp import PLAIN
from research_dp.distributed.collectives import takes


@gin.register
@takes("reduction", "devices", "report")
def majority_vote(grads, axis_names, *, devices, report, reduction=PLAIN):
    """Gradients of a device -> 1, -1, or 0 for a draw; sums of signs are sent in int8.

    It reports the part of its own signs in which a device agrees with most.
    """
    count = math.prod(devices[axis] for axis in axis_names)
    dtype = jnp.int8 if count < 128 else jnp.int32
    signs = jax.tree.map(lambda x: jnp.sign(x).astype(dtype), grads)
    most = jax.tree.map(lambda x: jnp.sign(reduction.all_reduce(x, axis_names)), signs)
    agree = jax.tree.map(lambda a, b: jnp.sum(a == b), signs, most)
    size = sum(x.size for x in jax.tree.leaves(signs))
    report("agreement", sum(jax.tree.leaves(agree)) / size)
    return jax.tree.map(lambda x, g: x.astype(g.dtype), most, grads)


majority_vote.wire_bytes = lambda shape, dtype: math.prod(shape)
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
