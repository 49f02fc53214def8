"""What the train steps of datarax have here beside what the seed has, and other edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import research_dp
from research_dp.strategies.jaxpr_collectives import collectives as read
from tests.support.steps import linear_and, regression, sgd_step, squares, stacked_state


def test_spmd_step_has_aux_rngs_and_clipping(mesh):
    def loss_fn(model, batch, rngs):
        keep = jax.random.bernoulli(rngs.dropout(), 0.5, batch["x"].shape)
        y = model(batch["x"] * keep)
        return jnp.mean((y - batch["y"]) ** 2), {"kept": jnp.sum(keep)}

    @nnx.jit
    def step(model, optimizer, rngs, batch):
        return research_dp.spmd_train_step(
            model, optimizer, loss_fn, batch, has_aux=True, rngs=rngs, max_grad_norm=0.5
        )

    model, optimizer = linear_and(optax.sgd(1.0))
    rngs = nnx.Rngs(dropout=0)
    sharding = research_dp.create_data_parallel_sharding(mesh)
    batch = research_dp.place_batch_on_shards(regression(), sharding)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    loss, aux = step(model, optimizer, rngs, batch)
    moved = jax.tree.map(lambda a, b: a - b, nnx.state(model), before)
    assert float(optax.tree.norm(moved)) == pytest.approx(0.5, rel=1e-5)  # more, unclipped
    assert loss.ndim == 0
    assert 0 < int(aux["kept"]) < 32
    assert int(rngs.dropout.count[...]) == 1
    # Other keys the next time, and the same compiled step.
    masks = {int(step(model, optimizer, rngs, batch)[1]["kept"]) for _ in range(4)}
    assert len(masks) > 1


def test_spmd_step_differentiates_what_the_optimizer_is_for():
    class Adapter(nnx.Variable):  # no nnx.Param, of which gradients are taken by default
        pass

    model, _ = linear_and(optax.sgd(0.1))
    model.bias = Adapter(jnp.zeros(1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=Adapter)
    frozen = jnp.copy(model.kernel[...])
    sgd_step(model, optimizer, regression())
    np.testing.assert_array_equal(model.kernel[...], frozen)
    assert np.abs(model.bias[...]).max() > 0.1


@pytest.mark.parametrize(
    ("optimizer", "max_norm", "micro_batches"),
    [(optax.adam(0.1), 0.1, 2), (optax.sgd(0.01), None, 1)],
)
def test_pmap_step_follows_one_device(optimizer, max_norm, micro_batches):
    """Other data on each device, micro-batches, clipping: as one device with the whole batch."""
    x = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)
    params = {"w": jnp.arange(3.0)[:, None]}
    state = stacked_state(optimizer, params)
    step = functools.partial(
        research_dp.data_parallel_train_step, squares, optimizer, max_grad_norm=max_norm
    )
    for _ in range(2):
        state, metrics = step({"x": x}, state, accumulation_steps=micro_batches)

    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    chain = optax.chain(clip, optimizer)
    opt_state = chain.init(params)
    for _ in range(2):
        loss, grads = jax.value_and_grad(lambda p: squares({"params": p}, {"x": x}))(params)
        updates, opt_state = chain.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(metrics["loss"], np.full(8, loss), rtol=1e-5)
    for on_device in state.params["w"]:
        np.testing.assert_allclose(on_device, params["w"], rtol=1e-5)
    with pytest.raises(ValueError, match=r"steps 3 does not divide .*'x', of shape \(4, 3\)"):
        step({"x": x}, state, accumulation_steps=3)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_pmap_step_communicates_once_for_all_micro_batches(micro_batches):
    optimizer = optax.sgd(0.1)
    state = stacked_state(optimizer, {"w": jnp.ones((3, 1))})
    found = read(
        lambda s, b: research_dp.data_parallel_train_step(
            squares, optimizer, b, s, accumulation_steps=micro_batches
        ),
        state,
        {"x": jnp.ones((8, 4, 3))},
    )
    # The gradient of w and the loss.
    assert sorted((c.nbytes, c.times) for c in found) == [(4, 1), (12, 1)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pmap_step_gives_each_device_its_own_keys_and_returns_aux(micro_batches):
    def loss_fn(variables, batch, rngs):
        noise = jax.random.uniform(rngs["noise"])
        return squares(variables, batch) + noise, {"noise": noise}

    optimizer = optax.sgd(0.1)
    state = stacked_state(optimizer, {"w": jnp.ones((3, 1))})
    root = jax.random.key(7)
    _, metrics = research_dp.data_parallel_train_step(
        loss_fn,
        optimizer,
        {"x": jnp.ones((8, 2, 3))},
        state,
        {"noise": root},
        has_aux=True,
        accumulation_steps=micro_batches,
    )
    keys = [jax.random.fold_in(root, device) for device in range(8)]
    if micro_batches > 1:
        keys = [[jax.random.fold_in(key, micro) for micro in range(micro_batches)] for key in keys]
    drawn = np.asarray(jax.tree.map(jax.random.uniform, keys)).reshape(8, micro_batches)
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_allclose(metrics["aux"]["noise"], drawn.sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.full(8, 9.0 + drawn.mean()), rtol=1e-6)


def test_pmap_step_takes_old_keys_and_refuses_what_is_no_key():
    def loss_fn(variables, batch, rngs):
        return squares(variables, batch) + jax.random.uniform(rngs)

    optimizer = optax.sgd(0.1)
    args = optimizer, {"x": jnp.ones((8, 2, 3))}, stacked_state(optimizer, {"w": jnp.ones((3, 1))})
    step = functools.partial(research_dp.data_parallel_train_step, loss_fn, *args)
    assert np.all(step(jax.random.PRNGKey(0))[1]["loss"] > 9.0)
    for wrong in (jax.random.split(jax.random.key(0), 8), nnx.Rngs(0)):
        with pytest.raises(ValueError, match="ive single random keys"):
            step(wrong)
