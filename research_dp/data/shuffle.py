"""Random streams of the data pipeline, and the order of examples: functions of the seed and step.

Position `i` of the training stream is entry `i % size` of the permutation of epoch `i // size`.
Each entry is computed without the others, so a run resumes anywhere, on any number of processes.
"""

from __future__ import annotations

import enum
import functools

import numpy as np

_ROUNDS = 6
_SMALL = 2**16  # permutations of at most this many examples are cached


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


def stream_positions(step: int, batch_size: int, rows: np.ndarray) -> np.ndarray:
    """Positions in the training stream of rows of a step's global batch; int64."""
    return step * batch_size + rows.astype(np.int64)


def example_indices(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Indices of examples, int64, at positions of the shuffled, endlessly repeated stream.

    Each of the `size` examples occurs once in each epoch. Each seed and epoch has its own order.
    """
    epochs, offsets = np.divmod(positions, size)
    indices = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        if size <= _SMALL:
            indices[mask] = _epoch_order(size, seed, int(epoch))[offsets[mask]]
        else:
            indices[mask] = permute(offsets[mask], size, seed, int(epoch))
    return indices


@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(size), size, seed, epoch)


def permute(offsets: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random permutation of [0, size), evaluated at offsets into an epoch; int64.

    A Feistel network on the next power of four, applied until the result falls inside [0, size)
    (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = generator(seed, Purpose.ORDER, epoch).integers(2**64, size=_ROUNDS, dtype=np.uint64)
    # The network's rounds map a half: with few examples, each of its values is computed once.
    halves = np.arange(1 << int(half), dtype=np.uint64) if size <= _SMALL else None
    tables = [halves if halves is None else _mix(halves ^ key) & mask for key in keys]
    result = offsets.astype(np.uint64)
    walking = np.ones(result.shape, bool)
    while walking.any():
        left, right = result[walking] >> half, result[walking] & mask
        for key, table in zip(keys, tables, strict=True):
            mixed = _mix(right ^ key) & mask if table is None else table[right]
            left, right = right, left ^ mixed
        result[walking] = (left << half) | right
        walking = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
