"""Where every random draw of the data comes from: the seed, what it is for, and which one."""

from __future__ import annotations

import enum

import numpy as np


class Purpose(enum.IntEnum):
    """What is drawn. Each has streams of its own; a number once given is never given again."""

    ORDER = 0  # of the examples of an epoch
    BATCH = 1  # augmentation of a step's batch
    EXAMPLE = 2  # augmentation of the example at a place in the training stream
    FILES = 3  # order of files, in a reader without random access
    BUFFER = 4  # order of the examples in that reader's shuffle buffer
    TOKENS = 5  # of the example at a place in the training stream, where there is no data
    EVAL_TOKENS = 6  # the same for evaluation


def generator(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """A generator that shares its stream with no other seed, purpose or index.

    Args:
        seed: Seed of the run, at least 0.
        purpose: What it draws.
        index: Which epoch, step or place, at least 0.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, index)))
