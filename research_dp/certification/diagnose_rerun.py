"""Causes that other runs tell: the step with one thing changed.

Each function is one suspicion. It returns what it found, in words, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from research_dp.certification.failed_step import Case, rows_of
from research_dp.certification.harness import gradients_of, step
from research_dp.certification.tolerances import gap
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.sharding import by_path

_MASKS = ("mask", "weights")


def without_clipping(case: Case) -> str | None:
    """Clipping by another norm: right but for the norm if nothing is clipped."""
    seen, limit = case.evidence, case.bench.spec.max_grad_norm
    if limit is None:
        return None
    unclipped = case.again(case.bench.with_spec(max_grad_norm=None))
    if unclipped.apart or {d.what for d in unclipped.wrong} - {"gradient norm"}:
        return None
    norms = f"{seen.found.norm:.6g}, where the oracle has {seen.expected.norm:.6g}"
    return (
        f"only with train.max_grad_norm = {limit}: gradients are clipped by another norm than the "
        f"global one, such as a device's local norm (its norm is {norms})"
    )


def unseen(case: Case) -> str | None:
    """Devices whose examples can be changed without anything else changing."""
    seen, bench = case.evidence, case.bench
    unseen = []
    for device in range(batch_devices(bench.strategy.mesh)):
        rows = rows_of(case, device)
        batch = {name: np.array(x) for name, x in seen.batch.items()}
        for name, x in case.other_batch.items():
            batch[name][rows] = x[rows]
        done = step(bench.strategy, seen.before, batch)
        changed = step(bench.oracle, seen.before, batch)
        same = done.metrics["loss"] == seen.found.metrics["loss"]
        if same and changed.metrics["loss"] != seen.expected.metrics["loss"]:
            unseen.append(device)
    if not unseen:
        return None
    rows = rows_of(case, unseen[0])
    return (
        f"the examples of device {', '.join(map(str, unseen))} do not count (places "
        f"{rows[0]} to {rows[-1]} of the batch first): another's are repeated in their stead"
    )


def with_equal_masks(case: Case) -> str | None:
    """Means of means: right if all examples count alike."""
    seen = case.evidence
    masks = [name for name in _MASKS if name in seen.batch]
    if not masks:
        return None
    ones = {name: np.ones_like(seen.batch[name]) for name in masks}
    if not case.again(batch={**seen.batch, **ones}).is_right:
        return None
    return (
        f"only with uneven {' and '.join(masks)}: a mean of each device's own means is taken, and "
        "not the sum over all valid items divided by their number"
    )


def one_step_behind(case: Case) -> str | None:
    """Parameters that were gathered too early. The oracle alone is run."""
    seen = case.evidence
    if not case.wrong("gradient"):
        return None
    old = seen.before._replace(params=case.earlier.params)
    behind = by_path(gradients_of(step(case.bench.oracle, old, seen.batch).state))
    found, expected = (by_path(gradients_of(done.state)) for done in (seen.found, seen.expected))
    bounds = {d.leaf: d.bound for d in seen.differences if d.what == "gradient"}

    def near(others: Mapping[str, Any]) -> bool:
        return all(gap(others[leaf], x).ulps <= bounds[leaf] for leaf, x in behind.items())

    # At the first step no parameters are older: the gradients are the oracle's.
    if near(expected) or not near(found):
        return None
    return "gradients are those of the parameters of the step before: a stale gather"


def without_keys(case: Case) -> str | None:
    """Random keys of a device: right if there are none."""
    model = case.bench.spec.model

    def loss(params: Any, state: Any, batch: Any, keys: Any, **more: Any) -> Any:
        return model.loss(params, state, batch, None, **more)

    without = case.bench.with_spec(model=dataclasses.replace(model, loss=loss))
    if not case.again(without).is_right:
        return None
    return (
        "only with random keys (dropout): they are to come from the seed, the step and the "
        "example's place in the global batch, not from a device's index"
    )


def with_the_same_examples(case: Case) -> str | None:
    """Statistics of a device: right if all have the same examples."""
    batch: Mapping[str, Any] = case.evidence.batch
    places = [rows_of(case, i) for i in range(batch_devices(case.bench.strategy.mesh))]
    weights = [np.asarray(batch[name]) for name in _MASKS if name in batch]
    # Of those that count most: with none that counts, all would be right.
    chosen = max(places, key=lambda rows: sum(float(w[rows].sum()) for w in weights))
    tiled = {name: np.array(x) for name, x in batch.items()}
    for rows in places:
        for name in tiled:
            tiled[name][rows] = batch[name][chosen]
    if not case.again(batch=tiled).is_right:
        return None
    return (
        "only where devices have other examples: something that is no sum over examples is taken "
        "of each device's own"
    )
