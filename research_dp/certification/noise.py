"""What rounding explains: the oracle's steps in a row with other rounding, and how they part."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from research_dp.certification import harness, tolerances
from research_dp.certification.harness import Batch, Bench, MetricSums, gradients_of
from research_dp.certification.tolerances import EPS, Named, gap, named
from research_dp.console import Report, silent
from research_dp.errors import UsageError
from research_dp.strategies import TrainState
from research_dp.strategies.strategy import init_key
from research_dp.types import DataSet, TrainOrder

Key = tuple[str, str]
Metric = Literal["loss", "grad_norm"]  # of a run's training records
LOSS, NORM, PARAMETER = (
    ("loss, in a row", ""),
    ("gradient norm, in a row", ""),
    "parameter, in a row",
)
_TRAJECTORIES = 2  # with other rounding, beside the oracle's
_FIGURES = {LOSS: "loss", NORM: "gradient norm"}  # scalars, with their kinds in `COARSE`
_KEYS: dict[Metric, Key] = {"loss": LOSS, "grad_norm": NORM}


class NoisyTrajectories:
    """The oracle's steps in a row from one state, with other rounding at each step.

    Attributes:
        spread: By array, the greatest L2 distance so far: of these trajectories from the oracle's,
            with `pairs` of any two of all.
        change: By parameter, the greatest change of an element in a step of the oracle so far.
    """

    def __init__(self, bench: Bench, start: TrainState, *, pairs: bool = False):
        self._bench, self._pairs = bench, pairs
        self._states = [start] * _TRAJECTORIES
        self._rng = np.random.default_rng(1)
        self.spread: dict[Key, float] = collections.defaultdict(float)
        self.change: dict[Key, float] = collections.defaultdict(float)

    def step(self, batch: Batch, before: TrainState, oracle: Named) -> list[Named]:
        """Takes a step on each trajectory, and returns their positions.

        `before` is the oracle's state before the step, `oracle` its position after it.
        """
        noisy = [self._step(index, batch) for index in range(_TRAJECTORIES)]
        with_oracle = ((x, oracle) for x in noisy)
        pairs = itertools.combinations((*noisy, oracle), 2) if self._pairs else with_oracle
        for one, other in pairs:
            for key, value in other.items():
                self.spread[key] = max(gap(one[key], value).norm, self.spread[key])
        for key, old in named(PARAMETER, before.params).items():
            change = np.abs(tolerances.as_float64(oracle[key]) - tolerances.as_float64(old))
            self.change[key] = max(float(change.max(initial=0)), self.change[key])
        return noisy

    def _step(self, index: int, batch: Batch) -> Named:
        bench, state = self._bench, self._states[index]
        result = bench.noisy_step(state, batch, self._rng)
        # The gradients are noisy, but they update the unperturbed parameters.
        grads = gradients_of(result.state)
        if bench.precision > EPS:
            # Partial sums that cancel are as large as a usual element.
            grads = harness.perturb(grads, self._rng, bench.precision / 2, least_usual=True)
        new = state if result.skipped else bench.update(state, grads)
        params, opt_state = new.params, new.opt_state
        self._states[index] = result.state._replace(params=params, opt_state=opt_state)
        return position(result.metrics, params)

    def allowed(self, key: Key, expected: Any) -> float:
        """How far from an array of the oracle, in L2 norm, rounding may move it.

        FACTOR times the spread. Parameters: four elements by a full update more, because early
        updates of Adam are signs of gradients. All may be off by the rounding of their own dtype.
        """
        noise = tolerances.FACTOR * self.spread[key] + 4 * self.change.get(key, 0.0)
        size = float(np.linalg.norm(tolerances.as_float64(expected)))
        return noise + _floor(key, expected.dtype, self._bench.precision) * size


def position(metrics: MetricSums, params: Any) -> Named:
    """Where a trajectory is after a step: the step's loss and gradient norm, and its parameters."""
    loss, norm = (np.float32(harness.mean(metrics[name])) for name in ("loss", "grad_norm"))
    return {LOSS: loss, NORM: norm, **named(PARAMETER, params)}


def _floor(key: Key, dtype: Any, precision: float) -> float:
    """What rounding to an array's own dtype explains, relative to the array's norm."""
    eps = float(jnp.finfo(dtype).eps)
    if key in _FIGURES:
        return tolerances.FLOOR_ULPS * eps + tolerances.COARSE[_FIGURES[key]] * precision
    return (tolerances.COARSE_ULPS if eps > EPS else tolerances.FLOOR_ULPS) * eps


@dataclasses.dataclass(frozen=True)
class Noise:
    """How far two runs that differ in rounding alone may be apart.

    Each of them is one more trajectory with roundings of its own, as the oracle is too. So the
    distances of all pairs of measured trajectories are samples of the distance of two runs. No
    factor for "two runs" comes on top, as it would where distances from an exact result were
    measured. The bound is FACTOR times the greatest of them, because few samples may be near to
    each other by chance.
    """

    loss: np.ndarray  # of the oracle, float64[steps]
    grad_norm: np.ndarray
    loss_spread: np.ndarray  # the greatest distance of two trajectories, float64[steps]
    grad_norm_spread: np.ndarray
    params: Mapping[str, tuple[float, float]]  # path -> allowed L2 distance, the oracle's norm
    precision: float  # of the `Bench`

    @property
    def steps(self) -> int:
        return len(self.loss)

    def allowed_record(self, metric: Metric, first_step: int, last_step: int) -> float:
        """How far apart two runs' means over the steps first_step + 1 to last_step may be.

        FACTOR times the mean of the steps' spreads: that two means are less far apart than steps
        are, on average, is not counted on. Plus the rounding of the figure itself.

        Raises:
            ValueError: Steps that were not measured, or none.
        """
        if not 0 <= first_step < last_step <= self.steps:
            raise ValueError(f"steps {first_step + 1} to {last_step} of {self.steps} measured")
        steps = slice(first_step, last_step)
        spread = getattr(self, f"{metric}_spread")[steps].mean()
        size = np.abs(getattr(self, metric)[steps]).mean()
        return float(
            tolerances.FACTOR * spread + _floor(_KEYS[metric], np.float32, self.precision) * size
        )

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`."""
        values = dataclasses.asdict(self)
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Noise:
        """The inverse of `as_json`."""
        series = ("loss", "grad_norm", "loss_spread", "grad_norm_spread")
        arrays = {name: np.array(values[name], np.float64) for name in series}
        params = {path: (float(a), float(b)) for path, (a, b) in values["params"].items()}
        return cls(**arrays, params=params, precision=float(values["precision"]))


def measure(bench: Bench, data: DataSet, *, steps: int, report: Report = silent) -> Noise:
    """Runs the oracle of a bench beside trajectories with other rounding, from its initial state.

    All take the batches and the random keys of the run. The bench's strategy is not run; it may be
    the oracle's own configuration.

    Raises:
        UsageError: The loss is not finite at some step, or the data end before `steps`.
    """
    report(f"Compiling {bench.oracle.name}")
    state = harness.to_host(bench.oracle.init(init_key(bench.spec.seed)))
    noisy, positions = NoisyTrajectories(bench, state, pairs=True), []
    for number, batch in enumerate(train_batches(bench, data, steps)):
        report("Measuring what rounding explains", f"step {number + 1} of {steps}")
        before, result = state, harness.run_step(bench.oracle, state, batch)
        state = result.state
        oracle = position(result.metrics, state.params)
        # What follows a figure that is not finite cannot be compared.
        figures = [[x[LOSS], x[NORM]] for x in (oracle, *noisy.step(batch, before, oracle))]
        if not np.isfinite(figures).all():
            raise UsageError(
                f"the loss or the gradient norm of one device's run is not finite at step "
                f"{number + 1}: what rounding explains cannot be measured; compare fewer steps."
            )
        positions.append(figures)
    series = np.array(positions, np.float64).transpose(2, 0, 1)  # figure, step, trajectory
    loss, norm = series[..., 0]
    loss_spread, norm_spread = np.ptp(series, axis=-1)
    params = {
        path: (noisy.allowed(key, value), float(np.linalg.norm(tolerances.as_float64(value))))
        for key, value in named(PARAMETER, state.params).items()
        for path in key[1:]
    }
    return Noise(loss, norm, loss_spread, norm_spread, params, bench.precision)


def train_batches(bench: Bench, data: DataSet, count: int) -> Iterator[Batch]:
    """The first batches of a run, with the rows of all processes."""
    size, seed = bench.spec.batch_size, bench.spec.seed
    data.prepare()
    rows = np.arange(size)
    order = TrainOrder(seed=seed, batch_size=size, rows=rows, first_step=0, num_steps=count)
    yield from itertools.islice(data.train(order), count)
