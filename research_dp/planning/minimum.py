"""The least bytes that a strategy must send: the README's table, parameter by parameter."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from research_dp.analysis.traffic import Collective
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.strategies import Recipe, Strategy, TrainSpec


def min_wire_bytes(
    recipe: Recipe, spec: TrainSpec, built: Strategy, traced: Sequence[Collective]
) -> float:
    """Bytes that a device sends in a step over rings, by the README's table.

    A model whose tables are exchanged by rows instead of gathered sends less.

    Args:
        recipe: The strategy.
        spec: What it was built for.
        built: It, built: its layouts say what is sharded.
        traced: The collectives of its traced step, from which the dtypes are taken. Where it has
            none, because the compiler inserts them, parameters' own dtypes count.
    """
    inside, across = built.mesh.shape[FSDP_AXIS], built.mesh.shape[DATA_AXIS]
    micros = spec.accumulation_steps
    gathers = micros if recipe.gather_each == "micro_batch" else 1
    syncs = micros if recipe.sync_each == "micro_batch" else 1
    width = _widths(traced)
    total = 0.0
    layouts = (built.layouts.params, built.layouts.slices)
    for held, piece in zip(*map(jax.tree.leaves, layouts), strict=True):
        own = held.dtype.itemsize
        count = math.prod(held.shape)
        gathered = count * width.get("all-gather", own)
        scattered = count * width.get("reduce-scatter", own)
        reduced = 2 * count * width.get("all-reduce", own)  # a sum travels a ring twice
        if held.dim is not None:
            again = 2 if recipe.gather_each == "micro_batch" else 1  # for the backward pass
            total += gathers * _ring(again * gathered + scattered, inside)
            total += syncs * _ring(reduced / inside, across)
        elif piece.dim is not None:
            total += _ring(syncs * scattered + gathered, inside)
            total += syncs * _ring(reduced / inside, across)
        else:
            total += syncs * _ring(reduced, inside * across)
    return total


def _ring(nbytes: float, devices: int) -> float:
    return nbytes * (devices - 1) / devices


def _widths(traced: Sequence[Collective]) -> dict[str, int]:
    """Bytes of an element of most of what each kind of collective carries of floating numbers."""
    sent: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in traced:
        if jnp.issubdtype(jnp.dtype(one.dtype), jnp.floating):
            sent[one.kind][one.dtype] += round(one.wire_bytes)
    return {kind: jnp.dtype(sums.most_common(1)[0][0]).itemsize for kind, sums in sent.items()}
