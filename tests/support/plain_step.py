"""A training step written out with jax and optax alone: what every strategy must compute.

Imports nothing of this package, so that it has none of its mistakes.
"""

import jax
import jax.numpy as jnp
import optax

FEATURES, WIDTH, CLASSES, MOMENTUM = 16, 32, 10, 0.9


def parameters(key):
    first, last = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (FEATURES, WIDTH)) / 4,
        "scale": jnp.ones((WIDTH,)),
        "bias": jnp.zeros((WIDTH,)),
        "last": jax.random.normal(last, (WIDTH, CLASSES)) / 6,
    }


def statistics():
    return {"mean": jnp.zeros((WIDTH,)), "var": jnp.ones((WIDTH,))}


def network(params, stats, batch, average=lambda x: x):
    """(sum of the losses that count, how many count, new statistics) of a micro-batch.

    Shifts by the running mean, so that gradients depend on the statistics that it was given.
    """
    hidden = batch["x"] @ params["first"]
    mean = average(hidden.mean(0, keepdims=True))
    var = average(((hidden - mean) ** 2).mean(0, keepdims=True))
    normed = (hidden - mean + 0.1 * stats["mean"][None]) / jnp.sqrt(var + 1e-3)
    normed = normed * params["scale"][None] + params["bias"][None]
    logits = jnp.tanh(normed) @ params["last"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    found = {"mean": mean[0], "var": var[0]}
    new = jax.tree.map(lambda a, b: MOMENTUM * a + (1 - MOMENTUM) * b, stats, found)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]), new


@jax.jit
def gradients(params, stats, batch):
    """((sum of losses, (how many, new statistics)), gradients of the sum)."""

    def loss(params):
        value, weight, new = network(params, stats, batch)
        return value, (weight, new)

    return jax.value_and_grad(loss, has_aux=True)(params)


def step(params, stats, opt_state, batch, optimizer, micro_batches, max_norm):
    """One step on one device; also returns the mean loss and the norm before clipping."""
    rows = len(batch["y"]) // micro_batches
    total, count, before = 0.0, 0.0, (params, stats, opt_state)
    sums = jax.tree.map(jnp.zeros_like, params)
    for i in range(micro_batches):
        micro = {name: x[i * rows : (i + 1) * rows] for name, x in batch.items()}
        (value, (weight, stats)), grads = gradients(params, stats, micro)
        total, count = total + value, count + weight
        sums = jax.tree.map(jnp.add, sums, grads)
    if not count:  # of none nothing is learnt: no momentum, no statistics
        return *before, (total, count, 0.0)
    # All examples that count are averaged over, whatever micro-batch they are in.
    mean = jax.tree.map(lambda g: g / count, sums)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(mean)))
    if norm > max_norm:
        mean = jax.tree.map(lambda g: g * max_norm / norm, mean)
    updates, opt_state = optimizer.update(mean, opt_state, params)
    params = jax.tree.map(jnp.add, params, updates)
    return params, stats, opt_state, (total, count, norm)
