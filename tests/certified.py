"""A small model, masked noise to train it on, and a strategy beside its oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.certification import quick
from research_dp.certification.certify import certify
from research_dp.certification.harness import Bench
from research_dp.commands.certify import quick_model
from research_dp.config import gin_internals, load
from research_dp.models import mlp
from research_dp.strategies import TrainSpec
from research_dp.types import DataSet

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


def recipe_of(stem, *bindings):
    load.load([f"strategies/{stem}.gin"], ["shard_params.min_weight_size = 64", *bindings])
    return gin_internals.value_of("train.strategy")


def perceptron(dropout_rate=0.3):
    return mlp(widths=(32, 16), num_classes=10, dropout_rate=dropout_rate)


def bench_of(stem, *, engine=None, spec=None, bindings=(), dtypes=(), **slots):
    single = recipe_of("single")
    slots = slots if engine is None else {**slots, "engine": engine}
    config = dataclasses.replace(recipe_of(stem, *bindings), **slots)
    settings = {
        "model": perceptron(),
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


# ---- The quick certification ----


@functools.cache
def quick_oracle(api, batch_size=32):
    """What one device computes, once for all strategies."""
    return quick.trace_single(quick_model(api), batch_size)


def quick_spec(api, batch_size=32):
    return quick.small_spec(quick_model(api), batch_size)


def quick_checks(config, api):
    size = quick.batch_size_for(config)
    strategy = config.build(quick_spec(api, size))
    return quick.compare(quick.trace(strategy, quick.batches(size)), quick_oracle(api, size))
