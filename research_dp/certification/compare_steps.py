"""Compares steps of a strategy with the oracle's: from the oracle's states, and in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from research_dp.certification import harness, tolerances
from research_dp.certification.harness import Batch, Bench, StepResult, gradients_of
from research_dp.certification.noise import NORM, NoisyTrajectories, position
from research_dp.certification.tolerances import EPS, SIZE, Difference, Envelope, Named, gap, named
from research_dp.distributed.norms import clip_factor
from research_dp.strategies import Strategy, TrainState
from research_dp.strategies import slots as contracts
from research_dp.strategies.state import of_layout
from research_dp.strategies.step import step_of
from research_dp.training.replica_check import differing_axes
from research_dp.types import DataSet, EvalOrder

SAMPLES, MORE_SAMPLES = 3, 16  # oracle steps with other rounding: always, and in doubt
Axes = tuple[str, ...]
_NOISY = 2  # trajectories of the oracle with other rounding
_CAUSES_FIRST = (
    *("items counted", "gradient", SIZE, "gradient norm", "loss", "model state", "parameter"),
    *("optimizer state", "loss scale"),
)


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """One step of the strategy and of the oracle, both from the oracle's state.

    Slots of each continue from their own state.
    """

    bench: Bench
    number: int
    batch: Batch
    before: TrainState
    slots: Any  # state of the strategy's, before the step; None: they begin anew
    expected: StepResult  # the oracle's
    actual: StepResult  # the strategy's
    differences: list[Difference]  # of all arrays that were compared
    replicas: list[tuple[str, str, Axes]]  # that differ: kind, path, along which mesh axes

    @property
    def own(self) -> TrainState:
        """The state before the step, as the strategy has it."""
        return harness.with_slots(self.bench.strategy, self.before, self.slots)

    @property
    def wrong(self) -> list[Difference]:
        """What rounding does not explain: causes before effects, the worst first."""
        wrong = [d for d in self.differences if d.is_wrong]
        return sorted(wrong, key=lambda d: (_CAUSES_FIRST.index(d.kind), -d.excess, d.leaf))

    @property
    def is_right(self) -> bool:
        return not self.replicas and not self.wrong

    def wrong_leaves(self, kind: str) -> list[str]:
        """Leaves of a kind that differ, the worst first; gradients in elements or in size."""
        kinds = (kind, SIZE) if kind == "gradient" else (kind,)
        return list(dict.fromkeys(d.leaf for d in self.wrong if d.kind in kinds))

    def rerun(self, batch: Batch | None = None, **changes: Any) -> StepComparison:
        """Compares the step again, with another batch or a changed spec."""
        bench, start = self.bench, (self.number, self.before, batch or self.batch)
        if changes:
            bench = dataclasses.replace(bench, spec=dataclasses.replace(bench.spec, **changes))
        return compare_step(bench, *start, slots=self.slots, seed=1)


def compare_step(
    bench: Bench,
    number: int,
    state: TrainState,
    batch: Batch,
    envelope: Envelope | None = None,
    *,
    slots: Any = None,
    seed: int = 0,
) -> StepComparison:
    """Runs one step of the strategy and of the oracle from the same state, but for their slots'.

    The noise of the step is measured with `seed`, and added to what `envelope` knows, if any.
    """
    envelope = envelope or Envelope(bench.precision)
    expected = harness.run_step(bench.oracle, state, batch)
    own = harness.with_slots(bench.strategy, state, slots)
    actual = harness.run_step(bench.strategy, own, batch)
    rng = np.random.default_rng((seed, number))
    for samples in (SAMPLES, MORE_SAMPLES):
        noisy = [_measured(bench.noisy_step(state, batch, rng)) for _ in range(samples)]
        differences = envelope.compare(number, _measured(actual), _measured(expected), noisy)
        # A ReLU at its kink falls on either side, but rarely: more samples show whether it does.
        if not any(d.is_wrong for d in differences):
            break
    # The update is compared with what the optimizer makes of the strategy's own gradients.
    before, oracle = _updated(state), _updated(expected.state)
    alone, reference = (
        before if r.skipped else _updated(bench.update(state, gradients_of(r.state), r.loss))
        for r in (expected, actual)
    )
    samples_of_update = [oracle]
    if bench.mixes and not expected.skipped:  # its sums may be in another order too
        moved = harness.perturb(gradients_of(expected.state), rng, tolerances.EPS)
        samples_of_update.append(_updated(bench.update(state, moved, expected.loss)))
    noise = max(
        d.excess
        for sample in samples_of_update
        for d in tolerances.compare_updates(number, sample, alone, before)
    )
    new, allowed = _updated(actual.state), max(1.0, tolerances.FACTOR * noise)
    differences += tolerances.compare_updates(number, new, reference, before, allowed)
    replicas = list(_differing_replicas(actual.on_devices, bench.strategy.mesh))
    sides = state, slots, expected, actual
    return StepComparison(bench, number, batch, *sides, differences, replicas)


def pending(strategy: Strategy, state: TrainState) -> Named | None:
    """What `sync` has yet to send of the mean gradient; None: its slot says nothing of it."""
    slot = contracts.attribute(strategy.config.sync, "pending")
    if slot is None:
        return None
    options = contracts.options_of(slot, of_layout(strategy))
    tree = slot(jax.tree.map(jnp.asarray, state.slots["sync"]), **options)
    expected = strategy.logical_state.params
    contracts.check_state("data_parallel.sync", tree, expected, "its `pending` returned")
    return named("gradient", tree)


def gathered(strategy: Strategy, state: TrainState) -> Any:
    """The parameters that each device computes with, in full, on the host."""
    config, specs = strategy.config, jax.tree.map(lambda p: p.spec, strategy.shardings.params)
    step = step_of(config.reduction)(config, strategy.spec, strategy.shardings, strategy.batch_axes)
    whole = jax.shard_map(
        lambda params: step.gathered(params, step.shardings.params),
        mesh=config.mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    own = harness.with_slots(strategy, state)
    return harness.to_host(jax.jit(whole)(harness.to_devices(strategy, own).params))


def conserved(step: StepComparison) -> Difference | None:
    """The gradient, with what `sync` has yet to send of it, against the oracle's: the worst leaf.

    None: the slot has no `pending`, its state is not in the unit of the loss, the oracle's gradient
    is not exact, or the step was skipped.
    """
    strategy, bounds = step.bench.strategy, {d.name: d.bound for d in step.differences}
    config, skipped = strategy.config, step.expected.skipped
    is_of_loss = config.sync_each == "step" and config.reduction.logical_shards is None
    if skipped or not is_of_loss or step.bench.oracle.algorithm:
        return None
    old, new = (pending(strategy, x) for x in (step.own, step.actual.state))
    if old is None or new is None:
        return None

    def unclipped(result: StepResult) -> Named:
        factor = float(clip_factor(jnp.float32(result.norm), strategy.spec.max_grad_norm))
        return named("gradient", jax.tree.map(lambda g: g / factor, gradients_of(result.state)))

    def compared(key: tuple[str, str], sent: np.ndarray, expected: np.ndarray) -> Difference:
        parts = np.stack([np.asarray(x, np.float64) for x in (sent, new[key], -old[key])])
        apart = gap(parts.sum(0).astype(expected.dtype), expected)
        # Each part is rounded, also where they cancel.
        largest = max(np.abs(x).max(initial=0) for x in (*parts, expected))
        size = largest / max(np.abs(expected).max(initial=0), np.finfo(np.float32).tiny)
        return Difference(*key, step.number, apart, bounds[" ".join(key)] * size)

    sent, expected = unclipped(step.actual), unclipped(step.expected)
    return max((compared(k, sent[k], expected[k]) for k in expected), key=lambda d: d.excess)


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


def _differing_replicas(state: TrainState, mesh: Mesh) -> Iterator[tuple[str, str, Axes]]:
    arrays = {
        **named("gradient", gradients_of(state)),
        **_updated(state),
        **named("model state", state.model_state),
        **named("slot state", state.slots),
    }
    for (kind, leaf), x in arrays.items():
        shards = shards_by_place(x, mesh)
        parts = {place: (index, x.tobytes()) for place, (index, x) in shards.items()}
        if axes := differing_axes(parts, mesh.axis_names):
            yield kind, leaf, axes


def shards_by_place(x: jax.Array, mesh: Mesh) -> dict[tuple[int, ...], tuple[Any, np.ndarray]]:
    """By a device's coordinates in the mesh: the index of its shard, and the shard."""
    places = {device: place for place, device in np.ndenumerate(mesh.devices)}
    return {places[s.device]: (s.index, np.asarray(s.data)) for s in x.addressable_shards}


def compare_evaluation(
    bench: Bench, data: DataSet, state: TrainState, envelope: Envelope
) -> list[Difference]:
    """Compares an evaluation step, in which each example counts once and padding does not."""
    size = bench.strategy.eval_batch_size
    batch = dict(next(iter(data.evaluate(EvalOrder(batch_size=size, rows=np.arange(size))))))
    # Some examples are always padding.
    batch["mask"] = batch["mask"] * (np.arange(size) < 1 + size // 2)

    def measured(strategy: Strategy, params: Any) -> Named:
        own = harness.with_slots(strategy, state._replace(params=params))
        placed = harness.to_devices(strategy, own)
        total, count = harness.evaluate(strategy, placed, [batch])["loss"]
        loss = np.float32(harness.mean((total, count)))
        return {("evaluation loss", ""): loss, ("evaluation items counted", ""): np.float32(count)}

    params, rng = state.params, np.random.default_rng(2)
    noisy = [measured(bench.oracle, harness.perturb(params, rng, EPS)) for _ in range(SAMPLES)]
    actual, expected = measured(bench.strategy, params), measured(bench.oracle, params)
    return envelope.compare(int(state.step), actual, expected, noisy)


class FreeRun:
    """The strategy's trajectory, and the oracle's with other rounding at each step."""

    def __init__(self, bench: Bench, start: TrainState):
        self._bench = bench
        self.state = bench.first_state(bench.strategy)
        self._noisy = NoisyTrajectories(bench, start, _NOISY)

    def step(self, oracle: StepComparison) -> list[Difference]:
        """Takes the step on all trajectories, and compares the strategy's with the oracle's."""
        self.state, metrics = harness.take_step(self._bench.strategy, self.state, oracle.batch)
        state = self._bench.strategy.logical(harness.to_host(self.state))
        actual = position(metrics, state.params)
        reference, *others = self._noisy.step(oracle.before, oracle.expected, oracle.batch)
        self._noisy.add_pairs((noisy, reference) for noisy in others)
        differences = []
        for key, expected in reference.items():
            if key == NORM:  # each step from the oracle's state compares it
                continue
            allowed, apart = self._noisy.allowed(key, expected), gap(actual[key], expected)
            is_finite = apart.norm and np.isfinite(apart.norm)
            bound = apart.ulps * allowed / apart.norm if is_finite else 0.0
            differences.append(Difference(*key, oracle.number, apart, bound))
        return differences
