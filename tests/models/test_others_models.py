"""Models with the shapes of published ones, as they are: the numbers of a plain loop of Optax.

Each has what kept somebody's model from being trained: arguments by name, constants, a batch as a
dataclass, draws in evaluation, sown losses, axes and metadata of its own.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import research_dp
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError
from research_dp.strategies import TrainSpec
from research_dp.strategies.batch_losses import order_dependence
from tests.support.recipes import recipe

FEATURES, CLASSES, BATCH, RATE = 8, 10, 32, 0.1
EXAMPLE = {
    "x": jax.ShapeDtypeStruct((FEATURES,), np.float32),
    "y": jax.ShapeDtypeStruct((), np.int32),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
# Of a grid the quick tests run one column.
STEMS = [("single", "fsdp"), pytest.param(("ddp", "zero1"), marks=pytest.mark.slow)]


def batch_of(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(CLASSES, size=BATCH).astype(np.int32)}


class Keyword(nn.Module):
    """Inputs by keyword alone, of which some are optional, and several outputs."""

    @nn.compact
    def __call__(self, *, features, positions=None, return_dict=True, deterministic=True):
        assert positions is None and not return_dict
        hidden = nn.tanh(nn.Dense(16)(features))
        return nn.Dense(CLASSES)(hidden), hidden


@dataclasses.dataclass
class Record:
    """A batch as an object, which JAX does not know."""

    x: Any
    y: Any


class OfRecord(nn.Module):
    @nn.compact
    def __call__(self, record):
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(16)(record.x)))


class OwnAxis(nn.Module):
    """As for a `pmap` over 'batch'."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
        return nn.Dense(CLASSES)(nn.relu(x))


class OnMeshAxes(nn.Module):
    """Metadata that names an axis of the mesh, and one that no mesh has."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "unknown"))
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(16, kernel_init=init)(x)))


@flax.struct.dataclass
class Config:
    rate: float = 0.5
    deterministic: bool = False


class ModeInConfig(nn.Module):
    """Its evaluation needs another module."""

    config: Config

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16)(x))
        x = nn.Dropout(self.config.rate, deterministic=self.config.deterministic)(x)
        return nn.Dense(CLASSES)(x)


class Mixture(nn.Module):
    """A loss and a metric of a layer inside: means over the examples."""

    @nn.compact
    def __call__(self, x):
        gates = nn.softmax(nn.Dense(2, name="gate")(x))
        self.sow("losses", "balance", jnp.mean(jnp.square(gates)))
        self.sow("metrics", "first", jnp.mean(gates[:, 0]))
        both = jnp.stack([nn.Dense(CLASSES)(x) for _ in range(2)], -1)
        return jnp.sum(both * gates[:, None], -1)


class NnxMixture(nnx.Module):
    def __init__(self, rngs):
        self.gate = nnx.Linear(FEATURES, 2, rngs=rngs)
        self.heads = nnx.List(nnx.Linear(FEATURES, CLASSES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        gates = nnx.softmax(self.gate(x))
        self.sow("losses", "balance", jnp.mean(jnp.square(gates)))
        both = jnp.stack([head(x) for head in self.heads], -1)
        return jnp.sum(both * gates[:, None], -1)


def plain_cross_entropy(apply, params, batch):
    return cross_entropy(apply({"params": params}, batch["x"]), batch["y"]).mean()


def mixture_loss(apply, params, batch):
    logits, sown = apply({"params": params}, batch["x"], mutable=["losses"])
    return cross_entropy(logits, batch["y"]).mean() + sum(jax.tree.leaves(sown["losses"]))


def own_axis_loss(apply, params, batch):
    state = {"batch_stats": {"BatchNorm_0": {"mean": jnp.zeros(16), "var": jnp.ones(16)}}}
    logits, _ = jax.vmap(
        lambda x: apply({"params": params, **state}, x, True, mutable=["batch_stats"]),
        axis_name="batch",
    )(batch["x"][None])
    return cross_entropy(logits[0], batch["y"]).mean()


def keyword_loss(apply, params, batch):
    logits, hidden = apply({"params": params}, features=batch["x"], return_dict=False)
    return cross_entropy(logits, batch["y"]).mean() + jnp.square(hidden).mean()


def own_call(apply, params, batch, keys):
    """Two calls of the model, and parameters in the loss: as any loop writes them."""
    first, second = apply(params, batch["x"]), apply(params, -batch["x"])
    decay = 0.1 * jnp.square(params["Dense_0"]["kernel"]).sum()
    return cross_entropy(first, batch["y"]) + jnp.square(second).mean(-1) + decay, {
        "right": first.argmax(-1) == batch["y"]
    }


def own_call_loss(apply, params, batch):
    first, second = (apply({"params": params}, s * batch["x"]) for s in (1, -1))
    decay = 0.1 * jnp.square(params["Dense_0"]["kernel"]).sum()
    return cross_entropy(first, batch["y"]).mean() + jnp.square(second).mean() + decay


def of_outputs(outputs, y):
    logits, hidden = outputs
    return cross_entropy(logits, y) + jnp.square(hidden).mean(-1)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(16)(x)))


BY_NAME = {"features": "x", "positions": None, "return_dict": False}
# Name -> (module, arguments of `from_linen`, the loss of a plain loop).
MODELS = {
    "keyword": (Keyword(), {"inputs": BY_NAME, "loss": of_outputs}, keyword_loss),
    "record": (
        OfRecord(),
        {"inputs": lambda batch: Record(**batch)},
        lambda apply, params, batch: plain_cross_entropy(
            lambda v, x: apply(v, Record(x, None)), params, batch
        ),
    ),
    "own axis": (OwnAxis(), {}, own_axis_loss),
    "mesh axes": (OnMeshAxes(), {}, plain_cross_entropy),
    "sown": (Mixture(), {}, mixture_loss),
    "own call": (Plain(), {"loss": own_call}, own_call_loss),
}


def built(stem, model, micros=2):
    options = {"example": EXAMPLE, "batch_size": BATCH, "accumulation_steps": micros}
    spec = TrainSpec(model=model, optimizer=optax.sgd(RATE), seed=3, **options)
    return recipe(stem).build(spec)


def trained(stem, model, micros=2):
    """Losses of each step and of an evaluation, and the parameters by path."""
    strategy = built(stem, model, micros)
    state, losses = strategy.init(0), []
    for step in range(3):
        local = {k: x[strategy.train_rows] for k, x in batch_of(step).items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        losses.append(metrics)
    size = strategy.eval_batch_size
    local = {k: x[:size][strategy.eval_rows] for k, x in batch_of(9).items()}
    local["mask"] = np.ones(len(strategy.eval_rows), np.float32)
    losses.append(strategy.eval_step(state, strategy.place_eval_batch(local)))
    means = [{k: x[0] / x[1] for k, x in m.items() if k != "nonfinite"} for m in losses]
    return jax.device_get(means), jax.device_get(by_path(strategy.logical(state).params))


@pytest.mark.parametrize("stems", STEMS)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_a_plain_loop(name, stems):
    module, options, loss = MODELS[name]
    model = research_dp.from_linen(module, **{"loss": cross_entropy, **options})
    start = built("single", model, 1).init(0)
    params = jax.tree.map(np.asarray, start.params)
    expected = []
    for step in range(3):
        batch = batch_of(step)
        value, grads = jax.value_and_grad(lambda p, b=batch: loss(module.apply, p, b))(params)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        expected.append(float(value))
    for stem in stems:
        metrics, found = trained(stem, model, micros=1)
        np.testing.assert_allclose([m["loss"] for m in metrics[:3]], expected, rtol=1e-5)
        for path, x in by_path(params).items():
            np.testing.assert_allclose(found[path], x, rtol=1e-4, atol=1e-6, err_msg=path)


def assert_alike(model, names=("loss",)):
    """Under `fsdp` as under `single`; metrics of each step, and of an evaluation."""
    expected, params = trained("single", model)
    metrics, found = trained("fsdp", model)
    for name in names:
        for a, b in zip(metrics, expected, strict=True):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
    for path, x in params.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-4, atol=1e-6, err_msg=path)
    return expected


def test_sown_metrics_are_logged_and_sown_losses_of_nnx_are_added():
    model = research_dp.from_linen(Mixture(), loss=cross_entropy)
    logged = assert_alike(model, ("loss", "balance", "first"))
    assert 0 < logged[0]["first"] < 1 and 0.25 <= logged[0]["balance"] <= 0.5
    model = research_dp.from_nnx(lambda rngs: NnxMixture(rngs), loss=cross_entropy)
    assert 0.25 <= assert_alike(model, ("loss", "balance"))[-1]["balance"] <= 0.5


def test_a_loss_of_its_own_calls_has_metrics_of_its_own():
    model = research_dp.from_linen(Plain(), loss=own_call)
    assert 0 <= assert_alike(model, ("loss", "right"))[0]["right"] < 1
    for options, message in (
        ({"metrics": {"right": cross_entropy}}, "a loss that takes `apply` returns its metrics"),
        ({"targets": "label"}, "targets: a loss that takes `apply` is given the batch"),
    ):
        with pytest.raises(UsageError, match=message):
            research_dp.from_linen(Plain(), loss=own_call, **options)
    # Its decay reads a parameter outside of the layer's call, so that layer is no unit.
    model = research_dp.from_linen(Plain(), loss=own_call, units=("Dense_0", "Dense_1"))
    assert set(built("fsdp", model).spec.model.units) == {"Dense_1"}


def two_draws(apply, params, batch, keys):
    """As R-Drop has it: the distance of two passes with other masks; a table for all examples."""
    first, second = (apply(params, batch["x"], jnp.arange(3.0)) for _ in range(2))
    return jnp.square(first - second).mean(-1)


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, table, train):
        assert table.shape == (3,)
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(x)) * table.sum()


class DropsAndDraws(nn.Module):
    """It has dropout besides the stream that it draws from, and the table as it is."""

    @nn.compact
    def __call__(self, x, table, train):
        x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return Drops()(x, table, train)


def test_calls_of_one_loss_draw_by_themselves():
    inputs = {"x": "x", "table": np.ones(3)}
    for module, options, evaluated in ((Drops(), {}, 0), (DropsAndDraws(), {"rngs": "noise"}, 1)):
        model = research_dp.from_linen(module, loss=two_draws, inputs=inputs, **options)
        losses = [float(m["loss"]) for m in assert_alike(model)]
        assert min(losses[:-1]) > 1e-3 and (losses[-1] > 1e-3) == evaluated


def test_evaluation_by_another_module():
    module = ModeInConfig(Config())
    evaluated = ModeInConfig(Config(deterministic=True))
    model = research_dp.from_linen(module, loss=cross_entropy, eval_module=evaluated)
    metrics = assert_alike(model)
    _, params = trained("single", model)
    batch = {k: x[: BATCH // 2] for k, x in batch_of(9).items()}
    tree = {"Dense_0": {}, "Dense_1": {}}
    for path, x in params.items():
        layer, name = path.split("/")
        tree[layer][name] = x
    with pytest.raises(UsageError, match="eval_module has other parameters than ModeInConfig"):
        other = research_dp.from_linen(module, loss=cross_entropy, eval_module=Mixture())
        built("single", other)
    expected = plain_cross_entropy(evaluated.apply, tree, batch)
    np.testing.assert_allclose(metrics[-1]["loss"], expected, rtol=1e-5)


# ---- Draws: each example has a call of its own ----


class Autoencoder(nn.Module):
    """A variational one: it draws in evaluation too, from a stream of its own."""

    @nn.compact
    def __call__(self, x):
        mean, logvar = jnp.split(nn.Dense(16)(x), 2, -1)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.make_rng("sample"), mean.shape)
        return nn.Dense(FEATURES)(z), mean, logvar


def evidence(outputs, batch):
    x, mean, logvar = outputs
    divergence = -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar), -1)
    return jnp.square(x - batch["x"]).sum(-1) + divergence


class WordDropout(nn.Module):
    """A mask drawn by the module itself, in training alone; BatchNorm over the batch."""

    @nn.compact
    def __call__(self, x, train):
        if train:
            x = x * jax.random.bernoulli(self.make_rng("dropout"), 0.7, x.shape)
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class SharedAttentionMask(nn.Module):
    """Attention weights drawn from a key that the module makes, as FlaxGPT2 does."""

    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.Dense(16)(x).reshape(-1, 4, 2, 2)
        rng = None if deterministic else self.make_rng("dropout")
        weights = nn.dot_product_attention_weights(
            x, x, dropout_rng=rng, dropout_rate=0.3, deterministic=deterministic
        )
        x = jnp.einsum("...hqk,...khd->...qhd", weights, x)
        return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))


class NnxNoise(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(FEATURES, n, rngs=rngs) for n in (FEATURES, CLASSES))
        self.rngs = rngs

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)) + jax.random.normal(self.rngs.noise(), x.shape))


DRAWING = {
    "autoencoder": (Autoencoder(), {"loss": evidence, "targets": None, "rngs": "sample"}),
    "words": (WordDropout(), {"rngs": ["dropout"]}),
    "attention": (SharedAttentionMask(), {"rngs": "dropout"}),
    "nnx": (lambda rngs: NnxNoise(rngs), {"rngs": "noise"}),
}


def drawing(name, **changed):
    module, options = DRAWING[name]
    make = research_dp.from_linen if isinstance(module, nn.Module) else research_dp.from_nnx
    return make(module, **{"loss": cross_entropy, **options, **changed})


@pytest.mark.parametrize("name", DRAWING)
def test_draws_are_the_same_on_any_number_of_devices(name):
    model = drawing(name)
    expected = assert_alike(model)
    assert len({float(m["loss"]) for m in expected}) == len(expected)
    strategy = built("ddp", model)
    local = {k: x[strategy.train_rows] for k, x in batch_of(0).items()}
    assert order_dependence(strategy, strategy.place_batch(local)) is None


def test_each_example_draws_its_own():
    """As a Flax call on it alone, with keys that differ."""
    model, x = drawing("nnx"), jnp.ones((4, FEATURES))
    params, state = model.init(jax.random.key(0), {"x": x, "y": jnp.zeros(4, jnp.int32)})
    keys = jax.random.split(jax.random.key(1), 4)

    def losses(x, keys, train):
        found = []
        for i in range(len(x)):
            batch = {"x": x[i][None], "y": jnp.zeros(1, jnp.int32)}
            own = None if keys is None else keys[i][None]
            out = model.loss(params, state, batch, own, train=train, batch_axes=())
            found.append(float(out.total))
        return found

    assert len(set(losses(x, keys, True))) == 4
    assert len(set(losses(x, None, False))) == 1  # in evaluation keys are made of the values
    assert len(set(losses(x * jnp.arange(1, 5)[:, None], None, False))) == 4


class Misused(nn.Module):
    """What cannot be said of one example, or of a device's part of the batch."""

    what: str

    @nn.compact
    def __call__(self, x):
        if self.what == "mean":
            x = x - research_dp.global_mean(x)[None]
        else:
            self.sow("losses", "each", jnp.square(x).mean(-1))
        return nn.Dense(CLASSES)(x)


def test_what_would_be_another_number_in_silence_is_refused():
    for what, options, message in (
        ("mean", {"rngs": "noise"}, r"global_mean in a model that is called for each example"),
        ("sown", {}, r"^each is sown with shape \(\d+,\).* Sow a number"),
    ):
        with pytest.raises(UsageError, match=message):
            built("ddp", research_dp.from_linen(Misused(what), loss=cross_entropy, **options))
    with pytest.raises(UsageError, match=r"inputs = \{'x': None\} names no array"):
        research_dp.from_linen(Plain(), loss=cross_entropy, inputs={"x": None})


def test_a_draw_that_is_not_named_is_refused_with_its_line():
    with pytest.raises(UsageError, match=r"test_others_models.py:\d+ \(__call__\).*rngs='sample'"):
        built("single", drawing("autoencoder", rngs=()))


# ---- Units ----


class Cache(nnx.Module):
    """What an attention keeps; a layer writes to it, and may return it."""

    def __init__(self, rows):
        self.values, self.count = nnx.Cache(jnp.zeros((rows, 8))), nnx.Cache(jnp.zeros((), int))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x, cache):
        y = nnx.tanh(self.linear(x))
        cache.values[...] = y
        cache.count[...] = cache.count[...] + 1
        return x + cache.values[...] * cache.count[...]


class Cached(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(Layer(rngs) for _ in range(2))
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        caches = [Cache(len(x)) for _ in self.layers]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x) * caches[-1].count[...]


def test_layers_that_are_given_a_cache_are_units():
    make = {"loss": cross_entropy, "units": "layers/*"}
    model = research_dp.from_nnx(lambda rngs: Cached(rngs), **make)
    assert built("fsdp", model).spec.model.units == {"layers/0": "part", "layers/1": "part"}
    assert_alike(model)


# ---- Parameters in and out ----


def test_a_run_begins_with_an_nnx_module_and_its_parameters_come_back(tmp_path):
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(64, 16, rngs=rngs)])
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.layers[0](x))))

    loaded = Normed(nnx.Rngs(7))
    loaded.norm.mean[...] = jnp.full(16, 3.0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 64)).astype(np.float32), rng.integers(CLASSES, size=64)
    model = research_dp.from_nnx(Normed, loss=cross_entropy)
    research_dp.run(
        ["strategies/fsdp.gin"],
        {"train.num_steps": 1, "train.batch_size": 32},
        workdir=tmp_path / "run",
        model=model,
        data=research_dp.from_arrays(x, y),
        optimizer=optax.sgd(0.0),
        initial=loaded,
    )
    found = research_dp.load(tmp_path / "run", model=model)
    back = Normed(nnx.Rngs(0))
    research_dp.update_nnx(back, found.params, found.model_state)
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(research_dp.nnx_variables, (loaded, nnx.state(loaded))),
    )
    with pytest.raises(UsageError, match=r"initial has 'runs/base', no array.* bind train.in"):
        research_dp.run([], {}, tmp_path / "other", initial="runs/base")
    params, moved = (research_dp.nnx_variables(module)[0] for module in (loaded, back))
    jax.tree.map(np.testing.assert_array_equal, params, moved)
    assert float(back.norm.mean[...].min()) > 2  # moved on from 3
    with pytest.raises(UsageError, match="paths than Normed: only one has head/bias, head/kernel"):
        del params["head"]
        research_dp.update_nnx(back, params)
