"""A small model, masked noise to train it on, and a strategy beside its oracle."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp import strategies
from research_dp.certification import harness
from research_dp.certification.certify import certify
from research_dp.certification.harness import Bench
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.placement import fingerprint
from research_dp.models import mlp
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.types import DataSet
from tests.support.recipes import recipe

BATCH = 32
STEPS = 3


def examples(order_seed, size):
    """Noise to learn; masked so that devices have uneven numbers of examples that count."""
    rng = np.random.default_rng(order_seed)
    return {
        "image": rng.normal(size=(size, 4, 4, 1)).astype(np.float32),
        "label": rng.integers(0, 10, size).astype(np.int32),
        "mask": (np.arange(size) % 7 < np.arange(size) // 4).astype(np.float32),
    }


def noise():
    def train(order):
        for number in range(order.first_step, order.num_steps):
            yield examples(number, order.batch_size)

    def evaluate(order):
        yield examples(-1 % 97, order.batch_size)

    example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in examples(0, 1).items()}
    return DataSet(
        name="noise",
        example=example,
        info={},
        prepare=lambda: None,
        train=train,
        evaluate=evaluate,
    )


def small_model(api="linen", dropout_rate=0.3):
    """A small perceptron with dropout."""
    return mlp(api=api, widths=(32, 16), num_classes=10, dropout_rate=dropout_rate)


def bench_of(stem, *, engine=None, spec=None, bindings=(), dtypes=(), **slots):
    single = recipe("single")
    slots = slots if engine is None else {**slots, "engine": engine}
    config = dataclasses.replace(recipe(stem, *bindings), **slots)
    settings = {
        "model": small_model(),
        "optimizer": optax.adam(1e-2),
        "example": noise().example,
        "batch_size": BATCH,
        "seed": 3,
        **(spec or {}),
    }
    precision = max(float(jnp.finfo(x).eps) for x in ("float32", *dtypes))
    return Bench(config=config, against=single, spec=TrainSpec(**settings), precision=precision)


def refusal(stem, **options):
    """The first difference and the cause of what is not certified."""
    dtypes = options.get("dtypes", ())
    done = certify(bench_of(stem, **options), noise(), steps=STEPS, dtypes=dtypes)
    assert not done.certified
    assert done.first_difference is not None
    return f"{done.first_difference} | {done.cause}"


# ---- What a strategy computes on a small run, against one device ----

RUN_STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.5
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((4, 4, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}
TOKENS = {"tokens": jax.ShapeDtypeStruct((16,), np.int32)}
# Relative and absolute tolerance.
_NEAR = {"losses": (0, 2e-6), "gradient norms": (1e-5, 0), "parameters": (0, 2e-5)}
_NEAR["evaluation loss"] = (1e-4, 0)
_VALID = 5  # examples of the evaluation batch; the others are padding


def spec_of(model, accumulation=1, *, clip=None, optimizer=None, seed=3, batch_size=BATCH):
    return TrainSpec(
        model=model,
        optimizer=optimizer or optax.adam(1e-2),
        example=EXAMPLE,
        batch_size=batch_size,
        accumulation_steps=accumulation,
        max_grad_norm=clip,
        seed=seed,
    )


def small_spec(api, batch_size=BATCH):
    return spec_of(small_model(api), MICRO_BATCHES, clip=MAX_NORM, batch_size=batch_size)


def batches(batch_size=BATCH, steps=RUN_STEPS):
    """The training batches, the same for every strategy."""
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(batch_size, 4, 4, 1)).astype(np.float32),
            "label": rng.integers(0, 10, batch_size).astype(np.int32),
        }
        for _ in range(steps)
    ]


def trace(strategy, data):
    """Trains on all batches, evaluates on a part of the first, with padding; by what is checked."""
    state = strategy.init(seed_key(0))
    initial, metrics = fingerprint(state.params), []
    for batch in data:
        state, sums = harness.take_step(strategy, state, batch)
        metrics.append({name: harness.mean(pair) for name, pair in sums.items()})
    rows = strategy.eval_batch_size
    padded = {name: x[:rows] for name, x in data[0].items()}
    padded["mask"] = (np.arange(rows) < _VALID).astype(np.float32)
    loss = harness.evaluate(strategy, state, [padded])["loss"]
    return {
        "initial parameters": initial,
        "losses": [step["loss"] for step in metrics],
        "gradient norms": [step["grad_norm"] for step in metrics],  # before clipping
        "parameters": jax.device_get(state.params),
        "examples counted": loss[1],
        "evaluation loss": harness.mean(loss),
    }


@functools.cache
def trace_single(api, batch_size=BATCH):
    """What one device computes, once for all strategies."""
    single = StrategyConfig(
        name="single", engine=strategies.compiled, mesh=strategies.one_device_mesh()
    )
    return trace(single.build(small_spec(api, batch_size)), batches(batch_size))


def assert_follows_single(config, api):
    """Trains a strategy with Adam, dropout, clipping, accumulation and padding, and one device."""
    size = math.lcm(BATCH, config.mesh.size * MICRO_BATCHES)
    found = trace(config.build(small_spec(api, size)), batches(size))
    expected = trace_single(api, size)
    assert max(expected["gradient norms"]) > MAX_NORM, "nothing was clipped"
    assert found["initial parameters"] == expected["initial parameters"]
    assert found["examples counted"] == _VALID
    for name, (relative, absolute) in _NEAR.items():
        assert_near(found, expected, name, rtol=relative, atol=absolute)


def assert_near(found, expected, name, **tolerance):
    close = functools.partial(np.testing.assert_allclose, err_msg=name, **tolerance)
    jax.tree.map(close, found[name], expected[name])
