"""Lets a strategy run on from its own states, and compares its trajectory with the oracle's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.certification import harness, tolerances
from research_dp.certification.harness import Batch, Bench, StepResult
from research_dp.certification.tolerances import Difference, Named, gap, named
from research_dp.strategies import TrainState
from research_dp.strategies.rng import init_key

_NOISY = 2  # trajectories of the oracle with other rounding
_PARAMETER = "parameter, in a row"


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
