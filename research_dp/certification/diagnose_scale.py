"""Suspicions about factors of gradients, norms and updates: see diagnose.py."""

from __future__ import annotations

import math

import jax
import numpy as np

from research_dp.certification.diagnose_case import NEAR, SHOWN, Case, ratio_of
from research_dp.certification.harness import gradients_of
from research_dp.distributed.jaxpr import walk
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.sharding import by_path
from research_dp.errors import some_of


def scaled_gradients(case: Case) -> str | None:
    """Gradients are multiples of the oracle's."""
    ratios, wrong, near = _gradient_ratios(case), case.wrong("gradient"), case.tolerance
    off = {leaf: r for leaf, r in ratios.items() if abs(r - 1) > NEAR and leaf in wrong}
    if not off:
        return None
    ratio = next(iter(off.values()))
    if not all(math.isclose(r, ratio, rel_tol=near, abs_tol=near) for r in off.values()):
        shown = ", ".join(f"{leaf} {r:.4g}" for leaf, r in list(off.items())[:SHOWN])
        return f"gradients are multiples of what they should be: {shown}"
    is_all = len(off) == len(ratios)
    which = "all gradients" if is_all else f"gradient {some_of(list(off), SHOWN)}"
    if abs(ratio) < near:
        return f"{which} is dropped: it is zero"
    return f"{which}: {ratio:.4g} times what it should be: {_factor_text(case, ratio)}"


def _gradient_ratios(case: Case) -> dict[str, float]:
    """Each gradient over the oracle's, without clipping; {} if one is no multiple of it."""
    results, limit = (case.step.expected, case.step.actual), case.bench.spec.max_grad_norm
    expected, actual = (by_path(gradients_of(result.state)) for result in results)
    clips = [1.0 if limit is None or r.norm <= limit else limit / r.norm for r in results]
    ratios = {}
    for leaf, reference in expected.items():
        if np.any(reference):
            ratio = ratio_of(actual[leaf], reference, case.tolerance)
            if ratio is None:
                return {}
            ratios[leaf] = ratio * (clips[0] / clips[1])
    return ratios


def _factor_text(case: Case, ratio: float) -> str:
    """The number of devices or micro-batches that a factor equals."""
    mesh, micros = case.bench.strategy.mesh, case.bench.spec.accumulation_steps
    if micros > 1 and _is_near(case, ratio, micros):
        one = case.bench.with_spec(accumulation_steps=1)
        if not _is_near(case, ratio, batch_devices(mesh)) or case.rerun(one).is_right:
            return f"{micros} micro-batches are summed, not averaged"
    counts = {"all devices": mesh.size, **{f"axis {a}": n for a, n in mesh.shape.items()}}
    for over, count in counts.items():
        if count > 1 and _is_near(case, ratio, count):
            vma = (
                ": under check_vma=True autodiff has summed them already, and a mean of equal sums "
                "leaves the sum (double reduction)"
            )
            return f"summed instead of averaged over {over}{vma if _checks_vma(case) else ''}"
        if count > 1 and _is_near(case, ratio, 1 / count):
            return f"averaged twice over {over}"
    if micros > 1 and _is_near(case, ratio, 1 / micros):
        return f"averaged twice over {micros} micro-batches"
    return "no number of devices or micro-batches"


def scaled_norm(case: Case) -> str | None:
    """The norm of right gradients is off, as by the root of a number of devices."""
    expected, actual = case.step.expected.norm, case.step.actual.norm
    is_wrong = case.wrong("gradient norm") and not case.wrong("gradient")
    if not is_wrong or not expected or not _gradient_ratios(case):
        return None
    squared = (actual / expected) ** 2
    for axis, count in case.bench.strategy.mesh.shape.items():
        if count > 1 and (_is_near(case, squared, count) or _is_near(case, squared, 1 / count)):
            way = "counts replicas" if squared > 1 else "lacks the shards of other devices"
            return f"the gradient norm {way} along axis {axis}: its square is {squared:.4g} times"
    return f"the gradient norm is {math.sqrt(squared):.4g} times that of the same gradients"


def scaled_update(case: Case) -> str | None:
    """Gradients are right, and their update is not the optimizer's."""
    leaves, step = case.wrong("parameter"), case.step
    if not leaves or case.wrong("gradient"):
        return None
    alone = case.bench.update(step.before, gradients_of(step.actual.state))
    trees = (step.before.params, step.actual.state.params, alone.params)
    before, actual, expected = (by_path(tree)[leaves[0]].astype(np.float64) for tree in trees)
    ratio = ratio_of(actual - before, expected - before)
    decay = ratio_of(actual - expected, before, tolerance=0.05)
    message = "not updated as the optimizer says"
    if ratio is not None and abs(ratio) < NEAR:
        message = "not updated"
    elif ratio is not None and abs(ratio - 1) > NEAR:
        message = f"updated by {ratio:.4g} times what the optimizer says"
    elif decay is not None:
        message = f"also scaled, by 1 {decay:+.1e} a step: a decay that is not the optimizer's"
    return f"gradients are right, but parameter {some_of(leaves, SHOWN)} is {message}"


def _is_near(case: Case, ratio: float, count: float) -> bool:
    return math.isclose(ratio, count, rel_tol=case.tolerance)


def _checks_vma(case: Case) -> bool:
    """Whether the training step has a `shard_map` with check_vma=True."""
    strategy = case.bench.strategy
    traced = jax.make_jaxpr(strategy.train_step)(strategy.abstract_state, strategy.abstract_batch)
    return any(one.params.get("check_vma") for one, _ in walk(traced.jaxpr))
