"""A small decoder, its batches and strategies: what tests of it share."""

import functools

import jax
import numpy as np
import optax

from research_dp.distributed.placement import fingerprint
from research_dp.models import transformer
from research_dp.strategies import TrainSpec
from tests.support.recipes import recipe

VOCAB, LENGTH, BATCH = 64, 16, 16


LOOK_AHEAD = "data_parallel.prefetch = True"


def model(**changes):
    sizes = {"vocab_size": VOCAB, "width": 16, "depth": 3, "heads": 2, "mlp_width": 32}
    return transformer(**{**sizes, "logits_at_once": 600, **changes})


def batch(seed, rows=BATCH, segments=True):
    rng = np.random.default_rng(seed)
    made = {"tokens": rng.integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)}
    if segments:
        made["segments"] = np.sort(rng.integers(0, 3, (rows, LENGTH)), axis=1).astype(np.int32)
    made["weights"] = rng.uniform(0.5, 2.0, (rows, LENGTH)).astype(np.float32)
    return made


def build(stem, model, *bindings, accumulation=1, rows=BATCH, more=()):
    small = "shard_params.min_weight_size = 128"
    strategy = recipe(stem, small, *bindings, more=more)
    return strategy.build(spec_of(model, accumulation, rows))


def spec_of(model, accumulation=1, rows=BATCH):
    return TrainSpec(
        model=model,
        optimizer=optax.adam(1e-2),
        example={k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in batch(0, 1).items()},
        batch_size=rows,
        accumulation_steps=accumulation,
        max_grad_norm=0.5,
        seed=3,
    )


def run(strategy, steps=3):
    """(fingerprint at birth, losses and norms)."""
    state = strategy.init(jax.random.key(0))
    born, numbers = fingerprint(state.params), []
    for seed in range(steps):
        state, metrics = strategy.train_step(state, strategy.place_batch(batch(seed)))
        numbers += [metrics["loss"][0] / metrics["loss"][1], metrics["grad_norm"][0]]
    return born, np.asarray(numbers)


@functools.cache
def oracle(tied):
    return run(build("single", model(tied=tied, dropout_rate=0.1)))
