"""A model of three arrays: an example above STOPS spoils the gradient of one."""

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.types import LossOutput

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


def step(strategy, state, **spoilt):
    x = np.linspace(0.5, 1.5, 16, dtype=np.float32)
    for place, value in spoilt.items():
        x[int(place[1:])] = value
    return strategy.train_step(state, strategy.place_batch({"x": x[strategy.train_rows]}))
