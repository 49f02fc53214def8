"""Layers of models: each dropout layer of a network has a number, and so a mask, of its own."""

import sys

import jax
import jax.numpy as jnp
import pytest

from research_dp.distributed.batch_examples import seed_key
from research_dp.models import convnet, mlp, transformer

IMAGES = {"image": jnp.zeros((2, 4, 4, 1)), "label": jnp.zeros(2, jnp.int32)}
TOKENS = {"tokens": jnp.zeros((2, 4), jnp.int32)}
SIZES = {"vocab_size": 8, "width": 8, "depth": 1, "heads": 2, "mlp_width": 8}


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("model", "sizes", "batch", "count"),
    [
        (mlp, {"widths": (4, 4, 4), "num_classes": 3}, IMAGES, 3),
        (convnet, {"features": (2,), "hidden": 4, "num_classes": 3}, IMAGES, 1),
        (transformer, SIZES, TOKENS, 2),
    ],
)
def test_each_dropout_draws_a_mask_of_its_own(monkeypatch, api, model, sizes, batch, count):
    numbers = set()

    def noted(x, rate, keys, layer):
        numbers.add(layer)
        return x

    monkeypatch.setattr(sys.modules[model.__module__], "dropout", noted)
    made = model(api=api, dropout_rate=0.5, **sizes)

    def loss(key):
        params, model_state = made.init(key, batch)
        keys = jax.random.split(key, 2)
        return made.loss(params, model_state, batch, keys, train=True, batch_axes=()).total

    jax.eval_shape(loss, seed_key(0))
    assert numbers == set(range(count))
