"""float16: a loss that is scaled, gradients that are divided first, steps that overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from research_dp.distributed.optimizer import dynamic_loss_scale
from research_dp.errors import UsageError
from research_dp.strategies import TrainSpec
from research_dp.types import LossOutput, TrainableModel
from tests.support.decoder import batch, build, model
from tests.support.marks import exhaustive
from tests.support.strategies import recipe
from tests.support.three_arrays import EXAMPLE, step

F16 = ["precision/f16.gin"]


def test_the_scale_falls_at_an_overflow_and_grows_after_good_steps():
    scaling = dynamic_loss_scale(initial=8.0, growth_interval=2)
    state = scaling.init()
    seen = []
    for finite in (True, True, True, False, True, True):
        state = scaling.adapt(state, jnp.asarray(finite))
        seen.append((float(state.scale), int(state.good_steps)))
    assert seen == [(8, 1), (16, 0), (16, 1), (8, 0), (8, 1), (16, 0)]


@pytest.mark.parametrize("stem", [*map(exhaustive, ("single", "ddp", "zero1")), "fsdp"])
def test_a_step_that_overflows_changes_the_scale_alone_and_the_next_ones_train(stem):
    # At 2^24 the gradients of a sum over tokens are beyond 65504.
    strategy = build(
        stem, model(dtype="float16"), "dynamic_loss_scale.initial = 16777216.0", more=F16
    )
    state = strategy.init(jax.random.key(0))
    before = jax.device_get(state.params)
    state, metrics = strategy.train_step(state, strategy.place_batch(batch(0)))
    assert float(state.loss_scale.scale) == 2.0**23 and int(state.step) == 1
    np.testing.assert_array_equal(metrics["grad_norm"], 0.0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    losses = []
    for _ in range(25):
        state, metrics = strategy.train_step(state, strategy.place_batch(batch(0)))
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    assert float(metrics["grad_norm"][1]) == 1 and np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.slow
def test_small_gradients_survive_because_the_loss_is_scaled():
    def first_step(initial):
        bindings = [f"dynamic_loss_scale.initial = {initial}"]
        strategy = build("fsdp", model(dtype="float16"), *bindings, more=F16)
        tiny = {**batch(0), "weights": batch(0)["weights"] * 1e-7}  # gradients of about 1e-9
        state = strategy.init(jax.random.key(0))
        return strategy.train_step(state, strategy.place_batch(tiny))[1]

    exact = build("fsdp", model())
    state = exact.init(jax.random.key(0))
    norm = exact.train_step(state, exact.place_batch(batch(0)))[1]["grad_norm"][0]
    assert float(first_step(2.0**20)["grad_norm"][0]) == pytest.approx(float(norm), rel=0.05)
    unscaled = float(first_step(1.0)["grad_norm"][0])  # of what is left after rounding
    assert abs(unscaled / float(norm) - 1) > 0.3


@pytest.mark.parametrize("given", [{"initial": 0.0}, {"factor": 1.0}, {"growth_interval": 0}])
def test_numbers_that_make_no_sense_are_refused(given):
    with pytest.raises(UsageError, match=next(iter(given))):
        dynamic_loss_scale(**given)


def test_gradients_are_clipped_before_they_are_rounded_to_the_dtype_of_their_parameters():
    """Those of two micro-batches add up to 120,000, beyond float16."""

    def init(key, batch):
        return {"w": jnp.zeros(16, jnp.float16)}, {}

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        rows = jnp.float32(batch["x"].shape[0])
        slope = jnp.sum(params["w"].astype(jnp.float32)) * 60_000
        return LossOutput(rows * slope, rows, model_state, {})

    spec = TrainSpec(
        model=TrainableModel(init, loss),
        optimizer=optax.sgd(1.0),
        example=EXAMPLE,
        batch_size=16,
        accumulation_steps=2,
        max_grad_norm=1.0,
    )
    strategy = recipe("single", "data_parallel.accumulation_dtype = 'float32'").build(spec)
    state, _ = step(strategy, strategy.init(0))
    np.testing.assert_allclose(state.params["w"], np.full(16, -0.25), rtol=1e-3)
