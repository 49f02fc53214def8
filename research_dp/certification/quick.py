"""A quick certification: a strategy alone, on a small built-in run, within fixed tolerances.

The run has Adam, dropout, clipping, accumulation and padding; its models are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from research_dp import strategies
from research_dp.certification import harness
from research_dp.certification.certificate import Certificate, Check
from research_dp.certification.harness import Batch, MetricSums
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, jaxpr_collectives
from research_dp.types import TrainableModel

STEPS, MICRO_BATCHES, MAX_NORM, NUM_CLASSES = 4, 2, 0.5, 10
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((4, 4, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}
BOUND = (
    "Bound: losses 2e-6, gradient norms 1e-5 (relative), parameters 2e-5, evaluation loss 1e-4 "
    "(relative); none for counts and initial parameters."
)
_VALID = 5  # examples of the evaluation batch; the others are padding


class Trace(NamedTuple):
    """What a strategy computes."""

    initial: str  # fingerprint of the initial parameters
    losses: list[float]  # of each step, as are the norms before clipping
    norms: list[float]
    params: Any  # the final ones
    metrics: MetricSums  # of an evaluation batch with padding


def certify_quick(config: StrategyConfig, models: Mapping[str, TrainableModel]) -> Certificate:
    """Certifies a strategy that shards arrays of 64 elements, on the small run.

    `models` are small classifiers of `EXAMPLE`, by the API that they are written in.
    """
    size = batch_size_for(config)
    title = f"{config.name} on {sizes_text(config.mesh.shape)} against single, a quick run"
    certificate = Certificate(title, BOUND)
    for api, model in models.items():
        strategy = config.build(small_spec(model, size))
        for check in compare(trace(strategy, batches(size)), trace_single(model, size)):
            certificate.check(f"{api} {check.name}", check.passed, check.message)
        certificate.check(f"{api} bytes sent a step", None, f"{wire_bytes(strategy):,.0f}")
    if not certificate.certified:
        certificate.cause = "--quick does not search for it; certify a run without --quick does"
    return certificate


def batch_size_for(config: StrategyConfig) -> int:
    """32, or what the strategy's devices can share."""
    return math.lcm(32, config.mesh.size * MICRO_BATCHES)


def small_spec(model: TrainableModel, batch_size: int = 32) -> TrainSpec:
    """The small run of a model."""
    return TrainSpec(
        model=model,
        optimizer=optax.adam(1e-2),
        example=EXAMPLE,
        batch_size=batch_size,
        accumulation_steps=MICRO_BATCHES,
        max_grad_norm=MAX_NORM,
        seed=3,
    )


def batches(batch_size: int = 32) -> Sequence[Batch]:
    """The training batches, the same for every strategy."""
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(batch_size, 4, 4, 1)).astype(np.float32),
            "label": rng.integers(0, NUM_CLASSES, batch_size).astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def trace_single(model: TrainableModel, batch_size: int = 32) -> Trace:
    """What one device computes."""
    single = StrategyConfig(
        name="single", engine=strategies.compiled, mesh=strategies.one_device_mesh()
    )
    return trace(single.build(small_spec(model, batch_size)), batches(batch_size))


def trace(strategy: Strategy, data: Sequence[Batch]) -> Trace:
    """Trains on all batches, and evaluates on a part of the first, with padding."""
    state = strategy.init(jax.random.key(0))
    initial, losses, norms = fingerprint(state.params), [], []
    for batch in data:
        state, metrics = strategy.train_step(state, harness.place_batch(strategy, batch))
        sums = harness.metric_sums(metrics)
        losses.append(harness.mean(sums["loss"]))
        norms.append(harness.mean(sums["grad_norm"]))
    rows = strategy.eval_batch_size
    examples = {name: x[:rows] for name, x in data[0].items()}
    examples["mask"] = (np.arange(rows) < _VALID).astype(np.float32)
    evaluated = harness.evaluate(strategy, state, examples)
    return Trace(initial, losses, norms, jax.device_get(state.params), evaluated)


def compare(actual: Trace, expected: Trace) -> Iterator[Check]:
    """Compares what a strategy computes with what one device does."""
    same = actual.initial == expected.initial
    yield Check("initial parameters", same, f"{'' if same else 'not '}the same bits")
    yield _near("losses", actual.losses, expected.losses, atol=2e-6)
    yield _near("gradient norms", actual.norms, expected.norms, rtol=1e-5)
    yield _near("parameters", actual.params, expected.params, atol=2e-5)
    count = actual.metrics["loss"][1]
    yield Check("examples counted", count == _VALID, f"{count:g} of {_VALID}")
    losses = (harness.mean(t.metrics["loss"]) for t in (actual, expected))
    yield _near("evaluation loss", *losses, rtol=1e-4)


def wire_bytes(strategy: Strategy) -> float:
    """Bytes that a device sends in a step, by the traced program."""
    return sum(one.wire_bytes for one in jaxpr_collectives.of_step(strategy))


def _near(name: str, actual: Any, expected: Any, *, atol: float = 0.0, rtol: float = 0.0) -> Check:
    if repr(jax.tree.structure(actual)) != repr(jax.tree.structure(expected)):
        return Check(name, False, "another tree")
    pairs = list(zip(*map(jax.tree.leaves, (actual, expected)), strict=True))
    if any(np.shape(a) != np.shape(b) for a, b in pairs):
        return Check(name, False, "other shapes")
    near = all(np.allclose(a, b, atol=atol, rtol=rtol) for a, b in pairs)
    most = max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)
    return Check(name, near, f"at most {most:.1e} apart")
