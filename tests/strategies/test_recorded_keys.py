"""Random keys of a seed, compared with tests/golden/keys.json: integers, the same on any machine.

A model shows them: its parameters are the bits of the key that it is initialised with, its metrics
means of the bits of its examples' keys.
"""

import gin
import jax
import jax.numpy as jnp
import pytest

import research_dp
from research_dp import LossOutput, TrainableModel
from tests.support import golden
from tests.support.runs import records

BINDINGS = {
    "train.model": "@show_keys()",
    "random_tokens.length": 1,
    "random_tokens.vocab_size": 2,
    "random_tokens.eval_examples": 8,
    "train.optimizer": "@optax.sgd()",
    "optax.sgd.learning_rate": 0.0,
    "train.batch_size": 8,
    "train.num_steps": 2,
    "train.log_every": 1,
    "train.seed": 3,
}


def halves(keys):
    """The bits of keys (...), 16 to an element of the last dim (4,): float32 has them exactly."""
    bits = jax.random.key_data(keys)
    parts = jnp.concatenate([bits & 0xFFFF, bits >> 16], -1)
    return parts.astype(jnp.float32)


@gin.register
def show_keys() -> TrainableModel:
    def init(key, batch):
        return {"key": halves(key)}, {}

    def loss(params, model_state, batch, keys, train, batch_axes):
        weight = jnp.float32(batch["tokens"].shape[0])
        sums = halves(keys).sum(0) if train else jnp.zeros(4)
        named = {f"bits_{i}": (x, weight) for i, x in enumerate(sums)}
        return LossOutput(0 * params["key"].sum(), weight, model_state, named)

    return TrainableModel(init, loss)


@pytest.mark.parametrize("stem", ["single", "fsdp"])
def test_a_seed_gives_the_recorded_keys(stem, tmp_path):
    files = ["data/random_tokens.gin", f"strategies/{stem}.gin"]
    summary = research_dp.run(files, BINDINGS, tmp_path, allow_unused=True)
    lines = records(tmp_path, "train")
    means = [[line[f"bits_{i}"] for i in range(4)] for line in lines]
    found = {"parameters": summary["params_fingerprint"], "keys of examples": means}
    if stem == "single":
        golden.recorded("keys", found)
    assert found == golden.recorded("keys"), f"If this is meant: {golden.command(__file__)}"
