"""Shipped strategies by name, built for small models; their steps and traffic."""

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.certification import harness
from research_dp.strategies.batch_losses import check_batch_loss
from research_dp.strategies.jaxpr_collectives import collectives
from research_dp.training.replica_check import ReplicaCheck, difference_text
from research_dp.types import LossOutput, TrainableModel
from tests.support.certified import BATCH as BATCH
from tests.support.certified import batches, spec_of
from tests.support.recipes import recipe


def build(stem, model, *, bindings=(), **options):
    return recipe(stem, *bindings).build(spec_of(model, **options))


def run_steps(strategy, steps):
    """The state after some steps."""
    state = strategy.init(jax.random.key(0))
    for batch in batches()[:steps]:
        state, _ = harness.take_step(strategy, state, batch)
    return state


def reports_of(strategy, state):
    """What a run reports after a step that left this state."""
    check = ReplicaCheck(strategy)
    check.check(1, state)
    return [difference_text(check.accepted, strategy.config)] if check.accepted else []


def examples_of(example, rows=BATCH):
    """A batch of noise, with small integers."""
    rng, made = np.random.default_rng(0), {}
    for name, x in example.items():
        shape = (rows, *x.shape)
        is_int = np.issubdtype(x.dtype, np.integer)
        made[name] = (rng.integers(0, 4, shape) if is_int else rng.normal(size=shape)).astype(
            x.dtype
        )
    return made


def order_warning(strategy):
    """What a run says before its first step of a model, by such a batch."""
    spec = strategy.spec
    return check_batch_loss(strategy, examples_of(spec.example, spec.batch_size))


def traffic(strategy):
    return collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)


def one_matrix(dtype=jnp.float32):
    """A model of two square matrices and nothing else, cast and transposed for use."""

    def init(key, batch):
        first, second = jax.random.split(key)
        return {
            "a": jax.random.normal(first, (16, 16)),
            "b": jax.random.normal(second, (16, 16)),
        }, {}

    def loss(params, state, batch, keys, *, train, batch_axes):
        x = batch["image"].reshape(-1, 16).astype(dtype)
        a, b = params["a"].astype(dtype).T, params["b"].astype(dtype)
        y = jnp.tanh(jnp.tanh(x * a.mean(0, keepdims=True) @ a) @ b)
        # Depends on the parameters twice, so that both are needed on the way back.
        y = (y * jnp.sum(a**2)).astype(jnp.float32)
        total = jnp.sum(jnp.square(y))
        return LossOutput(total, jnp.float32(x.shape[0]), state, {})

    return TrainableModel(init, loss)


# Wire bytes in units of P (n - 1) / n bytes of float32, for k micro-batches, where everything is
# sharded that can be; the table of docs/strategies.md.
WIRE = {
    "ddp": lambda k: 2,
    "zero1": lambda k: 2,
    "zero2": lambda k: k + 1,
    "fsdp": lambda k: 3 * k,
    "fsdp_keep": lambda k: 2,
}
