"""A contrastive loss: the two halves of a digit find each other among all halves of the batch.

python -m research_dp.train --gin_file=examples/contrastive.gin --cpu_devices=8 --workdir=runs/pairs
"""

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
from sklearn.datasets import load_digits

import research_dp

SCALE = 10.0  # of similarities, which are cosines


class Tower(nn.Module):
    """Images (B, 8, 4) as unit vectors (B, features)."""

    width: int
    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
        x = nn.Dense(self.features)(x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class TwoTowers(nn.Module):
    """The vectors of the left and of the right halves."""

    width: int = 64
    features: int = 16

    @nn.compact
    def __call__(self, left, right):
        return [Tower(self.width, self.features)(x) for x in (left, right)]


def similarities(vectors, batch):
    """Own (B,), of each left half with all right ones, and the reverse (B, examples)."""
    left, right = (SCALE * vectors[0], vectors[1])
    to_right = left @ research_dp.gather_examples(right).T
    to_left = right @ research_dp.gather_examples(left).T
    return jnp.sum(left * right, axis=-1), to_right, to_left


def contrastive(vectors, batch):
    """One number an example, (B,): both halves against the other halves of the batch."""
    own, to_right, to_left = similarities(vectors, batch)
    both = jax.nn.logsumexp(to_right, axis=-1) + jax.nn.logsumexp(to_left, axis=-1)
    return both / 2 - own


def found(vectors, batch):
    """Whether no other right half is nearer to a left half than its own, (B,)."""
    own, to_right, _ = similarities(vectors, batch)
    return own >= to_right.max(axis=-1) - 1e-4


@gin.register(module="examples")
def two_towers(width: int = 64, features: int = 16) -> research_dp.TrainableModel:
    """Two towers, trained on pairs against the other pairs of the batch."""
    return research_dp.from_linen(
        TwoTowers(width, features),
        loss=contrastive,
        inputs=("left", "right"),
        targets=None,
        metrics={"accuracy": found},
    )


@gin.register(module="examples")
def digit_halves() -> research_dp.DataSet:
    """The left and the right halves of handwritten digits."""
    images = load_digits().images / 16
    halves = {"left": images[:, :, :4], "right": images[:, :, 4:]}
    return research_dp.from_arrays(halves, eval=0.2, name="digit_halves")
