"""Searches for the cause of a wrong step: each suspicion is a function that confirms it, or not."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.certification import costs, diagnose_scale
from research_dp.certification.compare_steps import shards_by_place
from research_dp.certification.diagnose_case import NEAR, Case
from research_dp.certification.harness import gradients_of, run_step
from research_dp.certification.tolerances import gap
from research_dp.distributed.replica_difference import difference_text
from research_dp.distributed.sharding import by_path

_MASKS = ("mask", "weights")


def find_cause(cases: Sequence[Case]) -> str | None:
    """Reports the first suspicion that one of the cases confirms, the clearest case first."""
    # The first ones do not run the strategy again, which may keep something from run to run.
    for suspicions in (
        (_cast_on_the_wire, _shard_not_updated, _stale_shards, _one_step_behind),
        (
            _local_norm,
            replicas_differ,
            diagnose_scale.scaled_gradients,
            diagnose_scale.scaled_norm,
            diagnose_scale.scaled_update,
            _unused_examples,
            _right_if_equal,
            _rounded,
        ),
    ):
        for case in cases:
            for suspicion in suspicions:
                if message := suspicion(case):
                    return message
    return None


# ---- From the bits of the step and its traced program ----


def _cast_on_the_wire(case: Case) -> str | None:
    dtypes = ", ".join(costs.unnamed_dtypes(case.bench.strategy, case.dtypes))
    message = f"the program sends {dtypes}, which nothing in the configuration names: a cast"
    return message if dtypes else None


def _shard_not_updated(case: Case) -> str | None:
    """Shards of the optimizer's state, gradients included, have their old bits."""
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
    devices = "any device" if len(places) == len(stale) else case.devices_text(places)
    return f"the optimizer's state is not updated on {devices}: it has the bits of the step before"


def _stale_shards(case: Case) -> str | None:
    """A device has updated only its own shard of a replicated parameter."""
    if case.wrong("gradient"):
        return None
    step, mesh = case.step, case.bench.strategy.mesh
    before, expected = by_path(step.before.params), by_path(step.expected.state.params)
    for leaf, x in by_path(step.actual.on_devices.params).items():
        changed = before[leaf] != expected[leaf]
        for place, (index, block) in shards_by_place(x, mesh).items():
            old = (block == before[leaf][index]) & changed[index]
            if 0 < old.sum() < changed[index].sum() and old.mean() > NEAR:
                return (
                    f"after the update {old.sum()} of {old.size} elements of parameter {leaf} on "
                    f"{case.devices_text([place])} are those of the step before: a stale gather"
                )
    return None


def replicas_differ(case: Case) -> str | None:
    """Replicas do not have the same bits."""
    replicas = case.step.replicas
    if not replicas:
        return None
    kind, _, axes = replicas[0]
    leaves = [one.leaf for one in replicas if (one.kind, one.axes) == (kind, axes)]
    return difference_text(kind, leaves, axes, case.bench.strategy.mesh)


def _rounded(case: Case) -> str | None:
    off = [d.gap.relative for d in case.step.differences if d.kind == "gradient"]
    usual = statistics.median(off)
    for dtype in ("bfloat16", "float16"):
        eps = float(jnp.finfo(dtype).eps)
        if eps / 10 < usual < eps and max(off) < 4 * eps:
            return (
                f"gradients are usually {usual:.1e} off, as if they, or what they are computed "
                f"from, had been rounded to {dtype} on the way"
            )
    return None


# ---- From another run of the step, with something changed ----


def _one_step_behind(case: Case) -> str | None:
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
    if not is_near(actual) or is_near(expected):
        return None
    return "gradients are those of the parameters of the step before: a stale gather"


def _local_norm(case: Case) -> str | None:
    """All but the norm is right if nothing is clipped."""
    step, limit = case.step, case.bench.spec.max_grad_norm
    if limit is None:
        return None
    unclipped = case.rerun(case.bench.with_spec(max_grad_norm=None))
    if unclipped.replicas or {d.kind for d in unclipped.wrong} - {"gradient norm"}:
        return None
    return (
        f"only with train.max_grad_norm = {limit}: gradients are clipped by another norm than the "
        f"global one, such as a device's local norm (its norm is {step.actual.norm:.6g}, where the "
        f"oracle has {step.expected.norm:.6g})"
    )


def _unused_examples(case: Case) -> str | None:
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
    return (
        f"the examples of device {', '.join(map(str, unused))} do not count (places {rows[0]} to "
        f"{rows[-1]} of the batch first): another device's are repeated in their place"
    )


def _right_if_equal(case: Case) -> str | None:
    """The step is right if all examples count alike, without random keys, or if all are equal."""
    model, batch, rows_by_device = case.bench.spec.model, case.step.batch, case.rows_by_device()
    masks = {name: np.asarray(batch[name]) for name in _MASKS if name in batch}
    ones = {name: np.ones_like(mask) for name, mask in masks.items()}
    if ones and case.rerun(batch={**batch, **ones}).is_right:
        return (
            f"only with uneven {' and '.join(ones)}: a mean of each device's own means is taken, "
            "and not the sum over all valid items divided by their number"
        )

    def loss(params: Any, state: Any, batch: Any, keys: Any, **options: Any) -> Any:
        return model.loss(params, state, batch, None, **options)

    if case.rerun(case.bench.with_spec(model=dataclasses.replace(model, loss=loss))).is_right:
        return (
            "only with random keys (dropout): derive them from the seed, the step and the "
            "example's place in the global batch, not from a device's index"
        )
    # All devices get the examples of that with most valid ones: without any, steps are right.
    chosen = max(rows_by_device, key=lambda rows: sum(float(x[rows].sum()) for x in masks.values()))
    equal = {name: np.array(x) for name, x in batch.items()}
    for name, x in equal.items():
        for rows in rows_by_device:
            x[rows] = batch[name][chosen]
    if case.rerun(batch=equal).is_right:
        return (
            "only where devices have different examples: each device computes something from its "
            "own examples that is no sum over them"
        )
    return None
