"""Losses and layers over all examples of a batch: what they need of other devices' examples.

`gather_examples` and `global_mean` compute on any number of devices what one device computes. The
step says over which mesh axes the batch is split where it runs the model; nobody passes axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, all_mean, gather
from research_dp.distributed.differentiable_gather import with_gradient
from research_dp.errors import UsageError
from research_dp.types import PyTree

SCOPE = "over_the_batch"  # of the operations here: their bytes are the model's, not the strategy's


class _Split(NamedTuple):
    """How the batch that the model gets is split: over bound axes, and by which collectives."""

    axes: Axes = ()
    reduction: Reduction = PLAIN
    is_one: bool = False  # whether each example has a call of its own


# A context of JAX's, so that what it caches of a traced function depends on it.
_SPLIT: Any = jax.make_user_context(_Split())


@contextlib.contextmanager
def split_over(axes: Axes, reduction: Reduction) -> Iterator[None]:
    """While a model is traced for its part of a batch that is split over these axes."""
    with _SPLIT(_Split(axes, reduction)):
        yield


def of_one_example() -> contextlib.AbstractContextManager[Any]:
    """While a model is traced for one example, which knows of no other."""
    return _SPLIT(_Split(is_one=True))


@checked
def gather_examples(x: Arrays) -> PyTree:
    """All examples of the batch, in its order: for losses that compare examples.

    Inside a model or loss, in training and in evaluation, under every strategy. With
    `accumulation_steps` they are the micro-batch's; with exact sums (`tree_reduction`), whose
    logical shards know nothing of each other, the logical shard's.

    Args:
        x: Arrays whose first dim counts this device's examples, (B, ...), or a tree of them.

    Returns:
        The arrays of all devices, (B x devices, ...). On one device, under an engine of global
        arrays, and outside of a strategy: `x` itself. The gradient of an example is the sum over
        the devices' losses, exact at any order in reverse mode.
    """
    axes, reduction, _ = _SPLIT.value
    _check_examples(x, "gather_examples")
    if not axes:
        return x

    def full(x: jax.Array) -> jax.Array:
        return gather(x, 0, axes, reduction)

    def block(g: jax.Array) -> jax.Array:
        # Only sums: losses are sums over a device's examples, which the strategy averages, once.
        for axis in axes:
            g = reduction.reduce_scatter(g, axis, 0)
        return g

    def one(x: jax.Array) -> jax.Array:
        is_differentiable = jnp.issubdtype(x.dtype, jnp.inexact)
        return (with_gradient(full, block) if is_differentiable else full)(x)

    with jax.named_scope(SCOPE):
        return jax.tree.map(one, x)


@checked
def global_mean(x: Arrays) -> PyTree:
    """The mean over all examples of the batch: for statistics.

    Where and of which examples as in `gather_examples`; half precision is averaged in float32.

    Args:
        x: Arrays (B, ...) of this device's examples, or a tree of them.

    Returns:
        Arrays (...), the same on each device, in the dtype of `jnp.mean`.
    """
    axes, reduction, _ = _SPLIT.value
    _check_examples(x, "global_mean")

    def one(x: jax.Array) -> jax.Array:
        # Devices have equally many examples, so the mean of their means is that of all.
        local = jnp.mean(x, 0, dtype=jnp.promote_types(x.dtype, jnp.float32))
        mean = all_mean(local, axes, reduction) if axes else local
        return mean.astype(x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else mean.dtype)

    with jax.named_scope(SCOPE):
        return jax.tree.map(one, x)


def _check_examples(x: PyTree, function: str) -> None:
    if _SPLIT.value.is_one:
        raise UsageError(
            f"{function} in a model that is called for each example by itself (rngs): there is one "
            "example. Call it in the loss."
        )
    if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(x)):
        raise UsageError(f"{function}.x is a number. Give arrays (B, ...), one row an example.")


def seed_key(seed: int | jax.Array) -> jax.Array:
    """A key of Threefry, whatever JAX's default is: `vmap` over others draws from the first key."""
    with jax.transfer_guard_host_to_device("allow"):  # of a seed: who calls this asks for it
        return jax.random.key(seed, impl="threefry2x32")
