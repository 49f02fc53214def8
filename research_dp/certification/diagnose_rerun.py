"""Suspicions that a changed rerun of the step confirms: see the table in diagnose.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from research_dp.certification.diagnose_case import Case
from research_dp.certification.harness import gradients_of, run_step
from research_dp.certification.tolerances import gap
from research_dp.distributed.sharding import by_path

_MASKS = ("mask", "weights")


def without_clipping(case: Case) -> Mapping[str, Any] | None:
    """All but the norm is right if nothing is clipped."""
    step, limit = case.step, case.bench.spec.max_grad_norm
    if limit is None:
        return None
    unclipped = case.rerun(case.bench.with_spec(max_grad_norm=None))
    if unclipped.replicas or {d.kind for d in unclipped.wrong} - {"gradient norm"}:
        return None
    return {"limit": limit, "norm": step.actual.norm, "expected": step.expected.norm}


def unused_examples(case: Case) -> Mapping[str, Any] | None:
    """The strategy's loss ignores changes of some devices' examples."""
    step, bench, rows_by_device = case.step, case.bench, case.rows_by_device()
    unused = []
    for device, rows in enumerate(rows_by_device):
        batch = {name: np.array(x) for name, x in step.batch.items()}
        for name, x in case.other_batch.items():
            batch[name][rows] = x[rows]
        actual = run_step(bench.strategy, step.before, batch)
        expected = run_step(bench.oracle, step.before, batch)
        is_same = actual.metrics["loss"] == step.actual.metrics["loss"]
        if is_same and expected.metrics["loss"] != step.expected.metrics["loss"]:
            unused.append(device)
    if not unused:
        return None
    rows = rows_by_device[unused[0]]
    return {"devices": ", ".join(map(str, unused)), "first": rows[0], "last": rows[-1]}


def with_equal_masks(case: Case) -> Mapping[str, Any] | None:
    """The step is right if all examples count alike."""
    batch = case.step.batch
    masks = [name for name in _MASKS if name in batch]
    ones = {name: np.ones_like(batch[name]) for name in masks}
    if not masks or not case.rerun(batch={**batch, **ones}).is_right:
        return None
    return {"masks": " and ".join(masks)}


def one_step_behind(case: Case) -> Mapping[str, Any] | None:
    """The gradients are the oracle's at the parameters of the step before."""
    step = case.step
    if not case.wrong("gradient"):
        return None
    old = step.before._replace(params=case.earlier.params)
    behind = by_path(gradients_of(run_step(case.bench.oracle, old, step.batch).state))
    bounds = {d.leaf: d.bound for d in step.differences if d.kind == "gradient"}

    def is_near(grads: Mapping[str, Any]) -> bool:
        return all(gap(grads[leaf], x).ulps <= bounds[leaf] for leaf, x in behind.items())

    expected, actual = (by_path(gradients_of(r.state)) for r in (step.expected, step.actual))
    # At the first step no parameters are older: these gradients are the oracle's.
    return {} if is_near(actual) and not is_near(expected) else None


def without_keys(case: Case) -> Mapping[str, Any] | None:
    """The step is right if the model gets no random keys."""
    model = case.bench.spec.model

    def loss(params: Any, state: Any, batch: Any, keys: Any, **options: Any) -> Any:
        return model.loss(params, state, batch, None, **options)

    without = case.bench.with_spec(model=dataclasses.replace(model, loss=loss))
    return {} if case.rerun(without).is_right else None


def with_the_same_examples(case: Case) -> Mapping[str, Any] | None:
    """The step is right if all devices have the same examples."""
    batch, rows_by_device = case.step.batch, case.rows_by_device()
    weights = [np.asarray(batch[name]) for name in _MASKS if name in batch]
    # The device with most valid examples: without any, every step would be right.
    chosen = max(rows_by_device, key=lambda rows: sum(float(w[rows].sum()) for w in weights))
    tiled = {name: np.array(x) for name, x in batch.items()}
    for rows in rows_by_device:
        for name in tiled:
            tiled[name][rows] = batch[name][chosen]
    return {} if case.rerun(batch=tiled).is_right else None
