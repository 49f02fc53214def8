"""Strategies beside a step in plain JAX, which has no line in common with any of them.

Compared with `single` they could all have the same mistake.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp.distributed.sharding import by_path
from research_dp.strategies import TrainSpec
from research_dp.types import LossOutput, TrainableModel
from tests.support import plain_step
from tests.support.recipes import recipe
from tests.support.repository import ROOT, stems

BATCH, MICROS, MAX_NORM = 48, 3, 1.0
OPTIMIZERS = {"sgd": optax.sgd(0.5), "adam": optax.adam(1e-2)}
EXAMPLE = {
    "x": jax.ShapeDtypeStruct((plain_step.FEATURES,), np.float32),
    "y": jax.ShapeDtypeStruct((), np.int32),
    "mask": jax.ShapeDtypeStruct((), np.float32),
}


def init(key, batch):
    del batch
    return plain_step.parameters(key), plain_step.statistics()


def loss(params, model_state, batch, keys, *, train, batch_axes):
    del keys, train

    def average(x):
        return jax.lax.pmean(x, batch_axes) if batch_axes else x

    total, count, model_state = plain_step.network(params, model_state, batch, average)
    return LossOutput(total, count, model_state, {})


@functools.cache
def batches():
    """Their gradients are above, below and above the norm at which is clipped; then of none."""
    rng = np.random.default_rng(5)

    def batch(mask, shift):
        return {
            "x": rng.normal(size=(BATCH, plain_step.FEATURES)).astype(np.float32),
            "y": ((rng.integers(0, 3, BATCH) + shift) % 10).astype(np.int32),
            "mask": np.asarray(mask, np.float32),
        }

    # Of the second micro-batch, and of some devices, nothing counts.
    uneven = (np.arange(BATCH) % 5 < 2) & (np.arange(BATCH) // 16 != 1)
    halves = np.where(rng.random(BATCH) < 0.5, 0.5, 1.0)
    masks = (uneven, np.ones(BATCH), halves, np.zeros(BATCH), uneven)
    return [batch(mask, shift) for mask, shift in zip(masks, (0, 3, 6, 0, 7), strict=True)]


@functools.cache
def expected(name):
    optimizer = OPTIMIZERS[name]
    params, stats = init(jax.random.key(0), None)
    opt_state, found = optimizer.init(params), []
    for batch in batches():
        params, stats, opt_state, seen = plain_step.step(
            params, stats, opt_state, batch, optimizer, MICROS, MAX_NORM
        )
        found.append(jax.device_get((params, stats, opt_state, seen)))
    return found


def build(stem, name):
    spec = TrainSpec(
        model=TrainableModel(init, loss),
        optimizer=OPTIMIZERS[name],
        example=EXAMPLE,
        batch_size=BATCH,
        accumulation_steps=MICROS,
        max_grad_norm=MAX_NORM,
    )
    return recipe(stem).build(spec)


def on_host(state):
    """A copy: an array that the host has read is not overwritten, so not donated."""
    return jax.device_get(jax.tree.map(jnp.copy, state))


QUICK = {(stem, "sgd") for stem in ("single", "ddp", "fsdp", "zero1", "spmd")}


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        pytest.param(stem, name, marks=() if (stem, name) in QUICK else pytest.mark.exhaustive)
        for name in OPTIMIZERS
        for stem in stems()
    ],
)
def test_every_step_is_that_of_plain_jax(stem, name):
    near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    strategy = build(stem, name)
    state = strategy.init(jax.random.key(0))
    for number, batch in enumerate(batches()):
        old, before = state, on_host(state)
        local = {key: x[strategy.train_rows] for key, x in batch.items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        params, stats, opt_state, (total, count, norm) = expected(name)[number]
        found = on_host(state)
        jax.tree.map(near, found.params, params)
        jax.tree.map(near, found.model_state, stats)
        jax.tree.map(near, found.opt_state, opt_state)
        near(metrics["loss"], (total, count))
        near(metrics["grad_norm"][0], norm)
        # The memory of the old state is the new one's.
        assert [path for path, x in by_path(old._asdict()).items() if not x.is_deleted()] == []
        if not count:
            jax.tree.map(np.testing.assert_array_equal, found.params, before.params)


def test_the_batches_are_what_they_are_for():
    totals, counts, norms = np.array([seen for *_, seen in expected("sgd")]).T
    assert all(counts[[0, 1, 2, 4]] > 0) and counts[3] == totals[3] == norms[3] == 0
    assert counts[0] < BATCH / 3
    clipped = norms > MAX_NORM
    assert clipped.any() and (~clipped[[0, 1, 2, 4]]).any()
    text = (ROOT / "tests" / "support" / "plain_step.py").read_text()
    assert "research_dp" not in text
