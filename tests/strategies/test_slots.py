"""The four slots: their functions are the seeds', and functions of others fill them unchanged."""

import contextlib
import dataclasses
import functools
import re
import traceback
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import research_dp as rdp
from examples.error_feedback import ErrorFeedback
from research_dp import console
from research_dp.analysis import program_cost
from research_dp.analysis.program_cost import collectives_of
from research_dp.analysis.topologies import topology
from research_dp.commands import dry_run
from research_dp.distributed.boxed import unboxed
from research_dp.distributed.collectives import every, takes
from research_dp.distributed.optimizer import LossScale
from research_dp.models import convnet
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.manifest import Progress
from research_dp.strategies import PowerSGD, TrainSpec
from research_dp.strategies.jaxpr_collectives import collectives, of_step
from tests.support import decoder
from tests.support.certified import BATCH, examples, noise, small_model
from tests.support.marks import exhaustive
from tests.support.recipes import recipe
from tests.support.repository import ROOT
from tests.support.strategies import traffic

STEPS = 3


def spec(**changes):
    fields = {"model": small_model(), "optimizer": optax.adam(1e-2), "example": noise().example}
    return TrainSpec(**{**fields, "batch_size": BATCH, "max_grad_norm": 1.0, **changes})


def trained(config, steps=STEPS, **changes):
    """The state after some steps."""
    strategy = config.build(spec(**changes))
    state = strategy.init(jax.random.key(0))
    for step in range(steps):
        state, _ = strategy.train_step(state, strategy.place_batch(examples(step, BATCH)))
    return state


@functools.cache
def of_one_device():
    return jax.tree.map(np.asarray, trained(recipe("single")).params)


def follows_one_device(config, rtol=1e-4):
    params = jax.tree.map(np.asarray, trained(config).params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), params, of_one_device()
    )


@pytest.mark.parametrize(
    ("stem", "slot", "name"),
    [
        ("fsdp", "shard", "shard_params"),
        ("fsdp", "gather", "gather_params"),
        ("fsdp", "sync", "sync_gradients"),
        ("fsdp", "update", "apply_gradients"),
        ("zero1", "sync", "scatter_gradients"),
        ("zero1", "update", "fsdp_apply_gradients"),
        ("ddp", "sync", "sync_gradients"),
    ],
)
def test_a_shipped_strategy_calls_the_public_function(stem, slot, name):
    assert getattr(recipe(stem), slot).__wrapped__ is getattr(rdp, name)


@pytest.mark.parametrize("slot", ["gather", "sync", "update"])
def test_a_strategy_is_another_algorithm_if_one_of_its_slots_is(slot):
    def other(*args):
        raise AssertionError("it is not called")

    other.algorithm = "parameters are averaged each 8 steps"
    plain = recipe("fsdp")
    assert plain.algorithm is None
    assert dataclasses.replace(plain, **{slot: other}).algorithm == other.algorithm


# ---- Functions written for xlstm-jax's contract, with JAX and Flax alone ----


def is_box(x):
    return isinstance(x, nn.Partitioned)


def plain_shard(params, axis_name):
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def one(x):
        if not x.ndim or x.shape[0] % size:
            return x
        block = x.shape[0] // size
        shard = lax.dynamic_slice_in_dim(x, index * block, block)
        return nn.Partitioned(shard, (axis_name, *(None,) * (x.ndim - 1)))

    return jax.tree.map(one, params)


def plain_gather(params, axis):  # slots are called by position
    def one(box):
        if not is_box(box):
            return box
        dim = box.names.index(axis)

        @jax.custom_vjp
        def gather(x):
            return lax.all_gather(x, axis, axis=dim, tiled=True)

        def backward(_, g):
            total = lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            return (total / lax.axis_size(axis),)

        gather.defvjp(lambda x: (gather(x), None), backward)
        return gather(box.value)

    return jax.tree.map(one, params, is_leaf=is_box)


def plain_sync(grads, axis_names):
    def one(g):
        if not is_box(g):
            return lax.pmean(g, axis_names)
        over = tuple(axis for axis in axis_names if axis not in g.names)
        return g.replace(value=lax.pmean(g.value, over)) if over else g

    return jax.tree.map(one, grads, is_leaf=is_box)


def plain_update(gradients, parameters, optimizer):
    return optimizer.apply_gradients(gradients, parameters)


PLAIN_SLOTS = {
    "shard": plain_shard,
    "gather": plain_gather,
    "sync": plain_sync,
    "update": plain_update,
}


@pytest.mark.parametrize("slot", [*PLAIN_SLOTS, "all"])
@pytest.mark.parametrize("stem", ["hsdp"])
def test_a_function_of_the_seeds_contract_fills_a_slot(stem, slot):
    chosen = PLAIN_SLOTS if slot == "all" else {slot: PLAIN_SLOTS[slot]}
    follows_one_device(dataclasses.replace(recipe(stem), **chosen))


def test_the_plain_rule_decides_what_is_sharded():
    strategy = dataclasses.replace(recipe("fsdp"), shard=plain_shard).build(spec())
    dims = {p.path: p.dim for p in jax.tree.leaves(strategy.shardings.params)}
    assert dims["hidden_0/kernel"] == 0 and dims["head/bias"] is None
    (bias,) = [p for p in jax.tree.leaves(strategy.shardings.params) if p.path == "head/bias"]
    assert bias.reason == "`shard` left it replicated"


def twice(gradients, parameters, optimizer):
    return plain_update(gradients, plain_update(gradients, parameters, optimizer), optimizer)


@pytest.mark.parametrize(
    ("stem", "changes", "message"),
    [
        (
            "fsdp",
            {"sync": None, "update": rdp.fsdp_apply_gradients},
            "nothing averages the gradients of replicated",
        ),
        ("ddp", {"update": lambda g, params, optimizer: params}, "once, not 0 times"),
        ("ddp", {"update": twice}, "once, not 2 times"),
    ],
)
def test_slots_that_do_not_make_a_step_are_refused(stem, changes, message):
    with pytest.raises(rdp.UsageError, match=message):
        dataclasses.replace(recipe(stem), **changes).build(spec())


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (lambda params, axis: {}, "another tree than the parameters"),
        (
            lambda params, axis: {
                **params,
                "head": {
                    k: nn.Partitioned(x, (("data", axis),)) for k, x in params["head"].items()
                },
            },
            r"head/bias with names .*: name one dim 'fsdp', no tuple",
        ),
        (
            lambda params, axis: jax.tree.map(
                lambda x: nn.Partitioned(x, (axis, *(None,) * (x.ndim - 1))), params
            ),
            r"head/bias with shape \(10,\), which is not a shard of \(10,\) along dim 0",
        ),
    ],
)
def test_what_is_no_shard_is_refused(shard, message):
    config = dataclasses.replace(recipe("fsdp"), shard=shard)
    with pytest.raises(rdp.UsageError, match=message):
        config.build(spec())


def test_a_step_reaches_its_collective_in_eleven_frames(monkeypatch):
    """CONTRIBUTING.md, "Read the heart in an hour", names them."""
    all_gather, paths = lax.all_gather, []

    def spy(*args, **options):
        paths.append(traceback.extract_stack())
        return all_gather(*args, **options)

    monkeypatch.setattr(lax, "all_gather", spy)
    recipe("fsdp").build(spec())
    places = [(Path(f.filename), f.name) for f in paths[0]]
    package = Path(rdp.__file__).parent
    places = [(p, name) for p, name in places if package in p.parents]
    start = min(i for i, (path, name) in enumerate(places) if name == "gradients")
    files = {path for path, _ in places[start:]}
    assert len(places[start + 1 :]) == 11
    assert len(files) <= 8 and sum(len(f.read_text().splitlines()) for f in files) <= 2000
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`{name}`" in guide for _, name in places[start:])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("max_norm = 0.5", "max_grad_norm"),
        ("fsdp_group = 'fsdp'", "knows its axes"),
        ("dp_group = ()", "knows its axes"),
        ("loss = 1.0", "knows its axes"),
        ("dtype = 'bfloat16'", "bind it to the function of `sync`"),
        ("pre_divide = True", "bind it to the function of `sync`"),
    ],
)
def test_options_of_the_update_that_a_strategy_decides_are_refused(option, message):
    name = f"fsdp_apply_gradients.{option.split()[0]}"
    with pytest.raises(rdp.UsageError, match=message) as caught:
        recipe("zero1", f"fsdp_apply_gradients.{option}").build(spec())
    assert caught.value.binding == name


@pytest.mark.parametrize("calls", [0, 2])
def test_an_update_that_does_not_call_the_optimizer_once_is_refused(calls):
    def update(gradients, parameters, optimizer):
        new = [optimizer.apply_gradients(gradients, parameters) for _ in range(calls)]
        return new[-1] if new else None

    config = dataclasses.replace(recipe("ddp"), update=update)
    with pytest.raises(rdp.UsageError, match=f"must call .* once, not {calls} times"):
        config.build(spec())


def test_an_update_that_names_a_mesh_axis_is_told_where_it_runs():
    def update(gradients, parameters, optimizer):
        return optimizer.apply_gradients(rdp.sync_gradients(gradients, ("data",)), parameters)

    config = dataclasses.replace(recipe("ddp"), update=update)
    with pytest.raises(rdp.UsageError, match=r"\.update: .*data.*outside of the map.*take `mesh`"):
        config.build(spec())


# ---- Slots with state ----


def test_state_is_carried_and_differs_from_device_to_device(capsys):
    config = dataclasses.replace(recipe("ddp"), sync=ErrorFeedback())
    first = config.build(spec()).init(jax.random.key(0))
    assert all(not np.any(x) for x in jax.tree.leaves(first.slots))
    state = trained(config)
    for error, param in zip(
        jax.tree.leaves(state.slots["sync"]), jax.tree.leaves(state.params), strict=True
    ):
        assert error.shape == (8, *param.shape)
        assert error.sharding.shard_shape(error.shape) == (1, *param.shape)
    console.put(dry_run.state_table(config.build(spec())))
    assert re.search(r"\n *slots +[\d,]{4,} +[\d,]{4,}\n", capsys.readouterr().out)
    kernel = np.asarray(state.slots["sync"]["error"]["hidden_0"]["kernel"])
    assert len({x.tobytes() for x in kernel}) == 8


def test_error_feedback_follows_the_exact_gradients():
    """What was rounded away comes back: plain rounding drifts from the sum of the gradients."""
    config = dataclasses.replace(recipe("ddp"), sync=ErrorFeedback())
    follows_one_device(config, rtol=2e-2)


class Counting:
    """`sync_gradients` that counts its calls, the same on all devices."""

    differs_over = ()

    def __init__(self, change=lambda state: state + 1):
        self.change = change

    def init(self, params):
        return np.float32(0)

    def apply(self, grads, axis_names, *, state):
        return rdp.sync_gradients(grads, axis_names), self.change(state)

    def resize(self, state, devices):
        return state


def test_state_may_be_a_number_that_is_the_same_on_all_devices():
    state = trained(dataclasses.replace(recipe("ddp"), sync=Counting()))
    assert state.slots["sync"].sharding.is_fully_replicated and int(state.slots["sync"]) == STEPS


@pytest.mark.parametrize(
    "change",
    [lambda x: x.astype("bfloat16"), lambda x: jax.numpy.stack([x, x]), lambda x: {"count": x}],
)
def test_state_that_changes_its_type_is_refused(change):
    with pytest.raises(rdp.UsageError, match=r"new state has .* instead of state float32\[\]"):
        dataclasses.replace(recipe("ddp"), sync=Counting(change)).build(spec())


def test_state_that_does_not_fit_the_strategy_is_refused():
    slot = ErrorFeedback()
    with pytest.raises(rdp.UsageError, match="sharded gradients; use it with ddp"):
        dataclasses.replace(recipe("fsdp"), sync=slot).build(spec())
    slot.differs_over = ("data", "tp")
    with pytest.raises(rdp.UsageError, match=r"sync\.differs_over has axis 'tp'; the axes are"):
        dataclasses.replace(recipe("ddp"), sync=slot).build(spec())


def test_errors_keep_the_dtype_of_the_state():
    config = recipe("ddp", "data_parallel.accumulation_dtype = 'float32'")
    config = dataclasses.replace(config, sync=ErrorFeedback(), param_dtype="bfloat16")
    config.build(dataclasses.replace(spec(), accumulation_steps=2))


def low_rank(**options):
    return PowerSGD(min_size=0, **options)


def of_decoder(stem, slot, by_unit, frozen=(), **changes):
    """A strategy of a decoder, and its state and numbers after three steps of weighted tokens."""
    slot.by_unit = by_unit
    small = "shard_params.min_weight_size = 128"
    config = dataclasses.replace(recipe(stem, small), sync=slot, overlap=True, **changes)
    spec = dataclasses.replace(decoder.spec_of(decoder.model(dropout_rate=0.1)), frozen=frozen)
    strategy = config.build(spec)
    state, numbers = strategy.init(0), []
    for seed in range(3):
        batch = strategy.place_batch(decoder.batch(seed))
        state, metrics = strategy.train_step(state, batch)
        numbers += [metrics["loss"][0] / metrics["loss"][1], metrics["grad_norm"][0]]
    return strategy, state, np.asarray(numbers)


@pytest.mark.parametrize(
    ("stem", "slot", "apart"),
    [
        ("ddp", low_rank, 1e-5),
        exhaustive("zero1", low_rank, 1e-5),
        exhaustive("ddp", ErrorFeedback, 0.3),  # what rounding leaves, another sum leaves otherwise
    ],
)
def test_a_slot_with_state_is_called_unit_by_unit(stem, slot, apart):
    alone, state, numbers = of_decoder(stem, slot(), True)
    together, expected, same = of_decoder(stem, slot(), False)
    np.testing.assert_allclose(numbers, same, rtol=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (state.slots, expected.slots)), strict=True):
        assert np.linalg.norm(np.asarray(x) - y) <= apart * np.linalg.norm(y)
    sent = [[c for c in traffic(x) if c.nbytes > 100] for x in (alone, together)]
    assert {c.times for c in sent[1]} == {1} and 3 in {c.times for c in sent[0]}, "once a layer"
    total = [sum(c.wire_bytes for c in each) for each in sent]
    assert total[0] == pytest.approx(total[1], rel=0.1)


@pytest.mark.parametrize(
    "frozen",
    [
        "embed/.*|head/.*",  # nothing is left to the end
        exhaustive("blocks/.*|norm/.*"),  # everything is
        exhaustive("blocks/(qkv|out).*"),
    ],
)
def test_units_of_which_a_part_is_frozen_have_state_of_the_others(frozen):
    found = [of_decoder("ddp", low_rank(), by_unit, frozen)[1:] for by_unit in (True, False)]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)
    for x, y in zip(*(jax.tree.leaves(state.slots) for state, _ in found), strict=True):
        assert np.linalg.norm(np.asarray(x) - y) <= 1e-5 * np.linalg.norm(y)


def test_matrices_of_fewer_rows_than_the_rank_are_sent_as_they_are():
    convolutions = convnet(features=(4,), hidden=8, num_classes=10)  # kernels of one row
    exact, found = (
        trained(
            dataclasses.replace(recipe("ddp"), **slots),
            model=convolutions,
            optimizer=optax.sgd(0.1),
        ).params
        for slots in ({}, {"sync": low_rank(rank=64)})
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), exact, found)


def test_parameters_in_bfloat16_keep_errors_in_float32():
    _, state, numbers = of_decoder("ddp", low_rank(), True, param_dtype="bfloat16")
    assert np.isfinite(numbers).all()
    assert {x.dtype for x in jax.tree.leaves(state.slots)} == {np.dtype("float32")}


@pytest.mark.parametrize("times", [0, 2])
def test_a_unit_that_is_not_used_once_is_refused_where_it_has_state(times):
    def loss(params, state, batch, keys, *, train, batch_axes, units):
        x = batch["x"]
        for _ in range(times):
            x = units.run(lambda p, x: x @ p["a"]["w"], ("a",), params, x, remat="full")
        total = jnp.sum(jnp.square(x @ params["b"]["w"]))
        return rdp.LossOutput(total, jnp.float32(len(x)), state, {})

    def init(key, batch):
        return {"a": {"w": jnp.eye(4)}, "b": {"w": jnp.ones((4, 2))}}, {}

    built = spec(
        model=rdp.TrainableModel(init, loss, units={"a": "part"}),
        example={"x": jax.ShapeDtypeStruct((4,), "f4")},
    )
    config = dataclasses.replace(recipe("ddp"), sync=low_rank(by_unit=True), overlap=True)
    with pytest.raises(
        rdp.UsageError, match=rf"by_unit: the gradient of a/w is ready {times} times"
    ):
        config.build(built)
    config.sync.by_unit = False
    config.build(built)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (lambda params: params, "not a mapping of trees nested like the parameters"),
        (lambda params: jnp.zeros(3), "not a mapping of trees nested like the parameters"),
        (lambda params: {"count": jax.tree.map(lambda x: 1, params)}, "there are int"),
    ],
)
def test_state_that_no_unit_has_is_refused(state, problem):
    slot = Counting()
    slot.init, slot.by_unit = state, True
    with pytest.raises(rdp.UsageError, match=rf"sync\.by_unit: its state is .*{problem}"):
        dataclasses.replace(recipe("ddp"), sync=slot).build(spec())


def test_an_object_that_lacks_a_method_is_refused_with_its_name():
    class Incomplete:
        differs_over = ()
        init = apply = Counting.apply

    message = r"give a function, or a Stateful, or None\. It lacks resize\."
    with pytest.raises(rdp.UsageError, match=message):
        dataclasses.replace(recipe("ddp"), sync=Incomplete())


def test_a_gather_carries_no_state():
    with pytest.raises(rdp.UsageError, match=r"gather = .*ErrorFeedback.*give a function"):
        dataclasses.replace(recipe("fsdp"), gather=ErrorFeedback())


def on_devices(count, sync, stem="ddp", **axes):
    """A strategy with this slot on the first so many devices."""
    mesh = rdp.make_mesh(axes or {"data": count}, devices=jax.devices()[:count])
    return dataclasses.replace(recipe(stem), sync=sync, mesh=mesh).build(spec())


def saved_after_a_step(folder, strategy):
    """The state after its first step, which is saved."""
    state = strategy.init(jax.random.key(0))
    state, _ = strategy.train_step(state, strategy.place_batch(examples(0, BATCH)))
    progress = Progress(batch_size=BATCH, seed=0, order="", window={})
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        checkpoints.save(state, 1, progress, origin={})
    return state


def saved_and_restored(tmp_path, devices):
    """A state with slots, saved on eight devices and restored on others."""
    state = saved_after_a_step(tmp_path, on_devices(8, ErrorFeedback()))
    other = on_devices(devices, ErrorFeedback())
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        restored, _ = checkpoints.restore(other)
    return state, restored


def test_state_is_restored_bit_for_bit(tmp_path):
    state, restored = saved_and_restored(tmp_path, 8)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_on_other_devices_the_object_says_what_becomes_of_its_state(tmp_path):
    state, restored = saved_and_restored(tmp_path, 4)

    def check(before, after):
        assert after.sharding.shard_shape(after.shape) == (1, *before.shape[1:])
        np.testing.assert_allclose(after, np.stack([np.mean(before, 0)] * 4), rtol=1e-6)

    jax.tree.map(check, state.slots, restored.slots)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


# ---- What a slot is told of its step ----


class Told:
    """`sync_gradients` that keeps what it is told in its state."""

    def __init__(self, **changed):
        same = dict.fromkeys(("devices", "key", "norm", "step"), ())
        self.differs_over = {**same, "own": ("data", "fsdp"), **changed}

    @takes("devices", "key", "shardings")
    def init(self, params, *, devices, key, shardings):
        dims = [p.dim for p in jax.tree.leaves(shardings)]
        return {
            "devices": np.array([devices["data"], devices["fsdp"]]),
            "key": jax.random.key_data(key),
            "norm": np.float32(0),
            "own": np.zeros((2, len(dims))),
            "step": np.int32(-1),
        }

    @takes("devices", "key", "params", "scale", "step")
    def apply(self, grads, axes, *, state, devices, key, params, scale, step):
        first = jax.tree.leaves(params)[0].reshape(-1)[0]
        sizes = jnp.array([devices["data"], devices["fsdp"]])
        means = rdp.sync_gradients(grads, axes)
        told = {
            "devices": sizes,
            "key": jax.random.key_data(key),
            "norm": optax.tree.norm(unboxed(means)),
            "own": state["own"] + first + lax.axis_index(axes),
            "step": step * scale.astype(int),
        }
        return means, told

    @takes("devices", "params", "shardings")
    def resize(self, state, *, devices, params, shardings):
        assert jax.tree.structure(params) == jax.tree.structure(shardings)
        count = devices["data"] * devices["fsdp"]
        return {**state, "own": np.full((count, *state["own"].shape[1:]), 7.0, np.float32)}


@pytest.mark.parametrize(("stem", "sizes"), [("ddp", [8, 1]), ("hsdp", [2, 4])])
def test_a_slot_is_told_of_its_step_and_keeps_once_what_is_the_same(stem, sizes):
    strategy = dataclasses.replace(recipe(stem), sync=Told()).build(spec())
    state, keys = strategy.init(0), []
    for step in range(2):
        state, _ = strategy.train_step(state, strategy.place_batch(examples(step, BATCH)))
        told = state.slots["sync"]
        assert [*told["devices"]] == sizes and int(told["step"]) == step
        assert told["own"].shape == (8, 2, len(jax.tree.leaves(state.params)))
        assert len({x.tobytes() for x in np.asarray(told["own"])}) == 8
        keys.append(np.asarray(told["key"]).tobytes())
    assert all(x.is_fully_replicated for name, x in told.items() if name != "own")
    first = np.asarray(strategy.init(0).slots["sync"]["key"]).tobytes()
    assert len({first, *keys}) == 3
    assert first != np.asarray(strategy.init(1).slots["sync"]["key"]).tobytes()


@takes("report")
def reporting(grads, axes, *, report):
    report("device", lax.axis_index(axes))
    return rdp.sync_gradients(grads, axes)


class StatefulReporting(Counting):
    @takes("report")
    def apply(self, grads, axes, *, state, report):
        return reporting(grads, axes, report=report), state


@pytest.mark.parametrize("sync", [reporting, StatefulReporting()])
def test_sync_reports_metrics_the_mean_over_devices(sync):
    strategy = dataclasses.replace(recipe("ddp"), sync=sync).build(spec(accumulation_steps=2))
    batch = strategy.place_batch(examples(0, BATCH))
    _, metrics = strategy.train_step(strategy.init(0), batch)
    assert rdp.metric_means(metrics)["sync/device"] == 3.5
    assert rdp.check_batch_loss(strategy, batch) is None, "it is no metric of examples"


def test_a_report_that_cannot_be_is_refused():
    with pytest.raises(rdp.UsageError, match=r"sync_each = 'micro_batch': `sync` takes .*report"):
        dataclasses.replace(recipe("ddp"), sync=reporting, sync_each="micro_batch")

    @takes("report")
    def row(grads, axes, *, report):
        report("row", jnp.zeros(3))
        return rdp.sync_gradients(grads, axes)

    with pytest.raises(rdp.UsageError, match=r"sync: its metric 'row' has shape \(3,\)"):
        dataclasses.replace(recipe("ddp"), sync=row).build(spec())

    @takes("report")
    def twice(grads, axes, *, report):
        report("device", 1)
        return reporting(grads, axes, report=report)

    with pytest.raises(rdp.UsageError, match=r"metric 'device' is reported twice"):
        dataclasses.replace(recipe("ddp"), sync=twice).build(spec())


@pytest.mark.parametrize("stem", ["ddp", "zero1", "hsdp"])
def test_gradients_come_in_the_shapes_of_stored(stem):
    config = recipe(stem)

    @takes("stored", "shardings", "reduction")
    def sync(grads, axes, *, stored, shardings, reduction):
        came = jax.tree.map(jnp.shape, unboxed(grads))
        assert came == jax.tree.map(lambda p: p.local_shape, stored)
        options = {"shardings": shardings} if stem == "zero1" else {}
        return config.sync(grads, axes, reduction=reduction, **options)

    class Kept(Late):
        @takes("stored")
        def init(self, params, *, stored):
            return jax.tree.map(lambda p: jnp.zeros(p.local_shape), stored)

        @takes("stored", "shardings", "reduction")
        def apply(self, grads, axes, *, state, **options):
            came = jax.tree.map(jnp.shape, unboxed(grads))
            assert came == jax.tree.map(jnp.shape, state)
            return sync(grads, axes, **options), state

    for one in (sync, Kept()):
        dataclasses.replace(config, sync=one).build(spec())


def of_signs(optimizer):
    signs = optax.stateless(lambda g, p: jax.tree.map(jnp.sign, g))
    return optax.chain(signs, optimizer)


of_signs.algorithm = "steps of signs"


def test_a_strategy_brings_its_optimizer():
    own = dataclasses.replace(recipe("fsdp"), optimizer=of_signs)
    wrapped = dataclasses.replace(spec(), optimizer=of_signs(spec().optimizer))
    expected = recipe("fsdp").build(wrapped)
    strategy = own.build(spec())
    assert strategy.algorithm == "steps of signs" and expected.algorithm is None
    batch = strategy.place_batch(examples(0, BATCH))
    states = [x.train_step(x.init(0), batch)[0] for x in (strategy, expected)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    with pytest.raises(
        rdp.UsageError, match=r"optimizer returned .*None.* transformation of Optax"
    ):
        dataclasses.replace(own, optimizer=lambda inner: None).build(spec())


def weighted(scale=None, sync=None, devices=8, files=(), param_dtype=None):
    """The loss of a linear model whose examples have weights."""

    def loss(params, state, batch, keys, *, train, batch_axes):
        errors = jnp.square(batch["x"] @ params["w"]).sum(1) * batch["weight"]
        return rdp.LossOutput(errors.sum(), batch["weight"].sum(), state, {})

    def init(key, batch):
        return {"w": jnp.ones((8, 4))}, {}

    shapes = {"x": (8,), "weight": ()}
    mesh = rdp.make_mesh({"data": devices}, devices=jax.devices()[:devices])
    bindings = ["tree_reduction.logical_shards = 8"] if files else []
    config = recipe("ddp", *bindings, more=files)
    config = dataclasses.replace(config, sync=sync or Told(), mesh=mesh, param_dtype=param_dtype)
    if scale is not None:
        config = dataclasses.replace(config, loss_scale=LossScale(initial=scale))
    return config.build(
        TrainSpec(
            model=rdp.TrainableModel(init, loss),
            optimizer=optax.sgd(1e-2),
            example={name: jax.ShapeDtypeStruct(x, "f4") for name, x in shapes.items()},
            batch_size=16,
            accumulation_steps=1 if files else 2,
        )
    )


class Late:
    """The averages of the step before."""

    differs_over = ()

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    @takes("reduction")
    def apply(self, grads, axes, *, state, reduction):
        return state, rdp.sync_gradients(grads, axes, reduction=reduction)

    def resize(self, state, devices):
        return state


def test_exact_sums_reach_a_state_in_one_unit_on_any_number_of_devices():
    rng, found = np.random.default_rng(0), []
    batch = {"x": rng.normal(size=(16, 8)), "weight": rng.uniform(0.1, 1, size=16)}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    for devices in (2, 8):
        strategy = weighted(sync=Late(), devices=devices, files=("options/deterministic.gin",))
        state = strategy.init(0)
        for _ in range(3):
            state, _ = strategy.train_step(state, strategy.place_batch(batch))
        found.append(jax.tree.map(np.asarray, (state.params, state.slots)))
    jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *found)


def test_gradients_reach_a_state_in_the_unit_of_the_loss():
    """Whatever the loss scale and the weight of the batch; the steps are those without state."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    found = []
    for scale, weight in ((None, 1), (2.0**12, 1), (None, 1 / 4)):
        strategy = weighted(scale)
        batch = {"x": x, "weight": np.full(16, weight, np.float32)}
        state, metrics = strategy.train_step(strategy.init(0), strategy.place_batch(batch))
        norm = float(state.slots["sync"]["norm"])
        assert norm == pytest.approx(rdp.metric_means(metrics)["grad_norm"], rel=1e-6)
        found.append((norm, np.asarray(state.params["w"]).tolist()))
    for norm, w in found[1:]:
        assert norm == pytest.approx(found[0][0], rel=1e-6)
        np.testing.assert_allclose(w, found[0][1], rtol=1e-6)


def test_a_function_may_take_the_scale_of_its_gradients():
    norms = []

    @takes("scale")
    def sync(grads, axes, *, scale):
        means = rdp.sync_gradients(grads, axes)
        jax.debug.callback(lambda x: norms.append(float(x)), optax.tree.norm(means) * scale)
        return means

    config = dataclasses.replace(recipe("ddp"), sync=sync, loss_scale=LossScale())
    strategy = config.build(spec())
    batch = strategy.place_batch(examples(0, BATCH))
    _, metrics = strategy.train_step(strategy.init(0), batch)
    expected = rdp.metric_means(metrics)["grad_norm"]
    jax.effects_barrier()
    assert norms == pytest.approx([expected] * 8, rel=1e-6)
    with pytest.raises(rdp.UsageError, match=r"sync_each = 'micro_batch': `sync` takes `scale`"):
        dataclasses.replace(config, sync_each="micro_batch")


def test_an_update_is_told_of_its_step():
    told = []

    @takes("step", "key", "devices", "reduction")
    def update(grads, params, optimizer, *, step, key, devices, reduction):
        assert devices == {"data": 8, "fsdp": 1} and reduction is rdp.PLAIN
        jax.debug.callback(lambda *x: told.append(x), step, jax.random.key_data(key)[0])
        return optimizer.apply_gradients(grads, params)

    trained(dataclasses.replace(recipe("ddp"), update=update), steps=2)
    jax.effects_barrier()
    assert {int(step) for step, _ in told} == {0, 1} and len({int(x) for _, x in told}) == 2


def test_small_gradients_of_float16_reach_a_state():
    """Without their loss scale they are 0 in float16."""
    x = np.full((16, 8), 1e-4, np.float32)
    found = {}
    for sync in (rdp.sync_gradients, Sums()):
        strategy = weighted(2.0**15, sync=sync, param_dtype="float16")
        batch = strategy.place_batch({"x": x, "weight": np.ones(16, np.float32)})
        state, metrics = strategy.train_step(strategy.init(0), batch)
        found[sync] = rdp.metric_means(metrics)["grad_norm"]
    plain, with_state = found.values()
    assert with_state == pytest.approx(plain, rel=1e-2) and with_state > 0
    assert float(state.slots["sync"]) > 0


class Sums:
    """`sync_gradients` that keeps the sum of a gradient."""

    differs_over = ()

    def init(self, params):
        return np.float32(0)

    def apply(self, grads, axes, *, state):
        means = rdp.sync_gradients(grads, axes)
        return means, jnp.sum(means["w"], dtype=jnp.float32)

    def resize(self, state, devices):
        return state


def test_a_state_between_micro_batches_knows_no_loss_scale():
    message = r"sync_each = 'micro_batch' with a loss scale: the state of `sync` would change"
    with pytest.raises(rdp.UsageError, match=message):
        dataclasses.replace(
            recipe("ddp"), sync=Sums(), sync_each="micro_batch", loss_scale=LossScale()
        )


def test_a_function_that_takes_parameters_is_called_once_for_all():
    """Unit by unit it would get those of a unit."""
    calls = []

    @takes("params", "step", "key")
    def sync(grads, axes, *, params, step, key):
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        calls.append(len(jax.tree.leaves(grads)))
        return rdp.sync_gradients(grads, axes)

    model = decoder.model()
    dataclasses.replace(recipe("ddp"), sync=sync).build(decoder.spec_of(model))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("differs_over", "message"),
    [
        ({"other": ()}, "differs_over is no tree prefix of the state: "),
        ({"own": "data"}, "'data' is no tuple of axes"),
        ({"own": ("tp",)}, r"differs_over has axis 'tp'; the axes are"),
    ],
)
def test_axes_that_do_not_fit_the_state_are_named(differs_over, message):
    with pytest.raises(rdp.UsageError, match=rf"^data_parallel\.sync.*{message}"):
        dataclasses.replace(recipe("ddp"), sync=Told(**differs_over)).build(spec())


class Table:
    """State of any shape that the number of devices gives."""

    differs_over = ()

    def __init__(self, rows=3):
        self.rows = rows

    @takes("devices")
    def init(self, params, *, devices):
        return np.zeros((devices["data"], self.rows), np.float32)

    def apply(self, grads, axes, *, state):
        return rdp.sync_gradients(grads, axes), state + 1

    @takes("devices")
    def resize(self, state, *, devices):
        if state.shape[1] != self.rows:
            raise rdp.UsageError(f"Table has {state.shape[1]} rows, not {self.rows}: keep them.")
        return np.full((devices["data"], self.rows), state[0, 0])


def test_state_of_any_shape_is_resized_or_says_why_not(tmp_path):
    saved_after_a_step(tmp_path, on_devices(8, Table()))
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        restored, _ = checkpoints.restore(on_devices(4, Table()))
        np.testing.assert_array_equal(restored.slots["sync"], np.ones((4, 3)))
        with pytest.raises(rdp.UsageError, match=r"^Table has 3 rows, not 5: keep them\.$"):
            checkpoints.restore(on_devices(8, Table(5)))
        slot = Table()
        slot.resize = lambda state, devices: state
        with pytest.raises(rdp.UsageError, match=r"its `resize` returned state float32\[8, 3\] "):
            checkpoints.restore(on_devices(4, slot))


def test_parts_that_differ_are_resized_with_what_does_not(tmp_path):
    slot = Told()
    state = saved_after_a_step(tmp_path, on_devices(8, slot, "hsdp", data=2, fsdp=4))
    second = on_devices(4, slot, "hsdp", data=2, fsdp=2)
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        restored, _ = checkpoints.restore(second)
    before, after = state.slots["sync"], restored.slots["sync"]
    assert after["own"].shape[0] == 4 and np.all(np.asarray(after["own"]) == 7)
    assert all(np.array_equal(before[k], after[k]) for k in before if k != "own")
    second.train_step(restored, second.place_batch(examples(1, BATCH)))


# ---- What is communicated now and then ----


@takes("step")
def local_steps(grads, axes, *, step):
    """Averages the gradients of each fourth step alone."""
    return every(4, step, lambda g: rdp.sync_gradients(g, axes), lambda g: g, grads)


def of_gradients(found):
    return [c for c in found if c.kind == "all-reduce" and c.nbytes > 300]


def test_what_runs_every_few_steps_counts_with_its_share():
    """In the traced and in the compiled program; not as bytes of a branch that may be taken."""
    strategy = dataclasses.replace(recipe("ddp"), sync=local_steps).build(spec())
    plain = recipe("ddp").build(spec())
    lowered = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
    compiled = collectives_of(lowered.compile().as_text(), dict(strategy.mesh.shape))
    full = sum(c.wire_bytes for c in of_gradients(of_step(plain)))
    for found in (of_gradients(of_step(strategy)), of_gradients(compiled)):
        assert {c.share for c in found} == {0.25} and not any(c.in_branch for c in found)
        assert sum(c.wire_bytes for c in found) == pytest.approx(full / 4, rel=0.02)


def test_the_average_is_taken_in_the_steps_that_it_counts_for():
    def kernel(step):
        value = jnp.arange(8.0).reshape(8, 1)
        mapped = jax.shard_map(
            lambda x: every(4, step, lambda x: lax.pmean(x, "data"), lambda x: x, x),
            mesh=jax.sharding.Mesh(jax.devices(), ("data",)),
            in_specs=jax.P("data"),
            out_specs=jax.P("data"),
            check_vma=False,
        )
        return np.asarray(mapped(value))[:, 0].tolist()

    averaged = [kernel(jnp.int32(step)) == [3.5] * 8 for step in range(8)]
    assert averaged == [False, False, False, True] * 2
    for steps in (0, True, 1.5):
        with pytest.raises(rdp.UsageError, match=r"^every\.steps"):
            every(steps, jnp.int32(0), lambda: 0, lambda: 0)


def shares(function):
    """(share, whether it is in a branch that counts as taken) of each sum over devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), check_vma=False
    )
    found = collectives(mapped, jnp.ones(4), jnp.int32(0))
    return sorted((one.share, one.in_branch) for one in found)


def summed(x):
    return lax.psum(x, "data")


def same(x):
    return x


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, s: every(4, s, same, summed, x), [(0.75, False)]),
        (
            lambda x, s: every(4, s, summed, lambda x: summed(x) + 1, x),
            [(0.25, False), (0.75, False)],
        ),
        (lambda x, s: every(1, s, summed, same, x), [(1.0, False)]),
        # The twelfth step, of which the sixth is none.
        (
            lambda x, s: every(4, s, lambda x: every(6, s, summed, same, x), same, x),
            [(1 / 12, False)],
        ),
        (
            lambda x, s: every(4, s, lambda x: every(4, s, summed, same, x), same, x),
            [(0.25, False)],
        ),
        (
            lambda x, s: every(4, s, lambda x: lax.cond(x[0] > 0, summed, same, x), same, x),
            [(0.25, True)],
        ),
        (lambda x, s: lax.cond(s > 2, summed, same, x), [(1.0, True)]),
        (lambda x, s: jax.named_scope("every_2")(summed)(x), [(1.0, False)]),
    ],
)
def test_each_branch_counts_with_its_own_share(function, expected):
    assert shares(function) == expected


def test_the_time_of_what_runs_every_few_steps_is_that_of_an_average_step():
    def waits(steps):
        @takes("step")
        def sync(grads, axes, *, step):
            return every(steps, step, lambda g: rdp.sync_gradients(g, axes), lambda g: g, grads)

        strategy = dataclasses.replace(recipe("ddp"), sync=sync).build(spec())
        lowered = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
        cost = program_cost.read(lowered.compile(), strategy.mesh, topology("cpu:8"))
        return cost.schedule.step, cost.wire_bytes

    (often, sent), (seldom, less) = waits(1), waits(1000)
    assert seldom < often and less < sent
