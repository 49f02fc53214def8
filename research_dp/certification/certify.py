"""Runs all checks of a strategy against its oracle, and searches for the cause of a failure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from research_dp.certification import compare_steps, costs
from research_dp.certification.certificate import Certificate, StepRecord
from research_dp.certification.checkpoint_roundtrip import round_trips
from research_dp.certification.compare_steps import StepComparison, compare_step
from research_dp.certification.diagnose import find_cause
from research_dp.certification.diagnose_case import SHOWN, Case
from research_dp.certification.harness import Batch, Bench, run_step, to_host
from research_dp.certification.tolerances import CAP, Difference, Envelope, first_difference
from research_dp.certification.trajectory import FreeRun
from research_dp.distributed.mesh import sizes_text
from research_dp.errors import some_of
from research_dp.strategies import TrainState
from research_dp.strategies.random_draws import split_draws
from research_dp.types import DataSet, EvalOrder, TrainOrder

MAX_UNJUDGED = 0.01  # of the squared norm of the gradients
AFTER = 3  # steps after a checkpoint, and after a first difference
_UNSTABLE = (
    "the oracle changes so much when examples are reordered that a bug could hide in it: "
    "the model depends on their order, or its dtype is too coarse for it"
)
_INITIAL = (
    "parameters are not drawn as the oracle draws them: initialise unsharded arrays from one "
    "key under jit with output shardings, so that no device draws its own"
)
_STATEFUL = (
    "each step is right from the oracle's state, and steps in a row are not: the strategy "
    "keeps something from step to step besides the state that it is given"
)


def certify(bench: Bench, data: DataSet, *, steps: int, dtypes: Sequence[str] = ()) -> Certificate:
    """Certifies a strategy, or finds what is wrong with it.

    Args:
        bench: The strategy and its oracle.
        data: What they are trained on.
        steps: How many steps are compared.
        dtypes: Floating-point dtypes that the configuration names.

    Raises:
        UsageError: One of them cannot be built.
    """
    strategy, oracle = bench.strategy, bench.oracle
    certificate = Certificate(
        f"{strategy.name} on {sizes_text(strategy.mesh.shape)} against {oracle.name}, "
        f"{steps} steps of {bench.spec.batch_size} examples of {data.name}"
    )
    actual, initial = compare_steps.initial_states(bench)
    different = first_difference(actual, initial)
    certificate.check_bits("initial state", different)
    if different is None:
        _compare_steps(certificate, bench, data, initial, steps, tuple(dtypes))
    else:
        certificate.located = f"before the first step, {different} has other bits"
        certificate.cause = _INITIAL
    unnamed = costs.unnamed_dtypes(strategy, dtypes)
    message = f"{', '.join(unnamed)} is named nowhere" if unnamed else "named, or parameters' own"
    certificate.check("dtypes sent", not unnamed, message)
    for cost in costs.costs(bench.config.build(bench.spec), bench.spec):
        certificate.check(cost.name, cost.passed, cost.message)
    return certificate


def _compare_steps(
    certificate: Certificate,
    bench: Bench,
    data: DataSet,
    initial: TrainState,
    steps: int,
    dtypes: tuple[str, ...],
) -> None:
    """Compares steps up to the first difference; without one, also evaluation and checkpoints."""
    batches, start = _batches(bench, data, steps + AFTER), max(steps - AFTER, 0)
    envelope = Envelope(bench.precision)
    state, previous, free_run = initial, initial, FreeRun(bench, initial)
    for number in range(steps):
        batch = batches[number]
        if number == start:
            to_save = to_host(free_run.state)
        step = compare_step(bench, number, state, batch, envelope)
        in_a_row = free_run.step(number, batch, state, step.expected)
        certificate.steps.append(StepRecord(step, in_a_row))
        wrong_in_a_row = [d for d in in_a_row if d.is_wrong]
        if not step.is_right or wrong_in_a_row or not math.isfinite(step.expected.loss):
            break
        previous, state = state, step.expected.state
    _check_steps(certificate, step)
    steps_are_right = certificate.certified
    enough_is_judged = _check_noise(certificate, envelope)
    if steps_are_right and not math.isfinite(step.expected.loss):
        message = f"the oracle's loss is {step.expected.loss} at step {step.number}"
        certificate.check("finite", False, message)
        certificate.cause = "the run itself; a loss that is not finite cannot be compared"
    elif not enough_is_judged:
        draws = split_draws(bench.spec, bench.strategy)
        certificate.cause = draws.message if draws and draws.is_known else _UNSTABLE
    elif steps_are_right:
        _check_evaluation(certificate, bench, data, state, envelope)
        for way, different in round_trips(bench, to_save, batches[start:steps]):
            certificate.check_bits(way, different)
    else:
        certificate.located = _first_difference_text(step, wrong_in_a_row)
        certificate.cause = _cause(bench, step, previous, batches, dtypes)


def _batches(bench: Bench, data: DataSet, count: int) -> list[Batch]:
    seed, size = bench.spec.seed, bench.spec.batch_size
    rows = np.arange(size)
    data.prepare()
    order = TrainOrder(seed=seed, batch_size=size, rows=rows, first_step=0, num_steps=count)
    return list(itertools.islice(data.train(order), count))


def _check_steps(certificate: Certificate, last: StepComparison) -> None:
    message = "the same bits on all devices, at each step"
    if last.replicas:
        kind, leaf, axes = last.replicas[0]
        message = f"{kind} {leaf} differs along {' and '.join(axes)}, step {last.number}"
    certificate.check("copies", not last.replicas, message)
    worst: dict[str, Difference] = {}
    for d in certificate.worst().values():
        if d.kind not in worst or worst[d.kind].excess < d.excess:
            worst[d.kind] = d
    for kind, d in worst.items():
        where = f" at {d.leaf}" if d.leaf else ""
        message = f"{_excess_text(d)}, relative {d.gap.relative:.1e}{where}, step {d.step}"
        certificate.check(kind, not d.is_wrong, message)


def _excess_text(d: Difference) -> str:
    return f"{d.excess:.2g} times its bound: {d.gap.ulps:.3g} ULPs"


def _check_noise(certificate: Certificate, envelope: Envelope) -> bool:
    """Lists the gradients that are not judged; returns whether they are few."""
    unjudged = envelope.unjudged()
    certificate.not_judged = unjudged.leaves
    message = f"a gradient's size is known to {unjudged.bound:.1e}, of at most {CAP:g}"
    if unjudged.leaves:
        leaves = some_of(unjudged.leaves, SHOWN)
        message += f"; not that of {leaves}, which is {unjudged.share:.1g} of the squared norm"
    certificate.check("noise", unjudged.share <= MAX_UNJUDGED, message)
    return unjudged.share <= MAX_UNJUDGED


def _check_evaluation(
    certificate: Certificate, bench: Bench, data: DataSet, state: TrainState, envelope: Envelope
) -> None:
    size = bench.strategy.eval_batch_size
    order = EvalOrder(batch_size=size, rows=np.arange(size))
    examples = dict(next(iter(data.evaluate(order))))
    # Some examples are always padding.
    examples["mask"] = examples["mask"] * (np.arange(size) < 1 + size // 2)
    for d in compare_steps.compare_evaluation(bench, state, examples, envelope):
        certificate.check(d.kind, not d.is_wrong, _excess_text(d))


def _first_difference_text(step: StepComparison, wrong_in_a_row: Sequence[Difference]) -> str:
    if step.wrong:
        d = step.wrong[0]
        size = f"{d.gap.ulps:.3g} ULPs, relative {d.gap.relative:.1e}, bound {d.bound:.3g} ULPs"
        more = f" ({len(step.wrong) - 1} more differ)" if len(step.wrong) > 1 else ""
        return f"step {d.step}, {d.name}: {size}{more}"
    if step.replicas:
        kind, leaf, axes = step.replicas[0]
        return f"step {step.number}, {kind} {leaf}: copies differ along {' and '.join(axes)}"
    d = wrong_in_a_row[0]
    return f"step {d.step}, {d.name}: {d.gap.ulps:.3g} ULPs"


def _cause(
    bench: Bench,
    step: StepComparison,
    previous: TrainState,
    batches: list[Batch],
    dtypes: tuple[str, ...],
) -> str | None:
    """Searches for the cause, first a few steps later, when no optimizer moment is zero."""
    if step.is_right:
        return _STATEFUL
    first = Case(bench, step, previous, batches[step.number + 1], dtypes)
    next_state, number = step.expected.state, step.number + AFTER - 1
    state = run_step(bench.oracle, next_state, batches[number - 1]).state
    later = compare_step(bench, number, state, batches[number], Envelope(bench.precision))
    if later.is_right:
        return find_cause([first])
    return find_cause([dataclasses.replace(first, step=later, earlier=next_state), first])
