"""Modules as anybody writes them: every strategy computes what `single` does, or refuses."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import research_dp
import research_dp.deterministic.reduction
import research_dp.training.train
from research_dp.errors import UsageError
from research_dp.models.flax.linen import linen_functions_of_inputs
from research_dp.models.flax.nnx import nnx_functions_of_inputs
from research_dp.strategies import TrainSpec
from tests.support import own_modules as own
from tests.support.own_modules import CLASSES, EXAMPLE, FEATURES, MASKS, cross_entropy
from tests.support.recipes import recipe
from tests.support.repository import stems
from tests.support.strategies import order_warning, reports_of

BATCH, MICROS, STEPS = 32, 2, 2


def correct(logits, label):
    return logits.argmax(-1) == label


def linen_model(module, loss=cross_entropy, **options):
    return research_dp.from_linen(module, loss=loss, **options)


def nnx_model(factory, loss=cross_entropy, **options):
    return research_dp.from_nnx(factory, loss=loss, **options)


def model_of(module):
    """Of an NNX module, or of a function that is the `__call__` of a Linen module."""
    return nnx_model(module) if isinstance(module, type) else linen_model(own.linen(module))


def batch_of(seed, size=BATCH):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(CLASSES, size=size).astype(np.int32)}


def build(stem, model, *bindings):
    spec = TrainSpec(
        model=model,
        optimizer=optax.sgd(0.1),
        example=EXAMPLE,
        batch_size=BATCH,
        accumulation_steps=MICROS,
        seed=3,
    )
    return recipe(stem, *bindings).build(spec)


def trained(stem, model):
    """Losses, the evaluation and the state of a few steps, and what is reported after them."""
    strategy = build(stem, model)
    state, seen = strategy.init(0), []
    for step in range(STEPS):
        local = {name: x[strategy.train_rows] for name, x in batch_of(step).items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        seen.append({name: metrics[name] for name in metrics if name != "nonfinite"})
    size = strategy.eval_batch_size
    padded = {**batch_of(9, size), "mask": (np.arange(size) < 5).astype(np.float32)}
    local = {name: x[strategy.eval_rows] for name, x in padded.items()}
    seen.append(strategy.eval_step(state, strategy.place_eval_batch(local)))
    found = jax.device_get((seen, state.params, state.model_state))
    return found, reports_of(strategy, state)


def assert_near(found, expected):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(near, found, expected)


LAYERS = {"dropout": (0.3, False), "norm": (0.0, True), "both": (0.3, True)}


def model(api, layers):
    rate, norm = LAYERS[layers]
    if api == "linen":
        return linen_model(own.LinenNet(rate, norm), metrics={"accuracy": correct})
    return nnx_model(lambda rngs: own.NnxNet(rngs, rate, norm), metrics={"accuracy": correct})


@functools.cache
def on_one_device(api, layers):
    return trained("single", model(api, layers))[0]


QUICK = {("ddp", "linen", "both"), ("fsdp", "nnx", "both")}
# Strategies see functions on trees, whatever library they come from: APIs take turns.
CASES = {
    (stem, ("linen", "nnx")[(i + j) % 2], layers)
    for i, stem in enumerate(s for s in stems() if s != "single")
    for j, layers in enumerate(LAYERS)
    if layers == "both" or stem in ("ddp", "fsdp", "spmd")
}


@pytest.mark.parametrize(
    ("stem", "api", "layers"),
    [
        pytest.param(
            stem, api, layers, marks=() if (stem, api, layers) in QUICK else pytest.mark.exhaustive
        )
        for stem, api, layers in sorted(QUICK | CASES)
    ],
)
def test_every_strategy_computes_what_one_device_computes(stem, api, layers):
    found, reports = trained(stem, model(api, layers))
    assert_near(found, on_one_device(api, layers))
    assert not reports
    assert found[0][-1]["accuracy"][1] == 5, "padding was counted"
    state = jax.tree.leaves(found[2])
    assert bool(state) == (layers != "dropout"), "random state is no state of the model"


class LinenBatch(nn.Module):
    """Compares an example with the mean of the batch, in training and in evaluation."""

    @nn.compact
    def __call__(self, x, *, batch_axes=()):
        x = nn.Dense(CLASSES)(x)
        return x - jax.lax.pmean(x.mean(0, keepdims=True), batch_axes or ())


class NnxBatch(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x, batch_axes=()):
        x = self.dense(x)
        return x - jax.lax.pmean(x.mean(0, keepdims=True), batch_axes or ())


@pytest.mark.parametrize("stem", ["ddp", "fsdp", "spmd"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_evaluation_sees_the_axes_that_training_sees(api, stem):
    mixing = {"linen": lambda: linen_model(LinenBatch()), "nnx": lambda: nnx_model(NnxBatch)}
    (found, *_), _ = trained(stem, mixing[api]())
    (expected, *_), _ = trained("single", mixing[api]())
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(near, found[-1]["loss"], expected[-1]["loss"])
    jax.tree.map(near, found[0]["loss"], expected[0]["loss"])


class LinenEvaluated(nn.Module):
    """Communicates in evaluation alone."""

    @nn.compact
    def __call__(self, x, train, batch_axes=()):
        x = nn.Dense(CLASSES)(x)
        return x if train else x - jax.lax.pmean(x.mean(0, keepdims=True), batch_axes or ())


def test_exact_sums_refuse_a_model_that_mixes_examples_in_evaluation_alone():
    exact = ["data_parallel.reduction = @tree_reduction()", "tree_reduction.logical_shards = 8"]
    with pytest.raises(UsageError, match="statistics over the batch"):
        build("ddp", linen_model(LinenEvaluated()), *exact)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("default", ["rbg", "unsafe_rbg"])
def test_masks_do_not_depend_on_the_default_of_random_keys(api, default):
    """`vmap` over keys of rbg draws for all examples from the first key of a device."""
    expected, _ = trained("single", model(api, "dropout"))
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", default)
    try:
        assert jax.random.key_data(jax.random.key(0)).shape != (2,)
        found, reports = trained("ddp", model(api, "dropout"))
    finally:
        jax.config.update("jax_default_prng_impl", before)
    assert not reports
    assert_near(found[0], expected[0])


# ---- Masks ----


def masks(module, rows, keys, *, train=True):
    """The masks (B, 2, features) that a module with two draws has for these rows of ones."""
    inputs = jnp.ones((len(rows), 32))
    is_linen = isinstance(module, nn.Module)
    functions = (linen_functions_of_inputs if is_linen else nnx_functions_of_inputs)(module, "x")
    params, state = functions.init(jax.random.key(0), inputs)
    keys = keys[rows] if train else None
    y, state = jax.jit(lambda: functions.apply(params, state, inputs, train=train, keys=keys))()
    assert not jax.tree.leaves(state)
    return np.asarray(y)


@pytest.mark.parametrize(
    "module",
    [*MASKS["linen"], *MASKS["nnx"], *MASKS["attention"]],
    ids=lambda module: getattr(module, "__name__", type(module).__name__),
)
def test_a_mask_belongs_to_its_example_and_to_one_draw(module):
    keys = jax.random.split(jax.random.key(1), 16)
    found = masks(module, np.arange(16), keys)
    assert set(np.unique(found)) == {0.0, 2.0} and 0.4 < (found > 0).mean() < 0.6
    np.testing.assert_array_equal(masks(module, np.array([9, 4]), keys), found[[9, 4]])
    rows = found.reshape(32, 32)
    assert len({row.tobytes() for row in rows}) == 32, "two draws have the same mask"
    assert (masks(module, np.arange(4), keys, train=False) == 1).all()


def test_features_that_share_a_mask_share_it_in_an_example_alone():
    def call(self, x, train):
        return nn.Dropout(0.5, broadcast_dims=(1,), deterministic=not train)(x)

    keys = jax.random.split(jax.random.key(1), 64)
    found = masks(own.linen(call), np.arange(64), keys)
    assert (found == found[:, :1]).all() and 16 < (found[:, 0] > 0).sum() < 48


@pytest.mark.parametrize("broadcast", [True, False])
def test_heads_of_an_example_share_a_mask_where_flax_broadcasts_it(broadcast):
    options = {**own.ONES, "num_heads": 2, "qkv_features": 2, "broadcast_dropout": broadcast}

    def call(self, x, train):
        layer = nn.MultiHeadAttention(**options, deterministic=not train)
        return layer(x[..., None], x[:, :1, None])[..., 0]

    found = masks(own.linen(call), np.arange(64), jax.random.split(jax.random.key(1), 64))
    assert set(np.unique(found)) == ({0.0, 4.0} if broadcast else {0.0, 2.0, 4.0})
    assert len({row.tobytes() for row in found}) == 64 and 1.9 < found.mean() < 2.1


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_that_draw_nothing(rate):
    def call(self, x, train):
        return nn.Dropout(rate, deterministic=not train)(x)

    keys = jax.random.split(jax.random.key(1), 4)
    assert (masks(own.linen(call), np.arange(4), keys) == 1 - rate).all()
    layer = masks(lambda rngs: nnx.Dropout(rate, rngs=rngs), np.arange(4), keys)
    assert (layer == 1 - rate).all()


# ---- Arguments ----


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"w": jnp.ones(3), "n": jnp.zeros(3, jnp.int32)}, "parameter n is of dtype int32, which"),
        ({"w": jnp.ones(3), "n": jnp.zeros(3, bool)}, "parameter n is of dtype bool, which"),
        ({"w": jnp.ones(3), "k": jax.random.key(0)}, "parameter k is of dtype key<fry>, which is"),
        ({"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)}, "have the path 'params/a/b'; rename one"),
    ],
)
@pytest.mark.parametrize("stem", ["single", "fsdp", "spmd"])
def test_parameters_that_cannot_be_trained_or_saved_are_refused_at_once(stem, params, said):
    def loss(params, model_state, batch, keys, *, train, batch_axes):
        return research_dp.LossOutput(jnp.sum(batch["x"]), 1.0 * len(batch["x"]), model_state, {})

    spec = TrainSpec(
        model=research_dp.TrainableModel(lambda key, batch: (params, {}), loss),
        optimizer=optax.sgd(0.1),
        example={"x": jax.ShapeDtypeStruct((), np.float32)},
        batch_size=8,
    )
    with pytest.raises(UsageError, match=re.escape(said)):
        recipe(stem).build(spec)


def test_several_inputs_are_given_by_position():
    def call(self, x, y, *, train):
        return x + 10 * y[:, None]

    functions = linen_functions_of_inputs(own.linen(call), ["x", "y"])
    x, y = jnp.ones((4, 3)), jnp.arange(4.0)
    found, _ = functions.apply({}, {}, (x, y), train=False)
    np.testing.assert_array_equal(found, x + 10 * y[:, None])


@pytest.mark.slow
def test_a_static_argument_of_remat_is_given_by_position():
    net = nn.remat(own.LinenNet, static_argnums=(2,))()
    expected, _ = trained("single", linen_model(own.LinenNet()))
    found, _ = trained("single", linen_model(net))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        jax.tree.leaves(found),
        jax.tree.leaves(expected),
    )


def test_a_loss_per_position_is_weighted_by_position():
    def call(self, tokens):
        return nn.Embed(CLASSES, CLASSES)(tokens)

    options = {"inputs": "tokens", "targets": "next", "weights": "weights"}
    made = linen_model(own.linen(call), **options)
    rng = np.random.default_rng(0)
    tokens = rng.integers(CLASSES, size=(4, 6)).astype(np.int32)
    weights = rng.integers(2, size=(4, 6)).astype(np.float32)
    batch = {"tokens": tokens, "next": tokens, "weights": weights, "mask": np.float32([1, 1, 1, 0])}
    params, state = made.init(jax.random.key(0), batch)
    out = made.loss(params, state, batch, None, train=False, batch_axes=())
    assert out.weight == weights[:3].sum()
    logits = params["Embed_0"]["embedding"][tokens]
    total = (cross_entropy(logits, tokens) * weights)[:3].sum()
    np.testing.assert_allclose(out.total, total, rtol=1e-6)


def test_without_targets_the_loss_is_given_the_batch():
    def of_batch(output, batch):
        return cross_entropy(output, batch["y"])

    by_batch = linen_model(own.linen(plain), loss=of_batch, targets=None)
    by_target = linen_model(own.linen(plain))
    batch = batch_of(0)
    params, state = by_batch.init(jax.random.key(0), batch)
    options = {"train": False, "batch_axes": ()}
    outs = [one.loss(params, state, batch, None, **options) for one in (by_batch, by_target)]
    assert outs[0].total == outs[1].total


def test_a_list_of_nnx_has_keys_of_text_as_checkpoints_have():
    def make(rngs):
        layers = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        return nnx.Sequential(*layers, *(nnx.Linear(4, 4, rngs=rngs) for _ in range(10)))

    functions, x = nnx_functions_of_inputs(make, ["x"]), jnp.ones((2, 3))
    params, state = functions.init(jax.random.key(0), (x,))
    assert set(params["layers"]) == set(map(str, range(12)))
    found, after = functions.apply(params, state, (x,), train=True)
    module = make(nnx.Rngs(jax.random.key(0)))
    module.train()
    np.testing.assert_allclose(found, module(x), rtol=1e-6)
    np.testing.assert_array_equal(after["layers"]["1"]["mean"], module.layers[1].mean[...])


def test_options_of_a_module_that_names_none_have_all_that_linen_functions_gives():
    given = {}

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train, **options):
            given.update(options, train=train)
            return nn.Dense(2)(x)

    functions, x = research_dp.linen_functions(Net()), jnp.ones((2, 3))
    params, state = functions.init(jax.random.key(0), x)
    keys = jax.random.split(jax.random.key(1), 2)
    functions.apply(params, state, x, train=True, keys=keys, batch_axes=())
    assert given["train"] and given["keys"] is keys and given["batch_axes"] == ()


# ---- What is refused, and what is reported ----


REFUSED = {
    own.own_mean: "Net communicates along axis 'batch', which no mesh here has",
    own.masked_norm: "BatchNorm with a mask",
    own.sown: "Net gives variables 'kept' another structure at each call. Sow into 'losses'",
    own.always_drops: r"'dropout' of Flax in evaluation, at .*py:\d+ .*Give its dropout layers",
    own.always_batch_statistics: "Net changes its variables in evaluation. Give nn.BatchNorm",
    own.one_mask: r"broadcast_dims = \(0,\): one mask for all examples",
    own.of_features: r"a dropout layer gets an array \(8, 16\) in a batch of 16 examples",
    own.over_examples: r"a dropout layer gets an array \(8,\) in a batch of 16 examples",
    own.noise: r"Net draws from the RNG stream 'noise' .* in training, at .*own_modules.py:\d+",
    own.attention_of_its_own: "by a dropout layer, e.g. in an attention_fn of its own.* rngs=",
    own.NnxOwnAttention: "by a dropout layer, e.g. in an attention_fn of its own",
    own.attention_without_a_batch: r"gets an array \(16, 2, 4\) in a batch of 16 examples",
    own.attention_that_always_drops: "the RNG stream 'dropout' of Flax in evaluation",
    own.NnxAlwaysDrops: "a dropout layer draws in evaluation. Give it deterministic=True",
    own.NnxAlwaysBatchStatistics: "nnx.BatchNorm takes statistics of the batch in evaluation",
    own.NnxAlwaysOwnNorm: "nnx.BatchNorm takes statistics of the batch in evaluation",
    own.NnxPlainArray: r"NnxPlainArray.offset is an array that is no variable. .*nnx.data\(",
    own.NnxInside: r"NnxInside.layers.0.offset is an array that is no variable",
    own.NnxMaskedNorm: "BatchNorm with a mask",
}


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__)
def test_what_would_depend_on_the_devices_is_refused(module):
    with pytest.raises(UsageError, match=REFUSED[module]):
        lower(model_of(module))


@pytest.mark.parametrize("module", [own.always_batch_statistics, own.NnxAlwaysDrops])
def test_an_evaluation_that_fails_is_refused_before_training(module):
    with pytest.raises(UsageError, match=REFUSED[module]):
        build("ddp", model_of(module))


def lower(model):
    """The loss in training and in evaluation, as far as the compiler."""
    keys, batch = jax.random.split(jax.random.key(0), 16), batch_of(0, 16)
    params, state = jax.eval_shape(model.init, keys[0], batch)
    for given in (keys, None):
        options = {"keys": given, "train": given is not None, "batch_axes": ()}
        jax.jit(functools.partial(model.loss, **options)).lower(params, state, batch)


def plain(self, x):
    return nn.Dense(CLASSES)(x)


def another_mode(self, x, is_traning=False):
    return nn.Dense(CLASSES)(x)


def inference(self, x, inference=None):
    return nn.Dense(CLASSES)(x)


def two_inputs(self, x, y, train):
    return nn.Dense(CLASSES)(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: linen_model(own.linen(two_inputs)),
            r"Net.__call__\(x, y, train\) cannot be called with \(x, train=...\): missing a "
            "required argument: 'y'. Name its arrays by inputs=",
        ),
        (
            lambda: linen_model(own.linen(another_mode)),
            r"Net.__call__\(x, is_traning=False\) would always be called with is_traning = False. "
            "If it says whether the module trains, name it one of train, .*use_running_average",
        ),
        (lambda: linen_model(own.linen(inference)), "always be called with inference = None"),
        (lambda: linen_model(own.LinenNet), "from_linen.module = .*LinenNet'>: give"),
        (
            lambda: nnx_model(own.NnxNet(nnx.Rngs(0))),
            r"is a module, NnxNet. Give a function that makes it, e.g. lambda rngs: NnxNet\(",
        ),
        (
            lambda: nnx_model(lambda shape, rngs: own.NnxNet(rngs)),
            r"calls <lambda>\(shape, rngs\) with rngs alone. Give a function of rngs",
        ),
        (
            lambda: nnx_model(own.NnxSized),
            r"calls NnxSized\(width, rngs\) with rngs alone. Give a function of rngs",
        ),
        (
            lambda: research_dp.linen_functions(own.linen(two_inputs)),
            r"Net.__call__\(x, y, train\) cannot be called with \(x, train=...\)",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": lambda output, y: cross_entropy(output, y).mean()},
            r"loss returns one number for the batch. Return one number per example, \(16,\) here: "
            "leave out .mean",
        ),
        (
            {"metrics": {"hits": lambda output, y: correct(output, y).mean()}},
            "hits returns one number for the batch",
        ),
        (
            {"loss": lambda output, y: (output[:, :1] - y[None]) ** 2},
            r"loss returns an array \(16, 16\) for targets \(16,\): the output was broadcast",
        ),
        ({"loss": lambda output, y: output.sum(0)}, r"loss returns an array \(10,\)"),
        (
            {"metrics": {"loss": correct}},
            "model: its metric 'loss' has the name of one that every run reports. Rename it",
        ),
        (
            {"loss": lambda output, y: cross_entropy(output, y.astype(float))},
            r"loss fails on an output that is an array of shape \(16, 10\) and dtype float32 and "
            r"a target that is an array of shape \(16,\) and dtype int32:\n  TypeError: .*py:\d+\)",
        ),
        (
            {"metrics": {"hits": lambda output, y: optax.softmax_cross_entropy(output, y)}},
            r"hits fails on .*\n  ValueError: ",
        ),
        ({"inputs": "image"}, r"reads 'image' of .* gives \['x', 'y'\].*from_arrays\(\{'image': a"),
        ({"targets": "label"}, r"reads 'label' of a batch, but the data set gives \['x', 'y'\]"),
    ],
)
def test_a_loss_that_is_not_one_number_per_example_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build("single", linen_model(own.linen(plain), **options))


@pytest.mark.parametrize(
    ("values", "target", "is_broadcast"),
    [
        ((4, 4), (4, 1), True),  # (B,) against (B, 1)
        ((4, 6), (4, 6), False),
        ((4, 5), (4, 6), False),  # the next token
        ((4, 9), (4, 6, 4), False),  # a loss per anchor
        ((4,), (4, 10), False),  # one-hot labels
    ],
)
def test_values_of_more_numbers_than_targets_are_refused(values, target, is_broadcast):
    def loss(output, y):
        return jnp.zeros(values)

    def lowered():
        batch = {"x": jnp.ones((4, FEATURES)), "y": jnp.ones(target)}
        params, state = made.init(jax.random.key(0), batch)
        made.loss(params, state, batch, None, train=False, batch_axes=())

    made = linen_model(own.linen(plain), loss=loss)
    if not is_broadcast:
        return lowered()
    with pytest.raises(UsageError, match=r"for targets \(4, 1\).*Give output and target one shape"):
        lowered()


def test_a_class_is_a_factory_if_its_constructor_takes_one_argument():
    lower(nnx_model(own.NnxByKey))


def test_a_factory_that_makes_no_module_is_refused():
    with pytest.raises(UsageError, match=r"factory returns \w+, no nnx.Module"):
        build("single", nnx_model(lambda rngs: jnp.ones(3)))


class NnxTwoInputs(nnx.Module):
    def __init__(self, shape, rngs):
        self.dense = nnx.Linear(*shape, CLASSES, rngs=rngs)

    def __call__(self, x, y):
        return self.dense(x + y)


@pytest.mark.parametrize("function", ["init", "apply"])
def test_an_nnx_module_that_cannot_be_called_is_refused_where_it_is_made(function):
    functions, x = research_dp.nnx_functions(NnxTwoInputs), jnp.ones((2, FEATURES))
    calls = {
        "init": lambda: functions.init(jax.random.key(0), x),
        "apply": lambda: functions.apply({}, {}, x, train=True),
    }
    message = r"NnxTwoInputs.__call__\(x, y\) cannot be called with \(x\)"
    with pytest.raises(UsageError, match=message):
        calls[function]()


def test_nnx_functions_take_a_module_whose_methods_set_the_mode():
    functions = research_dp.nnx_functions(lambda shape, rngs: own.NnxNet(rngs, dropout=0.0))
    x = jax.random.normal(jax.random.key(1), (4, FEATURES))
    params, state = functions.init(jax.random.key(0), x)
    found, after = functions.apply(params, state, x, train=True)
    module = own.NnxNet(nnx.Rngs(jax.random.key(0)), dropout=0.0)
    np.testing.assert_allclose(found, module(x), rtol=1e-6)
    np.testing.assert_array_equal(after["norm"]["mean"], module.norm.mean[...])
    module.eval()
    found, same = functions.apply(params, after, x, train=False)
    np.testing.assert_allclose(found, module(x), rtol=1e-6)
    np.testing.assert_array_equal(same["norm"]["mean"], after["norm"]["mean"])


def test_statistics_of_a_device_are_refused():
    with pytest.raises(UsageError, match="numbers of an example depend on others of the batch"):
        order_warning(build("ddp", linen_model(own.linen(own.statistics_of_a_device))))


@pytest.mark.parametrize(
    ("module", "stem"),
    [
        (own.statistics_of_all, "ddp"),
        (own.NnxTransformed, "ddp"),
        pytest.param(own.NnxJitted, "ddp", marks=pytest.mark.exhaustive),
        pytest.param(own.noise_by_example, "fsdp", marks=pytest.mark.exhaustive),
        (own.attention, "fsdp"),
        (own.NnxAttention, "ddp"),
        pytest.param(own.attention, "ddp", marks=pytest.mark.exhaustive),
        pytest.param(own.NnxAttention, "fsdp", marks=pytest.mark.exhaustive),
        pytest.param(own.NnxAttention, "spmd", marks=pytest.mark.exhaustive),
    ],
)
def test_axes_keys_transforms_and_attention_keep_the_numbers_of_one_device(module, stem):
    expected, _ = trained("single", model_of(module))
    found, reports = trained(stem, model_of(module))
    assert not reports
    assert_near(found, expected)
    if "calls" in found[2]:
        assert found[2]["calls"] == STEPS * MICROS, "evaluation has counted"
