"""Runs all checks of a strategy against its oracle, and searches for the cause of a failure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.certification import compare_steps, costs, replicas
from research_dp.certification.certificate import Certificate, furthest
from research_dp.certification.compare_steps import StepComparison, compare_step, conserved
from research_dp.certification.diagnose import SHOWN, find_cause
from research_dp.certification.harness import (
    Batch,
    Bench,
    Restore,
    place_rows,
    run_step,
    saved,
    to_host,
    with_slots,
)
from research_dp.certification.noise import train_batches
from research_dp.certification.tolerances import CAP, Difference, Envelope, first_difference
from research_dp.console import Report, silent
from research_dp.distributed import encoded
from research_dp.distributed.mesh import build_mesh, sizes_text
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError, some_of
from research_dp.strategies import Strategy, TrainState, slots
from research_dp.strategies.batch_losses import order_dependence
from research_dp.strategies.state import resize_slots
from research_dp.types import DataSet

MAX_UNJUDGED = 0.01  # of the squared norm of the gradients
_SAME_MEAN = 1e-5  # of the largest element: means in float32, in another order
AFTER = 3  # steps after a checkpoint, and after a first difference
_UNSTABLE = (
    "the oracle changes so much when examples are reordered that a bug could hide in it: "
    "the model depends on their order, or its dtype is too coarse for it"
)
_INITIAL = (
    "parameters are not drawn as the oracle draws them: initialise unsharded arrays from one "
    "key under jit with output shardings, so that no device draws its own"
)
_LOST = "`sync` loses a part of the gradient, or its `pending` says something else than its state"
_BLOCKS = (
    "blocks, or their scales, depend on how an array is sharded: a block that several devices "
    "share has one scale, and lies where it does on one device"
)
_STATEFUL = (
    "each step is right from the oracle's state, and steps in a row are not: the strategy "
    "keeps something from step to step besides the state that it is given"
)


def certify(
    bench: Bench, data: DataSet, *, steps: int, dtypes: Sequence[str] = (), report: Report = silent
) -> Certificate:
    """Certifies a strategy on a data set, or finds what is wrong with it.

    `dtypes` are the floating-point ones that the configuration names. Raises UsageError if the
    strategy or the oracle cannot be built.
    """
    if bench.config.outer is not None:
        alone = replicas.one_replica(bench)
        certificate = certify(alone, data, steps=steps, dtypes=dtypes, report=report)
        if certificate.is_right:
            replicas.check_rounds(certificate, bench, data, report)
        return certificate
    strategy, oracle = bench.strategy, bench.oracle
    certificate = Certificate(
        f"{strategy.name} on {sizes_text(strategy.mesh.shape)} against {oracle.name}, "
        f"{steps} steps of {bench.spec.batch_size} examples of {data.name}"
    )
    report(f"Compiling {strategy.name} and {oracle.name}")
    both = strategy, oracle
    actual, initial = (x.logical(to_host(bench.first_state(x))) for x in both)
    if strategy.algorithm != oracle.algorithm:
        certificate.algorithm = strategy.algorithm or f"of {oracle.name}: {oracle.algorithm}"
    unnamed = ", ".join(costs.unnamed_dtypes(strategy, dtypes))
    different = first_difference(*(x._replace(slots=()) for x in (actual, initial)))
    certificate.check_bits("initial state", different)
    if different is None:
        _compare_steps(certificate, bench, data, initial, steps, unnamed, report)
    else:
        certificate.located = f"before the first step, {different} has other bits"
        certificate.cause = _INITIAL
    report("Comparing costs")
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
    unnamed: str,
    report: Report,
) -> None:
    """Compares steps up to the first difference; without one, also evaluation and checkpoints."""
    start = max(steps - AFTER, 0)
    batches = list(train_batches(bench, data, steps + AFTER))
    envelope, free_run = Envelope(bench.precision), compare_steps.FreeRun(bench, initial)
    previous, state, carried, sent = initial, initial, None, list[Difference]()
    for number in range(steps):
        report("Comparing steps", f"step {number + 1} of {steps}")
        if number == start:
            to_save = bench.strategy.logical(to_host(free_run.state))
        step = compare_step(bench, number, state, batches[number], envelope, slots=carried)
        if not number and certificate.algorithm:
            _check_kinds(certificate, step.differences, "{} of the first step")
        in_a_row = free_run.step(step)
        certificate.add_step(step, in_a_row)
        wrong_in_a_row = [d for d in in_a_row if d.is_wrong]
        is_finite = math.isfinite(step.expected.loss)
        sent += filter(None, [conserved(step)])
        judged = [d for d in sent if d.is_wrong]
        judged += [] if certificate.algorithm else [*step.wrong, *wrong_in_a_row]
        if step.replicas or judged or not is_finite:
            break
        previous, state, carried = state, step.expected.state, step.actual.state.slots
    _check_steps(certificate, step, sent)
    steps_are_right = certificate.is_right
    certificate.not_judged, share, bound = envelope.unjudged()
    message = f"a gradient's size is known to {bound:.1e}, of at most {CAP:g}"
    if certificate.not_judged:
        some = some_of(certificate.not_judged, SHOWN)
        message += f"; not that of {some}, which is {share:.1g} of the squared norm"
    certificate.check("noise", share <= MAX_UNJUDGED, message)
    if steps_are_right and not is_finite:
        message = f"the oracle's loss is {step.expected.loss} at step {step.number}"
        certificate.check("finite", False, message)
        certificate.cause = "the run itself; a loss that is not finite cannot be compared"
    elif share > MAX_UNJUDGED:
        found = order_dependence(bench.strategy, place_rows(bench.strategy, batches[0]))
        certificate.cause = found.message if found and found.is_random else _UNSTABLE
    elif steps_are_right:
        report("Comparing evaluation and checkpoints")
        # Of the slots, evaluation calls `gather`; a loss over each device's part changes it too.
        config = bench.strategy.config
        gathers_else = slots.attribute(config.gather, "algorithm") is not None
        gathers_else |= bool(config.compression and config.compression.gather)
        is_judged = bench.strategy.algorithm == config.algorithm and not gathers_else
        for d in compare_steps.compare_evaluation(bench, data, state, envelope):
            certificate.check(d.kind, not d.is_wrong if is_judged else None, _excess_text(d))
        if not certificate.is_right:
            found = order_dependence(bench.strategy, place_rows(bench.strategy, batches[0]))
            certificate.cause = found and found.message
        _check_encoded(certificate, bench.strategy, state)
        _check_round_trips(certificate, bench, to_save, batches[start:steps])
    elif any(d.is_wrong for d in sent) and (certificate.algorithm or step.is_right):
        certificate.cause = _LOST
    else:
        certificate.located = _first_difference_text(step, wrong_in_a_row)
        report("Searching for the cause")
        certificate.cause = _cause(step, previous, batches, unnamed)


def _check_steps(
    certificate: Certificate, last: StepComparison, sent: Sequence[Difference]
) -> None:
    message = "the same bits on all devices, at each step"
    if last.replicas:
        kind, leaf, axes = last.replicas[0]
        message = f"{kind} {leaf} differs along {' and '.join(axes)}, step {last.number}"
    certificate.check("copies", not last.replicas, message)
    for d in sorted(sent, key=lambda d: -d.excess)[:1]:
        message = f"{_excess_text(d)} at {d.leaf}, step {d.step}: together they are the gradient"
        certificate.check("sent and pending", not d.is_wrong, message)
    _check_kinds(certificate, certificate.worst().values())


def _check_kinds(
    certificate: Certificate, differences: Iterable[Difference], name: str = "{}"
) -> None:
    """Checks the furthest difference of each kind; another algorithm is not judged by them."""
    for kind, d in furthest(differences, "kind").items():
        where = f" at {d.leaf}" if d.leaf else ""
        message = f"{_excess_text(d)}, relative {d.gap.relative:.1e}{where}, step {d.step}"
        passed = None if certificate.algorithm else not d.is_wrong
        certificate.check(name.format(kind), passed, message)


def _excess_text(d: Difference) -> str:
    return f"{d.excess:.2g} times its bound: {d.gap.ulps:.3g} ULPs"


def _first_difference_text(step: StepComparison, wrong_in_a_row: Sequence[Difference]) -> str:
    if step.replicas and not step.wrong:
        kind, leaf, axes = step.replicas[0]
        return f"step {step.number}, {kind} {leaf}: replicas differ along {' and '.join(axes)}"
    d, *others = step.wrong or wrong_in_a_row
    text = f"step {d.step}, {d.name}: {d.gap.ulps:.3g} ULPs"
    if step.wrong:
        text += f", relative {d.gap.relative:.1e}, bound {d.bound:.3g} ULPs"
        text += f" ({len(others)} more differ)" if others else ""
    return text


def _cause(
    step: StepComparison, previous: TrainState, batches: Sequence[Batch], unnamed: str
) -> str | None:
    """Searches for the cause, first a few steps later, when no optimizer moment is zero."""
    if step.is_right:
        return _STATEFUL
    if unnamed:
        return f"the program sends {unnamed}, which nothing in the configuration names: a cast"
    bench, next_state, number = step.bench, step.expected.state, step.number + AFTER - 1
    cases = []
    if step.slots is None:  # else the strategy's slots would have to take these steps too
        state = run_step(bench.oracle, next_state, batches[number - 1]).state
        later = compare_step(bench, number, state, batches[number])
        cases = [] if later.is_right else [(later, next_state)]
    return find_cause([*cases, (step, previous)], batches[step.number + 1])


def _check_encoded(certificate: Certificate, strategy: Strategy, state: TrainState) -> None:
    """Checks that all devices decode of parameters what one device does, and by how much it errs.

    What a device computes with is compared with the blocks of unsharded arrays.
    """
    codecs = strategy.config.compression
    if codecs is None or codecs.gather is None:
        return
    exact, found = by_path(state.params), by_path(compare_steps.gathered(strategy, state))
    different, worst, place = None, 0.0, ""
    for path, p in by_path(strategy.shardings.params).items():
        if not codecs.takes(p):
            continue
        own, x = found[path], jnp.asarray(exact[path])
        decoded, ratio = encoded.alone(x, codecs.gather, stacked=p.stacked)
        if np.asarray(decoded.astype(own.dtype)).tobytes() != own.tobytes():
            different = different or path
        if ratio >= worst:
            worst, place = ratio, path
    message = "the same bits as one device decodes"
    if different:
        message = f"{different} has other bits than one device decodes"
    certificate.check("gathered", different is None, message)
    certificate.check("error of a block", None, f"{worst:.2g} of its largest element at {place}")
    if different:
        certificate.cause = _BLOCKS


def _check_round_trips(
    certificate: Certificate, bench: Bench, state: TrainState, batches: Sequence[Batch]
) -> None:
    """Checks the bits of a state that is saved and restored, by other strategies too."""
    strategy, oracle = bench.strategy, bench.oracle
    with saved(bench, strategy, state) as restore:
        restored = restore(strategy)
        certificate.check_bits("saved and restored", first_difference(restored, state))
        ends = []
        for end in (state, restored):
            for batch in batches:
                end = run_step(strategy, end, batch).state
            ends.append(end)
        certificate.check_bits(f"{len(batches)} steps after it", first_difference(*ends))
        for other in (oracle, *_on_half_of_the_devices(bench)):
            name = f"moved to {other.name} on {sizes_text(other.mesh.shape)}"
            _check_move(certificate, name, state, other, restore, strategy)
    there = to_host(with_slots(oracle, state))
    with saved(bench, oracle, there) as restore:
        _check_move(certificate, f"moved back from {oracle.name}", there, strategy, restore)


def _check_move(
    certificate: Certificate,
    name: str,
    state: TrainState,
    strategy: Strategy,
    restore: Restore,
    saved_by: Strategy | None = None,
) -> None:
    """Checks the bits of a state that another strategy restores, where its slots can be resized.

    With `saved_by`: and that what `sync` has yet to send is what it was.
    """
    abstract = strategy.abstract_state
    if by_path(state.slots).keys() != by_path(abstract.slots).keys():
        names = ", ".join(sorted({*state.slots, *abstract.slots}))
        message = f"not tried: the two strategies carry different state in slots ({names})"
        return certificate.check(name, None, message)
    everywhere = NamedSharding(strategy.mesh, PartitionSpec())  # as they are read
    read = state._replace(slots=jax.device_put(state.slots, everywhere))
    try:
        expected = to_host(resize_slots(strategy, read))
    except UsageError as error:
        # Its own words, unless what it returned is refused.
        holds, said = (False, "") if error.binding else (None, "not tried: ")
        return certificate.check(name, holds, f"{said}{error}")
    restored = restore(strategy)
    certificate.check_bits(name, first_difference(restored, expected))
    if saved_by is not None:
        before = compare_steps.pending(saved_by, state)
        after = compare_steps.pending(strategy, restored)
        if before and after:
            apart = {k: compare_steps.gap(after[k], x).relative for k, x in before.items()}
            worst = max(apart, key=lambda k: apart[k])
            message = f"as before it within {apart[worst]:.1e} at {worst[1]}"
            certificate.check(f"pending, {name}", apart[worst] < _SAME_MEAN, message)


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
