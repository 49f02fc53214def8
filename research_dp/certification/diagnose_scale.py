"""Causes that ratios tell: gradients, norms and updates that are a multiple of what they should be.

Each function is one suspicion. It returns what it found, in words, or None.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from research_dp.certification.failed_step import ALIKE, SHOWN, Case, leaves_of, ratio_of
from research_dp.certification.harness import gradients_of
from research_dp.deterministic.param_only_ops import operations
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.sharding import by_path


def multiple(case: Case) -> str | None:
    """Gradients that are a multiple of what they should be."""
    seen = case.evidence
    expected, found = (by_path(gradients_of(done.state)) for done in (seen.expected, seen.found))
    undo = _clip(case, seen.expected.norm) / _clip(case, seen.found.norm)
    near = case.alike
    ratios = {leaf: ratio_of(found[leaf], e, near) for leaf, e in expected.items() if np.any(e)}
    ratios = {leaf: None if r is None else r * undo for leaf, r in ratios.items()}
    if not ratios or None in ratios.values():
        return None
    wrong = case.wrong("gradient")
    off = {
        leaf: r
        for leaf, r in ratios.items()
        if r is not None and abs(r - 1) > ALIKE and leaf in wrong
    }
    if not off:
        return _norm_multiple(case)
    values = list(off.values())
    if not all(math.isclose(r, values[0], rel_tol=near, abs_tol=near) for r in values):
        told = ", ".join(f"{leaf} {r:.4g}" for leaf, r in list(off.items())[:SHOWN])
        return f"gradients are multiples of what they should be: {told}"
    which = "all gradients" if len(off) == len(ratios) else f"gradient {leaves_of(list(off))}"
    if abs(values[0]) < near:
        return f"{which} is dropped: it is zero"
    return f"{which}: {values[0]:.4g} times what it should be: {_why(case, values[0])}"


def _why(case: Case, ratio: float) -> str:
    """What a multiple may be the number of."""
    mesh, micros = case.bench.strategy.mesh, case.bench.spec.accumulation_steps
    if micros > 1 and _is(case, ratio, micros):
        one = case.bench.with_spec(accumulation_steps=1)
        if not _is(case, ratio, batch_devices(mesh)) or case.again(one).is_right:
            return f"{micros} micro-batches are summed, not averaged"
    counts = {"all devices": mesh.size, **{f"axis {a}": n for a, n in mesh.shape.items()}}
    for over, count in counts.items():
        if count > 1 and _is(case, ratio, count):
            if _checks_replication(case):
                return (
                    f"summed instead of averaged over {over}: under check_vma=True autodiff has "
                    "summed them already, and a mean of equal sums leaves the sum (double "
                    "reduction)"
                )
            return f"summed instead of averaged over {over}"
        if count > 1 and _is(case, ratio, 1 / count):
            return f"averaged twice over {over}"
    if micros > 1 and _is(case, ratio, 1 / micros):
        return f"averaged twice over {micros} micro-batches"
    return "no number of devices or micro-batches"


def _norm_multiple(case: Case) -> str | None:
    """A norm that is off by a root of a number of devices, gradients being right."""
    seen = case.evidence
    if not case.wrong("gradient norm") or case.wrong("gradient") or not seen.expected.norm:
        return None
    squared = (seen.found.norm / seen.expected.norm) ** 2
    for axis, count in case.bench.strategy.mesh.shape.items():
        if count > 1 and (_is(case, squared, count) or _is(case, squared, 1 / count)):
            way = "counts copies" if squared > 1 else "lacks the shards of other devices"
            return f"the gradient norm {way} along axis {axis}: its square is {squared:.4g} times"
    return f"the gradient norm is {math.sqrt(squared):.4g} times that of the same gradients"


def update(case: Case) -> str | None:
    """Updates that are not the optimizer's, gradients being right."""
    leaves = case.wrong("parameter")
    if not leaves or case.wrong("gradient"):
        return None
    seen = case.evidence
    alone = case.bench.update(seen.before, gradients_of(seen.found.state))
    trees = (seen.before.params, seen.found.state.params, alone.params)
    before, found, right = (by_path(tree)[leaves[0]].astype(np.float64) for tree in trees)
    told = f"gradients are right, but parameter {leaves_of(leaves)} is "
    ratio = ratio_of(found - before, right - before)
    if ratio is not None and abs(ratio) < ALIKE:
        return told + "not updated"
    if ratio is not None and abs(ratio - 1) > ALIKE:
        return told + f"updated by {ratio:.4g} times what the optimizer says"
    decay = ratio_of(found - right, before, near=0.05)
    if decay is not None:
        return told + f"also scaled, by 1 {decay:+.1e} a step: a decay that is not the optimizer's"
    return told + "not updated as the optimizer says"


def _clip(case: Case, norm: float) -> float:
    limit = case.bench.spec.max_grad_norm
    return 1.0 if limit is None or norm <= limit else limit / norm


def _is(case: Case, ratio: float, count: float) -> bool:
    return math.isclose(ratio, count, rel_tol=case.alike)


def _checks_replication(case: Case) -> bool:
    """Whether the training step has a `shard_map` that tracks replication."""
    strategy = case.bench.strategy
    traced = jax.make_jaxpr(strategy.train_step)(strategy.abstract_state, strategy.abstract_batch)
    return any(one.params.get("check_vma") for one in operations(traced.jaxpr))
