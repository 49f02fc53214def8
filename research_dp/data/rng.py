"""Random streams of the data pipeline: one for each seed, purpose and index."""

from __future__ import annotations

import enum

import numpy as np


class Purpose(enum.IntEnum):
    """What is drawn. Each purpose has its own streams; a number is never reused."""

    ORDER = 0  # of the examples of an epoch
    BATCH = 1  # augmentation of a step's batch
    EXAMPLE = 2  # augmentation of the example at a position of the training stream
    FILES = 3  # order of files, in `tf_data`
    BUFFER = 4  # order of the examples in the shuffle buffer of `tf_data`
    TOKENS = 5  # tokens at a position of the training stream of `random_tokens`
    EVAL_TOKENS = 6  # the same for evaluation


def generator(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """A generator that shares its stream with no other seed, purpose or index.

    The index is an epoch, step or position, at least 0.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, index)))
