"""Losses and layers that mix examples: found where they are built; a right way; accepted ones."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import research_dp
import research_dp.training.train
from examples import contrastive
from research_dp.analysis.program_cost import collectives_of, wire_totals
from research_dp.certification.certify import certify
from research_dp.distributed.batch_examples import split_over
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.mesh import planning_for
from research_dp.distributed.placement import fingerprint
from research_dp.errors import UsageError
from research_dp.models import convnet, mlp, resnet, transformer
from research_dp.strategies import TrainSpec
from research_dp.strategies.jaxpr_collectives import of_step
from research_dp.types import LossOutput, TrainableModel
from tests.support import certified
from tests.support.certified import TOKENS, bench_of, noise
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.marks import exhaustive
from tests.support.own_modules import EXAMPLE, FEATURES, cross_entropy
from tests.support.recipes import recipe
from tests.support.repository import stems
from tests.support.steps import mesh_of, on
from tests.support.strategies import examples_of, order_warning

CLASSES, BATCH = 4, 48


towers = functools.partial(contrastive.two_towers, width=16, features=8)


def built(model, stem="ddp", example=EXAMPLE, **options):
    settings = {"model": model, "optimizer": optax.sgd(0.1), "example": example}
    config = recipe(stem, "shard_params.min_weight_size = 1")
    return config.build(TrainSpec(**{**settings, "batch_size": BATCH, **options}))


# ---- What is found ----


def own_loss(function):
    """A model whose loss is `function` of the logits and the batch."""

    def init(key, batch):
        return {"w": jax.random.normal(key, (FEATURES, CLASSES))}, {}

    def loss(params, model_state, batch, keys, train, batch_axes):
        y = batch["y"] % CLASSES
        out = function(batch["x"] @ params["w"], y, params)
        if not isinstance(out, LossOutput):
            out = LossOutput(out.sum(), jnp.float32(out.shape[0]), {}, {})
        return out

    return TrainableModel(init, loss)


class Linen(nn.Module):
    layer: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(self.layer(nn.Dense(16)(x)))


class Nnx(nnx.Module):
    def __init__(self, layer, rngs):
        self.first, self.last = nnx.Linear(FEATURES, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.layer = layer

    def __call__(self, x):
        return self.last(self.layer(self.first(x)))


def in_linen(layer):
    return research_dp.from_linen(Linen(layer), loss=cross_entropy)


def in_nnx(layer):
    return research_dp.from_nnx(lambda rngs: Nnx(layer, rngs), loss=cross_entropy)


def in_batch_negatives(logits, y, _):
    return cross_entropy(logits @ logits.T, jnp.arange(logits.shape[0]))


def class_weights(logits, y, _):
    counts = jnp.zeros(CLASSES).at[y].add(1.0)
    return cross_entropy(logits, y) * (1 / (counts + 1))[y]


def class_weights_one_hot(logits, y, _):
    hot = jax.nn.one_hot(y, CLASSES)
    return cross_entropy(logits, y) * (hot @ (1 / (hot.sum(0) + 1)))


def masked_mean_alone(logits, y, _):
    mask = (y > 1).astype(jnp.float32)
    return LossOutput(jnp.sum(cross_entropy(logits, y) * mask) / mask.sum(), jnp.float32(1), {}, {})


def regularised_on_each_device(logits, y, params):
    total = cross_entropy(logits, y).sum() + jnp.sum(params["w"] ** 2)
    return LossOutput(total, jnp.float32(y.shape[0]), {}, {})


def hardest(logits, y, _):
    return LossOutput(jax.lax.top_k(cross_entropy(logits, y), 2)[0].sum(), jnp.float32(2), {}, {})


def gathered_by_place(logits, y, _):
    """Device 1's own pairs are not the first ones of all."""
    scores = logits @ research_dp.gather_examples(logits).T
    return cross_entropy(scores, jnp.arange(len(logits)))


def correlation(logits, y, _):
    matrix = logits.T @ logits / y.shape[0]
    return LossOutput(jnp.sum((matrix - jnp.eye(CLASSES)) ** 2), jnp.float32(1), {}, {})


def greatest_as_metric(logits, y, _):
    losses = cross_entropy(logits, y)
    sums = {"worst": (losses.max(), jnp.float32(1))}
    return LossOutput(losses.sum(), jnp.float32(y.shape[0]), {}, sums)


def pair_distances(logits, y, _):
    """To the nearest other example."""
    itself = 1e9 * jnp.eye(len(logits))
    return (jnp.sum((logits[:, None] - logits[None]) ** 2, -1) + itself).min(1)


def all_pairs(x):
    rows = len(x)
    first = jnp.broadcast_to(x[None], (rows, *x.shape)).reshape(rows * rows, -1)
    return jnp.concatenate([first, jnp.repeat(x, rows, axis=0)], axis=-1).reshape(rows, -1)


def neighbours(x):
    return x + jnp.roll(x, 1, axis=0)


MIXING = {
    "in-batch negatives": (own_loss, in_batch_negatives),
    "in-batch negatives, gathered": (own_loss, gathered_by_place),
    "class weights": (own_loss, class_weights),
    "class weights, one-hot": (own_loss, class_weights_one_hot),
    "a masked mean": (own_loss, masked_mean_alone),
    "the hardest examples": (own_loss, hardest),
    "a correlation": (own_loss, correlation),
    "a metric": (own_loss, greatest_as_metric),
    "distances of pairs": (own_loss, pair_distances),
    "the log of a sum": (
        own_loss,
        lambda x, y, _: LossOutput(jnp.log(cross_entropy(x, y).sum()), jnp.float32(1), {}, {}),
    ),
    "centred": (in_linen, lambda x: x - x.mean(0)[None]),
    "centred, nnx": (in_nnx, lambda x: x - x.mean(0, keepdims=True)),
    "whitened, nnx": (in_nnx, lambda x: x / jnp.std(x, axis=0)[None]),
    "scaled by a maximum": (in_linen, lambda x: x / jnp.abs(x).max()),
    "softmax over examples": (in_linen, lambda x: jax.nn.softmax(x, axis=0)),
    "attention over examples": (in_nnx, lambda x: jax.nn.softmax(x @ x.T) @ x),
    "neighbours": (in_linen, neighbours),
    "reversed, nnx": (in_nnx, lambda x: x + x[::-1]),
    "sorted": (in_linen, lambda x: jnp.sort(x, axis=0)),
    "running sums": (in_linen, lambda x: jnp.cumsum(x, axis=0)),
    "halves": (in_linen, lambda x: jnp.concatenate([x[: len(x) // 2], -x[len(x) // 2 :]])),
    "another order": (in_nnx, lambda x: x.reshape(x.shape[1], -1).T),
    "places": (in_linen, lambda x: x * jnp.arange(len(x))[:, None]),
    "places that are counted": (
        own_loss,
        lambda x, y, _: cross_entropy(x, y) * jnp.cumsum(jnp.ones(len(y))),
    ),
    "places between two numbers": (
        in_nnx,
        lambda x: x * jnp.linspace(0, 1, len(x))[:, None],
    ),
    "the first example": (in_linen, lambda x: x * jnp.zeros((len(x), 1)).at[0].set(1)),
    "all but the first": (
        in_linen,
        lambda x: x * jnp.pad(jnp.ones((len(x) - 1, 1)), ((1, 0), (0, 0))),
    ),
    "a permutation": (in_linen, lambda x: x[(jnp.arange(len(x)) + 1) % len(x)]),
    "gathered in vmap": (
        own_loss,
        lambda x, y, _: jax.vmap(lambda z: jax.nn.logsumexp(research_dp.gather_examples(z)))(x),
    ),
    "places in a product": (
        own_loss,
        lambda x, y, _: jnp.dot(jnp.arange(len(y), dtype="f4"), cross_entropy(x, y))[None],
    ),
    "earlier ones": (
        own_loss,
        lambda x, y, _: jnp.tril(jnp.ones((len(y), len(y)))) @ cross_entropy(x, y),
    ),
    "all pairs": (own_loss, lambda x, y, _: jnp.tanh(all_pairs(x)[:, ::3].sum(-1))),
    "a weight": (
        own_loss,
        lambda x, y, _: LossOutput(
            cross_entropy(x, y).sum(), x.max(), {}, {"weight": (x.sum(), x.sum())}
        ),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_examples_is_refused_with_its_numbers(name):
    kind, function = MIXING[name]
    model = kind(function)
    with pytest.raises(UsageError) as raised:
        order_warning(built(model))
    message = str(raised.value)
    assert re.search(
        r"\w in evaluation is -?[\d.]+, and -?[\d.]+ with half of its rows", message
    ), message
    assert "research_dp.gather_examples" in message and "loss_over = 'device'" in message
    assert raised.value.binding == "TrainSpec.model"
    for stem in ("single", "spmd"):  # they have all examples in one program
        assert order_warning(built(model, stem)) is None


class HeadOfZeros(nn.Module):
    """Its first loss is the log of CLASSES, whatever is before the head."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        return nn.Dense(CLASSES, kernel_init=nn.initializers.zeros)(x - x.mean(0)[None])


def test_a_head_of_zeros_hides_nothing():
    model = research_dp.from_linen(HeadOfZeros(), loss=cross_entropy)
    with pytest.raises(UsageError, match="loss in evaluation is"):
        order_warning(built(model))


def in_training(function):
    """A model of which `function` of the logits enters the loss of training alone."""
    model = own_loss(lambda logits, y, _: cross_entropy(logits, y))

    def loss(params, model_state, batch, keys, train, batch_axes):
        logits = batch["x"] @ params["w"]
        logits = function(logits, keys) if train else logits
        losses = cross_entropy(logits, batch["y"] % CLASSES)
        return LossOutput(losses.sum(), jnp.float32(len(losses)), {}, {})

    return dataclasses.replace(model, loss=loss)


def centred_of_each_micro_batch(logits, keys):
    return logits - research_dp.global_mean(logits)[None]


def test_training_is_tried_too_and_rows_stay_in_their_micro_batch():
    model = in_training(lambda logits, keys: logits - logits.mean(0)[None])
    with pytest.raises(UsageError, match=r"loss in training is .* with half of its rows"):
        order_warning(built(model, "fsdp"))
    model = in_training(centred_of_each_micro_batch)
    assert order_warning(built(model, "fsdp", accumulation_steps=3)) is None


def test_where_random_numbers_are_drawn_an_order_that_matters_is_a_warning():
    def noisy(logits, keys):
        own = jax.vmap(lambda key: jax.random.normal(key, (CLASSES,)))(keys)
        return logits - logits.mean(0)[None] + own

    warning = order_warning(built(in_training(noisy)))
    assert "loss in training is" in warning and "or numbers of an example depend" in warning


def test_half_precision_widens_the_bound_by_the_number_of_examples():
    def rounded(logits, y, _):
        return cross_entropy(logits.astype(jnp.bfloat16), y).astype(jnp.float32)

    assert order_warning(built(own_loss(rounded))) is None
    model = own_loss(lambda x, y, _: rounded(x - x.mean(0)[None], y, _))
    with pytest.raises(UsageError, match="depend on others"):
        order_warning(built(model))


def test_numbers_that_cancel_are_compared_by_the_size_of_their_addends():
    """The sum over all of centred values is rounding, and that over some is not."""

    def centred_metric(mean):
        model = own_loss(lambda logits, y, _: cross_entropy(logits, y))

        def loss(params, model_state, batch, keys, train, batch_axes):
            x, y = batch["x"] @ params["w"], batch["y"] % CLASSES
            mask = batch.get("mask", jnp.ones(len(y)))
            centred = mask * 10 * (x[:, 0] - mean(x[:, 0]))
            sums = {"centred": (centred.sum(), mask.sum())}
            return LossOutput(jnp.sum(mask * cross_entropy(x, y)), mask.sum(), {}, sums)

        return dataclasses.replace(model, loss=loss)

    alike = centred_metric(lambda x: research_dp.global_mean(x)[None])
    assert order_warning(built(alike)) is None
    mixing = centred_metric(lambda x: x.max()[None])
    with pytest.raises(UsageError, match="centred in evaluation is"):
        order_warning(built(mixing))


def test_a_sum_in_half_precision_is_known_to_its_last_place():
    def coarse(x, y, _):
        total = cross_entropy(x, y).astype(jnp.bfloat16).sum()
        return LossOutput(total.astype(jnp.float32), jnp.float32(len(y)), {}, {})

    assert order_warning(built(own_loss(coarse), batch_size=1024)) is None


def test_where_parameters_cannot_be_moved_they_are_those_of_the_start():
    def init(key, batch):
        return {"w": jnp.full((FEATURES, CLASSES), 1e-3)}, {}

    def rooted(params, model_state, batch, keys, train, batch_axes):
        x = batch["x"] @ jnp.sqrt(params["w"]) * jnp.arange(CLASSES)[None]
        losses = cross_entropy(x - x.mean(0)[None], batch["y"] % CLASSES)
        return LossOutput(losses.sum(), jnp.float32(len(losses)), {}, {})

    with pytest.raises(UsageError, match="depend on others"), jax.debug_nans(True):
        order_warning(built(TrainableModel(init, rooted)))


def test_it_takes_any_seed_and_the_memory_of_one_state():
    strategy, most = built(own_loss(lambda x, y, _: cross_entropy(x, y)), seed=2**32 - 1), []

    def counting(*args):
        most.append(sum(x.shape == (FEATURES, CLASSES) for x in jax.live_arrays()))
        return strategy.init(*args)

    before = sum(x.shape == (FEATURES, CLASSES) for x in jax.live_arrays())
    assert order_warning(dataclasses.replace(strategy, init=counting)) is None
    assert most == [before, before]


def test_the_optimizers_random_numbers_are_no_reason():
    model = in_training(lambda logits, keys: logits - logits.mean(0)[None])
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    with pytest.raises(UsageError, match="loss in training is"):
        order_warning(built(model, optimizer=noisy))


def test_an_evaluation_by_another_strategy_is_tried_by_its_first_batch():
    alike, mixing = (own_loss(f) for f in (lambda x, y, _: cross_entropy(x, y), in_batch_negatives))
    examples = {k: x[:44] for k, x in examples_of(EXAMPLE).items()}  # 44: the last are padding
    data = research_dp.from_arrays(examples)
    for model, message in ((alike, None), (mixing, "loss in evaluation is")):
        for stem in ("single", "ddp"):
            strategy = built(model, stem)
            if message is None or stem == "single":
                assert research_dp.eval_metrics(strategy, strategy.init(0), data)["loss"] > 0
                continue
            with pytest.raises(UsageError, match=message):
                research_dp.eval_metrics(strategy, strategy.init(0), data)


# ---- What is not ----


def masked_mean_weighted(logits, y, _):
    mask = (y > 1).astype(jnp.float32)
    mean = jnp.sum(cross_entropy(logits, y) * mask) / jnp.maximum(mask.sum(), 1)
    return LossOutput(mean * mask.sum(), mask.sum(), {}, {})


def masked_mean_regularised(logits, y, params):
    mask = (y > 1).astype(jnp.float32)
    mean = jnp.sum(cross_entropy(logits, y) * mask) / mask.sum()
    return LossOutput((mean + jnp.sum(params["w"] ** 2)) * mask.sum(), mask.sum(), {}, {})


def two_views(logits, y, _):
    views = jnp.concatenate([jnp.zeros_like(y), jnp.ones_like(y)])
    losses = cross_entropy(jnp.concatenate([logits, -logits]), views)
    return LossOutput(losses.sum(), jnp.float32(len(y)), {}, {})


def in_chunks(logits, y, _):
    return jax.lax.map(lambda example: cross_entropy(*example), (logits, y), batch_size=3)


def some_features(x):
    """Weights of features, made by scatters, sums and padding."""
    chosen = jnp.zeros(x.shape).at[:, 2].set(1.0).at[:, 4:].set(2.0)
    return x * chosen * jnp.pad(jnp.cumsum(chosen, 1), ((0, 0), (1, 0)))[:, 1:]


def one_hot_by_scatter(logits, y, _):
    places = jnp.arange(y.shape[0])
    return optax.softmax_cross_entropy(logits, jnp.zeros(logits.shape).at[places, y].set(1.0))


def scanned(logits, y, _):
    def add(total, example):
        return total + cross_entropy(*example), None

    return LossOutput(jax.lax.scan(add, 0.0, (logits, y))[0], jnp.float32(y.shape[0]), {}, {})


def regularised(logits, y, params):
    total = cross_entropy(logits, y).sum() + jnp.sum(params["w"] ** 2) * y.shape[0]
    return LossOutput(total, jnp.float32(y.shape[0]), {}, {})


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2)(nn.Dense(8)(x.reshape(-1, 4, 2)))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(x))


def packed(x):
    """Attention inside segments of an example."""
    words = x.reshape(len(x), 4, 4)
    segments = jnp.cumsum(words[..., 0] > 0, axis=1)
    same = segments[:, :, None] == segments[:, None]
    scores = jnp.where(same, words @ words.swapaxes(1, 2), -1e9)
    return (jax.nn.softmax(scores) @ words).reshape(len(x), 16)


def routed(x):
    """The best two of four experts, for each example."""
    gates, experts = jax.lax.top_k(x[:, :4], 2)
    tables = jnp.arange(4 * 16.0).reshape(4, 16)
    return jnp.einsum("bk,bkd->bd", jax.nn.softmax(gates), tables[experts]) + x


IMAGES = {"image": jax.ShapeDtypeStruct((8, 8, 3), np.float32), "label": EXAMPLE["y"]}
LM = {"vocab_size": 32, "width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "dropout_rate": 0.1}
PAIRS = {name: jax.ShapeDtypeStruct((8, 4), np.float32) for name in ("left", "right")}
ALIKE = {
    **{
        f"{make.__name__} {api}": (functools.partial(make, num_classes=10, api=api, **more), IMAGES)
        for make, more in (
            (mlp, {"widths": (8,), "dropout_rate": 0.1}),
            (convnet, {"features": (4,), "hidden": 8, "norm": "batch", "dropout_rate": 0.1}),
            (resnet, {}),
        )
        for api in ("linen", "nnx")
    },
    **{
        f"decoder {api} {attention}": (
            functools.partial(transformer, **LM, api=api, attention=attention),
            TOKENS,
        )
        for api, attention in (("linen", "xla"), ("nnx", "chunked"))
    },
    "contrastive": (contrastive.two_towers, PAIRS),
    "masked mean, weighted": (lambda: own_loss(masked_mean_weighted), EXAMPLE),
    "masked mean, regularised": (lambda: own_loss(masked_mean_regularised), EXAMPLE),
    "labels of views": (lambda: own_loss(two_views), EXAMPLE),
    "one-hot by scatter": (lambda: own_loss(one_hot_by_scatter), EXAMPLE),
    "a regulariser for each example": (lambda: own_loss(regularised), EXAMPLE),
    "log probabilities": (
        lambda: own_loss(lambda x, y, _: -jax.nn.log_softmax(x)[jnp.arange(len(y)), y]),
        EXAMPLE,
    ),
    "rows of a table": (lambda: own_loss(lambda x, y, p: jnp.sum(p["w"][y] ** 2, -1)), EXAMPLE),
    "a scan over examples": (lambda: own_loss(scanned), EXAMPLE),
    "in chunks": (lambda: own_loss(in_chunks), EXAMPLE),
    "attention": (lambda: research_dp.from_linen(Attention(), loss=cross_entropy), EXAMPLE),
    "BatchNorm, Dropout": (lambda: research_dp.from_linen(Norm(), loss=cross_entropy), EXAMPLE),
    **{
        name: (functools.partial(kind, layer), EXAMPLE)
        for name, kind, layer in (
            ("packed", in_linen, packed),
            ("routed", in_nnx, routed),
            ("two views", in_linen, lambda x: sum(jnp.split(jnp.concatenate([x, -x]), 2))),
            ("heads", in_nnx, lambda x: x.reshape(-1, 4, 4).transpose(1, 0, 2).mean(0) @ EYE),
            ("lax.map", in_linen, lambda x: jax.lax.map(jnp.sort, x)),
            ("vmap", in_nnx, jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3), mode="same"))),
            (
                "scan over features",
                in_linen,
                lambda x: jax.lax.scan(lambda c, t: (c + t, c * t), jnp.zeros(len(x)), x.T)[1].T,
            ),
            ("sorted features", in_linen, lambda x: jnp.take_along_axis(x, jnp.argsort(x), 1)),
            ("noise of all", in_nnx, lambda x: x + jax.random.normal(jax.random.key(0), (1, 16))),
            ("global mean", in_linen, lambda x: x - research_dp.global_mean(x)[None]),
            ("norms", in_nnx, lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
            ("some features", in_linen, some_features),
            ("fft", in_linen, lambda x: jnp.fft.fft(x).real),
            ("a loop", in_linen, lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c / 2 + x, x)),
        )
    },
}
EYE = np.eye(4, 16, dtype=np.float32)


@pytest.mark.parametrize(
    "name", [*[*ALIKE][::3], *map(exhaustive, [*ALIKE][1::3] + [*ALIKE][2::3])]
)
def test_a_model_that_treats_examples_alike_is_accepted_without_a_word(name):
    make, example = ALIKE[name]
    assert order_warning(built(make(), "hsdp", example)) is None


# ---- The right way ----


def pairs(rows, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(rows, 8, 4)).astype(np.float32) for name in PAIRS}


def trained(stem, devices=8, micros=1, model=None, exact=False):
    """Losses of three steps and an evaluation with padding, and the parameters."""
    spec = TrainSpec(
        model=model or towers(),
        optimizer=optax.adam(1e-2),
        example=PAIRS,
        batch_size=BATCH,
        accumulation_steps=micros,
        max_grad_norm=1.0,
    )
    own = ["make_mesh.axes = {'data': 1}"] if stem == "hsdp" and devices == 1 else []
    with planning_for(jax.devices()[:devices]):
        if exact:
            own += [f"data_parallel.compiler_options = {AS_USERS_COMPILE}"]
        config = recipe(stem, *own, more=["options/deterministic.gin"] if exact else [])
    strategy = config.build(spec)
    state, found = strategy.init(0), []
    for seed in range(3):
        local = {k: x[strategy.train_rows] for k, x in pairs(BATCH, seed).items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        del metrics["nonfinite"]
        found += [number for name in sorted(metrics) for number in metrics[name]]
    rows = strategy.eval_batch_size
    batch = {**pairs(rows, 9), "mask": (np.arange(rows) < rows - 3).astype(np.float32)}
    local = {k: x[strategy.eval_rows] for k, x in batch.items()}
    found += [*strategy.eval_step(state, strategy.place_eval_batch(local))["loss"]]
    return np.asarray(jax.device_get(found)), fingerprint(state.params)


@functools.cache
def on_one_device(micros):
    return trained("single", micros=micros)[0]


QUICK = {("ddp", 8, 1), ("hsdp", 8, 3), ("zero2", 8, 3), ("fsdp", 8, 1)}
# Each strategy on two and on eight devices, and with each number of micro-batches; two on one.
CASES = {
    (stem, devices, (1, 3)[(i + j) % 2])
    for i, stem in enumerate(s for s in stems() if s != "single")
    for j, devices in enumerate((2, 8))
} | {("fsdp", 1, 3), ("spmd", 1, 1)}


@pytest.mark.parametrize(
    ("stem", "devices", "micros"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive)
        for case in sorted(QUICK | CASES)
    ],
)
def test_a_contrastive_loss_is_that_of_one_device(stem, devices, micros):
    np.testing.assert_allclose(trained(stem, devices, micros)[0], on_one_device(micros), rtol=1e-6)


def centred(x):
    """Statistics of all examples, in a layer: their gradients go through all devices."""
    mean = research_dp.global_mean(x)[None]
    return (x - mean) / jnp.sqrt(research_dp.global_mean(jnp.square(x - mean)) + 1e-3)[None]


class Centred(nn.Module):
    @nn.compact
    def __call__(self, left, right):
        return centred(nn.Dense(8)((left + right).reshape(len(left), -1)))


class NnxCentred(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, left, right):
        return centred(self.dense((left + right).reshape(len(left), -1)))


def ranked(scores, batch):
    """A plain loss that gathers, in half precision and as integers too."""
    best = scores.argmax(-1)
    others = research_dp.gather_examples({"scores": scores.astype("float16"), "best": best})
    same = best[:, None] == others["best"][None]
    near = jnp.abs(scores[:, None] - others["scores"][None].astype("float32")).mean(-1)
    return jnp.where(same, near, -near).mean(-1)


@pytest.mark.parametrize("stem", ["hsdp", "spmd_fsdp", "fsdp_keep"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_statistics_and_gathered_scores_are_those_of_one_device(api, stem):
    inputs = {"inputs": ("left", "right"), "targets": None, "loss": ranked}
    if api == "linen":
        model = research_dp.from_linen(Centred(), **inputs)
    else:
        model = research_dp.from_nnx(NnxCentred, **inputs)
    expected, _ = trained("single", model=model)
    np.testing.assert_allclose(trained(stem, model=model)[0], expected, rtol=1e-3)


EXACT = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp")


@pytest.mark.exhaustive
def test_exact_sums_give_one_fingerprint():
    """A logical shard is a batch of its own: the same on any number of devices."""
    found = {
        (stem, devices): trained(stem, devices, exact=True)
        for stem in EXACT
        for devices in ((1,) if stem == "single" else (2, 8))
    }
    assert len({print_ for _, print_ in found.values()}) == 1
    numbers = [x for x, _ in found.values()]
    for other in numbers:
        np.testing.assert_array_equal(other, numbers[0])


def test_second_derivatives_go_through_all_devices():
    def energy(x):
        everyone = research_dp.gather_examples(x)
        return jnp.sum(jnp.tanh(x @ everyone.T) ** 2)

    def product(x, v):
        def slope(x):
            return jnp.vdot(jax.grad(total)(x), v)

        return jax.grad(slope)(x)

    x, v = np.random.default_rng(0).normal(size=(2, 16, 3)).astype(np.float32)
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "fsdp"))
    axes = P(("data", "fsdp"))

    def total(x):
        return energy(x)

    expected = product(x, v)

    def mapped(x, v):
        with split_over(("data", "fsdp"), PLAIN):
            return product(x, v)

    options = {"mesh": mesh, "in_specs": axes, "out_specs": axes, "check_vma": False}
    np.testing.assert_allclose(jax.jit(jax.shard_map(mapped, **options))(x, v), expected, rtol=2e-4)


def test_outside_of_a_strategy_they_are_those_of_one_device():
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    assert research_dp.gather_examples(x) is x
    np.testing.assert_array_equal(research_dp.global_mean({"a": x})["a"], x.mean(0))
    assert research_dp.global_mean(np.array([2**30, 2**30], np.int32)) == 2.0**30
    for function in (research_dp.gather_examples, research_dp.global_mean):
        with pytest.raises(UsageError, match=f"{function.__name__}.x is a number. Give arrays"):
            function(jnp.float32(1))


def test_a_mean_over_devices_of_half_precision_is_added_in_float32():
    """Eight means of 60,000 are beyond float16."""

    def mapped(x):
        with split_over(("data",), PLAIN):
            return research_dp.global_mean(x)

    mean = on(mesh_of(data=8), mapped, P("data"))(jnp.full((8, 1), 60_000, jnp.float16))
    assert (mean.dtype, mean[0]) == (jnp.float16, 60_000)


# ---- Accepted ----


def test_a_loss_over_each_devices_part_is_another_algorithm_that_says_so():
    model = own_loss(in_batch_negatives)
    strategy = built(model, loss_over="device")
    assert strategy.algorithm == "the loss is that of each device's part of the batch"
    assert order_warning(strategy) is None
    assert built(model, "single", loss_over="device").algorithm is None
    alike = own_loss(lambda logits, y, _: cross_entropy(logits, y))
    assert "loss_over = 'device' shows no effect" in order_warning(built(alike, loss_over="device"))
    whole = BATCH // 8  # micro-batches of one example a device, which mixes with nothing
    assert order_warning(built(alike, loss_over="device", accumulation_steps=whole)) is None


# ---- Planted ----


def gathered_by(gather):
    """A contrastive model that gathers by itself; its examples name themselves by place."""

    def init(key, batch):
        return {"w": jax.random.normal(key, (16, 8)) / 4}, {}

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        z = batch["image"].reshape(batch["label"].shape[0], -1) @ params["w"]
        everyone, first = gather(z, batch_axes)
        losses = cross_entropy(z @ everyone.T, first + jnp.arange(len(z)))
        return LossOutput(losses.sum(), jnp.float32(len(z)), model_state, {})

    return TrainableModel(init, loss)


def place(z, axes):
    return jax.lax.axis_index(axes) * len(z) if axes else 0


def everyone(z, axes):
    return jax.lax.all_gather(z, axes, tiled=True) if axes else z


def right(z, axes):
    return research_dp.gather_examples(z), place(z, axes)


def without_gradient(z, axes):
    return (jax.lax.stop_gradient(everyone(z, axes)) if axes else z), place(z, axes)


def divided(z, axes):
    full = everyone(z, axes)
    part = full / 8 if axes else full
    return part + jax.lax.stop_gradient(full - part), place(z, axes)


def by_device(z, axes):
    full = everyone(z, axes)
    return jnp.roll(full, -place(z, axes), axis=0), place(z, axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "cause"),
    [
        (without_gradient, "no gradient comes back to the devices that have them"),
        (divided, "is not the sum over the devices' losses: divided"),
        (by_device, "not all of them in the order of the global batch"),
    ],
)
def test_certify_names_a_wrong_gather(gather, cause):
    found = certified.refusal("ddp", spec={"model": gathered_by(gather)})
    assert cause in found and "all_gather at test_batch_losses.py:" in found, found


@pytest.mark.slow
def test_certify_accepts_a_right_gather_and_says_what_is_another_algorithm():
    done = certify(bench_of("ddp", spec={"model": gathered_by(right)}), noise(), steps=3)
    assert done.certified, done
    costs = {check.name: check for check in done.checks}
    assert "gather_examples" in costs["bytes of the model's own"].message
    part = {"model": gathered_by(lambda z, axes: (z, 0)), "loss_over": "device"}
    done = certify(bench_of("ddp", spec=part), noise(), steps=3)
    assert done.is_right and not done.certified
    assert done.algorithm.startswith("the loss is that of each device's part")


def test_the_bytes_of_gathered_examples_are_counted_apart():
    """(B, features) of each tower: gathered, and the gradients scattered, once a micro-batch."""
    strategy = built(towers(), example=PAIRS, accumulation_steps=3)
    traced = of_step(strategy)
    lowered = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
    text = lowered.compile().as_text()
    compiled = collectives_of(text, dict(strategy.mesh.shape))
    both = 2 * (BATCH * 8 * 4) * 7 / 8  # of two towers
    for found in (traced, compiled):
        own = [one for one in found if one.of_model]
        assert {one.kind for one in own} <= {"all-gather", "reduce-scatter", "all-reduce"}
        # The metric gathers the right halves again, unless the compiler sees that it need not.
        assert sum(x.wire_bytes for x in own if x.kind == "all-gather") in (both, 1.5 * both)
        assert sum(x.wire_bytes for x in own if x.kind == "reduce-scatter") == both
    totals = wire_totals(compiled)
    assert 0 < totals["of_model"] < totals["total"]


def test_what_the_order_of_rows_cannot_show_is_not_refused():
    """`certify` compares with one device: this total counts the regulariser once a device."""
    assert order_warning(built(own_loss(regularised_on_each_device))) is None


@jax.jit
def jitted_mean(x):
    return research_dp.global_mean(x)


def test_a_jitted_helper_is_traced_anew_for_another_split():
    """JAX keeps what it traced: of one strategy for the next, it would be wrong."""
    for axes, expected in (((), 0.5), (("data",), 7.5), ((), 0.5)):

        def run(x, axes=axes):
            with split_over(axes, PLAIN):
                return jitted_mean(x)[None]

        mapped = jax.shard_map(
            run,
            mesh=Mesh(np.array(jax.devices()), ("data",)),
            check_vma=False,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        assert float(jax.jit(mapped)(jnp.arange(16.0))[0]) == expected


@jax.custom_vjp
def whitened(x):
    return x - research_dp.global_mean(x)[None]


whitened.defvjp(
    lambda x: (whitened(x), None), lambda _, ct: (ct - research_dp.global_mean(ct)[None],)
)


def test_a_derivative_of_ones_own_sees_the_batch_too():
    model = own_loss(lambda logits, y, _: cross_entropy(jnp.tanh(whitened(logits)), y))

    def grad_norm(stem):
        strategy, rng = built(model, stem), np.random.default_rng(0)
        batch = {"x": rng.normal(size=(BATCH, 8)).astype("f4"), "y": np.arange(BATCH, dtype="i4")}
        return strategy.train_step(strategy.init(0), strategy.place_batch(batch))[1]["grad_norm"]

    np.testing.assert_allclose(grad_norm("ddp"), grad_norm("single"), rtol=1e-5)


def test_a_mistake_in_evaluation_is_found_when_it_is_built():
    def loss(params, model_state, batch, keys, train, batch_axes):
        total = jnp.sum(batch["x"] if train else batch["nokey"])
        return LossOutput(total, jnp.float32(1), {}, {})

    with pytest.raises(KeyError, match="nokey"):
        built(TrainableModel(lambda key, batch: ({"w": jnp.ones(3)}, {}), loss))
