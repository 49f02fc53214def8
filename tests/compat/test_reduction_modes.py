"""The table of modes in docs/api_nnx.md, row by row; case 21 has its first one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import research_dp
from research_dp import reduce_gradients_across_devices as reduce_across
from tests.support.steps import MODES, linear_and, mean_squares, squares, stacked_state


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_replicated_parameters_are_summed_once(mode):
    """The mean over 16 examples of w * x is w * 7.5; `lax.pmean` gives 60 under check_vma=True."""
    x = jnp.arange(16.0).reshape(8, 2)

    def reduced(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(w * x))(w)
        tree = {"w": gradient}
        return reduce_across(tree, loss=loss)["w"], reduce_across(tree, "sum")["w"]

    mean, total = MODES[mode](reduced, jnp.ones(()), x, in_axes=(None, 0))
    np.testing.assert_array_equal(mean, np.full(8, 7.5))
    np.testing.assert_array_equal(total, np.full(8, 60.0))


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_is_right_for_a_loss_that_was_averaged_before_if_it_is_shown(mode):
    def reduced(w, x, reduce_type="mean"):
        averaged = lambda w: jax.lax.pmean(jnp.mean(w * x), "batch")  # noqa: E731
        loss, gradient = jax.value_and_grad(averaged)(w)
        return reduce_across(gradient, reduce_type, loss=loss)

    arguments = jnp.ones(()), jnp.arange(16.0).reshape(8, 2)
    found = MODES[mode](reduced, *arguments, in_axes=(None, 0))
    np.testing.assert_array_equal(found, np.full(8, 7.5))
    if mode.endswith("=True"):  # elsewhere nothing is known, and nothing wrong
        total = functools.partial(reduced, reduce_type="sum")
        with pytest.raises(ValueError, match=r"same along axes \['batch'\].* sum .* not known"):
            MODES[mode](total, *arguments, in_axes=(None, 0))


@pytest.mark.parametrize("mode", MODES)
def test_what_takes_global_arrays_refuses_to_be_mapped(mode):
    mesh = Mesh(jax.devices(), ("batch",))
    sharding = research_dp.create_data_parallel_sharding(mesh, "batch")
    model, optimizer = linear_and(optax.sgd(0.1))
    sgd = optax.sgd(0.1)
    state = stacked_state(sgd, {"w": jnp.ones((2, 1))})

    def spmd(x):
        batch = {"x": x, "y": jnp.zeros((8, 1))}
        return research_dp.spmd_train_step(model, optimizer, mean_squares, batch)

    def pmapped(x):
        return research_dp.data_parallel_train_step(squares, sgd, {"x": x[:, None]}, state)[0]

    for step in (spmd, pmapped):
        with pytest.raises(ValueError, match=r"_step takes .* inside a map over .*batch"):
            MODES[mode](step, jnp.ones((8, 8, 2)), in_axes=(0,))
    place = functools.partial(research_dp.place_batch_on_shards, sharding=sharding)
    if mode != "vmap":
        with pytest.raises(ValueError):
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
