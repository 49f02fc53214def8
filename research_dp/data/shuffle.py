"""The order of examples: a function of the seed and the step alone.

Example number `i` of the training stream is `permutation of epoch i // size` at `i % size`. Any of
them can be found without the others, so a run continues anywhere, on any number of processes.
"""

from __future__ import annotations

import functools

import numpy as np

from research_dp.data.rng import Purpose, generator

_ROUNDS = 6
_SMALL = 2**16  # epochs of up to so many examples are kept


def stream_positions(step: int, batch_size: int, rows: np.ndarray) -> np.ndarray:
    """Places in the training stream of rows of the global batch at a step; int64."""
    return step * batch_size + rows.astype(np.int64)


def example_indices(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Indices into a data set of places in its shuffled, endlessly repeated stream.

    Args:
        positions: Places in the stream, int64.
        size: Number of examples; each occurs once in each epoch.
        seed: Another seed is another order; so is another epoch.

    Returns:
        Indices in [0, size), int64.
    """
    epochs, places = np.divmod(positions, size)
    indices = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        if size <= _SMALL:
            indices[chosen] = _epoch_order(size, seed, int(epoch))[places[chosen]]
        else:
            indices[chosen] = permute(places[chosen], size, seed, int(epoch))
    return indices


@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """A whole epoch at once, which costs little more than a few places of it."""
    return permute(np.arange(size), size, seed, epoch)


def permute(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random permutation of [0, size), evaluated at some places.

    A Feistel network on the next power of four, walked until it falls inside [0, size) (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    Args:
        places: Places in the epoch, each in [0, size), integer.
        size: Number of examples.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        An index for each place, int64, of the places' shape.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = generator(seed, Purpose.ORDER, epoch).integers(2**64, size=_ROUNDS, dtype=np.uint64)
    result = places.astype(np.uint64)
    walking = np.ones(result.shape, bool)
    while walking.any():
        left, right = result[walking] >> half, result[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[walking] = (left << half) | right
        walking = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
