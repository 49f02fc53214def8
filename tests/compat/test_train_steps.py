"""What train steps and placements take: each kind of model, optimizer, state, mesh and batch."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import research_dp
from research_dp import UsageError

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - jnp.cos(batch["x"])) ** 2)


class Normalised(nnx.Module):
    """A model whose step changes parameters and statistics."""

    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x) + 1.0)


def trained(batch, spec=None, mesh=None, optimizer=nnx.Optimizer, wrt=nnx.Param):
    """Losses of three steps, and the model after them."""
    model = Normalised()
    if spec is not None:
        filters = {nnx.Param: spec, ...: P()}
        nnx.update(model, research_dp.place_nnx_state_on_shards(nnx.state(model), mesh, filters))
    state = optimizer(model, optax.sgd(0.1, 0.9), wrt=wrt)

    @nnx.jit
    def step(model, state, batch):
        return research_dp.spmd_train_step(model, state, loss_fn, batch, max_grad_norm=0.5)

    return [step(model, state, batch) for _ in range(2)], model


@pytest.fixture(scope="module")
def one_device():
    return trained({"x": X})


@pytest.mark.parametrize(
    ("spec", "in_context"), [(None, False), (P(), False), (P(), True), (P("data"), False)]
)
def test_spmd_numbers_are_those_of_one_device(any_mesh, spec, in_context, one_device):
    expected, one = one_device
    sharding = research_dp.create_data_parallel_sharding(any_mesh)
    batch = research_dp.place_batch_on_shards({"x": X}, sharding)
    with jax.set_mesh(any_mesh) if in_context else contextlib.nullcontext():
        losses, model = trained(batch, spec, any_mesh)
    assert all(loss.ndim == 0 for loss in losses)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, map(nnx.state, (model, one))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    if spec:
        assert model.linear.kernel[...].addressable_shards[0].data.shape == (1, 8)


def test_spmd_trains_some_parameters_where_all_are_sharded_over_the_axis_of_the_batch():
    mesh = jax.make_mesh((8,), ("data",))
    batch = jax.device_put({"x": X}, jax.NamedSharding(mesh, P("data")))
    wrt = nnx.All(nnx.Param, nnx.PathContains("norm"))
    expected, one = trained({"x": X}, wrt=wrt)
    losses, model = trained(batch, P("data"), mesh, wrt=wrt)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(model.norm.scale, one.norm.scale, rtol=1e-4)
    assert model.linear.kernel[...].addressable_shards[0].data.shape == (1, 8)


def test_spmd_takes_an_optimizer_with_its_own_model_and_no_other(one_device):
    expected, _ = one_device
    losses, model = trained({"x": X}, optimizer=nnx.ModelAndOptimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    other = nnx.ModelAndOptimizer(Normalised(), optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(UsageError, match="a ModelAndOptimizer of another model"):
        research_dp.spmd_train_step(model, other, loss_fn, {"x": X})


def test_spmd_names_arrays_that_are_committed_to_different_devices(any_mesh):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    sharding = research_dp.create_data_parallel_sharding(any_mesh)
    batch = research_dp.place_batch_on_shards({"x": X}, sharding)
    with pytest.raises(UsageError, match=r"batch/x is on 8 devices and model/bias on 1"):
        research_dp.spmd_train_step(model, optimizer, loss_fn, batch)


def test_a_batch_keeps_its_text_and_objects(any_mesh):
    sharding = research_dp.create_data_parallel_sharding(any_mesh)
    batch = {
        "x": X,
        "key": jax.random.split(jax.random.key(0), 16),
        "files": np.array(["a.png"] * 3),
        "captions": np.array([None, "a caption"], object),
        "dates": np.array(["2026-01-01"], "datetime64[D]"),
        "no_gradient": np.zeros(3, jax.dtypes.float0),
    }
    placed = research_dp.place_batch_on_shards(batch, sharding)
    assert {name for name in batch if placed[name] is batch[name]} == set(batch) - {"x", "key"}
    assert placed["x"].addressable_shards[0].data.shape == (2, 8)
    assert placed["key"].addressable_shards[0].data.shape == (2,)


def pmap_step(batch, **options):
    sgd = optax.sgd(0.1)
    params = {"w": jnp.ones((3, 1))}
    state = jax_utils.replicate(TrainState.create(apply_fn=None, params=params, tx=sgd))

    def squares(variables, batch):
        return jnp.mean((batch["x"] @ variables["params"]["w"]) ** 2)

    return research_dp.data_parallel_train_step(squares, sgd, batch, state, **options)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({}, {}, "batch = {} has no leaves"),
        ({"x": np.ones((0, 2, 3))}, {}, r"leaf 'x' of shape \(0, 2, 3\) needs a first dim"),
        ({"x": np.ones((8, 0, 3))}, {}, r"'batch/x' of shape \(8, 0, 3\) has no rows"),
        ({"x": np.ones((8, 2, 3)), "y": np.ones(4)}, {}, "leaf 'y' .* 8 like the first leaf"),
        ({"x": np.ones((8, 2, 3))}, {"rngs": 0}, "rngs = 0. Give single random keys"),
    ],
)
def test_the_pmap_step_refuses_what_it_cannot_train_on(batch, options, message):
    with pytest.raises(UsageError, match=message):
        pmap_step(batch, **options)


def test_rules_give_the_axes_of_an_array():
    rules = research_dp.MeshRules(data="dp", embed="mp")
    assert (rules.data, rules.embed, rules.mlp, rules.heads) == ("dp", "mp", None, None)
    assert rules("data", "heads", "embed") == ("dp", None, "mp")
    assert rules() == ()
    assert research_dp.data_parallel_rules("batch")("heads", "data") == (None, "batch")
    with pytest.raises(AttributeError):
        rules.data = "other"
    with pytest.raises(AttributeError):
        rules("unknown")
    with pytest.raises(UsageError, match=r"MeshRules.data = 3: give a string, or None"):
        research_dp.MeshRules(data=3)


def test_padding_counts_dims_from_the_end_too():
    x = jnp.ones((2, 3))
    assert research_dp.pad_to_multiple(x, 4, -1).shape == (2, 4)
    assert research_dp.unpad(research_dp.pad_to_multiple(x, 4, -1), 3, -1).shape == (2, 3)
    with pytest.raises(UsageError, match=r"unpad.length = 4 is more than dim 1 of \(2, 3\) has"):
        research_dp.unpad(x, 4, 1)
