"""Runs all checks of a strategy against its oracle, and searches for the cause of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from research_dp.certification import compare_steps, costs
from research_dp.certification.certificate import Certificate, StepRecord, furthest
from research_dp.certification.compare_steps import StepComparison, compare_step
from research_dp.certification.diagnose import find_cause
from research_dp.certification.diagnose_case import SHOWN, Case
from research_dp.certification.harness import Batch, Bench, run_step, to_devices, to_host
from research_dp.certification.tolerances import CAP, Difference, Envelope, first_difference
from research_dp.distributed.mesh import build_mesh, sizes_text
from research_dp.errors import some_of
from research_dp.strategies import Strategy, TrainState
from research_dp.strategies.random_draws import split_draws
from research_dp.strategies.strategy import init_key
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.manifest import Progress
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
    # Slots with state have none of the oracle's.
    actual, initial = (
        to_host(one.init(init_key(bench.spec.seed)))._replace(slots=())
        for one in (strategy, oracle)
    )
    different = first_difference(actual, initial)
    certificate.check_bits("initial state", different)
    if different is None:
        _compare_steps(certificate, bench, data, initial, steps, tuple(dtypes))
    else:
        certificate.located = f"before the first step, {different} has other bits"
        certificate.cause = _INITIAL
    unnamed = ", ".join(costs.unnamed_dtypes(strategy, dtypes))
    message = f"{unnamed} is named nowhere" if unnamed else "named, or parameters' own"
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
    seed, size, count = bench.spec.seed, bench.spec.batch_size, steps + AFTER
    rows = np.arange(size)
    data.prepare()
    order = TrainOrder(seed=seed, batch_size=size, rows=rows, first_step=0, num_steps=count)
    batches, start = list(itertools.islice(data.train(order), count)), max(steps - AFTER, 0)
    envelope, free_run = Envelope(bench.precision), compare_steps.FreeRun(bench, initial)
    previous = state = initial
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
        for way, different in _round_trips(bench, to_save, batches[start:steps]):
            certificate.check_bits(way, different)
        if bench.has_slot_state:
            message = "not tried: the state of slots is that of one strategy and its devices"
            certificate.check("moved", None, message)
    else:
        certificate.located = _first_difference_text(step, wrong_in_a_row)
        certificate.cause = _cause(bench, step, previous, batches, dtypes)


def _check_steps(certificate: Certificate, last: StepComparison) -> None:
    message = "the same bits on all devices, at each step"
    if last.replicas:
        kind, leaf, axes = last.replicas[0]
        message = f"{kind} {leaf} differs along {' and '.join(axes)}, step {last.number}"
    certificate.check("copies", not last.replicas, message)
    for kind, d in furthest(certificate.worst().values(), "kind").items():
        where = f" at {d.leaf}" if d.leaf else ""
        message = f"{_excess_text(d)}, relative {d.gap.relative:.1e}{where}, step {d.step}"
        certificate.check(kind, not d.is_wrong, message)


def _excess_text(d: Difference) -> str:
    return f"{d.excess:.2g} times its bound: {d.gap.ulps:.3g} ULPs"


def _check_noise(certificate: Certificate, envelope: Envelope) -> bool:
    """Lists the gradients that are not judged; returns whether they are few."""
    leaves, share, bound = envelope.unjudged()
    certificate.not_judged = leaves
    message = f"a gradient's size is known to {bound:.1e}, of at most {CAP:g}"
    if leaves:
        some = some_of(leaves, SHOWN)
        message += f"; not that of {some}, which is {share:.1g} of the squared norm"
    certificate.check("noise", share <= MAX_UNJUDGED, message)
    return share <= MAX_UNJUDGED


def _check_evaluation(
    certificate: Certificate, bench: Bench, data: DataSet, state: TrainState, envelope: Envelope
) -> None:
    size = bench.strategy.eval_batch_size
    examples = dict(next(iter(data.evaluate(EvalOrder(batch_size=size, rows=np.arange(size))))))
    # Some examples are always padding.
    examples["mask"] = examples["mask"] * (np.arange(size) < 1 + size // 2)
    for d in compare_steps.compare_evaluation(bench, state, examples, envelope):
        certificate.check(d.kind, not d.is_wrong, _excess_text(d))


def _round_trips(
    bench: Bench, state: TrainState, batches: Sequence[Batch]
) -> Iterator[tuple[str, str | None]]:
    """Saves a state and yields ways to restore it, each with the first array that changes bits."""
    strategy, oracle = bench.strategy, bench.oracle
    with _saved(bench, strategy, state) as restore:
        restored = restore(strategy)
        yield "saved and restored", first_difference(restored, state)
        ends = (_train(strategy, start, batches) for start in (state, restored))
        yield f"{len(batches)} steps after it", first_difference(*ends)
        if bench.has_slot_state:
            return
        for other in (oracle, *_on_half_of_the_devices(bench)):
            sizes = sizes_text(other.mesh.shape)
            yield f"moved to {other.name} on {sizes}", first_difference(restore(other), state)
    with _saved(bench, oracle, state) as restore:
        yield f"moved back from {oracle.name}", first_difference(restore(strategy), state)


@contextlib.contextmanager
def _saved(
    bench: Bench, strategy: Strategy, state: TrainState
) -> Iterator[Callable[[Strategy], TrainState]]:
    """Saves a state; the folder is opened anew for each use, as by a run that continues."""
    spec = bench.spec
    progress = Progress(batch_size=spec.batch_size, seed=spec.seed, order="", window={})
    with tempfile.TemporaryDirectory() as folder:

        def restore(other: Strategy) -> TrainState:
            with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
                restored = checkpoints.restore(other.abstract_state)
                assert restored is not None  # it was saved just now
                return to_host(restored[0])

        with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
            checkpoints.save(to_devices(strategy, state), int(state.step), progress, origin={})
        yield restore


def _train(strategy: Strategy, state: TrainState, batches: Sequence[Batch]) -> TrainState:
    for batch in batches:
        state = run_step(strategy, state, batch).state
    return state


def _on_half_of_the_devices(bench: Bench) -> Iterator[Strategy]:
    """The strategy on half of an axis, if one has an even size; it is traced, not compiled."""
    mesh, sizes = bench.config.mesh, dict(bench.config.mesh.shape)
    axis = max(sizes, key=lambda name: (sizes[name] % 2 == 0, sizes[name]))
    if sizes[axis] % 2:
        return
    sizes[axis] //= 2
    devices = list(mesh.devices.flat)[: math.prod(sizes.values())]
    smaller = dataclasses.replace(bench.config, mesh=build_mesh(sizes, devices))
    yield dataclasses.replace(bench, config=smaller).strategy


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
    batches: Sequence[Batch],
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
