"""Losses and gradients that are no numbers: found at their step, named, skipped or stopped at."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp.errors import RunFailure
from research_dp.strategies import NONFINITE, SKIPPED
from research_dp.strategies.strategy import NO_WEIGHT
from research_dp.training.nonfinite import NonfiniteCheck
from research_dp.types import LossOutput, TrainableModel
from tests.support import three_arrays
from tests.support.marks import exhaustive
from tests.support.processes import FAULTY
from tests.support.repository import stems
from tests.support.runs import MLP, lines, summary
from tests.support.three_arrays import STOPS, init, step

PATHS = ["a", "b", "c"]


build = functools.partial(three_arrays.build, accumulation_steps=2, max_grad_norm=1.0)


ALL = [s if s in ("fsdp", "spmd") else exhaustive(s) for s in stems()]


@pytest.mark.parametrize("stem", ALL)
def test_a_spoilt_step_is_named_and_changes_nothing_if_it_is_to_be_skipped(stem):
    strategy = build(stem, skip_nonfinite=True)
    state, metrics = step(strategy, strategy.init(jax.random.key(0)))
    np.testing.assert_array_equal(metrics[NONFINITE], [0, 0, 0, 0])
    before = jax.device_get(state)
    state, metrics = step(strategy, state, x5=2 * STOPS)
    # One example, of one device's micro-batch, spoils the gradient of `b` alone.
    np.testing.assert_array_equal(np.asarray(metrics[NONFINITE]) > 0, [True, False, True, False])
    np.testing.assert_array_equal(metrics[SKIPPED], [1, 1])
    for name in ("loss", "grad_norm"):
        np.testing.assert_array_equal(metrics[name], [0, 0])
    after = jax.device_get(state)
    assert int(after.step) == 2
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=before.step), before)
    state, metrics = step(strategy, state)
    np.testing.assert_array_equal(metrics[SKIPPED], [0, 1])
    assert np.isfinite(jax.device_get(state.params["b"])).all()
    assert (jax.device_get(state.params["b"]) != before.params["b"]).all(), "it does not go on"


def test_a_loss_that_is_no_number_is_wrong_whatever_the_gradients_are():
    strategy = build("fsdp")
    state, metrics = step(strategy, strategy.init(jax.random.key(0)), x3=np.nan)
    flags = np.asarray(metrics[NONFINITE]) > 0
    np.testing.assert_array_equal(flags, [True, True, False, True])
    np.testing.assert_array_equal(metrics[SKIPPED], [0, 0])  # which no record has
    assert np.isnan(jax.device_get(state.params["a"])).all(), "what 'stop' does not pay for"


@pytest.mark.parametrize("stem", ["fsdp", exhaustive("ddp"), exhaustive("spmd_fsdp")])
def test_with_a_scaled_loss_an_overflow_is_no_failure_until_the_scale_is_one(stem):
    scaled = ["data_parallel.loss_scale = @dynamic_loss_scale()", "dynamic_loss_scale.initial = "]
    for initial, wrong in ((2.0, False), (1.0, True)):
        strategy = build(stem, scaled[0], f"{scaled[1]}{initial}")
        state = strategy.init(jax.random.key(0))
        before = jax.device_get(state.params)
        state, metrics = step(strategy, state, x5=2 * STOPS)
        assert bool(metrics[NONFINITE][0] > 0) == wrong
        assert float(state.loss_scale.scale) == 1.0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


def test_a_step_that_is_left_out_lowers_the_scale_of_the_loss():
    scaled = [
        "data_parallel.loss_scale = @dynamic_loss_scale()",
        "dynamic_loss_scale.initial = 8.0",
    ]
    strategy = build("fsdp", *scaled, skip_nonfinite=True)
    state, metrics = step(strategy, strategy.init(jax.random.key(0)), x3=np.nan)
    assert (float(metrics[SKIPPED][0]), float(state.loss_scale.scale)) == (1.0, 4.0)


def test_what_is_said_of_a_step():
    def flags(*values):
        return jax.device_put(np.array(values, np.float32))

    said = []
    stop = NonfiniteCheck(PATHS, "stop", "Nothing was touched.", said.append)
    stop.check(1, flags(0, 0, 0, 0))
    with pytest.raises(RunFailure, match=r"(?s)step 7: the gradient of b is not finite.*Nothing"):
        stop.check(7, flags(1, 0, 1, 0))
    with pytest.raises(RunFailure, match="step 8: the loss is not finite"):
        stop.check(8, flags(1, 0, 0, 0))
    stop.hint = "Are labels in range?"
    with pytest.raises(RunFailure, match=r"data\.\n  Are labels in range\?$"):
        stop.check(1, flags(1, 0, 0, 0))
    skip = NonfiniteCheck(PATHS, "skip", "Nothing was touched.", said.append)
    for number in range(99):
        skip.check(number, flags(1, 1, 1, 1))
    assert said[-1] == "Skipped step 98: the gradient of all 3 parameters is not finite"
    with pytest.raises(RunFailure, match="99 steps before it"):
        skip.check(99, flags(1, 1, 1, 1))
    skip.check(100, flags(0, 0, 0, 0))
    skip.check(101, flags(1, 1, 0, 0))
    assert said[-1] == "Skipped step 101: the gradient of a is not finite"


@pytest.mark.parametrize("stem", ["hsdp", exhaustive("spmd")])
def test_parameters_that_overflowed_are_not_saved(stem):
    strategy = build(stem)
    state = strategy.init(jax.random.key(0))
    check = NonfiniteCheck(PATHS, "stop", "Nothing was touched.", print)
    check.check_state(3, state)
    # As the best loss of a schedule that waits for a plateau, before there is one.
    check.check_state(3, state._replace(opt_state=(*state.opt_state, jnp.float32(np.inf))))
    spoilt = {**state.params, "b": state.params["b"].at[5, 7].set(np.inf)}
    with pytest.raises(RunFailure, match=r"step 3: b has become infinite or NaN"):
        check.check_state(3, state._replace(params=spoilt))
    adam, *others = state.opt_state
    adam = adam._replace(nu={**adam.nu, "c": adam.nu["c"].at[0].set(np.inf)})
    with pytest.raises(RunFailure, match=r"step 3: opt_state \S*nu/c has become infinite"):
        check.check_state(3, state._replace(opt_state=(adam, *others)))
    slots = {"sync": {"a": jnp.array([[0.0, np.nan]])}}
    with pytest.raises(RunFailure, match=r"step 3: slots sync/a has become infinite"):
        check.check_state(3, state._replace(slots=slots))


@pytest.mark.slow
def test_a_run_stops_with_its_checkpoint_untouched_and_goes_on_without_the_step(command, tmp_path):
    flags = [
        *MLP,
        *FAULTY[:3],
        "--gin.faulty.step=8",
        "--gin.faulty.kind=nan",
        "--gin.train.num_steps=12",
        "--gin.train.checkpoint_every=4",
        "--gin.train.log_every=3",
        "--cpu_devices=2",
        f"--workdir={tmp_path}",
    ]
    stopped = command(*flags)
    assert stopped.returncode == 1
    assert (
        "error: step 8: the gradient of head/bias, head/kernel, hidden_0/kernel is not"
        in stopped.stderr
    )
    assert "Traceback" not in stopped.stderr
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["4"]
    done = command(*flags, "--gin.train.on_nonfinite=skip")
    assert done.returncode == 0, done.stderr
    assert "Continuing from step 4" in done.stdout and "Skipped step 8" in done.stdout
    assert summary(tmp_path)["skipped_steps"] == 1
    assert np.isfinite(summary(tmp_path)["train"]["loss"])
    records = lines(tmp_path, "train")
    assert [records[s].get("skipped_steps") for s in (3, 6, 9, 12)] == [None, 0, 1, 0]
    assert records[9]["loss"] is not None


def weighed(stem, weight, optimizer=None):
    """The first step of examples that all have this weight: metrics and parameters."""

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        weights = jnp.full(batch["x"].shape, weight, jnp.float32)
        return LossOutput(
            jnp.sum(weights * batch["x"] * jnp.sum(params["a"] ** 2)), weights.sum(), {}, {}
        )

    model = TrainableModel(init, loss)
    strategy = three_arrays.build(stem, model=model, optimizer=optax.sgd(0.1), max_grad_norm=1.0)
    state, metrics = step(strategy, strategy.init(0))
    return jax.device_get((metrics, state.params))


@pytest.mark.parametrize("stem", ["single", "fsdp"])
@pytest.mark.parametrize("weight", [1e-11, 1e-7, 1e6])
def test_a_step_does_not_depend_on_the_unit_of_weights(stem, weight):
    (metrics, params), (expected, others) = weighed(stem, weight), weighed(stem, 1.0)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(params["a"], others["a"], rtol=1e-5)
    assert not metrics[NONFINITE].any()


@pytest.mark.parametrize("weight", [1e-13, 1e-30, 1e-39])
def test_weights_that_are_too_small_to_train_on_are_named(weight):
    metrics, _ = weighed("fsdp", weight)
    if metrics[NONFINITE][0] == NO_WEIGHT:  # the backend takes it for 0
        return
    check = NonfiniteCheck(PATHS, "stop", "Nothing was touched.", print)
    with pytest.raises(RunFailure, match="step 3: the weights of its examples are too small"):
        check.check(3, jax.device_put(metrics[NONFINITE]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stem", ["single", "ddp"])
def test_counts_are_not_rounded_to_the_dtype_of_their_sums(stem, dtype):
    """131,088 tokens are too many for float16, and no multiple of what bfloat16 resolves."""

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        rows = batch["x"].shape[0]
        tokens = jnp.int32(8193 * rows)
        total = (jnp.sum(params["a"] ** 2) * rows).astype(dtype)
        return LossOutput(total, tokens, {}, {"length": (total, tokens)})

    model = TrainableModel(init, loss)
    strategy = three_arrays.build(stem, model=model, optimizer=optax.sgd(0.1))
    _, metrics = step(strategy, strategy.init(0))
    assert metrics["loss"][1] == metrics["length"][1] == 16 * 8193
