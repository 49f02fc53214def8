"""Reductions and gathers by all-to-all: the transport moves bytes only, and each device adds.

They send as many bytes as a ring, and add in an order that does not depend on the transport.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed.vma import as_varying


def over_gloo() -> bool:
    """Whether collectives go over gloo, whose reduce-scatter and all-gather are not used.

    Its reduce-scatter returns wrong numbers for blocks of 4 MiB and more, now and then: a race in
    its halving-doubling algorithm (https://github.com/jax-ml/jax/issues/40830). Its all-gather
    loses 3 to 4 ms to a thread that polls for a lock where a process has one core
    (experiments/overhead). Once `jax.distributed` is set up, JAX's CPU client uses gloo for the
    devices of one process too.
    """
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's block, along `dim`, of the sum over a bound axis; added in rank order."""
    # Block j goes to device j; received blocks are in the order of their senders. Only a sum:
    # the caller divides.
    received = lax.all_to_all(as_varying(x, (axis,)), axis, dim, dim, tiled=True)
    blocks = received.reshape(*x.shape[:dim], lax.axis_size(axis), -1, *x.shape[dim + 1 :])
    return jnp.sum(blocks, axis=dim, dtype=x.dtype)


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The devices' blocks along `dim`, in rank order; needs memory for as many copies of `x`."""
    dim %= x.ndim
    copies = jnp.concatenate([as_varying(x, (axis,))] * lax.axis_size(axis), axis=dim)
    return lax.all_to_all(copies, axis, dim, dim, tiled=True)


def all_reduce(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over bound axes, on every device: scattered, then gathered, one axis at a time."""
    for axis in axes:
        flat = jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(axis)))
        total = all_gather(reduce_scatter(flat, axis, 0), axis, 0)
        x = total[: x.size].reshape(x.shape)
    return x
