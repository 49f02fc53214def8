"""Causes that the bits of one step and the traced program tell: nothing is run again.

Each function is one suspicion. It returns what it found, in words, or None.
"""

from __future__ import annotations

import statistics

import jax.numpy as jnp
import numpy as np

from research_dp.certification import costs, replica_blocks
from research_dp.certification.failed_step import ALIKE, Case, places_of
from research_dp.distributed.replica_difference import difference_text
from research_dp.distributed.sharding import by_path


def cast(case: Case) -> str | None:
    """A dtype on the wire that nothing names."""
    found = costs.unnamed_dtypes(case.bench.strategy, case.dtypes)
    if not found:
        return None
    return f"the program sends {', '.join(found)}, which nothing in the configuration names: a cast"


def rounded(case: Case) -> str | None:
    """Gradients whose differences are of the size of a coarse dtype's rounding."""
    seen = case.evidence
    off = [d.gap.relative for d in seen.differences if d.what == "gradient"]
    usual = statistics.median(off)
    for dtype in ("bfloat16", "float16"):
        eps = float(jnp.finfo(dtype).eps)
        if eps / 10 < usual < eps and max(off) < 4 * eps:
            return (
                f"gradients are usually {usual:.1e} off, as if they, or what they are computed "
                f"from, had been rounded to {dtype} on the way"
            )
    return None


def not_updated(case: Case) -> str | None:
    """Devices whose part of the optimizer's state, gradients included, has its old bits."""
    seen, mesh = case.evidence, case.bench.strategy.mesh
    trees = (seen.found.on_devices.opt_state, seen.before.opt_state, seen.expected.state.opt_state)
    found, before, expected = map(by_path, trees)
    old: dict[tuple[int, ...], bool] = {}
    for leaf, x in found.items():
        for place, (index, block) in replica_blocks.blocks(x, mesh).items():
            was, is_to_be = before[leaf][index], expected[leaf][index]
            if np.array_equal(was, is_to_be) or np.ndim(was) == 0:
                continue
            old[place] = np.array_equal(block, was) and old.get(place, True)
    stale = [place for place, is_old in old.items() if is_old]
    if not stale:
        return None
    where = "any device" if len(stale) == len(old) else places_of(stale, mesh)
    return f"the optimizer's state is not updated on {where}: it has the bits of the step before"


def stale_gather(case: Case) -> str | None:
    """Whole parameters that are new in a device's own slice, and old elsewhere."""
    seen, mesh = case.evidence, case.bench.strategy.mesh
    if case.wrong("gradient"):
        return None
    before, expected = by_path(seen.before.params), by_path(seen.expected.state.params)
    for leaf, x in by_path(seen.found.on_devices.params).items():
        changed = before[leaf] != expected[leaf]
        for place, (index, block) in replica_blocks.blocks(x, mesh).items():
            old = (block == before[leaf][index]) & changed[index]
            if 0 < old.sum() < changed[index].sum() and old.mean() > ALIKE:
                return (
                    f"after the update {old.sum()} of {old.size} elements of parameter {leaf} on "
                    f"{places_of([place], mesh)} are those of the step before: a stale gather"
                )
    return None


def apart(case: Case) -> str | None:
    """Copies that differ."""
    apart = case.evidence.apart
    if not apart:
        return None
    first = apart[0]
    leaves = [one.leaf for one in apart if (one.what, one.axes) == (first.what, first.axes)]
    return difference_text(first.what, leaves, first.axes, case.bench.strategy.mesh)
