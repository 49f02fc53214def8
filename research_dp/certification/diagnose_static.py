"""Suspicions that the step's bits and its traced program confirm: see the table in diagnose.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.certification import costs
from research_dp.certification.compare_steps import shards_by_place
from research_dp.certification.diagnose_case import NEAR, Case
from research_dp.distributed.replica_difference import difference_text
from research_dp.distributed.sharding import by_path


def cast_on_the_wire(case: Case) -> Mapping[str, Any] | None:
    """A dtype on the wire that the configuration does not name."""
    unnamed = costs.unnamed_dtypes(case.bench.strategy, case.dtypes)
    return {"dtypes": ", ".join(unnamed)} if unnamed else None


def rounded(case: Case) -> Mapping[str, Any] | None:
    """Gradients that are off by about the rounding of a coarse dtype."""
    off = [d.gap.relative for d in case.step.differences if d.kind == "gradient"]
    usual = statistics.median(off)
    for dtype in ("bfloat16", "float16"):
        eps = float(jnp.finfo(dtype).eps)
        if eps / 10 < usual < eps and max(off) < 4 * eps:
            return {"usual": usual, "dtype": dtype}
    return None


def not_updated(case: Case) -> Mapping[str, Any] | None:
    """Devices whose shards of the optimizer's state, gradients included, have their old bits."""
    step, mesh = case.step, case.bench.strategy.mesh
    states = (step.actual.on_devices, step.before, step.expected.state)
    actual, before, expected = (by_path(state.opt_state) for state in states)
    stale: dict[tuple[int, ...], bool] = {}
    for leaf, x in actual.items():
        for place, (index, shard) in shards_by_place(x, mesh).items():
            old = before[leaf][index]
            if np.ndim(old) and not np.array_equal(old, expected[leaf][index]):
                stale[place] = np.array_equal(shard, old) and stale.get(place, True)
    places = [place for place, is_stale in stale.items() if is_stale]
    if not places:
        return None
    is_all = len(places) == len(stale)
    return {"devices": "any device" if is_all else case.devices_text(places)}


def stale_shards(case: Case) -> Mapping[str, Any] | None:
    """Replicated parameters of which a device has updated its own shard alone."""
    if case.wrong("gradient"):
        return None
    step, mesh = case.step, case.bench.strategy.mesh
    before, expected = by_path(step.before.params), by_path(step.expected.state.params)
    for leaf, x in by_path(step.actual.on_devices.params).items():
        changed = before[leaf] != expected[leaf]
        for place, (index, block) in shards_by_place(x, mesh).items():
            old = (block == before[leaf][index]) & changed[index]
            if 0 < old.sum() < changed[index].sum() and old.mean() > NEAR:
                device = case.devices_text([place])
                return {"old": old.sum(), "size": old.size, "leaf": leaf, "device": device}
    return None


def replicas_differ(case: Case) -> Mapping[str, Any] | None:
    """Replicas that do not have the same bits."""
    replicas = case.step.replicas
    if not replicas:
        return None
    kind, _, axes = replicas[0]
    leaves = [one.leaf for one in replicas if (one.kind, one.axes) == (kind, axes)]
    return {"message": difference_text(kind, leaves, axes, case.bench.strategy.mesh)}
