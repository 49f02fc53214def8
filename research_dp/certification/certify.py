"""Runs all checks of a strategy against an oracle, and looks for the cause of what fails."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from research_dp.certification import checkpoint_roundtrip, compare_steps, costs, diagnose
from research_dp.certification.certificate import Certificate, Check, StepRecord
from research_dp.certification.compare_steps import Evidence
from research_dp.certification.failed_step import Case, leaves_of
from research_dp.certification.harness import Batch, Bench, on_host, step
from research_dp.certification.tolerances import CAP, Difference, Envelope, Hidden, same_bits
from research_dp.distributed.mesh import sizes_text
from research_dp.strategies import TrainState
from research_dp.strategies.random_draws import split_draws
from research_dp.types import DataSet, EvalOrder, TrainOrder

NOISY_PART = 0.01  # of the squared norm of gradients, what noise may hide
UNSTABLE = (
    "the oracle changes so much when examples are reordered that a bug could hide in it: "
    "the model depends on their order, or its dtype is too coarse for it"
)
AFTER = 3  # steps after a checkpoint, and after a first difference


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
    done = Certificate(
        f"{strategy.name} on {sizes_text(strategy.mesh.shape)} against {oracle.name}, "
        f"{steps} steps of {bench.spec.batch_size} examples of {data.name}"
    )
    born = _initial(bench)
    done.checks.append(born)
    if born.right:
        batches = _batches(bench, data, steps + AFTER)
        _follow(done, bench, data, batches, steps, tuple(dtypes))
    else:
        done.first = f"before the first step, {born.told}"
        done.cause = (
            "parameters are not drawn as the oracle draws them: initialise whole arrays from one "
            "key under jit with output shardings, so that no device draws its own"
        )
    unnamed = costs.unnamed_dtypes(strategy, dtypes)
    told = ", ".join(unnamed) + " is named nowhere" if unnamed else "named, or parameters' own"
    done.checks.append(Check("dtypes sent", not unnamed, told))
    for cost in costs.costs(bench.config.build(bench.spec), bench.spec):
        most = "" if cost.most is None else f" of at most {cost.most:,.0f}"
        right = None if cost.most is None else cost.is_right
        done.checks.append(Check(cost.what, right, f"{cost.measured:,.0f}{most} ({cost.told})"))
    if not done.certified and done.first is None:
        failed = next(check for check in done.checks if check.right is False)
        done.first = f"{failed.what}: {failed.told}"
    return done


def _batches(bench: Bench, data: DataSet, count: int) -> list[Batch]:
    spec = bench.spec
    data.prepare()
    order = TrainOrder(
        seed=spec.seed,
        batch_size=spec.batch_size,
        rows=np.arange(spec.batch_size),
        first_step=0,
        num_steps=count,
    )
    return list(itertools.islice(data.train(order), count))


def _initial(bench: Bench) -> Check:
    lost = same_bits(*compare_steps.initial_state(bench))
    return Check(
        "initial state", lost is None, "the same bits" if lost is None else f"{lost} has other bits"
    )


def _follow(
    done: Certificate,
    bench: Bench,
    data: DataSet,
    batches: list[Batch],
    steps: int,
    dtypes: tuple[str, ...],
) -> None:
    """Takes all steps, or those to the first difference; then what only a right one is asked."""
    envelope = Envelope(bench.precision)
    truth, wandering = compare_steps.begin(bench)
    earlier, mid, seen = truth, None, None
    for number in range(steps):
        if number == max(steps - AFTER, 0):
            mid = on_host(wandering.state)
        seen = compare_steps.look(bench, number, truth, batches[number], envelope)
        row = wandering.step(number, batches[number], truth, seen.expected)
        done.steps.append(_record(seen, row))
        if not seen.is_right or any(d.is_wrong for d in row):
            break
        if not math.isfinite(seen.expected.loss):
            break
        earlier, truth = truth, seen.expected.state
    assert seen is not None  # there is one step at least
    _step_checks(done, seen)
    hidden = envelope.hidden()
    done.unjudged = hidden.leaves
    steps_are_right = done.certified
    done.checks.append(_noise(hidden))
    if not math.isfinite(seen.expected.loss) and steps_are_right:
        told = f"the oracle's loss is {seen.expected.loss} at step {seen.number}"
        done.checks.append(Check("finite", False, told))
        done.cause = "the run itself; nothing can be compared with what is no number"
    elif hidden.part > NOISY_PART:
        draws = split_draws(bench.spec, bench.strategy)
        done.cause = draws.message if draws and draws.is_known else UNSTABLE
    elif steps_are_right:
        assert mid is not None
        left = batches[max(steps - AFTER, 0) : steps]
        _ends(done, bench, data, truth, envelope, mid, left)
    else:
        done.first = _first(done, seen)
        done.cause = _cause(bench, seen, earlier, batches, dtypes)


def _noise(hidden: Hidden) -> Check:
    told = f"a gradient's size is known to {hidden.bound:.1e}, of at most {CAP:g}"
    if hidden.leaves:
        told += (
            f"; not that of {leaves_of(list(hidden.leaves))}, which is {hidden.part:.1g} of the "
            "squared norm"
        )
    return Check("noise", hidden.part <= NOISY_PART, told)


def _record(seen: Evidence, row: list[Difference]) -> StepRecord:
    found, expected = seen.found, seen.expected
    return StepRecord(
        seen.number,
        found.loss,
        expected.loss,
        found.norm,
        expected.norm,
        seen.differences + row,
    )


def _step_checks(done: Certificate, seen: Evidence) -> None:
    told = "the same bits on all devices, at each step"
    if seen.apart:
        one = seen.apart[0]
        told = f"{one.what} {one.leaf} differs along {' and '.join(one.axes)}, step {seen.number}"
    done.checks.append(Check("copies", not seen.apart, told))
    worst: dict[str, Difference] = {}
    for d in done.worst().values():
        if d.what not in worst or worst[d.what].excess < d.excess:
            worst[d.what] = d
    for what, d in worst.items():
        where = f" at {d.leaf}" if d.leaf else ""
        done.checks.append(
            Check(
                what,
                not d.is_wrong,
                f"{d.excess:.2g} times its bound: {d.gap.ulps:.3g} ULPs, relative "
                f"{d.gap.relative:.1e}{where}, step {d.step}",
            )
        )


def _ends(
    done: Certificate,
    bench: Bench,
    data: DataSet,
    state: TrainState,
    envelope: Envelope,
    mid: TrainState,
    left: list[Batch],
) -> None:
    """Evaluation, and what becomes of a state that is saved."""
    size = bench.strategy.eval_batch_size
    source = data.evaluate(EvalOrder(batch_size=size, rows=np.arange(size)))
    examples = dict(next(iter(source)))
    examples["mask"] = examples["mask"] * (np.arange(size) < 1 + size // 2)  # padding, always
    for d in compare_steps.evaluated(bench, state, examples, envelope):
        told = f"{d.excess:.2g} times its bound: {d.gap.ulps:.3g} ULPs"
        done.checks.append(Check(d.what, not d.is_wrong, told))
    for survived in checkpoint_roundtrip.survivals(bench, mid, left):
        told = f"{survived.lost} has other bits" if survived.lost else "the same bits"
        done.checks.append(Check(survived.what, not survived.lost, told))


def _first(done: Certificate, seen: Evidence) -> str | None:
    if seen.wrong:
        d = seen.wrong[0]
        size = f"{d.gap.ulps:.3g} ULPs, relative {d.gap.relative:.1e}, bound {d.bound:.3g} ULPs"
        more = len(seen.wrong) - 1
        return f"step {d.step}, {d.name}: {size}" + (f" ({more} more differ)" if more else "")
    if seen.apart:
        one = seen.apart[0]
        axes = " and ".join(one.axes)
        return f"step {seen.number}, {one.what} {one.leaf}: copies differ along {axes}"
    wrong = [d for d in done.steps[-1].differences if d.is_wrong]
    if not wrong:
        return None
    return f"step {wrong[0].step}, {wrong[0].name}: {wrong[0].gap.ulps:.3g} ULPs"


def _cause(
    bench: Bench,
    seen: Evidence,
    earlier: TrainState,
    batches: list[Batch],
    dtypes: tuple[str, ...],
) -> str | None:
    """Looks for it a few steps later, if it is still there: no moment is zero any more by then."""
    if seen.is_right:
        return (
            "each step is right from the oracle's state, and steps in a row are not: the strategy "
            "keeps something from step to step besides the state that it is given"
        )
    first = Case(bench, seen, earlier, batches[seen.number + 1], dtypes)
    next_state = seen.expected.state
    number = seen.number + AFTER - 1
    state = step(bench.oracle, next_state, batches[number - 1]).state
    later = compare_steps.look(bench, number, state, batches[number], Envelope(bench.precision))
    if later.is_right:
        return diagnose.cause([first])
    return diagnose.cause([dataclasses.replace(first, evidence=later, earlier=next_state), first])
