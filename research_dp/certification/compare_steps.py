"""Compares steps of a strategy with the oracle's: from the oracle's states, and in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from research_dp.certification import harness, tolerances
from research_dp.certification.harness import Batch, Bench, StepResult, gradients_of
from research_dp.certification.tolerances import SIZE, Difference, Envelope, Named, gap, named
from research_dp.distributed.replica_difference import differing_axes
from research_dp.strategies import Strategy, TrainState
from research_dp.strategies.strategy import init_key

SAMPLES, MORE_SAMPLES = 3, 16  # oracle steps with other rounding: always, and in doubt
_NOISY = 2  # trajectories of the oracle with other rounding
_PARAMETER = "parameter, in a row"
_CAUSES_FIRST = (
    *("items counted", "gradient", SIZE, "gradient norm", "loss", "model state", "parameter"),
    *("optimizer state", "loss scale"),
)


class ReplicaDifference(NamedTuple):
    """An array of a state whose replicas differ, and the mesh axes along which they do."""

    kind: str
    leaf: str
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """One step of the strategy and of the oracle, both from the oracle's state."""

    number: int
    batch: Batch
    before: TrainState
    expected: StepResult  # the oracle's
    actual: StepResult  # the strategy's
    differences: list[Difference]  # of all arrays that were compared
    replicas: list[ReplicaDifference]

    @property
    def wrong(self) -> list[Difference]:
        """What rounding does not explain: causes before effects, the worst first."""
        wrong = [d for d in self.differences if d.is_wrong]
        return sorted(wrong, key=lambda d: (_CAUSES_FIRST.index(d.kind), -d.excess, d.leaf))

    @property
    def is_right(self) -> bool:
        return not self.replicas and not self.wrong


def compare_step(
    bench: Bench, number: int, state: TrainState, batch: Batch, envelope: Envelope, *, seed: int = 0
) -> StepComparison:
    """Runs one step of the strategy and of the oracle from the same state.

    The noise of the step is measured with `seed`, and added to what `envelope` knows.
    """
    expected = harness.run_step(bench.oracle, state, batch)
    actual = harness.run_step(bench.strategy, state, batch)
    rng = np.random.default_rng((seed, number))

    def compare(samples: int) -> list[Difference]:
        noisy = [_measured(bench.noisy_step(state, batch, rng)) for _ in range(samples)]
        return envelope.compare(number, _measured(actual), _measured(expected), noisy)

    differences = compare(SAMPLES)
    if any(d.is_wrong for d in differences):
        # A ReLU at its kink falls on either side, but rarely: more samples show whether it does.
        differences = compare(MORE_SAMPLES)
    differences += _compare_updates(bench, number, state, expected, actual)
    replicas = list(_differing_replicas(actual.on_devices, bench.strategy.mesh))
    return StepComparison(number, batch, state, expected, actual, differences, replicas)


def _measured(result: StepResult) -> Named:
    """The arrays of a step that rounding changes."""
    return {
        ("loss", ""): np.float32(result.loss),
        ("items counted", ""): np.float32(result.metrics["loss"][1]),
        ("gradient norm", ""): np.float32(result.norm),
        **named("gradient", gradients_of(result.state)),
        **named("model state", result.state.model_state),
        **named("loss scale", result.state.loss_scale),
    }


def _updated(state: TrainState) -> Named:
    """The arrays that the optimizer updates."""
    optimizer_state = named("optimizer state", harness.optimizer_state_of(state))
    return {**named("parameter", state.params), **optimizer_state}


def _compare_updates(
    bench: Bench, number: int, state: TrainState, expected: StepResult, actual: StepResult
) -> Iterator[Difference]:
    """Compares the update with what the optimizer makes of the strategy's own gradients."""

    def reference(result: StepResult) -> Named:
        skipped = result.skipped
        return _updated(state if skipped else bench.update(state, gradients_of(result.state)))

    before, oracle, alone = _updated(state), _updated(expected.state), reference(expected)
    noise = max(tolerances.update_excess(oracle[key], alone[key], before[key]) for key in oracle)
    allowed = max(1.0, tolerances.FACTOR * noise)
    return tolerances.compare_updates(
        number, _updated(actual.state), reference(actual), before, allowed
    )


def _differing_replicas(state: TrainState, mesh: Mesh) -> Iterator[ReplicaDifference]:
    arrays = {
        **named("gradient", gradients_of(state)),
        **_updated(state),
        **named("model state", state.model_state),
        **named("slot state", state.slots),
    }
    for (kind, leaf), x in arrays.items():
        shards = {
            place: (index, shard.tobytes())
            for place, (index, shard) in shards_by_place(x, mesh).items()
        }
        if axes := differing_axes(shards, mesh.axis_names):
            yield ReplicaDifference(kind, leaf, axes)


def shards_by_place(
    x: jax.Array, mesh: Mesh
) -> dict[tuple[int, ...], tuple[tuple[slice, ...], np.ndarray]]:
    """By a device's coordinates in the mesh: the index of its shard, and the shard."""
    places = {device: place for place, device in np.ndenumerate(mesh.devices)}
    return {places[s.device]: (s.index, np.asarray(s.data)) for s in x.addressable_shards}


def compare_evaluation(
    bench: Bench, state: TrainState, batch: Batch, envelope: Envelope
) -> list[Difference]:
    """Compares an evaluation step, in which each example counts once and padding does not."""

    def measured(strategy: Strategy, state: TrainState) -> Named:
        placed = harness.to_devices(strategy, state)
        loss = harness.evaluate(strategy, placed, batch)["loss"]
        return {
            ("evaluation loss", ""): np.float32(harness.mean(loss)),
            ("evaluation items counted", ""): np.float32(loss[1]),
        }

    rng = np.random.default_rng(2)
    noisy = [measured(bench.oracle, harness.perturb_params(state, rng)) for _ in range(SAMPLES)]
    actual, expected = measured(bench.strategy, state), measured(bench.oracle, state)
    return envelope.compare(int(state.step), actual, expected, noisy)


class FreeRun:
    """The strategy's trajectory, and the oracle's with other rounding at each step."""

    def __init__(self, bench: Bench, start: TrainState):
        self._bench = bench
        self.state = bench.strategy.init(init_key(bench.spec.seed))
        self._noisy_states = [start] * _NOISY
        self._rng = np.random.default_rng(1)
        self._spread: dict[tuple[str, str], float] = {}
        self._change: dict[tuple[str, str], float] = {}

    def step(
        self, number: int, batch: Batch, before: TrainState, oracle: StepResult
    ) -> list[Difference]:
        """Takes a step on all trajectories, and compares the strategy's with the oracle's.

        A loss may be FACTOR times as far off as the noisy trajectories are. So may parameters, in
        L2 norm, and four elements by a full update more, because early updates of Adam are signs
        of gradients. Both may always be off by the rounding of their own dtype.
        """
        strategy = self._bench.strategy
        placed = harness.place_batch(strategy, batch)
        self.state, metrics = strategy.train_step(self.state, placed)
        loss = harness.mean(harness.metric_sums(metrics)["loss"])
        actual = _position(loss, harness.to_host(self.state.params))
        noisy = [self._noisy_step(i, batch) for i in range(_NOISY)]
        previous = named(_PARAMETER, before.params)
        differences = []
        for key, expected in _position(oracle.loss, oracle.state.params).items():
            value = tolerances.as_float64(expected)
            spread = max(gap(x[key], expected).norm for x in noisy)
            self._spread[key] = max(spread, self._spread.get(key, 0.0))
            allowed = tolerances.FACTOR * self._spread[key]
            if key in previous:
                change = np.abs(value - tolerances.as_float64(previous[key])).max(initial=0)
                self._change[key] = max(float(change), self._change.get(key, 0.0))
                allowed += 4 * self._change[key]
            allowed += self._floor(key, expected) * float(np.linalg.norm(value))
            apart = gap(actual[key], expected)
            is_finite = apart.norm and np.isfinite(apart.norm)
            bound = apart.ulps * allowed / apart.norm if is_finite else 0.0
            differences.append(Difference(*key, number, apart, bound))
        return differences

    def _floor(self, key: tuple[str, str], value: Any) -> float:
        """The relative difference that is allowed whatever the noise is."""
        eps = float(jnp.finfo(np.asarray(value).dtype).eps)
        if key[0] == _PARAMETER:
            is_fine = eps <= tolerances.EPS
            return (tolerances.FLOOR_ULPS if is_fine else tolerances.COARSE_ULPS) * eps
        return tolerances.FLOOR_ULPS * eps + tolerances.coarse_ulps("loss") * self._bench.precision

    def _noisy_step(self, index: int, batch: Batch) -> Named:
        bench, state = self._bench, self._noisy_states[index]
        result = bench.noisy_step(state, batch, self._rng)
        # The gradients are noisy, but they update the unperturbed parameters.
        grads = harness.gradients_of(result.state)
        if bench.precision > tolerances.EPS:
            grads = harness.round_gradients(grads, bench.precision, self._rng)
        new = state if result.skipped else bench.update(state, grads)
        self._noisy_states[index] = result.state._replace(
            params=new.params, opt_state=new.opt_state
        )
        return _position(result.loss, new.params)


def _position(loss: float, params: Any) -> Named:
    return {("loss, in a row", ""): np.float32(loss), **named(_PARAMETER, params)}
