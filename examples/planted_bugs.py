"""Strategies with one bug each: in a slot, in the model, or in an engine.

docs/spot_the_bug.md shows some of them, with what `certify` says. examples/bugs/ has their gin
files. The tests of `certify` use all of them.
"""

import dataclasses
import functools
import inspect
from unittest import mock

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from research_dp.distributed import buckets
from research_dp.distributed.boxed import is_box, leaves_with_paths, value_of, with_value
from research_dp.distributed.collectives import PLAIN, Reduction, takes
from research_dp.distributed.optimizer import map_state
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


def on_devices(mesh, function, in_specs, out_specs):
    """A function of what each device has."""
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def device():
    """The position of this device on the mesh."""
    return lax.axis_index(("data", "fsdp"))


# ---- In a slot ----


@gin.register
def summed(grads, axes):
    """The mean over the devices."""
    return jax.tree.map(lambda g: lax.psum(g, axes), grads)


def averaged_twice(grads, axes):
    """A mean of means."""
    mean = sync_gradients(grads, axes)
    return jax.tree.map(lambda g: g / lax.axis_size("data"), mean)


def mean_of_sums(grads, axes):
    """Nothing is left to average where autodiff has summed: the mean of equal sums is the sum."""
    return jax.tree.map(lambda g: lax.pmean(g, axes), grads)


@gin.register
def inside_groups_alone(grads, axes):
    """The mean over the devices of a group, then over the groups."""
    return sync_gradients(grads, ("fsdp",))


def cast_on_the_way(grads, axes):
    """Rounds what is communicated, which nothing in the configuration names."""
    return sync_gradients(grads, axes, dtype="bfloat16")


@gin.register
def rounded_before(grads, axes):
    """The mean over the devices."""
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grads)
    return sync_gradients(rounded, axes)


@gin.register
def one_dropped(grads, axes):
    """The mean over the devices, with a parameter frozen for an experiment long ago."""
    return on_leaf(sync_gradients(grads, axes), "hidden_1/bias", jnp.zeros_like)


@takes("shardings")
def one_summed(grads, axes, *, shardings):
    """One gradient is not divided by the number of devices."""
    mean = scatter_gradients(grads, axes, shardings=shardings)
    return on_leaf(mean, "head/bias", lambda g: g * lax.axis_size("fsdp"))


def one_shrunk(grads, axes):
    """Less than the rounding of a bfloat16 element, but all one way."""
    return on_leaf(sync_gradients(grads, axes), "hidden_0/kernel", lambda g: g * 0.985)


def _all_reduce(x, axes):
    # Sums of squares are a vector; gradients have rows, metrics pairs.
    return x if x.ndim < 2 else PLAIN.all_reduce(x, axes)


@gin.register
def local_norm():
    """Collectives that leave out the norm's: each device clips by the norm of its own shards."""
    return Reduction(_all_reduce, PLAIN.reduce_scatter)


@gin.register
@takes("shardings", "mesh")
def stale_slices(gradients, parameters, optimizer, *, shardings, mesh):
    """Updates the local slice of each parameter, and all-gathers the slices."""
    slices = jax.tree.map(lambda p: p.spec, shardings)

    def gathered(new, old):
        def own(x, slice_, p):
            if p.dim is None:
                return slice_
            start = lax.axis_index("fsdp") * slice_.shape[p.dim]
            return lax.dynamic_update_slice_in_dim(x, slice_, start, p.dim)

        full = buckets.gather_tree(buckets.shard_tree(old, shardings), shardings)
        return jax.tree.map(own, full, new, shardings)

    gather = on_devices(mesh, gathered, (slices, PartitionSpec()), PartitionSpec())
    return gather(optimizer.apply_gradients(gradients, parameters), parameters)


@takes("shardings", "mesh")
def one_shard_not_updated(gradients, parameters, optimizer, *, shardings, mesh):
    """Device 3 keeps its old optimizer state."""
    held = inspect.getclosurevars(optimizer.apply_gradients).nonlocals
    before = held["state"].opt_state
    new = optimizer.apply_gradients(gradients, parameters)
    after = held["opt_states"].pop()

    def kept(after, before):
        return jax.tree.map(lambda a, b: jnp.where(device() == 3, b, a), after, before)

    specs = map_state(lambda _, p: p.spec, after, shardings, lambda _: PartitionSpec())
    held["opt_states"].append(on_devices(mesh, kept, (specs, specs), specs)(after, before))
    return new


@gin.register
@takes("shardings", "mesh")
def decayed(gradients, parameters, optimizer, **options):
    """A weight decay besides the optimizer's."""
    new = fsdp_apply_gradients(gradients, parameters, optimizer, **options)
    return on_leaf(new, "head/kernel", lambda x: x * (1 - 1e-4))


def eightfold(gradients, parameters, optimizer):
    """The learning rate times the number of devices."""
    new = optimizer.apply_gradients(gradients, parameters)
    return jax.tree.map(lambda a, b: b + 8 * (a - b), new, parameters)


# ---- In the model ----


def with_loss(model, change):
    """The model with another loss: change(model's loss, ...)."""
    return dataclasses.replace(model, loss=functools.partial(change, model.loss))


@gin.register
def model_with_own_keys(model):
    """The model, with dropout masks that differ from device to device.

    Args:
        model: Any model with dropout.
    """
    return with_loss(model, keys_by_device)


def keys_by_device(loss, params, state, batch, keys, *, train, batch_axes):
    """Folds the number of the device into the key of each example."""
    for axis in batch_axes if keys is not None else ():
        number = lax.axis_index(axis)
        keys = jax.vmap(lambda key, n=number: jax.random.fold_in(key, n))(keys)
    return loss(params, state, batch, keys, train=train, batch_axes=batch_axes)


def mean_of_means(loss, params, state, batch, keys, *, train, batch_axes):
    """Each device counts alike, whatever the number of its examples that count."""
    out = loss(params, state, batch, keys, train=train, batch_axes=batch_axes)
    rows = jnp.float32(batch["label"].shape[0])
    return LossOutput(out.total / jnp.maximum(out.weight, 1) * rows, rows, out.model_state, {})


def own_statistics(loss, params, state, batch, keys, *, train, batch_axes):
    """Batch statistics of each device's own examples."""
    return loss(params, state, batch, keys, train=train, batch_axes=())


# ---- In an engine ----


def checked_replication(config, spec):
    """`check_vma=True`, under which autodiff sums, and a mean of equal sums leaves the sum."""
    tracked = functools.partial(_tracked, jax.shard_map)
    with mock.patch.object(jax, "shard_map", tracked):
        return mapped(config, spec)


def _tracked(shard_map, *args, **options):
    return shard_map(*args, **{**options, "check_vma": True})


def micro_batches_summed(config, spec):
    """An engine that adds up the gradients of the micro-batches."""

    def loss(loss, *args, **more):
        out = loss(*args, **more)
        return out._replace(weight=out.weight / spec.accumulation_steps)

    return mapped(config, dataclasses.replace(spec, model=with_loss(spec.model, loss)))


def repeated_data(config, spec):
    """The second device gets the first one's examples."""
    strategy = mapped(config, spec)
    rows = spec.batch_size // strategy.mesh.size

    def place_batch(examples):
        wrong = {name: np.array(x) for name, x in examples.items()}
        for x in wrong.values():
            x[rows : 2 * rows] = x[:rows]
        return strategy.place_batch(wrong)

    return dataclasses.replace(strategy, place_batch=place_batch)


def one_step_behind(config, spec):
    """Gradients are taken at the parameters of the call before."""
    strategy = mapped(config, spec)
    seen = []

    def train_step(state, batch):
        if isinstance(jax.tree.leaves(state.params)[0], jax.core.Tracer):
            return strategy.train_step(state, batch)
        fresh = jax.tree.map(jnp.copy, state)
        seen.append(state.params)
        stale = seen[0] if len(seen) < _CALLS + 1 else seen.pop(0)
        at_old, metrics = strategy.train_step(
            fresh._replace(params=jax.tree.map(jnp.copy, stale)), batch
        )
        moved = jax.tree.map(
            lambda p, new, old: p + (new - old), state.params, at_old.params, stale
        )
        return at_old._replace(params=moved), metrics

    return dataclasses.replace(strategy, train_step=train_step)


_CALLS = 2  # the step before is so many calls ago: one from the reference's state, one free-running


def drifting(config, spec, *, by=1.5):
    """Parameters that it made itself are scaled before they are used."""
    strategy, made = mapped(config, spec), []

    def train_step(state, batch):
        leaf = jax.tree.leaves(state.params)[0]
        if any(leaf is one for one in made):
            state = state._replace(params=jax.tree.map(lambda x: x * by, state.params))
        new, metrics = strategy.train_step(state, batch)
        made.append(jax.tree.leaves(new.params)[0])
        return new, metrics

    return dataclasses.replace(strategy, train_step=train_step)


def keyed_by_device(config, spec):
    """Initial parameters of a key of its own."""
    strategy = mapped(config, spec)

    def init(key, initial=None):
        return strategy.init(jax.random.fold_in(key, strategy.mesh.size), initial)

    return dataclasses.replace(strategy, init=init)
