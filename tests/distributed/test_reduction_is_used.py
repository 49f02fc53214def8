"""Sums and gathers of a step are those of its `Reduction`, and none besides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed.sharding import infer_sharding
from research_dp.strategies import TrainSpec, jaxpr_collectives
from tests.support.certified import BATCH, noise, small_model
from tests.support.recipes import recipe
from tests.support.steps import mesh_of, on

CALLS = {
    "ddp": {"all_reduce"},
    "zero1": {"all_reduce", "reduce_scatter", "all_gather"},
    "zero2": {"all_reduce", "reduce_scatter", "all_gather"},
    "fsdp": {"all_reduce", "reduce_scatter", "all_gather"},
    "fsdp_keep": {"all_reduce", "reduce_scatter", "all_gather"},
    "hsdp": {"all_reduce", "reduce_scatter", "all_gather"},
}


def silent(calls):
    """A reduction that notes what it is asked for, and communicates nothing."""

    def all_reduce(x, axes):
        calls.add("all_reduce")
        return x

    def reduce_scatter(x, axis, dim):
        calls.add("reduce_scatter")
        return jax.lax.slice_in_dim(x, 0, x.shape[dim] // jax.lax.axis_size(axis), axis=dim)

    def all_gather(x, axis, dim, to):
        calls.add("all_gather")
        return jnp.concatenate([x] * jax.lax.axis_size(axis), axis=dim)

    return rdp.Reduction(all_reduce, reduce_scatter, all_gather=all_gather)


@pytest.mark.parametrize("stem", CALLS)
def test_every_collective_of_a_step_is_the_reductions(stem):
    calls = set()
    bindings = ("gather_params.bucket_bytes = 1000",) if stem == "hsdp" else ()
    config = dataclasses.replace(recipe(stem, *bindings), reduction=silent(calls))
    spec = TrainSpec(
        model=small_model(),
        optimizer=optax.adam(1e-2),
        example=noise().example,
        batch_size=BATCH,
        max_grad_norm=1.0,
    )
    assert jaxpr_collectives.of_step(config.build(spec)) == []
    assert calls == CALLS[stem]


# Values that vary over the first axis alone: their type says so under `check_vma=True`.


def test_a_scatter_over_two_axes_sums_over_the_one_that_values_vary_on():
    tree = {"w": jnp.arange(16.0).reshape(4, 4)}
    layout = infer_sharding(tree, lambda *_: rdp.ShardDecision(0), 4)

    def scattered(tree):
        varying = jax.tree.map(lambda x: x * (1.0 + jax.lax.axis_index("a")), tree)
        return rdp.scatter_mean_tree(varying, layout, axis=("a", "b"))

    found = on(mesh_of(a=2, b=2), scattered, P(), P(("a", "b")), check_vma=True)(tree)
    np.testing.assert_array_equal(found["w"], 1.5 * tree["w"])


def test_an_update_over_two_axes_where_autodiff_has_summed_over_one():
    params, x = {"w": jnp.ones((3, 5))}, jnp.arange(8.0)
    transform = optax.sgd(0.5)

    def update(params, opt_state, x):
        varying = jax.lax.pcast(params, "a", to="varying")
        value, grads = jax.value_and_grad(lambda p: jnp.mean(x) * jnp.sum(p["w"]))(varying)
        return rdp.fsdp_update(grads, params, transform, opt_state, loss=value)[0]

    opt_state = transform.init(params)
    specs = (P(), P(), P(("a", "b")))
    found = on(mesh_of(a=2, b=2), update, specs, P(), check_vma=True)(params, opt_state, x)
    np.testing.assert_allclose(found["w"], 1 - 0.5 * 3.5, rtol=1e-6)
