"""A step of `lm_tiny` in the formulation of xlstm-jax, written from its documentation.

`lm_peers.py` compares with it. Inside `jax.shard_map`, each module gathers its large weights when
it is called. The gather's gradient is the mean over the processes, scattered. The gathered weights
are kept for the backward pass.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import Partitioned
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_by_hand import CLIP, OPTIMIZER, WIDTH, block, norm

AXIS, MIN_WEIGHT_SIZE = "data", 1024


def is_box(x):
    return isinstance(x, Partitioned)


def names_of(shape, devices):
    """Names the largest dim that divides by `devices`, or none of a small weight."""
    dims = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim), reverse=True)
    fitting = [dim for dim in dims if shape[dim] % devices == 0]
    if np.prod(shape) <= MIN_WEIGHT_SIZE or not fitting:
        return None
    return tuple(AXIS if dim == fitting[0] else None for dim in range(len(shape)))


def boxed(weights, devices):
    """Boxes each weight to partition. Names are those of one block, without the stacked dim."""

    def box(path, x):
        names = names_of(x.shape[path[0].key == "blocks" :], devices)
        return x if names is None else Partitioned(x, names)

    return jax.tree_util.tree_map_with_path(box, weights)


def spec_of(x):
    """Returns the spec of a weight, or a tree like its box."""
    if not is_box(x):
        return P()
    stacked = [None] * (x.value.ndim - len(x.names))
    return x.replace(value=P(*stacked, *x.names))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_with_mean_gradients(x, dim):
    return lax.all_gather(x, AXIS, axis=dim, tiled=True)


def scatter_mean(dim, _, g):
    total = lax.psum_scatter(g, AXIS, scatter_dimension=dim, tiled=True)
    return (total / lax.axis_size(AXIS),)


gather_with_mean_gradients.defvjp(
    lambda x, dim: (gather_with_mean_gradients(x, dim), None), scatter_mean
)


def gathered(x):
    """Returns the whole weight."""
    return gather_with_mean_gradients(x.value, x.names.index(AXIS)) if is_box(x) else x


def loss(weights, tokens):
    def layer(x, shards):
        return block(x, jax.tree.map(gathered, shards, is_leaf=is_box)), None

    table = gathered(weights["embed"])
    x, _ = lax.scan(layer, table[tokens] * WIDTH**0.5, weights["blocks"], unroll=True)
    logits = norm(x, gathered(weights["norm"])) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def clipped(grads):
    """Clips by the global norm; squares of partitioned gradients are summed over the axis."""
    leaves = jax.tree.leaves(grads, is_leaf=is_box)
    squares = sum(jnp.sum(g.value**2) for g in leaves if is_box(g))
    total = lax.psum(squares, AXIS) + sum(jnp.sum(g**2) for g in leaves if not is_box(g))
    return jax.tree.map(lambda g: g * CLIP / jnp.maximum(CLIP, jnp.sqrt(total)), grads)


def step(weights, state, tokens):
    value, grads = jax.value_and_grad(loss)(weights, tokens)
    grads = jax.tree.map(lambda g: g if is_box(g) else lax.pmean(g, AXIS), grads, is_leaf=is_box)
    updates, state = OPTIMIZER.update(clipped(grads), state, weights)
    return optax.apply_updates(weights, updates), state, lax.pmean(value, AXIS)


def build(mesh, weights):
    """Returns (placed weights and optimizer state, compiled step)."""
    weights = boxed(weights, mesh.size)
    specs = jax.tree.map(spec_of, weights, is_leaf=is_box)
    state_specs = optax.tree_map_params(
        OPTIMIZER,
        lambda _, spec: spec,
        jax.eval_shape(OPTIMIZER.init, weights),
        specs,
        transform_non_params=lambda _: P(),
    )
    ins, outs = (specs, state_specs, P(AXIS)), (specs, state_specs, P())
    to_place = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (specs, state_specs), is_leaf=lambda x: type(x) is P
    )
    weights = jax.device_put(weights, to_place[0])
    state = jax.jit(OPTIMIZER.init, out_shardings=to_place[1])(weights)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return (weights, state), jax.jit(mapped, donate_argnums=(0, 1))
