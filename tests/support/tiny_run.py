"""Runs of the real loop that take milliseconds, in this process: tests of files and restarts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.config import load
from research_dp.errors import RunFailure, UsageError, message_of
from research_dp.strategies import TrainSpec
from research_dp.types import DataSet, LossOutput, TrainableModel
from tests.support.strategies import recipe

BATCH, DIM = 4, 8


def _init(key, batch):
    return {"w": jax.random.normal(key, (DIM, DIM)), "b": jnp.zeros((1, DIM))}, {}


def _loss(params, model_state, batch, keys, *, train, batch_axes):
    y = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    count = jnp.float32(y.shape[0]) if train else jnp.sum(batch["mask"])
    error = jnp.mean(jnp.square(y - batch["x"]), axis=-1)
    total = jnp.sum(error if train else error * batch["mask"])
    return LossOutput(total, count, model_state, {})


def _batch(seed, size):
    return np.random.default_rng(seed).normal(size=(size, DIM)).astype(np.float32)


def _train(order):
    for step in range(order.first_step, order.num_steps):
        yield {"x": _batch([order.seed, step], order.batch_size)[order.rows]}


def _evaluate(order):
    yield {"x": _batch(9, order.batch_size)[order.rows], "mask": np.ones(len(order.rows), "f4")}


MODEL = TrainableModel(_init, _loss)
DATA = DataSet(
    name="tiny",
    example={"x": jax.ShapeDtypeStruct((DIM,), np.float32)},
    info={},
    prepare=lambda: None,
    train=_train,
    evaluate=_evaluate,
)
OPTIMIZER = optax.adam(1e-2)


@functools.cache
def _strategy():
    """`single`, whose programs are compiled once for all runs."""
    load.reset()
    single = recipe("single")
    spec = TrainSpec(model=MODEL, optimizer=OPTIMIZER, example=DATA.example, batch_size=BATCH)
    built = single.build(spec)
    load.reset()
    return dataclasses.replace(single, engine=lambda recipe, spec: built)


def train(folder, *, num_steps=8, **options):
    """Runs the loop; returns its exit status."""
    from research_dp.training.train import train

    settings = {
        "model": MODEL,
        "data": DATA,
        "log_every": 2,
        "checkpoint_every": 2,
        "eval_every": 4,
        **options,
    }
    return train(
        strategy=settings.pop("strategy", None) or _strategy(),
        optimizer=OPTIMIZER,
        num_steps=num_steps,
        batch_size=BATCH,
        workdir=str(folder),
        **settings,
    )


def outcome(folder, **options):
    """How a command would end: its exit status, and the message of a failure."""
    try:
        return train(folder, **options), ""
    except UsageError as error:
        return 2, message_of(error)
    except RunFailure as error:
        return 1, message_of(error)
