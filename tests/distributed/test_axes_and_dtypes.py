"""Axes that are named twice and dtypes that cannot carry a sum or a parameter are refused."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import research_dp as rdp
import research_dp.training.train
from research_dp.config import load
from research_dp.distributed.collectives import Wire
from research_dp.distributed.differentiable_gather import GatherOptions, gather_tree_with_mean_grads
from research_dp.distributed.sharding import infer_sharding
from research_dp.distributed.units import exchange_rows, take_rows
from tests.support.certified import EXAMPLE, batches
from tests.support.plain_models import with_own_loss
from tests.support.recipes import recipe
from tests.support.steps import abstract, mesh_of, on

W = jnp.ones((16, 4))
TWICE = ("fsdp", "fsdp")


LATER = {
    "shard_module_params": lambda axes: rdp.shard_module_params(nn.Dense, axes)(4).init(
        jax.random.key(0), W
    ),
    "shard_nnx_module_params": lambda axes: nnx.state(
        rdp.shard_nnx_module_params(nnx.Linear, axes)(4, 4, rngs=nnx.Rngs(0))
    ),
}


# Functions that use their arguments at once are in tests/repository/test_calls.py, all of them.
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("axes", [TWICE, ["fsdp", ("fsdp",)]], ids=["flat", "nested"])
def test_an_axis_that_is_named_twice(name, axes):
    with pytest.raises(rdp.UsageError, match="named twice"):
        abstract(mesh_of(fsdp=8), lambda: LATER[name](axes))


@pytest.mark.parametrize("dtype", ["int8", jnp.uint32, bool, "complex64", "float33"])
def test_a_dtype_that_is_not_floating_point(dtype):
    with pytest.raises(rdp.UsageError, match=r"\.dtype = .*: give a floating-point dtype"):
        abstract(mesh_of(fsdp=8), lambda: rdp.sync_gradients(W, "fsdp", dtype=dtype))


def test_parameters_that_are_integers_are_still_gathered():
    def function():
        return rdp.gather_params(rdp.shard_params(jnp.arange(16), "fsdp", 0), "fsdp")

    assert abstract(mesh_of(fsdp=8), function).dtype == jnp.int32


Z = jnp.arange(32, dtype=jnp.float32).reshape(8, 4) * (3 + 4j)
BF16 = {"gather_dtype": "bfloat16", "grad_scatter_dtype": "bfloat16"}
OPTION_ON_COMPLEX = {
    "all_mean": lambda z: rdp.all_mean(z, "fsdp", dtype="float32"),
    "all_mean_tree": lambda z: rdp.all_mean_tree(z, "fsdp", dtype="bfloat16"),
    "sync_gradients": lambda z: rdp.sync_gradients(z, "fsdp", dtype="bfloat16"),
    "scatter_mean": lambda z: jnp.sum(
        rdp.all_mean(rdp.scatter_mean(jnp.tile(z, (8, 1)), 0, "fsdp", dtype="float32"), "fsdp"), 0
    )[None],
    "accumulate_gradients": lambda z: rdp.all_mean(
        rdp.accumulate_gradients(
            lambda w, x: jnp.sum(jnp.real(w * z)) * x, z, jnp.ones(2), dtype="bfloat16"
        )[1],
        "fsdp",
    ),
}


@pytest.mark.parametrize("name", OPTION_ON_COMPLEX)
def test_a_sum_of_complex_arrays_keeps_the_imaginary_part(name):
    found = on(mesh_of(fsdp=8), OPTION_ON_COMPLEX[name], P("fsdp"))(Z)
    assert jnp.allclose(found, jnp.mean(Z, 0, keepdims=True), rtol=1e-6), found


def gathered_by_tree(x):
    layout = infer_sharding(
        [jax.ShapeDtypeStruct((64,), x.dtype)], lambda *_: rdp.ShardDecision(0), 8
    )
    options = GatherOptions(0, "fsdp", "bfloat16", Wire(dtype="bfloat16", bucket_bytes=64))
    return gather_tree_with_mean_grads([x], layout, options)[0]


GATHERS = {
    "gather_array": lambda x: rdp.gather_array_with_mean_grads(x, 0, "fsdp", **BF16),
    "gather_params": lambda x: rdp.gather_params(nn.Partitioned(x, ("fsdp",)), "fsdp", **BF16),
    "tree": gathered_by_tree,
    "rows": lambda x: jnp.concatenate(
        exchange_rows(
            x[None].reshape(1, 8),
            jnp.zeros(1, int),
            GatherOptions(1, "fsdp", "bfloat16", Wire(dtype="bfloat16")),
        )
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_keeps_complex_arrays_and_integers(name):
    mesh = mesh_of(fsdp=8)
    for x in (1001 * jnp.arange(64), jnp.arange(64) * (1.001 + 1j)):
        assert jnp.array_equal(on(mesh, GATHERS[name], P("fsdp"))(x), x)
    if name == "rows":
        return  # each device's gradient there is that of rows of all devices

    def loss(x):
        return jnp.sum(jnp.abs(GATHERS[name](x) - 1j) ** 2)

    z = jnp.arange(64) * (1.001 + 1j)
    found = on(mesh, jax.grad(loss), P("fsdp"), P("fsdp"))(z)
    assert jnp.allclose(found, jax.grad(lambda z: jnp.sum(jnp.abs(z - 1j) ** 2))(z))


def test_rows_of_a_complex_table_have_complex_gradients():
    table = jnp.arange(8.0).reshape(4, 2) * (1 + 2j)
    gradient = jax.grad(lambda t, take: jnp.sum(jnp.abs(take(t)) ** 2))
    rows = jnp.array([1, 1, 3])
    found = gradient(table, lambda t: take_rows(t, rows))
    assert jnp.allclose(found, gradient(table, lambda t: t[rows]))


def test_gradients_of_micro_batches_are_added_in_the_dtype_that_is_named():
    """In bfloat16 a sum of ones ends at 256."""
    ones = jnp.ones((1000, 4), jnp.bfloat16)
    mean = functools.partial(rdp.accumulate_gradients, lambda w, x: jnp.sum(w * x), ones[0], ones)
    _, found = mean(dtype="float32")
    assert found.dtype == ones.dtype and jnp.array_equal(found, ones[0])
    assert not jnp.array_equal(mean()[1], ones[0])


def complex_weights(stem, *bindings):
    """What one step of a linear model with complex weights makes of them."""

    def init(key, batch):
        return {"w": jnp.full((16, 16), 1 + 1j, jnp.complex64)}, {}

    def apply(params, model_state, x, keys, train):
        x = x.reshape(x.shape[0], -1)
        return jnp.real(x @ (params["w"] * (1 - 0.5j))), model_state

    load.reset()
    model = with_own_loss(init, apply)
    spec = rdp.TrainSpec(model=model, optimizer=optax.sgd(0.1), example=EXAMPLE, batch_size=16)
    strategy = recipe(stem, *bindings).build(spec)
    examples = {name: x[strategy.train_rows] for name, x in batches(16)[0].items()}
    state = strategy.init(jax.random.key(0))
    return strategy.train_step(state, strategy.place_batch(examples))[0].params["w"]


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("ddp", ("sync_gradients.dtype",)),
        ("fsdp", ("gather_params.gather_dtype", "gather_params.grad_scatter_dtype")),
    ],
)
def test_a_strategy_in_bfloat16_trains_complex_parameters(stem, options):
    options = (*options, "data_parallel.param_dtype")
    expected = complex_weights(stem)
    found = complex_weights(stem, *(f"{option} = 'bfloat16'" for option in options))
    assert found.dtype == jnp.complex64 and not jnp.array_equal(expected, expected[0, 0])
    assert jnp.allclose(found, expected, rtol=1e-6), (found, expected)
