"""A quick certification: a strategy alone, on a small built-in run, within fixed tolerances.

The run has Adam, dropout, clipping, accumulation and padding; its models are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from research_dp import strategies
from research_dp.certification import harness
from research_dp.certification.certificate import Certificate, Check
from research_dp.certification.harness import Batch
from research_dp.console import Report, silent
from research_dp.distributed.batch_examples import seed_key
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
# Relative and absolute tolerance.
_NEAR = {"losses": (0, 2e-6), "gradient norms": (1e-5, 0), "parameters": (0, 2e-5)}
_NEAR["evaluation loss"] = (1e-4, 0)
_VALID = 5  # examples of the evaluation batch; the others are padding


def certify_quick(
    config: StrategyConfig, models: Mapping[str, TrainableModel], report: Report = silent
) -> Certificate:
    """Certifies a strategy that shards arrays of 64 elements, on the small run.

    `models` are small classifiers of `EXAMPLE`, by the API that they are written in.
    """
    size = batch_size_for(config)
    title = f"{config.name} on {sizes_text(config.mesh.shape)} against single, a quick run"
    certificate = Certificate(title, BOUND)
    for api, model in models.items():
        report(f"Certifying {config.name} on a quick run in {api}")
        strategy = config.build(small_spec(model, size))
        certificate.algorithm = strategy.algorithm
        for check in compare(trace(strategy, batches(size)), trace_single(model, size)):
            passed = None if strategy.algorithm and check.name in _NEAR else check.passed
            certificate.check(f"{api} {check.name}", passed, check.message)
        sent = sum(one.wire_bytes for one in jaxpr_collectives.of_step(strategy))
        certificate.check(f"{api} bytes sent a step", None, f"{sent:,.0f}")
    if not certificate.is_right:
        certificate.cause = "a quick run does not search for it; a complete certification does"
    return certificate


def batch_size_for(config: StrategyConfig) -> int:
    """A multiple of 32 that the strategy's devices can share."""
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


def trace_single(model: TrainableModel, batch_size: int = 32) -> dict[str, Any]:
    """What one device computes."""
    single = StrategyConfig(
        name="single", engine=strategies.compiled, mesh=strategies.one_device_mesh()
    )
    return trace(single.build(small_spec(model, batch_size)), batches(batch_size))


def trace(strategy: Strategy, data: Sequence[Batch]) -> dict[str, Any]:
    """Trains on all batches, evaluates on a part of the first, with padding; by what is checked."""
    state = strategy.init(seed_key(0))
    initial, metrics = fingerprint(state.params), []
    for batch in data:
        state, sums = harness.take_step(strategy, state, batch)
        metrics.append({name: harness.mean(pair) for name, pair in sums.items()})
    rows = strategy.eval_batch_size
    examples = {name: x[:rows] for name, x in data[0].items()}
    examples["mask"] = (np.arange(rows) < _VALID).astype(np.float32)
    loss = harness.evaluate(strategy, state, [examples])["loss"]
    return {
        "initial parameters": initial,
        "losses": [step["loss"] for step in metrics],
        "gradient norms": [step["grad_norm"] for step in metrics],  # before clipping
        "parameters": jax.device_get(state.params),
        "examples counted": loss[1],
        "evaluation loss": harness.mean(loss),
    }


def compare(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[Check]:
    """Compares what a strategy computes with what one device does."""
    for name, value in actual.items():
        if name == "initial parameters":
            same = value == expected[name]
            yield Check(name, same, f"{'' if same else 'not '}the same bits")
        elif name == "examples counted":
            yield Check(name, value == _VALID, f"{value:g} of {_VALID}")
        elif repr(jax.tree.structure(value)) != repr(jax.tree.structure(expected[name])):
            yield Check(name, False, "another tree")
        else:
            pairs = list(zip(*map(jax.tree.leaves, (value, expected[name])), strict=True))
            near, message = all(np.shape(a) == np.shape(b) for a, b in pairs), "other shapes"
            if near:
                near = all(np.allclose(a, b, *_NEAR[name]) for a, b in pairs)
                most = max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)
                message = f"at most {most:.1e} apart"
            yield Check(name, near, message)
