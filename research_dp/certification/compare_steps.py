"""Steps of a strategy beside the oracle's, each from the oracle's own state and in a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.certification import replica_blocks
from research_dp.certification.harness import (
    Batch,
    Bench,
    Done,
    as_pairs,
    gradients_of,
    nudged,
    on_host,
    optimizer_state_of,
    put,
    rounded,
    step,
)
from research_dp.certification.tolerances import (
    COARSE_ULPS,
    EPS,
    FACTOR,
    FLOOR_ULPS,
    SIZE,
    Difference,
    Envelope,
    Named,
    applied_alike,
    coarse_of,
    gap,
    named,
    update_ratio,
    wide,
)
from research_dp.distributed.sharding import by_path
from research_dp.strategies import TrainState
from research_dp.strategies.rng import init_key

NOISY, WANDERING, MORE = 3, 2, 16  # oracles that round otherwise: each step, in a row, in doubt


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One step from the oracle's state.

    Attributes:
        number: Of the step.
        batch: What it was given.
        before: The oracle's state.
        expected: What the oracle made of it.
        found: What the strategy made of it.
        differences: All that was compared.
        apart: Arrays whose copies differ between devices.
    """

    number: int
    batch: Batch
    before: TrainState
    expected: Done
    found: Done
    differences: list[Difference]
    apart: list[replica_blocks.Apart]

    @property
    def wrong(self) -> list[Difference]:
        """What rounding does not explain, the worst first, causes before effects."""
        found = [d for d in self.differences if d.is_wrong]
        return sorted(found, key=lambda d: (_ORDER.index(d.what), -d.excess, d.leaf))

    @property
    def is_right(self) -> bool:
        return not self.apart and not self.wrong


_ORDER = (
    *("items counted", "gradient", SIZE, "gradient norm", "loss", "model state", "parameter"),
    *("optimizer state", "loss scale"),
)


def look(
    bench: Bench, number: int, state: TrainState, batch: Batch, envelope: Envelope, *, seed: int = 0
) -> Evidence:
    """Compares one step of the strategy with the oracle's, both from the same state.

    Args:
        bench: The two.
        number: Of the step.
        state: The oracle's state.
        batch: The global batch.
        envelope: What is known of the noise; it learns.
        seed: Of the noise.
    """
    expected, found = step(bench.oracle, state, batch), step(bench.strategy, state, batch)
    rng = np.random.default_rng((seed, number))

    def held(count: int) -> list[Difference]:
        noisy = [_measured(bench.noisy(state, batch, rng)) for _ in range(count)]
        return envelope.compare(number, _measured(found), _measured(expected), noisy)

    differences = held(NOISY)
    if any(d.is_wrong for d in differences):
        # A unit at the edge of its activation falls on either side, but rarely: ask more often.
        differences = held(MORE)
    differences += _updates(bench, number, state, expected, found)
    apart = [
        one
        for what, tree in parts_of(found.on_devices).items()
        for one in replica_blocks.differing(what, tree, bench.strategy.mesh)
    ]
    return Evidence(number, batch, state, expected, found, differences, apart)


def parts_of(state: TrainState) -> dict[str, Any]:
    """The trees of a state by what they are."""
    return {
        "gradient": gradients_of(state),
        "parameter": state.params,
        "optimizer state": optimizer_state_of(state),
        "model state": state.model_state,
    }


def _measured(done: Done) -> Named:
    """What a step has that rounding changes."""
    return {
        ("loss", ""): np.float32(done.loss),
        ("items counted", ""): np.float32(done.metrics["loss"][1]),
        ("gradient norm", ""): np.float32(done.norm),
        **named("gradient", gradients_of(done.state)),
        **named("model state", done.state.model_state),
        **named("loss scale", done.state.loss_scale),
    }


def _updates(
    bench: Bench, number: int, state: TrainState, expected: Done, found: Done
) -> list[Difference]:
    """Holds new parameters to what the optimizer makes of the strategy's own gradients."""

    def parts(state: TrainState) -> Named:
        own = named("optimizer state", optimizer_state_of(state))
        return {**named("parameter", state.params), **own}

    def alone(done: Done) -> Named:
        if done.skipped:
            return parts(state)
        return parts(bench.update(state, gradients_of(done.state)))

    before, own, of_oracle = parts(state), parts(expected.state), alone(expected)
    noise = max(update_ratio(own[name], of_oracle[name], before[name]) for name in own)
    allowed = max(1.0, FACTOR * noise)
    return list(applied_alike(number, parts(found.state), alone(found), before, allowed))


@dataclasses.dataclass
class Wandering:
    """The strategy's own trajectory, and the oracle's with other rounding at each step.

    Attributes:
        bench: The strategy and its oracle.
        state: The strategy's state, on its devices.
        others: States of the oracle that rounded otherwise.
    """

    bench: Bench
    state: TrainState
    others: list[TrainState]

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self._spread: dict[tuple[str, str], float] = {}
        self._moved: dict[str, float] = {}

    def step(self, number: int, batch: Batch, before: TrainState, truth: Done) -> list[Difference]:
        """All take a step; compares where they are.

        A loss may be FACTOR times as far off as the others came. So may parameters, in L2 norm,
        and four elements a whole update more: early updates of Adam are signs of gradients. At
        least they may be off by the rounding of their own dtype, each element of them.
        """
        strategy = self.bench.strategy
        placed = strategy.place_batch({k: x[strategy.train_rows] for k, x in batch.items()})
        self.state, metrics = strategy.train_step(self.state, placed)
        total, count = as_pairs(metrics)["loss"]
        found = _positions(total / count if count else 0.0, on_host(self.state.params))
        others = [self._wander(i, batch) for i in range(len(self.others))]
        expected = _positions(truth.loss, truth.state.params)
        old = by_path(before.params)
        differences = []
        for name, value in expected.items():
            spread = max(_apart(x[name], value) for x in others)
            self._spread[name] = max(spread, self._spread.get(name, 0.0))
            allowed = FACTOR * self._spread[name]
            if name[1]:
                moved = float(np.abs(wide(value) - wide(old[name[1]])).max(initial=0))
                self._moved[name[1]] = max(moved, self._moved.get(name[1], 0.0))
                allowed += 4 * self._moved[name[1]]
            allowed += self._floor(name, value) * float(np.linalg.norm(wide(value)))
            whole, apart = gap(found[name], value), _apart(found[name], value)
            bound = whole.ulps * allowed / apart if apart and np.isfinite(apart) else 0.0
            differences.append(Difference(*name, number, whole, bound))
        return differences

    def _floor(self, name: tuple[str, str], value: Any) -> float:
        """Relative difference that is allowed whatever the others did."""
        eps = float(jnp.finfo(np.asarray(value).dtype).eps)
        if name[1]:
            return (FLOOR_ULPS if eps <= EPS else COARSE_ULPS) * eps
        return FLOOR_ULPS * eps + coarse_of("loss") * self.bench.precision

    def _wander(self, index: int, batch: Batch) -> Named:
        state = self.others[index]
        done = self.bench.noisy(state, batch, self._rng)
        # Gradients are noisy, the parameters they are applied to are not.
        grads = gradients_of(done.state)
        if self.bench.precision > EPS:
            grads = rounded(grads, self.bench.precision, self._rng)
        new = state if done.skipped else self.bench.update(state, grads)
        same = done.state._replace(params=new.params, opt_state=new.opt_state)
        self.others[index] = same
        return _positions(done.loss, same.params)


def begin(bench: Bench) -> tuple[TrainState, Wandering]:
    """The oracle's initial state, on the host, and what sets out from there by itself."""
    key = init_key(bench.spec.seed)
    truth = on_host(bench.oracle.init(key))
    return truth, Wandering(bench, bench.strategy.init(key), [truth] * WANDERING)


def _positions(loss: float, params: Any) -> Named:
    return {
        ("loss, in a row", ""): np.float32(loss),
        **named("parameter, in a row", params),
    }


def _apart(a: Any, b: Any) -> float:
    """L2 norm of a difference; inf if one is not a number where the other is."""
    wide_a, wide_b = wide(a), wide(b)
    if not np.array_equal(np.isfinite(wide_a), np.isfinite(wide_b)):
        return float("inf")
    return float(np.linalg.norm(np.nan_to_num(wide_a - wide_b)))


def initial_state(bench: Bench) -> tuple[TrainState, TrainState]:
    """The strategy's initial state and the oracle's, on the host."""
    key = init_key(bench.spec.seed)
    return on_host(bench.strategy.init(key)), on_host(bench.oracle.init(key))


def evaluated(
    bench: Bench, state: TrainState, batch: Batch, envelope: Envelope
) -> list[Difference]:
    """Compares an evaluation step, of which each example counts once and padding does not."""

    def measured(strategy: Any, state: TrainState) -> Named:
        rows = {name: x[strategy.eval_rows] for name, x in batch.items()}
        sums = as_pairs(strategy.eval_step(put(strategy, state), strategy.place_eval_batch(rows)))
        total, count = sums["loss"]
        return {
            ("evaluation loss", ""): np.float32(total / count if count else 0.0),
            ("evaluation items counted", ""): np.float32(count),
        }

    rng = np.random.default_rng(2)

    noisy = [measured(bench.oracle, nudged(state, rng)) for _ in range(NOISY)]
    found, expected = (measured(s, state) for s in (bench.strategy, bench.oracle))
    return envelope.compare(int(state.step), found, expected, noisy)
