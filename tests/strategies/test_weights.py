"""What has weight 0 counts nothing, whatever it is; where nothing has weight, nothing moves."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import research_dp
from research_dp.errors import UsageError
from research_dp.strategies.strategy import NO_WEIGHT, NONFINITE, SKIPPED
from tests.support.marks import exhaustive

ROWS, WIDTH, CLASSES, LENGTH = 16, 8, 4, 5
CE = optax.softmax_cross_entropy_with_integer_labels
WHOLE = ("single", "ddp", "spmd")  # parameters and optimizer state
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = jnp.tanh(nn.Dense(8)(x))
        return nn.Dense(CLASSES)(hidden)


class NormedNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=not train)(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.hidden(x)))


class PerPosition(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[..., 0]


def is_right(output, target):
    return jnp.argmax(output, -1) == target


def squared(output, target):
    return (output - target) ** 2


def of_batch(output, batch):
    return CE(output, batch["y"]) * batch["x"][:, 0]


CLASSIFIER = research_dp.from_linen(Net(), loss=CE, weights="w", metrics={"accuracy": is_right})
REGRESSION = research_dp.from_linen(PerPosition(), loss=squared, weights="w")


def build(stem, model, optimizer, batch, **options):
    config = research_dp.strategy(stem, **({} if stem in WHOLE else {"min_weight_size": 4}))
    example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in batch.items()}
    spec = research_dp.TrainSpec(
        model=model, optimizer=optimizer, example=example, batch_size=len(batch["w"]), **options
    )
    return config.build(spec)


def trained(stem, model, batches, optimizer=None):
    """The parameters and the means of the metrics of each step."""
    strategy = build(stem, model, optimizer or optax.adam(1e-2), batches[0])
    state, means = strategy.init(0), []
    for batch in batches:
        state, metrics = strategy.train_step(state, strategy.place_batch(batch))
        means.append(research_dp.metric_means(metrics))
    return jax.device_get(state.params), means


def classes(rng, weights):
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, ROWS).astype(np.int32), "w": weights}


def spoilt(batch, rng, positions=False):
    """The same batch with garbage where it has no weight."""
    x, y, ignored = batch["x"].copy(), batch["y"].copy(), batch["w"] == 0
    y[ignored] = rng.choice(GARBAGE, ignored.sum()) if positions else rng.choice([-100, 99, -1])
    rows = ignored.all(1) if positions else ignored
    x[rows] = rng.choice(GARBAGE, x[rows].shape)
    return {**batch, "x": x, "y": y}


def softmax_gradients(p, batch, count):
    """(loss, metrics, gradients) of `Net`, by hand in float64."""
    rows = batch["w"] != 0
    x, y, w = batch["x"][rows].astype(float), batch["y"][rows], batch["w"][rows].astype(float)
    hidden = np.tanh(x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"])
    logits = hidden @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"]
    exp = np.exp(logits - logits.max(1, keepdims=True))
    probs, here = exp / exp.sum(1, keepdims=True), np.arange(len(y))
    loss = -np.log(probs[here, y]) @ w / count
    accuracy = (logits.argmax(1) == y) @ w / count
    probs[here, y] -= 1
    out = probs * w[:, None] / count
    back = out @ p["Dense_1"]["kernel"].T * (1 - hidden**2)
    grads = {
        "Dense_0": {"kernel": x.T @ back, "bias": back.sum(0)},
        "Dense_1": {"kernel": hidden.T @ out, "bias": out.sum(0)},
    }
    return {"loss": loss, "accuracy": accuracy}, grads


def square_gradients(p, batch, count):
    """The same of `PerPosition`."""
    rows = batch["w"].any(1)
    x, w = batch["x"][rows].astype(float), batch["w"][rows].astype(float)
    y = np.where(w == 0, 0, batch["y"][rows]).astype(float)
    error = (x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"])[..., 0] - y
    out = 2 * error * w / count
    kernel = np.einsum("btd,bt->d", x, out)[:, None]
    grads = {"Dense_0": {"kernel": kernel, "bias": out.sum(keepdims=True)[0]}}
    return {"loss": (error**2 * w).sum() / count}, grads


def positions(rng, weights):
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(ROWS, LENGTH)).astype(np.float32), "w": weights}


@pytest.mark.parametrize("stem", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["classes", "positions"])
def test_garbage_without_weight_is_as_in_a_loop_of_numpy(stem, kind):
    """200 random batches, with NaN, inf, 1e30 or labels out of range where they have no weight."""
    rng, is_by_position = np.random.default_rng(0), kind == "positions"
    model, make = (REGRESSION, positions) if is_by_position else (CLASSIFIER, classes)
    by_hand = square_gradients if is_by_position else softmax_gradients
    shape = (ROWS, LENGTH) if is_by_position else (ROWS,)
    strategy, left_out = None, 0
    for number in range(200):
        share = rng.choice([0.0, 0.1, 0.5, 0.9], p=[0.05, 0.25, 0.4, 0.3])
        weights = (rng.random(shape) < share) * rng.choice([1.0, 0.5, 3.0], shape)
        batch = spoilt(make(rng, weights.astype(np.float32)), rng, is_by_position)
        if strategy is None:
            strategy = build(stem, model, optax.sgd(0.05), batch)
            state = strategy.init(0)
            expected = jax.tree.map(np.float64, jax.device_get(state.params))
        state, metrics = strategy.train_step(state, strategy.place_batch(batch))
        if not (count := weights.sum()):
            left_out += 1
            assert metrics[NONFINITE][0] == NO_WEIGHT
            continue
        means, grads = by_hand(expected, batch, count)
        expected = jax.tree.map(lambda p, g: p - 0.05 * g, expected, grads)
        found = research_dp.metric_means(metrics)
        for name, value in means.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (number, name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        jax.device_get(state.params),
        expected,
    )
    assert left_out


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    np.testing.assert_equal(one[1], other[1])


@pytest.mark.parametrize(
    "model",
    [
        research_dp.from_nnx(NnxNet, loss=CE, weights="w"),
        research_dp.from_linen(NormedNet(), loss=CE, weights="w"),
        research_dp.from_linen(Net(), loss=of_batch, targets=None, weights="w"),
    ],
    ids=["nnx", "batch_norm", "loss_of_the_batch"],
)
@pytest.mark.parametrize("stem", ["fsdp", exhaustive("spmd"), exhaustive("zero1")])
def test_the_contents_of_what_has_no_weight_change_nothing(stem, model):
    rng = np.random.default_rng(1)
    weights = (np.arange(ROWS) % 3 != 0).astype(np.float32)
    good = [classes(rng, weights) for _ in range(3)]
    same(trained(stem, model, good), trained(stem, model, [spoilt(b, rng) for b in good]))


def test_tokens_that_no_target_follows_count_nothing():
    model = research_dp.models.transformer(vocab_size=8, width=8, depth=1, heads=2, mlp_width=8)
    tokens = np.arange(2 * 5).reshape(2, 5).astype(np.int32) % 8
    weights = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], np.float32)
    found = model.counted({"tokens": tokens, "weights": weights}, "tokens")
    np.testing.assert_array_equal(found, [[True] * 3 + [False] * 2, [False] * 5])
    batch = {"tokens": tokens, "weights": weights, "mask": np.ones(2)}
    np.testing.assert_array_equal(model.counted(batch, "mask"), [True, False])
    params, _ = model.init(jax.random.key(0), {"tokens": tokens})

    def loss(params, tokens):
        batch = {"tokens": jnp.asarray(tokens), "weights": jnp.asarray(weights)}
        out = model.loss(params, {}, batch, None, train=False)
        return out.total / out.weight

    ignored = np.where(found, tokens, -100)
    for value in (loss, jax.grad(loss)):
        jax.tree.map(np.testing.assert_array_equal, value(params, tokens), value(params, ignored))
        assert np.isfinite(jax.tree.leaves(value(params, ignored))[0]).all()


@pytest.mark.parametrize(
    "stem",
    [
        "fsdp",
        "single",
        *map(exhaustive, ("ddp", "zero1", "zero2", "hsdp", "spmd_fsdp", "fsdp_keep")),
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_a_batch_without_weight_moves_nothing_but_the_number_of_the_step(stem, skips):
    rng = np.random.default_rng(2)
    model = research_dp.from_linen(NormedNet(), loss=CE, weights="w")
    batches = [classes(rng, np.full(ROWS, w, np.float32)) for w in (1, 0, 1)]
    strategy = build(stem, model, optax.adamw(1e-2), batches[0], skip_nonfinite=skips)
    state, _ = strategy.train_step(strategy.init(0), strategy.place_batch(batches[0]))
    before = jax.device_get(state)
    state, metrics = strategy.train_step(state, strategy.place_batch(spoilt(batches[1], rng)))
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=before.step), before)
    assert int(after.step) == 2
    np.testing.assert_array_equal(metrics[SKIPPED], [1, 1])
    np.testing.assert_array_equal(metrics["grad_norm"], [0, 0])
    state, metrics = strategy.train_step(state, strategy.place_batch(batches[2]))
    np.testing.assert_array_equal(metrics[SKIPPED], [0, float(skips)])
    first, second = (jax.tree.leaves(jax.device_get(x.params))[0] for x in (state, after))
    assert (first != second).any()


def halved(gradients, parameters, optimizer):
    new = optimizer.apply_gradients(gradients, parameters)
    return jax.tree.map(lambda x: x / 2, new)


def test_an_update_that_does_more_than_the_optimizer_moves_nothing_without_weight():
    batch = classes(np.random.default_rng(4), np.zeros(ROWS, np.float32))
    config = dataclasses.replace(research_dp.strategy("ddp"), update=halved)
    example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in batch.items()}
    options = {"model": CLASSIFIER, "optimizer": optax.sgd(0.1), "batch_size": ROWS}
    strategy = config.build(research_dp.TrainSpec(example=example, **options))
    state = strategy.init(0)
    before = jax.device_get(state.params)
    state, _ = strategy.train_step(state, strategy.place_batch(batch))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_no_weight_of_0(weight):
    batch = classes(np.random.default_rng(5), np.r_[weight, np.ones(ROWS - 1)].astype(np.float32))
    strategy = build("ddp", CLASSIFIER, optax.sgd(0.1), batch)
    _, metrics = strategy.train_step(strategy.init(0), strategy.place_batch(batch))
    assert metrics[NONFINITE][0] == 1
    assert metrics[SKIPPED][0] == 0
    assert CLASSIFIER.counted(batch, "w")[0]


def test_a_loss_that_takes_the_batch_ignores_labels_by_position():
    model = research_dp.from_linen(Net(), loss=of_batch, targets=None, weights="w")
    batch = {
        "x": np.ones((2, 3, WIDTH)),
        "y": np.ones((2, 3)),
        "w": np.array([[0, 1, 1], [0, 0, 0]]),
    }
    np.testing.assert_array_equal(model.counted(batch, "y"), batch["w"])
    np.testing.assert_array_equal(model.counted(batch, "x")[:, 0, 0], [True, False])


def run(tmp_path, capsys, weights, eval_weights, **bindings):
    rng = np.random.default_rng(3)
    data = research_dp.from_arrays(
        classes(rng, weights), eval=classes(rng, eval_weights), info={"num_classes": CLASSES}
    )
    settings = {f"train.{k}": v for k, v in {"num_steps": 4, "log_every": 1, **bindings}.items()}
    settings["train.batch_size"] = 8
    options = {"model": CLASSIFIER, "data": data, "optimizer": optax.adamw(1e-2)}
    result = research_dp.run("strategies/single.gin", settings, workdir=tmp_path / "run", **options)
    return result, capsys.readouterr().out


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_run_names_and_counts_steps_without_weight(tmp_path, capsys, on_nonfinite):
    ones, zeros = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    summary, said = run(tmp_path, capsys, zeros, ones, on_nonfinite=on_nonfinite)
    for step in (1, 2, 3, 4):
        assert f"Skipped step {step}: nothing in its batch has weight" in said
    assert summary["skipped_steps"] == 4


def test_an_evaluation_without_weight_is_named_and_the_run_is_saved(tmp_path, capsys):
    ones, zeros = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    with pytest.raises(UsageError, match=r"^nothing in the evaluation data"):
        run(tmp_path, capsys, ones, zeros)
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
