"""Parameters gathered in int8, each 256 elements with a scale of their own: a slot `gather`.

As in ZeRO++ (Wang et al., 2023, arXiv 2306.10209). Gradients are scattered as under `fsdp`.
"""

import math

import gin
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from research_dp import PLAIN, gather_array_with_mean_grads
from research_dp.distributed.boxed import is_box
from research_dp.distributed.buckets import flatten_padded, unflatten
from research_dp.distributed.collectives import takes
from research_dp.distributed.differentiable_gather import GATHERED

BLOCK = 256


@gin.register
@takes("reduction")
def int8_gather(params, axis_name, *, reduction=PLAIN):
    """Boxed shards -> parameters that were rounded to int8; their gradients are shards of means."""

    def one(box):
        if not is_box(box):
            return box  # replicated
        dim = box.names.index(axis_name)

        def exact(shard):
            return gather_array_with_mean_grads(shard, dim, axis_name, reduction=reduction)

        @jax.custom_vjp
        def gathered(shard):
            blocks, scales = (jax.lax.all_gather(x, axis_name) for x in rounded(shard))
            values = (blocks * scales).astype(shard.dtype)  # (devices, blocks, elements)
            shards = [unflatten(x.ravel(), shard.shape) for x in values]
            # By this name a unit drops what it gathered, and gathers it again.
            return checkpoint_name(jnp.concatenate(shards, dim), GATHERED)

        def backward(shard, gradient):
            return jax.vjp(exact, shard)[1](gradient)  # what it would gather is not computed

        gathered.defvjp(lambda shard: (gathered(shard), shard), backward)
        return gathered(box.value)

    return jax.tree.map(one, params, is_leaf=is_box)


int8_gather.algorithm = "parameters are gathered in int8"
int8_gather.wire_bytes = lambda shape, dtype: -(-math.prod(shape) // BLOCK) * (BLOCK + 4)


def rounded(x):
    """int8 (blocks, 256), and a float32 scale for each block."""
    blocks = flatten_padded(x.astype(jnp.float32), BLOCK).reshape(-1, BLOCK)
    most = jnp.max(jnp.abs(blocks), 1, keepdims=True)
    scales = jnp.where(most == 0, 1, most) / 127  # what is not finite stays so
    return jnp.round(blocks / scales).astype(jnp.int8), scales
