"""A model of three arrays: an example above STOPS spoils the gradient of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.strategies import TrainSpec
from research_dp.types import LossOutput, TrainableModel
from tests.support.recipes import recipe

EXAMPLE = {"x": jax.ShapeDtypeStruct((), np.float32)}
STOPS = 1e3  # an example above it makes the gradient of `b` infinite, and nothing else


def init(key, batch):
    del key, batch
    return {"a": jnp.ones((128,)), "b": jnp.ones((16, 8)), "c": jnp.ones((3,))}, {}


def loss(params, model_state, batch, keys, *, train, batch_axes):
    del keys, train, batch_axes
    x = batch["x"]
    sizes = jnp.sum(params["a"] ** 2) + jnp.sum(params["c"] ** 2)
    # sqrt has an infinite slope at 0.
    is_right = jnp.where(x > STOPS, 0.0, 1.0)[:, None, None]
    root = jnp.sum(jnp.sqrt(is_right * params["b"][None] ** 2))
    total = jnp.sum(jnp.where(x > STOPS, 1.0, x)) * sizes + root
    return LossOutput(total, jnp.float32(x.shape[0]), model_state, {})


def spec_of(**options):
    return TrainSpec(
        **{"model": TrainableModel(init, loss), "optimizer": optax.adam(1e-2), **options},
        example=EXAMPLE,
        batch_size=16,
    )


def build(stem, *bindings, slots=(), **options):
    return dataclasses.replace(recipe(stem, *bindings), **dict(slots)).build(spec_of(**options))


def step(strategy, state, **spoilt):
    x = np.linspace(0.5, 1.5, 16, dtype=np.float32)
    for place, value in spoilt.items():
        x[int(place[1:])] = value
    return strategy.train_step(state, strategy.place_batch({"x": x[strategy.train_rows]}))
