"""Slots under which replicas drift: `--import=tests.support.drifting`."""

import gin
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from research_dp import sync_gradients
from research_dp.distributed.collectives import takes


@gin.register(module="tests")
def not_at_all(grads, axis_names):
    """Each device follows gradients of its own."""
    return grads


@gin.register(module="tests")
def over_data_alone(grads, axis_names):
    return sync_gradients(grads, ("data",))


@gin.register(module="tests")
def over_fsdp_alone(grads, axis_names):
    return sync_gradients(grads, ("fsdp",))


def on_copies(mesh, function):
    """A function of each device's own copy of replicated arrays."""
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


@gin.register(module="tests")
@takes("mesh")
def with_noise(gradients, parameters, optimizer, *, mesh):
    """Adds to the parameters what depends on the device."""

    def noisy(params):
        noise = 1e-3 * jax.lax.axis_index("data").astype("float32")
        return jax.tree.map(lambda x: x + noise, params)

    return on_copies(mesh, noisy)(optimizer.apply_gradients(gradients, parameters))


class Counting:
    """A `sync` whose state is the same on all devices: how often it was called, three times."""

    differs_over = ()

    def init(self, params):
        return jnp.zeros(3, jnp.int32)

    def apply(self, grads, axis_names, *, state):
        return sync_gradients(grads, axis_names), state + 1

    def resize(self, state, devices):
        return state


class Remembering(Counting):
    """A `sync` whose state are a device's own gradients, which it does not declare."""

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def apply(self, grads, axis_names, *, state):
        return sync_gradients(grads, axis_names), grads


class EverySecond(Counting):
    """An `update` that averages parameters each second step, as DiLoCo does more rarely."""

    algorithm = "parameters are averaged each second step"

    @takes("mesh")
    def apply(self, gradients, parameters, optimizer, *, mesh, state):
        new = optimizer.apply_gradients(gradients, parameters)
        is_due = state[0] % 2 == 1
        mean = on_copies(mesh, lambda x: sync_gradients(x, ("data", "fsdp")))(new)
        return jax.tree.map(lambda m, x: jnp.where(is_due, m, x), mean, new), state + 1
