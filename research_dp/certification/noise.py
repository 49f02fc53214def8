"""What rounding explains: the oracle's steps in a row with other rounding, and how they part."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.certification import harness, tolerances
from research_dp.certification.harness import Batch, Bench, StepResult, gradients_of
from research_dp.certification.tolerances import EPS, Named, gap, named
from research_dp.console import Report, silent
from research_dp.errors import UsageError
from research_dp.strategies import TrainState
from research_dp.training.batches import train_order
from research_dp.types import DataSet, EvalOrder, HostSums

Key = tuple[str, str]
LOSS, NORM, PARAMETER = (
    ("loss, in a row", ""),
    ("gradient norm, in a row", ""),
    "parameter, in a row",
)
_FIGURES = {LOSS: "loss", NORM: "gradient norm"}  # scalars, with their kinds in `COARSE`
METRICS = {"loss": LOSS, "grad_norm": NORM}  # of a run's training records
_EVALUATION = "evaluation loss"  # the kind of all metrics of an evaluation
_NOISY = 4  # trajectories beside the oracle's, in `measure`
_LEAST_FACTOR = 2
_MARGIN = 10  # steps after a record whose spread counts for it too


class NoisyTrajectories:
    """The oracle's steps in a row from one state, with other rounding at each step.

    It also knows how far apart trajectories are that differ in rounding alone, by array.
    """

    def __init__(self, bench: Bench, start: TrainState, count: int):
        self._bench = bench
        self._states = [start] * count
        self._rng = np.random.default_rng(1)
        self._distances: dict[Key, list[float]] = collections.defaultdict(list)
        self._change: dict[Key, float] = collections.defaultdict(float)  # of parameters in a step

    def step(self, before: TrainState, oracle: StepResult, batch: Batch) -> list[Named]:
        """Takes a step on each trajectory; returns positions, that of the oracle's own step first.

        That step began at `before`: it shows how much an element of each parameter changes.
        """
        reference = position(oracle.metrics, oracle.state.params)
        for key, old in named(PARAMETER, before.params).items():
            change = np.abs(tolerances.as_float64(reference[key]) - tolerances.as_float64(old))
            self._change[key] = max(float(change.max(initial=0)), self._change[key])
        return [reference, *(self._step(index, batch) for index in range(len(self._states)))]

    def states(self) -> Iterator[TrainState]:
        """Where each trajectory is, with the rounding of one more pass through the model."""
        for state in self._states:
            yield state._replace(params=harness.perturb(state.params, self._rng, EPS))

    def _step(self, index: int, batch: Batch) -> Named:
        bench, state = self._bench, self._states[index]
        result = bench.noisy_step(state, batch, self._rng)
        # The gradients are noisy, but they update the unperturbed parameters.
        grads = gradients_of(result.state)
        if bench.precision > EPS:
            # Partial sums that cancel are as large as a usual element.
            grads = harness.perturb(grads, self._rng, bench.precision / 2, least_usual=True)
        new = state if result.skipped else bench.update(state, grads, result.loss)
        params, opt_state = new.params, new.opt_state
        self._states[index] = result.state._replace(params=params, opt_state=opt_state)
        return position(result.metrics, params)

    def add_pairs(self, pairs: Iterable[tuple[Named, Named]]) -> None:
        """Adds positions of two trajectories after the same step."""
        for one, other in pairs:
            for key, value in other.items():
                self._distances[key].append(gap(one[key], value).norm)

    def allowed(self, key: Key, value: Any, factor: float = tolerances.FACTOR) -> float:
        """How far apart, in L2 norm, two arrays near `value` may be.

        `factor` times as far as the trajectories are. Parameters: four elements by a full update
        more, because early updates of Adam are signs of gradients. All may be off by the rounding
        of their own dtype.
        """
        noise = factor * max(self._distances[key]) + 4 * self._change[key]
        return noise + _floor(key, value.dtype, self._bench.precision) * _norm(value)

    def factor(self, key: Key) -> float:
        """From the greatest of the distances to a bound: FACTOR, or less where all are alike.

        Where many roundings add up, all pairs are about equally far apart, and so is the next one.
        Where one rounding dominates, the greatest of ten distances is at least four times the
        least.
        """
        least, greatest = min(self._distances[key]), max(self._distances[key])
        alike = (greatest / least) ** 2 if least else np.inf
        return float(min(tolerances.FACTOR, max(_LEAST_FACTOR, alike)))


def position(metrics: HostSums, params: Any) -> Named:
    """Where a trajectory is after a step: the step's loss and gradient norm, and its parameters."""
    loss, norm = (np.float32(harness.mean(metrics[name])) for name in ("loss", "grad_norm"))
    return {LOSS: loss, NORM: norm, **named(PARAMETER, params)}


def _floor(key: Key, dtype: Any, precision: float) -> float:
    """What rounding to an array's own dtype explains, relative to the array's norm."""
    eps = float(jnp.finfo(dtype).eps)
    figure = _EVALUATION if key[0] == _EVALUATION else _FIGURES.get(key)
    if figure:
        return tolerances.FLOOR_ULPS * eps + tolerances.COARSE[figure] * precision
    return (tolerances.COARSE_ULPS if eps > EPS else tolerances.FLOOR_ULPS) * eps


def _norm(x: Any) -> float:
    return float(np.linalg.norm(tolerances.as_float64(x)))


@dataclasses.dataclass(frozen=True)
class Noise:
    """How far apart two runs may be that differ in rounding alone, as `measure` finds it.

    Each run is one more trajectory with its own roundings, as the oracle is. So the distances of
    pairs of trajectories are samples of the distance of two runs. The bound is FACTOR times the
    greatest of ten such distances, or less where all ten are alike. If the noise is one normal
    variable, its five samples are that close together once in 10,000 measurements.
    """

    loss: np.ndarray  # of the oracle at each step, float64[steps]
    grad_norm: np.ndarray
    loss_spread: np.ndarray  # the greatest distance of two trajectories, float64[steps]
    grad_norm_spread: np.ndarray
    params: Mapping[str, tuple[float, float]]  # path -> allowed L2 distance, the oracle's L2 norm
    precision: float  # of the `Bench`
    # Step -> metric -> how far apart the means of two evaluations may be.
    evaluations: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def allowed_record(self, metric: str, first_step: int, last_step: int) -> float:
        """How far apart two runs' means over the steps first_step + 1 to last_step may be.

        FACTOR times the greatest spread so far, and the rounding of the figure itself. Ten steps
        after count too: noise grows a thousandfold within a few steps, and no two runs at the same
        one. Averaging makes real means agree better than that.

        Raises:
            ValueError: Steps that were not measured, or none.
        """
        if not 0 <= first_step < last_step <= self.steps:
            raise ValueError(f"steps {first_step + 1} to {last_step} of {self.steps} measured")
        spread = getattr(self, f"{metric}_spread")[: last_step + _MARGIN].max()
        size = np.abs(getattr(self, metric)[first_step:last_step]).mean()
        floor = _floor(METRICS[metric], np.float32, self.precision)
        return float(tolerances.FACTOR * spread + floor * size)

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`."""
        values = dataclasses.asdict(self)
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def measure(
    bench: Bench,
    data: DataSet,
    *,
    steps: int,
    evaluated: Collection[int] = (),
    report: Report = silent,
) -> Noise:
    """Runs the bench's oracle and its noisy trajectories for `steps` steps from the initial state.

    All take the run's batches and random keys, and are evaluated after the steps `evaluated`. The
    bench's strategy does not run: it may be the oracle's own configuration, `Bench(config=oracle,
    against=oracle, spec=spec)`. Its `precision` is that of the coarsest of the runs compared.

    Raises:
        UsageError: A loss, gradient norm or parameter is not finite, or the data end before.
    """
    report(f"Compiling {bench.oracle.name}")
    state = harness.to_host(bench.first_state(bench.oracle))
    trajectories = NoisyTrajectories(bench, state, _NOISY)
    figures: list[list[list[float]]] = []  # by step, trajectory and metric
    evaluations: dict[int, Mapping[str, float]] = {}
    for number, batch in enumerate(train_batches(bench, data, steps), 1):
        report("Measuring what rounding explains", f"step {number} of {steps}")
        result = harness.run_step(bench.oracle, state, batch)
        positions, state = trajectories.step(state, result, batch), result.state
        figures.append([[float(x[LOSS]), float(x[NORM])] for x in positions])
        _check_finite(figures[-1], "the loss or the gradient norm", number)
        if number in evaluated:
            report("Measuring what rounding explains", f"evaluation at step {number}")
            evaluations[number] = _allowed_evaluation(bench, data, [state, *trajectories.states()])
    if len(figures) < steps:
        raise UsageError(f"{data.name} ends after {len(figures)} of {steps} steps.")
    trajectories.add_pairs(itertools.combinations(positions, 2))
    params = {
        key[1]: (trajectories.allowed(key, x, trajectories.factor(key)), _norm(x))
        for key, x in named(PARAMETER, state.params).items()
    }
    _check_finite(list(params.values()), "a parameter", steps)
    loss, norm = np.array(figures).T  # trajectory, step
    spreads = np.ptp(loss, axis=0), np.ptp(norm, axis=0)
    return Noise(loss[0], norm[0], *spreads, params, bench.precision, evaluations)


def _allowed_evaluation(
    bench: Bench, data: DataSet, states: Iterable[TrainState]
) -> dict[str, float]:
    """How far apart two evaluations may be, by metric, from those of trajectories at one step.

    FACTOR times their spread, and the rounding of the figure itself. Where a metric counts, as an
    accuracy does, it moves by whole items: two more may fall to the other side by chance.
    """
    oracle, allowed = bench.oracle, {}
    order = EvalOrder(batch_size=oracle.eval_batch_size, rows=np.arange(oracle.eval_batch_size))
    found = [
        harness.evaluate(oracle, harness.to_devices(oracle, state), data.evaluate(order))
        for state in states
    ]
    for name, (_, count) in found[0].items():
        means = [harness.mean(sums[name]) for sums in found]
        floor = _floor((_EVALUATION, name), np.float32, bench.precision) * abs(means[0])
        counts = all(float(sums[name][0]).is_integer() for sums in found)
        items = 2 / max(count, 1.0) + 2 * bench.precision if counts else 0.0
        allowed[name] = float(tolerances.FACTOR * np.ptp(means) + floor + items)
    return allowed


def _check_finite(values: Any, what: str, step: int) -> None:
    if not np.isfinite(values).all():
        raise UsageError(
            f"what rounding explains is not known: after {step} steps on one device {what} is not "
            "finite. Compare fewer steps."
        )


def train_batches(bench: Bench, data: DataSet, count: int) -> Iterator[Batch]:
    """The run's first batches, at most `count`, each with all its examples."""
    data.prepare()
    order = train_order(bench.oracle, 0, count)
    order = dataclasses.replace(order, rows=np.arange(order.batch_size))
    for batch in itertools.islice(data.train(order), count):
        yield {name: np.array(x) for name, x in batch.items()}  # its memory may be used again
