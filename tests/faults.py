"""Data that goes wrong at one step of one process: `--import=faults`, for tests of what follows."""

import ctypes
import dataclasses
import os
import signal
import time
from typing import Literal

import gin
import jax
import numpy as np

from research_dp.distributed.data_set import DataSet

Kind = Literal["sleep", "hold", "kill", "abort", "freeze", "raise", "nan", "inf"]


@gin.register(module="tests")
def faulty(*, data: DataSet = gin.REQUIRED, kind: Kind, step: int, process: int = 0) -> DataSet:
    """`data` that fails while the batch of a step is read, in one process."""

    def train(order):
        for number, batch in enumerate(data.train(order), order.first_step + 1):
            here = number == step and jax.process_index() == process
            yield _fail(kind, batch) if here else batch

    return dataclasses.replace(data, train=train)


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
