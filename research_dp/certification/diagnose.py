"""Searches for the cause of a wrong step: each suspicion is a function that confirms it, or not."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.certification import tolerances
from research_dp.certification.compare_steps import StepComparison, shards_by_place
from research_dp.certification.harness import Batch, gradients_of, place_rows, run_step
from research_dp.certification.tolerances import as_float64, gap, projection
from research_dp.distributed.jaxpr import source_line, walk
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError, some_of
from research_dp.strategies import TrainState
from research_dp.strategies.batch_losses import operations_of_loss, order_dependence
from research_dp.training.replica_check import difference_text

SHOWN = 3
_NEAR = 1e-3  # relative distance
_MASKS = ("mask", "weights")


def find_cause(cases: Sequence[tuple[StepComparison, TrainState]], other: Batch) -> str | None:
    """Reports the first suspicion that a wrong step confirms, the clearest step first.

    Each step comes with the oracle's state one step before; `other` is another batch.
    """
    # The first ones do not run the strategy again, which may keep something from run to run.
    suspicions = [
        suspicion
        for step, earlier in cases
        for suspicion in (_not_updated(step), _stale_shards(step), _one_step_behind(step, earlier))
    ]
    for step, _ in cases:
        suspicions += (_local_norm(step), replicas_differ(step), _own_gather(step))
        suspicions.append(_scaled_gradients(step))
        suspicions += (_scaled_norm(step), _scaled_update(step), _unused_examples(step, other))
        suspicions += (_right_if_equal(step), _rounded(step))
    return next(itertools.chain(*suspicions), None)


# ---- From the bits of the step ----


def _shards(step: StepComparison, part: str) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """A part of the state by leaf and device: its shard, the one before, and the oracle's."""
    states = (step.actual.on_devices, step.before, step.expected.state)
    actual, before, expected = (by_path(getattr(state, part)) for state in states)
    for leaf, x in actual.items():
        for place, (index, shard) in shards_by_place(x, step.bench.strategy.mesh).items():
            pairs = zip(step.bench.strategy.mesh.axis_names, place, strict=True)
            device = f"({' '.join(f'{axis} {i}' for axis, i in pairs)})"
            yield leaf, device, shard, before[leaf][index], expected[leaf][index]


def _not_updated(step: StepComparison) -> Iterator[str]:
    """Shards of the optimizer's state, gradients included, have their old bits."""
    stale: dict[str, bool] = {}
    for _, device, shard, before, expected in _shards(step, "opt_state"):
        if np.ndim(before) and not np.array_equal(before, expected):
            stale[device] = np.array_equal(shard, before) and stale.get(device, True)
    if names := [device for device, is_stale in stale.items() if is_stale]:
        where = f"device{'s' if len(names) > 1 else ''} {some_of(names, SHOWN)}"
        where = "any device" if len(names) == len(stale) else where
        yield f"the optimizer's state is not updated on {where}: it has the bits of the step before"


def _stale_shards(step: StepComparison) -> Iterator[str]:
    """A device has updated only its own shard of a replicated parameter."""
    for leaf, device, shard, before, expected in _shards(step, "params"):
        changed = before != expected
        old = (shard == before) & changed
        is_stale = 0 < old.sum() < changed.sum() and old.mean() > _NEAR
        if is_stale and not step.wrong_leaves("gradient"):
            yield (
                f"after the update {old.sum()} of {old.size} elements of parameter {leaf} on "
                f"device {device} are those of the step before: a stale gather"
            )


def replicas_differ(step: StepComparison) -> Iterator[str]:
    """Replicas do not have the same bits."""
    if step.replicas:
        yield difference_text(step.replicas, step.bench.strategy.config)


def _own_gather(step: StepComparison) -> Iterator[str]:
    """The model gathers examples by itself, in another order or with another gradient."""
    strategy = step.bench.strategy
    if not strategy.splits_batch:
        return
    rows = len(step.bench.rows_by_device[0])
    forward, backward = operations_of_loss(strategy, rows)
    gathers = [e for e in forward if e.primitive.name == "all_gather"]
    comes_back = any(e.primitive.name == "reduce_scatter" for e in backward)
    divided = "their gradient is not the sum over the devices' losses: divided, say"
    wrong = divided if comes_back else "no gradient comes back to the devices that have them"
    if step.wrong_leaves("loss"):
        wrong = "not all of them in the order of the global batch"
    if gathers and (step.wrong_leaves("loss") or step.wrong_leaves("gradient")):
        where = f"the model gathers examples (all_gather at {source_line(gathers[0])})"
        yield f"{where}, but {wrong}: take research_dp.gather_examples"


def _scaled_gradients(step: StepComparison) -> Iterator[str]:
    """Gradients are multiples of the oracle's."""
    ratios, wrong, near = _gradient_ratios(step), step.wrong_leaves("gradient"), _tolerance(step)
    off = {leaf: r for leaf, r in ratios.items() if abs(r - 1) > _NEAR and leaf in wrong}
    if not off:
        return
    ratio = next(iter(off.values()))
    which = "all gradients" if len(off) == len(ratios) else f"gradient {some_of([*off], SHOWN)}"
    if not all(math.isclose(r, ratio, rel_tol=near, abs_tol=near) for r in off.values()):
        shown = ", ".join(f"{leaf} {r:.4g}" for leaf, r in [*off.items()][:SHOWN])
        yield f"gradients are multiples of what they should be: {shown}"
    elif abs(ratio) < near:
        yield f"{which} is dropped: it is zero"
    else:
        yield f"{which}: {ratio:.4g} times what it should be: {_factor_text(step, ratio)}"


def _gradient_ratios(step: StepComparison) -> dict[str, float]:
    """Each gradient over the oracle's, without clipping; {} if one is no multiple of it."""
    limit, results = step.bench.spec.max_grad_norm, (step.expected, step.actual)
    clips = [1.0 if limit is None or r.norm <= limit else limit / r.norm for r in results]
    expected, actual = (by_path(gradients_of(r.state)) for r in results)
    near = _tolerance(step)
    ratios = {k: _ratio(actual[k], x, near) for k, x in expected.items() if np.any(x)}
    if any(math.isnan(ratio) for ratio in ratios.values()):
        return {}
    return {leaf: ratio * (clips[0] / clips[1]) for leaf, ratio in ratios.items()}


def _factor_text(step: StepComparison, ratio: float) -> str:
    """The number of devices or micro-batches that a factor equals."""
    mesh, micros = step.bench.strategy.mesh, step.bench.spec.accumulation_steps
    if micros > 1 and _is_near(step, ratio, micros):
        is_sure = not _is_near(step, ratio, batch_devices(mesh))
        if is_sure or step.rerun(accumulation_steps=1).is_right:
            return f"{micros} micro-batches are summed, not averaged"
    counts = {"all devices": mesh.size, **{f"axis {a}": n for a, n in mesh.shape.items()}}
    for over, count in counts.items():
        if count > 1 and _is_near(step, ratio, count):
            strategy, vma = step.bench.strategy, ""
            state, batch = strategy.abstract_state, strategy.abstract_batch
            traced = jax.make_jaxpr(strategy.train_step)(state, batch)
            if any(one.params.get("check_vma") for one, _ in walk(traced.jaxpr)):
                vma = (
                    ": under check_vma=True autodiff has summed them already, and a mean of equal "
                    "sums leaves the sum (double reduction)"
                )
            return f"summed instead of averaged over {over}{vma}"
        if count > 1 and _is_near(step, ratio, 1 / count):
            return f"averaged twice over {over}"
    if micros > 1 and _is_near(step, ratio, 1 / micros):
        return f"averaged twice over {micros} micro-batches"
    return "no number of devices or micro-batches"


def _tolerance(step: StepComparison) -> float:
    """Relative distance within which one array counts as a multiple of another."""
    precision = step.bench.precision
    return tolerances.COARSE_ULPS * precision if precision > tolerances.EPS else _NEAR


def _is_near(step: StepComparison, ratio: float, count: float) -> bool:
    return math.isclose(ratio, count, rel_tol=_tolerance(step))


def _ratio(actual: Any, expected: Any, tolerance: float = _NEAR) -> float:
    """The factor by which one array is a multiple of another; nan if it is no multiple."""
    a, b = as_float64(actual), as_float64(expected)
    ratio = projection(a, b)
    if ratio is None or not np.all(np.isfinite(a)):
        return math.nan
    rest, size = float(np.linalg.norm(a - ratio * b)), float(np.linalg.norm(a))
    return ratio if rest <= tolerance * max(size, _NEAR * float(np.linalg.norm(b))) else math.nan


def _scaled_norm(step: StepComparison) -> Iterator[str]:
    """The norm of right gradients is off, as by the root of a number of devices."""
    expected, actual = step.expected.norm, step.actual.norm
    is_wrong = step.wrong_leaves("gradient norm") and not step.wrong_leaves("gradient")
    if not is_wrong or not expected or not _gradient_ratios(step):
        return
    squared = (actual / expected) ** 2
    for axis, count in step.bench.strategy.mesh.shape.items():
        if count > 1 and (_is_near(step, squared, count) or _is_near(step, squared, 1 / count)):
            way = "counts replicas" if squared > 1 else "lacks the shards of other devices"
            yield f"the gradient norm {way} along axis {axis}: its square is {squared:.4g} times"
    yield f"the gradient norm is {math.sqrt(squared):.4g} times that of the same gradients"


def _scaled_update(step: StepComparison) -> Iterator[str]:
    """Gradients are right, and their update is not the optimizer's."""
    leaves = step.wrong_leaves("parameter")
    if not leaves or step.wrong_leaves("gradient"):
        return
    alone = step.bench.update(step.before, gradients_of(step.actual.state), step.actual.loss)
    trees = (step.before.params, step.actual.state.params, alone.params)
    before, actual, expected = (by_path(tree)[leaves[0]].astype(np.float64) for tree in trees)
    ratio = _ratio(actual - before, expected - before)
    decay = _ratio(actual - expected, before, tolerance=0.05)
    message = "not updated as the optimizer says"
    if abs(ratio) < _NEAR:
        message = "not updated"
    elif abs(ratio - 1) > _NEAR:
        message = f"updated by {ratio:.4g} times what the optimizer says"
    elif not math.isnan(decay):
        message = f"also scaled, by 1 {decay:+.1e} a step: a decay that is not the optimizer's"
    yield f"gradients are right, but parameter {some_of(leaves, SHOWN)} is {message}"


def _rounded(step: StepComparison) -> Iterator[str]:
    off = [d.gap.relative for d in step.differences if d.kind == "gradient"]
    usual = statistics.median(off)
    for dtype in ("bfloat16", "float16"):
        eps = float(jnp.finfo(dtype).eps)
        if eps / 10 < usual < eps and max(off) < 4 * eps:
            yield (
                f"gradients are usually {usual:.1e} off, as if they, or what they are computed "
                f"from, had been rounded to {dtype} on the way"
            )


# ---- From another run of the step, with something changed ----


def _one_step_behind(step: StepComparison, earlier: TrainState) -> Iterator[str]:
    """The gradients are the oracle's at the parameters of the step before."""
    if not step.wrong_leaves("gradient"):
        return
    old = run_step(step.bench.oracle, step.before._replace(params=earlier.params), step.batch)
    behind = by_path(gradients_of(old.state))
    bounds = {d.leaf: d.bound for d in step.differences if d.kind == "gradient"}

    def is_near(grads: Mapping[str, Any]) -> bool:
        return all(gap(grads[leaf], x).ulps <= bounds[leaf] for leaf, x in behind.items())

    actual, expected = (by_path(gradients_of(r.state)) for r in (step.actual, step.expected))
    # At the first step no parameters are older: these gradients are the oracle's.
    if is_near(actual) and not is_near(expected):
        yield "gradients are those of the parameters of the step before: a stale gather"


def _local_norm(step: StepComparison) -> Iterator[str]:
    """All but the norm is right if nothing is clipped."""
    if (limit := step.bench.spec.max_grad_norm) is None:
        return
    unclipped = step.rerun(max_grad_norm=None)
    if not unclipped.replicas and not {d.kind for d in unclipped.wrong} - {"gradient norm"}:
        yield (
            f"only with train.max_grad_norm = {limit}: gradients are clipped by another norm than "
            f"the global one, such as a device's local norm (its norm is {step.actual.norm:.6g}, "
            f"where the oracle has {step.expected.norm:.6g})"
        )


def _unused_examples(step: StepComparison, other: Batch) -> Iterator[str]:
    """The strategy's loss ignores changes of some devices' examples."""
    bench, unused = step.bench, []
    for device, rows in enumerate(bench.rows_by_device):
        batch = {name: np.array(x) for name, x in step.batch.items()}
        for name, x in other.items():
            batch[name][rows] = x[rows]
        actual = run_step(bench.strategy, step.own, batch)
        expected = run_step(bench.oracle, step.before, batch)
        is_same = actual.metrics["loss"] == step.actual.metrics["loss"]
        if is_same and expected.metrics["loss"] != step.expected.metrics["loss"]:
            unused.append(device)
    if unused:
        rows = bench.rows_by_device[unused[0]]
        yield (
            f"the examples of device {', '.join(map(str, unused))} do not count (places {rows[0]} "
            f"to {rows[-1]} of the batch first): another device's are repeated in their place"
        )


def _right_if_equal(step: StepComparison) -> Iterator[str]:
    """The step is right if all examples count alike, without random keys, or if all are equal."""
    model, batch, rows_by_device = step.bench.spec.model, step.batch, step.bench.rows_by_device
    masks = {name: np.asarray(batch[name]) for name in _MASKS if name in batch}
    ones = {name: np.ones_like(mask) for name, mask in masks.items()}
    if ones and step.rerun({**batch, **ones}).is_right:
        yield (
            f"only with uneven {' and '.join(ones)}: a mean of each device's own means is taken, "
            "and not the sum over all valid items divided by their number"
        )

    def loss(params: Any, state: Any, batch: Any, keys: Any, **options: Any) -> Any:
        return model.loss(params, state, batch, None, **options)

    without_keys = False
    with contextlib.suppress(UsageError):  # of a model that does not train without
        without_keys = step.rerun(model=dataclasses.replace(model, loss=loss)).is_right
    if without_keys:
        yield (
            "only with random keys (dropout): derive them from the seed, the step and the "
            "example's place in the global batch, not from a device's index"
        )
    strategy = step.bench.strategy
    if found := order_dependence(strategy, place_rows(strategy, batch)):
        yield f"numbers of an example depend on others of the batch: {found.message}"
    # All devices get the examples of that with most valid ones: without any, steps are right.
    chosen = max(rows_by_device, key=lambda rows: sum(float(x[rows].sum()) for x in masks.values()))
    equal = {name: np.array(x) for name, x in batch.items()}
    for name, x in equal.items():
        for rows in rows_by_device:
            x[rows] = batch[name][chosen]
    if step.rerun(equal).is_right:
        yield (
            "only where devices have different examples: each device computes something from its "
            "own examples that is no sum over them"
        )
