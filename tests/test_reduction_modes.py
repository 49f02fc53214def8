"""The table of modes in docs/api_nnx.md, row by row; case 21 has its first one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from steps import MODES, linear_and, mean_squares

import research_dp
from research_dp import reduce_gradients_across_devices as reduce_across


def own_loss_gradient(w, x):
    return reduce_across({"w": jax.grad(lambda w: jnp.mean(w * x))(w)})["w"]


@pytest.mark.parametrize("mode", [m for m in MODES if m != "shard_map, check_vma=True"])
def test_gradients_of_replicated_parameters_are_averaged_once(mode):
    """The mean over 16 examples of w * x is w * 7.5."""
    x = jnp.arange(16.0).reshape(8, 2)
    found = MODES[mode](own_loss_gradient, jnp.ones(()), x, in_axes=(None, 0))
    np.testing.assert_array_equal(found, np.full(8, 7.5))


def test_gradients_that_jax_summed_already_are_refused():
    """Under check_vma=True `lax.pmean` would leave the sum, 60, which is 8 times too much."""
    x, run = jnp.arange(16.0).reshape(8, 2), MODES["shard_map, check_vma=True"]
    with pytest.raises(ValueError, match=r"gradient 'w' is the same .*'batch'.*pcast.*check_vma"):
        run(own_loss_gradient, jnp.ones(()), x, in_axes=(None, 0))

    def mended(w, x):
        return own_loss_gradient(jax.lax.pcast(w, "batch", to="varying"), x)

    for mode in ("shard_map, check_vma=True", "shard_map, check_vma=False"):
        found = MODES[mode](mended, jnp.ones(()), x, in_axes=(None, 0))
        np.testing.assert_array_equal(found, np.full(8, 7.5))


@pytest.mark.parametrize("mode", [m for m in MODES if m != "vmap"])
def test_what_takes_global_arrays_refuses_to_be_mapped(mode):
    mesh = Mesh(jax.devices(), ("batch",))
    sharding = research_dp.create_data_parallel_sharding(mesh, "batch")
    model, optimizer = linear_and(optax.sgd(0.1))

    def step(x):
        batch = {"x": x, "y": jnp.zeros((8, 1))}
        return research_dp.spmd_train_step(model, optimizer, mean_squares, batch)

    with pytest.raises(ValueError, match=r"inside a map over .*batch"):
        MODES[mode](step, jnp.ones((8, 8, 2)), in_axes=(0,))
    with pytest.raises(ValueError):
        place = functools.partial(research_dp.place_batch_on_shards, sharding=sharding)
        MODES[mode](place, jnp.ones((8, 8, 2)), in_axes=(0,))


@pytest.mark.parametrize("mode", MODES)
def test_tree_reduction_is_of_what_the_mode_sees(mode):
    blocks = jnp.arange(16.0).reshape(8, 2)
    found = MODES[mode](research_dp.reduce_gradient_tree, blocks, in_axes=(0,))
    np.testing.assert_array_equal(found, blocks.mean(axis=1))


def test_reduction_over_several_axes():
    two = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("dp", "fsdp"))
    for axes, expected in ((("dp", "fsdp"), [3.5] * 8), ("dp", [2, 3, 4, 5] * 2)):
        found = jax.shard_map(
            functools.partial(reduce_across, axis_name=axes),
            mesh=two,
            in_specs=P(("dp", "fsdp")),
            out_specs=P(("dp", "fsdp")),
            check_vma=False,
        )(jnp.arange(8.0))
        np.testing.assert_array_equal(found, expected)
