"""Holds a strategy to what one device computes, step by step, on a small model.

A strategy is exact if it starts with the same bits and follows the same losses, gradient norms,
parameters and evaluation as `single`, with Adam, dropout, clipping, accumulation and padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from research_dp.distributed.placement import fingerprint
from research_dp.models import mlp
from research_dp.strategies import (
    Strategy,
    StrategyConfig,
    TrainSpec,
    compiled,
    data_parallel,
    jaxpr_collectives,
    one_device_mesh,
)
from research_dp.types import TrainableModel

STEPS = 4
MICRO_BATCHES = 2
MAX_NORM = 0.5
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((4, 4, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}
APIS = ("linen", "nnx")
_VALID = 5  # examples of the evaluation batch that count


class Trace(NamedTuple):
    """What a strategy computed.

    Attributes:
        born: Fingerprint of the initial parameters.
        losses: Mean training loss of each step.
        norms: Gradient norm of each step, before clipping.
        params: Final parameters.
        metrics: Evaluation metrics on a batch of which few examples count: sum and count.
    """

    born: str
    losses: list[float]
    norms: list[float]
    params: Any
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison with the oracle.

    Attributes:
        api: 'linen' or 'nnx', the model's.
        what: What was compared.
        right: Whether it agrees.
        told: The greatest difference, or what is wrong.
    """

    api: str
    what: str
    right: bool
    told: str


@functools.cache
def batches(batch_size: int = 32) -> Sequence[Mapping[str, np.ndarray]]:
    """The training batches, the same for every strategy."""
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(batch_size, 4, 4, 1)).astype(np.float32),
            "label": rng.integers(0, 10, batch_size).astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def small_model(api: str) -> TrainableModel:
    """A perceptron with dropout."""
    return mlp(api=api, widths=(32, 16), num_classes=10, dropout_rate=0.3)


def small_spec(api: str, batch_size: int = 32) -> TrainSpec:
    """What strategies are built for here."""
    return TrainSpec(
        model=small_model(api),
        optimizer=optax.adam(1e-2),
        example=EXAMPLE,
        batch_size=batch_size,
        accumulation_steps=MICRO_BATCHES,
        max_grad_norm=MAX_NORM,
        seed=3,
    )


def trace(
    strategy: Strategy,
    data: Sequence[Mapping[str, np.ndarray]],
    change: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = lambda batch: batch,
) -> Trace:
    """Trains on batches, then evaluates on a part of the first.

    Args:
        strategy: Built for them.
        data: Global batches.
        change: What is done to each before.
    """
    state = strategy.init(jax.random.key(0))
    born = fingerprint(state.params)
    losses, norms = [], []
    for batch in data:
        local = {name: x[strategy.train_rows] for name, x in change(batch).items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
        norms.append(float(metrics["grad_norm"][0]))
    part = {name: x[: strategy.eval_batch_size] for name, x in data[0].items()}
    mask = (np.arange(strategy.eval_batch_size) < _VALID).astype(np.float32)
    examples = strategy.place_eval_batch({**part, "mask": mask})
    metrics = jax.device_get(strategy.eval_step(state, examples))
    return Trace(born, losses, norms, jax.device_get(state.params), metrics)


@functools.cache
def oracle(api: str, batch_size: int = 32) -> Trace:
    """What one device computes."""
    single = data_parallel(name="single", engine=compiled, mesh=one_device_mesh())
    return trace(single.build(small_spec(api, batch_size)), batches(batch_size))


def batch_size_for(devices: int) -> int:
    """32, or what that many devices can share."""
    return math.lcm(32, devices * MICRO_BATCHES)


def checks(recipe: StrategyConfig, api: str) -> Iterator[Check]:
    """Compares a strategy with the oracle.

    Args:
        recipe: The strategy; its rule should shard arrays of 64 elements.
        api: 'linen' or 'nnx'.

    Raises:
        UsageError: It cannot be built.
    """
    size = batch_size_for(recipe.mesh.size)
    strategy = recipe.build(small_spec(api, size))
    expected, found = oracle(api, size), trace(strategy, batches(size))

    def check(what: str, right: bool, told: str) -> Check:
        return Check(api, what, bool(right), told)

    same = found.born == expected.born
    yield check("initial parameters", same, "the same bits" if same else "not the same bits")
    yield check("losses", *_near(found.losses, expected.losses, atol=2e-6))
    yield check("gradient norms", *_near(found.norms, expected.norms, rtol=1e-5))
    yield check("parameters", *_near(found.params, expected.params, atol=2e-5))
    count = found.metrics["loss"][1]
    yield check("examples counted", count == _VALID, f"{count:g} of {_VALID}")
    mean = [m["loss"][0] / m["loss"][1] for m in (found.metrics, expected.metrics)]
    yield check("evaluation loss", *_near(*mean, rtol=1e-4))


def wire_bytes(recipe: StrategyConfig, api: str) -> float:
    """Bytes that a device sends in a step, as the traced program says."""
    strategy = recipe.build(small_spec(api, batch_size_for(recipe.mesh.size)))
    return sum(one.wire_bytes for one in jaxpr_collectives.of_step(strategy))


def _near(found: Any, expected: Any, *, atol: float = 0.0, rtol: float = 0.0) -> tuple[bool, str]:
    """Whether all numbers of two trees are near, and the greatest difference."""
    if repr(jax.tree.structure(found)) != repr(jax.tree.structure(expected)):
        return False, "another tree"
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    right = all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, atol=atol, rtol=rtol) for a, b in pairs
    )
    if any(np.shape(a) != np.shape(b) for a, b in pairs):
        return False, "other shapes"
    most = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return right, f"at most {most:.1e} apart"
