"""Data and devices that go wrong at one step: `--import=tests.support.faults`."""

import ctypes
import dataclasses
import os
import signal
import time
from typing import Literal

import gin
import jax
import numpy as np

from research_dp import sync_gradients
from research_dp.strategies import StrategyConfig
from research_dp.types import DataSet

Kind = Literal["sleep", "hold", "kill", "abort", "freeze", "raise", "nan", "inf"]


@gin.register(module="tests")
def faulty(*, data: DataSet = gin.REQUIRED, kind: Kind, step: int, process: int = 0) -> DataSet:
    """`data` that fails while the batch of a step is read, in one process."""

    def train(order):
        for number, batch in enumerate(data.train(order), order.first_step + 1):
            here = number == step and jax.process_index() == process
            yield _fail(kind, batch) if here else batch

    return dataclasses.replace(data, train=train)


@gin.register(module="tests")
def flipping(*, strategy: StrategyConfig = gin.REQUIRED, device: int, step: int) -> StrategyConfig:
    """`strategy` whose device, after a step, holds one wrong bit of the first parameter."""

    def engine(recipe, spec):
        built = strategy.engine(recipe, spec)

        def train_step(state, batch):
            now = None if isinstance(state.step, jax.core.Tracer) else int(state.step) + 1
            state, metrics = built.train_step(state, batch)
            if now == step:
                first, *others = jax.tree.leaves(state.params)
                leaves = [flip(first, jax.devices()[device]), *others]
                params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
                state = state._replace(params=params)
            return state, metrics

        return dataclasses.replace(built, train_step=train_step)

    return dataclasses.replace(strategy, engine=engine)


@gin.register(module="tests")
def ascending(grads, axis_names):
    """A `sync` that averages, and turns the sign of gradients."""
    return jax.tree.map(lambda g: -g, sync_gradients(grads, axis_names))


def flip(x, device, bit=0, place=0):
    """The same array with one bit of one element changed in one device's copy."""
    parts = []
    for shard in x.addressable_shards:
        own = np.array(shard.data)
        if shard.device == device:
            own.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
        parts.append(jax.device_put(own, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _fail(kind, batch):
    if kind == "sleep":
        time.sleep(600)
    elif kind == "hold":  # in C, and the interpreter's lock is kept
        ctypes.PyDLL(None).sleep(600)
    elif kind == "raise":
        raise OSError("the disk is gone")
    elif kind in ("nan", "inf"):
        spoilt = np.array(batch["image"])
        spoilt[0] = float(kind)
        return {**batch, "image": spoilt}
    else:
        numbers = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "freeze": signal.SIGSTOP}
        os.kill(os.getpid(), numbers[kind])
    return batch
