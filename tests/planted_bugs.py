"""Strategies with one bug each, as users write them: in a slot, in the model, or in an engine."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from research_dp.distributed import buckets
from research_dp.distributed.boxed import is_box, leaves_with_paths, value_of, with_value
from research_dp.distributed.collectives import PLAIN, Reduction, takes
from research_dp.strategies import (
    fsdp_apply_gradients,
    mapped,
    scatter_gradients,
    sync_gradients,
)
from research_dp.types import LossOutput


def on_leaf(tree, name, change):
    """The tree with one leaf changed."""
    leaves = dict(leaves_with_paths(tree))
    leaves[name] = with_value(leaves[name], change(value_of(leaves[name])))
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_box), leaves.values())


def place():
    return lax.axis_index(("data", "fsdp"))


# ---- In a slot ----


def summed(grads, axes):
    return jax.tree.map(lambda g: lax.psum(g, axes), grads)


def averaged_twice(grads, axes):
    mean = sync_gradients(grads, axes)
    return jax.tree.map(lambda g: g / lax.axis_size("data"), mean)


def mean_of_sums(grads, axes):
    """Nothing is left to average where autodiff has summed: the mean of equal sums is the sum."""
    return jax.tree.map(lambda g: lax.pmean(g, axes), grads)


def inside_groups_alone(grads, axes):
    return sync_gradients(grads, ("fsdp",))


def cast_on_the_way(grads, axes):
    return sync_gradients(grads, axes, dtype="bfloat16")


def rounded_before(grads, axes):
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grads)
    return sync_gradients(rounded, axes)


def one_dropped(grads, axes):
    return on_leaf(sync_gradients(grads, axes), "hidden_1/bias", jnp.zeros_like)


@takes("shardings")
def one_summed(grads, axes, *, shardings):
    mean = scatter_gradients(grads, axes, shardings=shardings)
    return on_leaf(mean, "head/bias", lambda g: g * lax.axis_size("fsdp"))


def one_shrunk(grads, axes):
    """Less than the rounding of a bfloat16 element, but all one way."""
    return on_leaf(sync_gradients(grads, axes), "hidden_0/kernel", lambda g: g * 0.985)


def _local_norm(x, axes):
    # Sums of squares travel as a vector; gradients in rows, metrics in pairs.
    return x if x.ndim < 2 else PLAIN.all_reduce(x, axes)


local_norm = Reduction(_local_norm, PLAIN.reduce_scatter)


@takes("shardings")
def stale_slices(gradients, parameters, optimizer, *, shardings):
    """What is gathered are shards from before the update; a device's own are new."""
    old = buckets.shard_tree(parameters, shardings)
    new = optimizer.apply_gradients(gradients, old)
    full = buckets.gather_tree(old, shardings)

    def own(x, slice_, p):
        if p.dim is None:
            return slice_
        start = lax.axis_index("fsdp") * slice_.shape[p.dim]
        return lax.dynamic_update_slice_in_dim(x, slice_, start, p.dim)

    return jax.tree.map(own, full, new, shardings)


def one_shard_not_updated(gradients, parameters, optimizer):
    before = optimizer._before.opt_state
    new = optimizer.apply_gradients(gradients, parameters)
    optimizer.state = jax.tree.map(
        lambda a, b: jnp.where(place() == 3, b, a), optimizer.state, before
    )
    return new


@takes("shardings", "averaged")
def decayed(gradients, parameters, optimizer, **options):
    new = fsdp_apply_gradients(gradients, parameters, optimizer, **options)
    return on_leaf(new, "head/kernel", lambda x: x * (1 - 1e-4))


def eightfold(gradients, parameters, optimizer):
    new = optimizer.apply_gradients(gradients, parameters)
    return jax.tree.map(lambda a, b: b + 8 * (a - b), new, parameters)


# ---- In the model ----


def with_loss(model, change):
    """The model with a loss of another's making: change(model's loss, ...)."""
    return dataclasses.replace(model, loss=functools.partial(change, model.loss))


def keys_by_device(loss, params, state, batch, keys, *, train, batch_axes):
    for axis in batch_axes:
        number = lax.axis_index(axis)
        keys = (
            None if keys is None else jax.vmap(lambda k, n=number: jax.random.fold_in(k, n))(keys)
        )
    return loss(params, state, batch, keys, train=train, batch_axes=batch_axes)


def mean_of_means(loss, params, state, batch, keys, *, train, batch_axes):
    out = loss(params, state, batch, keys, train=train, batch_axes=batch_axes)
    rows = jnp.float32(batch["label"].shape[0])
    return LossOutput(out.total / jnp.maximum(out.weight, 1) * rows, rows, out.model_state, {})


def own_statistics(loss, params, state, batch, keys, *, train, batch_axes):
    return loss(params, state, batch, keys, train=train, batch_axes=())


# ---- In an engine ----


def checked_replication(recipe, spec):
    """`check_vma=True`, under which autodiff sums, and a mean of equal sums leaves the sum."""
    tracked = functools.partial(_tracked, jax.shard_map)
    with mock.patch.object(jax, "shard_map", tracked):
        return mapped(recipe, spec)


def _tracked(shard_map, *args, **options):
    return shard_map(*args, **{**options, "check_vma": True})


def micro_batches_summed(recipe, spec):
    def loss(loss, *args, **more):
        out = loss(*args, **more)
        return out._replace(weight=out.weight / spec.accumulation_steps)

    return mapped(recipe, dataclasses.replace(spec, model=with_loss(spec.model, loss)))


def repeated_data(recipe, spec):
    """The second device is given the first one's examples."""
    strategy = mapped(recipe, spec)
    rows = spec.batch_size // strategy.mesh.size

    def place_batch(examples):
        wrong = {name: np.array(x) for name, x in examples.items()}
        for x in wrong.values():
            x[rows : 2 * rows] = x[:rows]
        return strategy.place_batch(wrong)

    return dataclasses.replace(strategy, place_batch=place_batch)


def one_step_behind(recipe, spec):
    """Gradients are taken at the parameters of the call before."""
    strategy = mapped(recipe, spec)
    held = []

    def train_step(state, batch):
        if isinstance(jax.tree.leaves(state.params)[0], jax.core.Tracer):
            return strategy.train_step(state, batch)
        fresh = jax.tree.map(jnp.copy, state)
        held.append(state.params)
        stale = held[0] if len(held) < _CALLS + 1 else held.pop(0)
        at_old, metrics = strategy.train_step(
            fresh._replace(params=jax.tree.map(jnp.copy, stale)), batch
        )
        moved = jax.tree.map(
            lambda p, new, old: p + (new - old), state.params, at_old.params, stale
        )
        return at_old._replace(params=moved), metrics

    return dataclasses.replace(strategy, train_step=train_step)


_CALLS = 2  # the step before is so many calls ago: one from the oracle's state, one in a row


def drifting(recipe, spec, *, by=1.5):
    """Parameters that it made itself are scaled before they are used."""
    strategy, made = mapped(recipe, spec), []

    def train_step(state, batch):
        leaf = jax.tree.leaves(state.params)[0]
        if any(leaf is one for one in made):
            state = state._replace(params=jax.tree.map(lambda x: x * by, state.params))
        new, metrics = strategy.train_step(state, batch)
        made.append(jax.tree.leaves(new.params)[0])
        return new, metrics

    return dataclasses.replace(strategy, train_step=train_step)


def keyed_by_device(recipe, spec):
    """Initial parameters of a key of its own."""
    strategy = mapped(recipe, spec)
    return dataclasses.replace(
        strategy, init=lambda key: strategy.init(jax.random.fold_in(key, strategy.mesh.size))
    )
