"""Where the time of steps goes, the learning rate, and names that a model's metrics cannot have."""

import dataclasses
import functools
import time

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from research_dp.distributed.optimizer import dynamic_loss_scale
from research_dp.errors import UsageError
from research_dp.strategies import TrainSpec
from research_dp.strategies.engines import compiled
from research_dp.training import batches, throughput
from research_dp.training.optimizers import LearningRate, remembering_rate
from research_dp.training.train import train
from research_dp.types import MEASURED, LossOutput
from tests.support import runs, tiny_run
from tests.support.recipes import recipe
from tests.support.runs import summary

PARTS = ("data_wait_seconds", "dispatch_seconds", "device_wait_seconds")


records = functools.partial(runs.records, measured=True)


def test_the_parts_add_up_to_the_time_of_the_window_and_slow_data_is_seen(tmp_path):
    def slow(order):
        for number, batch in enumerate(tiny_run.DATA.train(order)):
            time.sleep(0.02 if number >= 4 else 0)
            yield batch

    data = dataclasses.replace(tiny_run.DATA, train=slow)
    options = {"log_every": 4, "checkpoint_every": 4, "eval_every": 8}
    assert tiny_run.outcome(tmp_path, num_steps=12, data=data, **options) == (0, "")
    _, *windows = records(tmp_path, "train")
    for window in windows:
        seconds = 4 / window["steps_per_second"]
        assert sum(window[part] for part in PARTS) <= seconds
        fraction = window["data_wait_seconds"] / seconds
        assert window["data_wait_fraction"] == pytest.approx(fraction) and fraction > 0.5
        assert window["save_seconds"] > 0
    assert [line["step"] for line in records(tmp_path, "eval")] == [8, 12]
    assert all(line["eval_seconds"] > 0 for line in records(tmp_path, "eval"))
    seconds = summary(tmp_path)["seconds"]
    assert list(seconds) == ["data", "dispatch", "device", "evaluation", "saves", "total"]
    assert sum(seconds.values()) - seconds["total"] < seconds["total"]
    assert seconds["data"] >= sum(window["data_wait_seconds"] for window in windows)


@pytest.mark.parametrize(("milliseconds", "ahead"), [(0, 32), (30, 2)])
def test_a_burst_of_batches_for_idle_devices_is_short(milliseconds, ahead):
    read = []

    def slow():
        for number in range(100):
            time.sleep(milliseconds / 1000)
            read.append(number)
            yield np.zeros(4)

    first = next(batches.prefetch(lambda batch: batch, slow(), lambda: False))
    assert (len(read), first.shape) == (ahead, (4,))


def test_a_step_counts_only_while_the_clock_runs():
    clock = throughput.Throughput(8)
    clock.count_step()
    assert clock.overall() is None
    clock.start()
    clock.count_step()
    clock.stop()
    assert clock.overall() == 1 / clock.seconds["steps"]


def test_a_record_without_a_save_has_no_time_of_one(tmp_path):
    options = {"checkpoint_every": None, "eval_every": None}
    assert tiny_run.outcome(tmp_path, num_steps=6, **options) == (0, "")
    assert not any("save_seconds" in line for line in records(tmp_path, "train"))
    assert summary(tmp_path)["seconds"]["saves"] > 0  # the last one


def test_batches_that_devices_do_not_wait_for_are_no_wait_for_data(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 10.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = throughput.Throughput(8)
    clock.spend("data_wait", 0.0)  # before the first step: it compiles
    clock.start()
    clock.count_step()
    clock.spend("data_wait", 0.0)
    clock.wait(lambda: None)
    assert clock.rates() == {
        "steps_per_second": 0.1,
        "examples_per_second": 0.8,
        "data_wait_seconds": 1.0,
        "dispatch_seconds": 0.0,
        "device_wait_seconds": 3.0,
        "data_wait_fraction": 0.1,
    }


def test_device_memory_is_that_of_the_fullest_device_that_reports_it(monkeypatch):
    assert throughput.device_memory() == {}, "CPUs report none"

    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    devices = [Device({"bytes_in_use": 5}), Device(None), Device({"bytes_in_use": 7})]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert throughput.device_memory() == {"device_memory_bytes": 7.0}


# ---- The learning rate ----

PARAMS = {"w": np.ones(3, np.float32)}


def rate_of(optimizer, updates=0):
    """The rate that is reported after some updates, and how far they moved a weight."""
    state = optimizer.init(PARAMS)
    rate = LearningRate(optimizer, jax.eval_shape(lambda: state))
    moved = None
    for _ in range(updates):
        moved, state = optimizer.update(PARAMS, state, PARAMS)
        rate.read(state)
    return rate.after(updates), moved and -float(moved["w"][0])


def made(name, text):
    gin.parse_config([f"{name}.learning_rate = {text}"])
    return gin.get_configurable(name)()


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "adafactor"])
def test_each_registered_optimizer_tells_a_constant_rate(name):
    assert rate_of(made(name, "0.25")) == (0.25, None)


def test_a_schedule_is_that_of_the_newest_update():
    gin.parse_config(["linear_schedule.init_value = 1.0", "linear_schedule.end_value = 0.0"])
    gin.parse_config("linear_schedule.transition_steps = 4")
    optimizer = made("sgd", "@linear_schedule()")
    for updates, expected in ((1, 1.0), (2, 0.75), (4, 0.25)):
        rate, moved = rate_of(optimizer, updates)
        assert rate == moved == expected, "the rate is that of another step"
    assert rate_of(optimizer)[0] == 1.0  # every step was skipped


def test_injected_hyperparameters_are_read_from_the_state():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    assert rate_of(optax.inject_hyperparams(optax.sgd)(schedule), 2) == (0.75, 0.75)
    chain = optax.chain(optax.clip(9.0), optax.inject_hyperparams(optax.sgd)(0.5))
    assert rate_of(chain, 1) == (0.5, 0.5)


def test_others_tell_none():
    inner = remembering_rate(optax.sgd)(0.5)
    for optimizer in (
        optax.sgd(0.5),
        optax.chain(inner, optax.scale(0.1)),
        made("adafactor", None),
    ):
        assert rate_of(optimizer)[0] is None


def test_a_skipped_step_counts_no_update(tmp_path):
    def broken(order):
        for number, batch in enumerate(tiny_run.DATA.train(order)):
            yield {"x": batch["x"] * np.nan} if number == 1 else batch

    data = dataclasses.replace(tiny_run.DATA, train=broken)
    optimizer = remembering_rate(optax.sgd)(optax.linear_schedule(1.0, 0.0, 10))
    skips = dataclasses.replace(tiny_run._strategy(), engine=compiled)
    train(
        model=tiny_run.MODEL,
        data=data,
        strategy=skips,
        optimizer=optimizer,
        num_steps=4,
        batch_size=tiny_run.BATCH,
        log_every=2,
        on_nonfinite="skip",
        workdir=str(tmp_path),
    )
    rates = [line["learning_rate"] for line in records(tmp_path, "train")]
    np.testing.assert_allclose(rates, [1.0, 0.8], rtol=1e-6)


def test_a_step_that_overflows_in_float16_counts_no_update(tmp_path):
    """Also where the run was continued: the state counts the updates before."""
    scale = dynamic_loss_scale(initial=2.0**24, growth_interval=100)
    big = dataclasses.replace(tiny_run.MODEL, loss=_in_half)
    optimizer = remembering_rate(optax.sgd)(optax.linear_schedule(1e-3, 0.0, 100))
    scaled = dataclasses.replace(recipe("single"), loss_scale=scale)
    options = {"model": big, "data": tiny_run.DATA, "strategy": scaled, "optimizer": optimizer}
    options |= {"batch_size": tiny_run.BATCH, "log_every": 10, "workdir": str(tmp_path)}
    train(num_steps=25, checkpoint_every=5, **options)
    train(num_steps=40, checkpoint_every=5, **options)
    last = records(tmp_path, "train")[-1]
    overflows = np.log2(2.0**24 / last["loss_scale"])
    assert 3 < overflows < 20 and last["step"] == 40
    newest = 40 - overflows - 1  # the first update has the rate of update 0
    assert last["learning_rate"] == pytest.approx(1e-3 * (1 - newest / 100), rel=1e-5)


def _in_half(params, model_state, batch, keys, *, train, batch_axes):
    y = batch["x"].astype("float16") @ params["w"].astype("float16")
    total = jnp.sum(jnp.square(y.astype("float32"))) / 8
    return LossOutput(total, jnp.float32(y.shape[0]), model_state, {})


@pytest.mark.parametrize("length", [8, 10, 100, 1000])
def test_a_decay_to_zero_is_no_negative_rate(length):
    """It ends a rounding below 0, and the run may be longer."""
    for schedule in (
        optax.linear_schedule(3e-4, 0.0, length),
        optax.join_schedules(
            [optax.linear_schedule(0.0, 1e-3, length), optax.linear_schedule(1e-3, 0.0, length)],
            [length],
        ),
    ):
        optimizer = remembering_rate(optax.sgd)(schedule)
        state = jax.eval_shape(optimizer.init, PARAMS)
        assert LearningRate(optimizer, state, 3 * length).after(1) is not None


@pytest.mark.parametrize("rate", [-0.1, optax.linear_schedule(1.0, -1e-3, 4)])
def test_a_rate_that_climbs_the_loss_is_refused(tmp_path, rate):
    optimizer = remembering_rate(optax.sgd)(rate)
    skips = dataclasses.replace(tiny_run._strategy(), engine=compiled)
    options = {"model": tiny_run.MODEL, "data": tiny_run.DATA, "strategy": skips}
    options |= {"batch_size": tiny_run.BATCH, "workdir": str(tmp_path)}
    with pytest.raises(UsageError, match=r"learning rate is -\S+ at step [15], .* negate the loss"):
        train(optimizer=optimizer, num_steps=8, **options)


# ---- Names ----


@pytest.mark.parametrize("name", MEASURED)
def test_a_metric_of_the_model_with_a_measured_name_is_refused(name):
    def loss(*args, **options):
        out = tiny_run._loss(*args, **options)
        return LossOutput(out.total, out.weight, out.model_state, {name: (out.total, out.weight)})

    model = dataclasses.replace(tiny_run.MODEL, loss=loss)
    example = tiny_run.DATA.example
    spec = TrainSpec(model=model, optimizer=optax.sgd(1.0), example=example, batch_size=4)
    with pytest.raises(UsageError, match=f"its metric '{name}' has the name of one"):
        recipe("single").build(spec)


@pytest.mark.parametrize(
    ("idle_since", "waited"), [(None, 0.0), (1.0, 4.0), (8.5, 1.5), (20.0, 0.0)]
)
def test_only_what_idle_devices_wait_for_a_batch_counts(monkeypatch, idle_since, waited):
    """Devices that end just before the batch is there did not wait for all of it."""
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    clock = throughput.Throughput(8)
    clock.start()
    clock.spend_on_batch(6.0, idle_since)
    parts = clock.seconds["data_wait"], clock.seconds["device_wait"]
    assert parts == (waited, 4.0 - waited)


def test_the_end_of_the_newest_program_is_noted_while_the_host_is_busy():
    programs, before = batches.InFlight(), time.perf_counter()
    assert programs.idle_since() == 0.0
    programs.add({"loss": jax.numpy.zeros(()) + 1})
    time.sleep(0.2)  # in which a batch is read
    assert before < programs.idle_since() < time.perf_counter() - 0.05
    programs.close()


def test_a_rate_that_is_an_array_is_not_known():
    """Optax takes what broadcasts, and so did runs."""
    for rate in (np.full(3, 0.1), lambda step: jax.numpy.full((1,), 1e-3)):
        optimizer = remembering_rate(optax.sgd)(rate)
        assert LearningRate(optimizer, optimizer.init(np.zeros(3))).after(1) is None
