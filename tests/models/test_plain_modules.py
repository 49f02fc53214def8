"""Flax's own BatchNorm and Dropout under every strategy: `single`'s numbers, or a report."""

import functools
import gc
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp.certification import diagnose
from research_dp.config import load
from research_dp.errors import UsageError
from research_dp.models import convnet, mlp
from research_dp.models.flax.linen import linen_functions
from research_dp.models.flax.nnx import nnx_functions
from research_dp.models.image_classifiers import image_classifier
from research_dp.models.layers import dropout, network_functions
from research_dp.strategies import TrainSpec
from research_dp.strategies.batch_losses import check_batch_loss
from research_dp.training import trainer
from tests.support import certified, decoder, plain_models
from tests.support.certified import EXAMPLE, batches
from tests.support.faults import flip
from tests.support.plain_models import MODELS, DropoutNet, linen_dropout, with_own_loss
from tests.support.processes import start
from tests.support.recipes import recipe
from tests.support.repository import stems
from tests.support.runs import summary
from tests.support.strategies import order_warning, reports_of

BATCH, MICROS = 32, 2
# Where a device's loss sees a part of the batch: along which axes.
AXES = {
    **dict.fromkeys(("fsdp", "fsdp_keep", "zero1", "zero2"), "fsdp (size 8)"),
    "ddp": "data (size 8)",
    **dict.fromkeys(("hsdp", "hsdp_zero1"), "data (size 2) and fsdp (size 4)"),
}
STATISTICS = {
    "nn.BatchNorm": "batch_stats/BatchNorm_0/mean, batch_stats/BatchNorm_0/var",
    "nnx.BatchNorm": "norm/mean, norm/var",
}


def spec_of(model, **options):
    return TrainSpec(
        **options,
        model=model,
        optimizer=optax.sgd(0.1),
        example=EXAMPLE,
        batch_size=BATCH,
        accumulation_steps=MICROS,
    )


def first_step(stem, model, **options):
    """The loss and the state of the first step, and what is reported after it."""
    load.reset()
    spec = spec_of(model, **options)
    strategy = recipe(stem).build(spec)
    local = {name: x[strategy.train_rows] for name, x in batches(BATCH)[0].items()}
    warning = check_batch_loss(strategy, local)
    placed = strategy.place_batch(local)
    state, metrics = strategy.train_step(strategy.init(jax.random.key(0)), placed)
    found = jax.device_get((metrics["loss"], state.params, state.model_state))
    return found, [*reports_of(strategy, state), *([warning] if warning else [])]


@functools.cache
def on_one_device(name):
    found, reports = first_step("single", MODELS[name]())
    assert not reports
    return found


def same(found, expected):
    near = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    return all(jax.tree.leaves(near))


# Strategies see functions on trees, whatever library they come from: libraries take turns.
QUICK = {("ddp", "nn.BatchNorm"), ("ddp", "nnx.Dropout"), ("spmd", "nn.BatchNorm")}


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        pytest.param(stem, name, marks=() if (stem, name) in QUICK else pytest.mark.exhaustive)
        for i, stem in enumerate(s for s in stems() if s != "single")
        for name in MODELS
        if name.startswith(("nn.", "nnx.")[i % 2]) or (stem, name) in QUICK
    ],
)
def test_numbers_are_those_of_single_or_it_is_reported(stem, name):
    if stem in AXES and name in STATISTICS:
        with pytest.raises(UsageError, match="numbers of an example depend on others"):
            first_step(stem, MODELS[name]())
        found, reports = first_step(stem, MODELS[name](), loss_over="device")
    else:
        found, reports = first_step(stem, MODELS[name]())
    if stem not in AXES:
        assert same(found, on_one_device(name)) and not reports
        return
    assert not same(found[:2], on_one_device(name)[:2])
    (report,) = reports
    if name in STATISTICS:
        paths = STATISTICS[name]
        assert f"copies of model state {paths} differ along mesh axis {AXES[stem]}: " in report
        assert (
            "statistics are each device's own; take a module with BatchNorm by from_linen" in report
        )
    else:
        assert "loss in training is " in report and "a key serves several examples" in report


def by_functions(net):
    """The module as a model by `linen_functions` or `nnx_functions`."""
    functions = linen_functions(net()) if issubclass(net, nn.Module) else nnx_functions(net)
    return image_classifier(functions, 10)


@pytest.mark.parametrize(
    "model",
    [
        functools.partial(by_functions, DropoutNet),
        functools.partial(by_functions, plain_models.NnxDropoutNet),
        *(
            pytest.param(model, marks=pytest.mark.exhaustive)
            for model in (
                functools.partial(by_functions, plain_models.BatchNormNet),
                functools.partial(by_functions, plain_models.NnxBatchNormNet),
                functools.partial(plain_models.linen_batch_norm, axes=True),
                plain_models.linen_dropout_by_example,
                functools.partial(convnet, features=(4,), hidden=8, num_classes=10, norm="batch"),
            )
        ),
    ],
)
def test_what_takes_all_devices_into_account_is_not_reported(model):
    expected, _ = first_step("single", model())
    found, reports = first_step("ddp", model())
    assert same(found, expected) and not reports


def test_a_report_names_only_arrays_that_differ_along_its_axes():
    spec = spec_of(plain_models.linen_batch_norm(), loss_over="device")
    strategy = recipe("hsdp", "make_mesh.axes = {'data': 2, 'fsdp': 4}").build(spec)
    state = strategy.init(jax.random.key(0))
    norm = dict(state.model_state["batch_stats"]["BatchNorm_0"])
    for device in jax.devices()[4:]:
        norm["mean"] = flip(norm["mean"], device)
    norm["var"] = flip(norm["var"], jax.devices()[5])
    model_state = {"batch_stats": {"BatchNorm_0": norm}}
    (report,) = reports_of(strategy, state._replace(model_state=model_state))
    along = "differ along mesh axis data (size 2): "
    assert f"copies of model state batch_stats/BatchNorm_0/mean {along}" in report

    replicas = [("gradient", "a", ("data",)), ("gradient", "b", ("data", "fsdp"))]
    step = SimpleNamespace(replicas=replicas, bench=SimpleNamespace(strategy=strategy))
    assert f"copies of gradient a {along}" in next(diagnose.replicas_differ(step))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_certify_gives_the_same_reason(name):
    if name in STATISTICS:
        found = certified.refusal("ddp", spec={"model": MODELS[name]()})
        assert "statistics are each device's own; take a module with BatchNorm" in found, found
        return
    _, (report,) = first_step("ddp", MODELS[name]())
    load.reset()
    spec = {"model": MODELS[name](), "accumulation_steps": MICROS}
    _, reason = report.split(" with half of its rows ")
    assert reason in certified.refusal("ddp", spec=spec)


# ---- Draws, from the program alone ----


def drawing(draw):
    """A model that multiplies its input with draw(keys, rows, x), a function of a user's."""

    def init(key, batch):
        return {"w": jnp.ones((16, 10))}, {}

    def apply(params, model_state, x, keys, train):
        x = x.reshape(x.shape[0], -1)
        if train:
            x = x * draw(keys, x)
        return x @ params["w"], model_state

    return with_own_loss(init, apply)


KEY = jax.random.key(7)


def by_example(keys, x):
    return jax.vmap(lambda key: jax.random.bernoulli(key, shape=x.shape[1:]))(keys)


def in_layers(keys, x):
    def layer(x, number):
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        return x * by_example(own, x), None

    return jax.lax.scan(layer, x, jnp.arange(3))[0]


def in_layers_from_one(keys, x):
    def layer(x, number):
        return x * jax.random.bernoulli(jax.random.fold_in(KEY, number), shape=x.shape), None

    return jax.lax.scan(layer, x, jnp.arange(3))[0]


def in_a_branch(keys, x):
    def drawn(x):
        return jax.random.normal(keys[0], x.shape)

    return jax.lax.cond(jax.random.bits(KEY) > 0, drawn, lambda x: x, x)


def by_name_of_example(keys, x):
    names = jnp.int32(x[:, 0])
    return by_example(jax.vmap(jax.random.fold_in, (None, 0))(KEY, names), x)


def by_place_from_the_first(keys, x):
    places = jnp.arange(x.shape[0])
    return by_example(jax.vmap(jax.random.fold_in, (None, 0))(keys[0], places), x)


def one_after_another(keys, x, draw=jax.random.normal):
    return jax.lax.map(lambda key: draw(key, x.shape[1:]), keys)


def one_key_for_each_in_turn(keys, x):
    return jax.lax.map(lambda x: x * jax.random.normal(keys[0], x.shape), x)


def one_constant_for_each_in_turn(keys, x):
    return jax.lax.map(lambda x: x * jax.random.normal(KEY, x.shape), x)


def by_place_in_turn(keys, x):
    def one(place):
        return jax.random.normal(jax.random.fold_in(KEY, place), x.shape[1:])

    return jax.lax.map(one, jnp.arange(x.shape[0]))


def two_in_turn(keys, x):
    pairs = jax.vmap(jax.random.split)(keys)
    return jax.lax.map(lambda pair: one_after_another(pair, x).sum(0), pairs)


def gamma(keys, x):
    return jax.vmap(lambda key: jax.random.gamma(key, 2.0, x.shape[1:]))(keys)


def by_place_on_device(keys, x):
    places = jnp.arange(x.shape[0])
    return by_example(jax.vmap(jax.random.fold_in, (None, 0))(KEY, places), x)


@pytest.mark.parametrize(
    ("draw", "is_reported"),
    [
        (by_example, False),
        (in_layers, False),
        (by_name_of_example, False),
        (lambda keys, x: jax.random.normal(KEY, (1, *x.shape[1:])), False),
        (lambda keys, x: jax.random.normal(keys[0], x.shape), True),
        (lambda keys, x: jax.random.normal(KEY, x.shape), True),
        (lambda keys, x: jax.random.normal(keys[0], (1, *x.shape[1:])), True),
        (lambda keys, x: by_example(jax.random.split(keys[0], x.shape[0]), x), True),
        (lambda keys, x: by_example(jax.random.split(KEY, x.shape[0]), x), True),
        (lambda keys, x: jax.random.normal(jax.random.PRNGKey(1), x.shape), True),
        (by_place_on_device, True),
        (by_place_from_the_first, True),
        (one_after_another, False),
        (two_in_turn, False),
        (one_constant_for_each_in_turn, False),
        (one_key_for_each_in_turn, True),
        (by_place_in_turn, True),
        (gamma, False),
        (lambda keys, x: jax.random.gamma(keys[0], 2.0, x.shape), True),
        (lambda keys, x: jax.random.gamma(KEY, 2.0, x.shape), True),
        (in_layers_from_one, True),
        (in_a_branch, True),
    ],
)
def test_a_draw_is_reported_if_an_examples_numbers_depend_on_its_device(draw, is_reported):
    spec = spec_of(drawing(draw))
    assert order_warning(recipe("single").build(spec)) is None
    load.reset()
    warning = order_warning(recipe("ddp").build(spec))
    assert (warning is not None) == is_reported, warning
    if is_reported:
        assert "loss in training is " in warning and "a key serves several examples" in warning


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_the_shipped_dropout_is_not_reported(api):
    spec = spec_of(mlp(api=api, widths=(8, 8), num_classes=10, dropout_rate=0.5))
    assert order_warning(recipe("fsdp").build(spec)) is None


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_submodule_is_given_the_keys_of_examples(api):
    def network(layers, x):
        return layers.submodule("part", lambda part, x: dropout(x, 0.5, part.keys, layer=0))(x)

    functions = network_functions(api, network, jnp.float32)
    x, keys = jnp.ones((4, 8)), jax.random.split(jax.random.key(0), 4)
    y, _ = functions.apply({}, {}, x, train=True, keys=keys)
    np.testing.assert_array_equal(y, dropout(x, 0.5, keys, layer=0))


@pytest.mark.parametrize(
    "stem", ["fsdp", *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("ddp",))]
)
def test_a_decoder_with_units_is_not_reported(stem):
    built = decoder.build(stem, decoder.model(dropout_rate=0.1))
    assert check_batch_loss(built, decoder.batch(0)) is None


@pytest.mark.slow
def test_certify_names_draws_that_depend_on_the_device():
    def from_the_first(keys, x):
        own = [jax.random.fold_in(keys[0], i) for i in range(len(keys))]
        return jnp.stack([jax.random.normal(key, x.shape[1:]) for key in own])

    found = certified.refusal("ddp", spec={"model": drawing(from_the_first)})
    assert "a key serves several examples" in found, found


def test_with_logical_shards_a_device_alone_draws_the_same():
    spec = spec_of(linen_dropout(lambda keys: keys[0]))
    shards = "tree_reduction.logical_shards = 16"
    built = recipe("ddp", shards, more=["options/deterministic.gin"]).build(spec)
    assert order_warning(built) is None


# ---- A run, as its user sees it ----

SENTENCE = "Numbers may differ from those of one device: copies of model state batch_stats/"
PLAIN = [
    "--gin_file=runs/digits.gin",
    "--gin_file=models/mlp.gin",
    "--import=tests.support.plain_models",
    "--gin.train.model=@linen_batch_norm()",
    "--gin.train.num_steps=3",
    "--gin.train.loss_over=device",
]


def test_a_run_reports_statistics_of_a_device_once_after_its_first_step(main, tmp_path):
    flags = ["--gin_file=strategies/fsdp.gin", f"--workdir={tmp_path}"]
    done = main(*PLAIN, *flags)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("First step done")
    assert (before.count(SENTENCE), after.count(SENTENCE)) == (0, 1)
    (warning,) = summary(tmp_path)["warnings"]
    assert warning.startswith(SENTENCE) and f"Warning: {warning}\n" in done.stdout


def test_a_run_is_tried_once_also_where_more_devices_go_on_with_it(main, tmp_path, monkeypatch):
    tried = []

    def kernels():
        gc.collect()
        return sum(x.ndim == 2 and x.dtype == jnp.float32 for x in jax.live_arrays())

    def counted(strategy, batch):
        tried.append(1)
        assert kernels() == before  # none of a state that is restored: there is memory for one
        return check_batch_loss(strategy, batch)

    before = kernels()

    monkeypatch.setattr(trainer, "check_batch_loss", counted)
    flags = ["--gin.train.num_steps=1", "--gin.train.loss_over=batch", f"--workdir={tmp_path}"]
    on_one = [*PLAIN, "--gin_file=strategies/single.gin", *flags]
    assert main(*on_one).returncode == 0 and not tried
    further = ["--gin_file=strategies/ddp.gin", *flags, "--gin.train.num_steps=2"]
    refused = main(*PLAIN, *further)
    assert refused.returncode == 2 and tried == [1]
    assert "numbers of an example depend on others of the batch" in refused.stderr
    right = [*further, "--gin.linen_batch_norm.axes=True"]
    assert main(*PLAIN, *right).returncode == 0 and tried == [1, 1]
    done = main(*PLAIN, *right, "--gin.train.num_steps=3")
    assert done.returncode == 0 and tried == [1, 1], done.stderr


@pytest.mark.slow
def test_the_comparison_waits_for_a_step_that_is_not_left_out(command, tmp_path):
    flags = ["--gin_file=strategies/ddp.gin", "--cpu_devices=2", f"--workdir={tmp_path}"]
    scale = ["--gin.data_parallel.loss_scale=@dynamic_loss_scale()"]
    # The loss overflows once.
    scale += [f"--gin.dynamic_loss_scale.{name}={2.0**127}" for name in ("initial", "factor")]
    done = command(*PLAIN, *flags, *scale, "--gin.train.log_every=1")
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split(SENTENCE)
    assert "train step 1/3" in before and "loss_scale 1\n" not in before, done.stdout
    assert "train step 2/3" in after


@pytest.mark.slow
def test_processes_compare_what_each_has(command, tmp_path):
    flags = ["--gin_file=strategies/ddp.gin", "--cpu_devices=1", f"--workdir={tmp_path}"]
    both = start(command, 2, *flags, run=PLAIN)
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert (outputs[0].count(SENTENCE), outputs[1].count(SENTENCE)) == (1, 0)
    assert "differ along mesh axis data (size 2)" in summary(tmp_path)["warnings"][0]


@pytest.mark.slow
def test_a_run_whose_numbers_are_those_of_one_device_warns_of_nothing(command, tmp_path):
    flags = ["--gin_file=strategies/fsdp.gin", "--gin.linen_batch_norm.axes=True"]
    flags.append("--gin.train.loss_over=batch")
    done = command(*PLAIN, *flags, "--cpu_devices=2", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout and "warnings" not in summary(tmp_path)
