"""A test bench: a strategy and its oracle, with each step's gradients and update visible.

Both are built with an optimizer that records its gradients in its state; the strategy's own
functions run unchanged. States pass between the two as host arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.certification.tolerances import EPS
from research_dp.distributed.collectives import cast_dtype
from research_dp.distributed.jaxpr import mixing_operation
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.optimizer import apply_in_step
from research_dp.distributed.sharding import LeafSharding, is_key
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.manifest import Progress
from research_dp.strategies import (
    NONFINITE,
    PlacedBatch,
    Strategy,
    StrategyConfig,
    TrainSpec,
    TrainState,
)
from research_dp.strategies.state import init_slots
from research_dp.strategies.strategy import init_key
from research_dp.training.initial import InitialParams
from research_dp.training.throughput import accumulate
from research_dp.types import HostSums, LossOutput

PyTree = Any
Batch = Mapping[str, np.ndarray]
Restore = Callable[[Strategy], TrainState]
POSITIONS = "positions of the examples"


class RecordedState(NamedTuple):
    """The optimizer's state, and the averaged, clipped gradients of its last update."""

    inner: PyTree
    recorded_gradients: PyTree


def record_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the gradients of its last update in its state."""

    def init(params: PyTree) -> RecordedState:
        return RecordedState(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    inner_update = optax.with_extra_args_support(optimizer).update

    def update(
        grads: PyTree, state: RecordedState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, RecordedState]:
        updates, inner = inner_update(grads, state.inner, params, **extra)
        old = state.recorded_gradients
        return updates, RecordedState(
            inner, jax.tree.map(lambda g, x: g.astype(x.dtype), grads, old)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def gradients_of(state: TrainState) -> PyTree:
    """The gradients that led to a state."""
    return optax.tree.get(state.opt_state, "recorded_gradients")


def optimizer_state_of(state: TrainState) -> PyTree:
    """The optimizer's state without the recorded gradients."""

    def is_recorded(x: Any) -> bool:
        return isinstance(x, RecordedState)

    return jax.tree.map(
        lambda x: x.inner if is_recorded(x) else x, state.opt_state, is_leaf=is_recorded
    )


class StepResult(NamedTuple):
    """The new state, as host arrays and on the devices, and the step's metrics."""

    state: TrainState
    metrics: HostSums
    on_devices: TrainState

    @property
    def loss(self) -> float:
        return mean(self.metrics["loss"])

    @property
    def norm(self) -> float:
        return mean(self.metrics["grad_norm"])

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a value was not finite."""
        return not self.metrics["grad_norm"][1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A strategy and the oracle that it is compared with."""

    config: StrategyConfig
    against: StrategyConfig  # takes the strategy's param_dtype, accumulation_dtype and loss_scale
    spec: TrainSpec
    precision: float = EPS  # epsilon of the coarsest dtype of gradients before they are summed
    gather_dtype: str | None = None  # of the strategy; the oracle rounds sharded parameters to it
    initial: InitialParams | None = None  # None: from the seed

    def first_state(self, strategy: Strategy) -> TrainState:
        """A strategy's state before the first step, on its devices."""
        arrays = self.initial and self.initial.arrays(strategy, lambda line: None)
        return strategy.init(init_key(self.spec.seed), arrays)

    @functools.cached_property
    def strategy(self) -> Strategy:
        return self._config.build(self._recording_spec)

    @functools.cached_property
    def oracle(self) -> Strategy:
        spec, model, dtype = self._recording_spec, self.spec.model, self.gather_dtype

        def round_sharded(x: jax.Array, sharding: LeafSharding) -> jax.Array:
            return x if sharding.dim is None else x.astype(cast_dtype(x.dtype, dtype))

        def loss(params: PyTree, *args: Any, **options: Any) -> LossOutput:
            rounded = jax.tree.map(round_sharded, params, self.strategy.shardings.params)
            return model.loss(rounded, *args, **options)

        if dtype is not None and self.against.gather is None:
            spec = dataclasses.replace(spec, model=dataclasses.replace(model, loss=loss))
        numerics = ("accumulation_dtype", "loss_scale")
        changes = {name: getattr(self.config, name) for name in numerics}
        changes["param_dtype"] = self.config.stored_dtype
        return dataclasses.replace(self.against, **changes).build(spec)

    @functools.cached_property
    def _config(self) -> StrategyConfig:
        return dataclasses.replace(self.config, optimizer=None)

    @functools.cached_property
    def _recording_spec(self) -> TrainSpec:
        """With the strategy's optimizer, which the oracle takes too."""
        optimizer = record_gradients(self.config.optimizer_of(self.spec))
        return dataclasses.replace(self.spec, optimizer=optimizer)

    @functools.cached_property
    def _apply_optimizer(self) -> Callable[..., tuple[PyTree, PyTree]]:
        optimizer = self._config.fitted(self._recording_spec).optimizer
        return jax.jit(functools.partial(apply_in_step, optimizer))

    @functools.cached_property
    def mixes(self) -> bool:
        """Whether the optimizer's update combines elements, so that devices may sum otherwise."""
        state = self.oracle.abstract_state
        update = jax.make_jaxpr(functools.partial(apply_in_step, self.oracle.spec.optimizer))
        program = update(state.params, state.opt_state, state.params, jnp.float32(1))
        return mixing_operation(program) is not None

    @property
    def rows_by_device(self) -> list[np.ndarray]:
        """The positions in the batch of each device's examples."""
        devices = batch_devices(self.strategy.mesh)
        rows = np.arange(self.spec.batch_size).reshape(self.spec.accumulation_steps, devices, -1)
        return [rows[:, device].reshape(-1) for device in range(devices)]

    def update(self, state: TrainState, grads: PyTree, loss: float) -> TrainState:
        """Applies the optimizer to some gradients, of this loss, outside any strategy."""
        shardings = jax.tree.map(lambda x: x.sharding, self.oracle.logical_state)
        placed = jax.device_put(
            (grads, state.opt_state, state.params),
            (gradients_of(shardings), shardings.opt_state, shardings.params),
        )
        params, opt_state = to_host(self._apply_optimizer(*placed, loss))
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state)

    def noisy_step(self, state: TrainState, batch: Batch, rng: np.random.Generator) -> StepResult:
        """The oracle's step with other rounding.

        Each micro-batch's examples are permuted with their keys, so that sums over them associate
        differently. Parameters are perturbed by up to one float32 ULP, as if inner products had
        been summed in another order.
        """
        start = state._replace(params=perturb(state.params, rng, EPS))
        rows = np.arange(self.spec.batch_size).reshape(self.spec.accumulation_steps, -1)
        order = rng.permuted(rows, axis=1).reshape(-1)
        # Positions are placed as one more array of the batch, so that they are sharded as it is.
        permuted = {name: x[order] for name, x in batch.items()}
        permuted[POSITIONS] = order.astype(np.int32)
        examples = dict(self.oracle.place_batch(permuted).examples)
        return run_step(self.oracle, start, PlacedBatch(examples, examples.pop(POSITIONS)))


def run_step(strategy: Strategy, state: TrainState, batch: Batch | PlacedBatch) -> StepResult:
    """Runs one training step from host arrays; the batch may be on the devices already."""
    on_devices, metrics = take_step(strategy, to_devices(strategy, state), batch)
    return StepResult(strategy.logical(to_host(on_devices)), metrics, on_devices)


def take_step(
    strategy: Strategy, state: TrainState, batch: Batch | PlacedBatch
) -> tuple[TrainState, HostSums]:
    """Runs one training step from a state on the devices, which it donates."""
    if not isinstance(batch, PlacedBatch):
        batch = place_rows(strategy, batch)
    new, metrics = strategy.train_step(state, batch)
    return new, accumulate({}, [{name: x for name, x in metrics.items() if name != NONFINITE}])


def place_rows(strategy: Strategy, batch: Batch) -> PlacedBatch:
    """The rows of a global batch that are this process's, on its devices."""
    return strategy.place_batch({name: x[strategy.train_rows] for name, x in batch.items()})


def evaluate(strategy: Strategy, state: TrainState, batches: Iterable[Batch]) -> HostSums:
    """The metrics of evaluation batches, for a state on the devices."""
    sums: HostSums = {}
    for batch in batches:
        rows = {name: x[strategy.eval_rows] for name, x in batch.items()}
        sums = accumulate(sums, [strategy.eval_step(state, strategy.place_eval_batch(rows))])
    return sums


def mean(pair: tuple[float, float]) -> float:
    """Sum over count; 0 if nothing was counted."""
    return pair[0] / pair[1] if pair[1] else 0.0


def to_devices(strategy: Strategy, state: TrainState) -> TrainState:
    """A host state on a strategy's devices; a copy, because steps donate it."""
    return strategy.stored(to_host(state))


@contextlib.contextmanager
def saved(bench: Bench, strategy: Strategy, state: TrainState) -> Iterator[Restore]:
    """Saves a state; the folder is opened anew for each use, as by a run that continues."""
    spec = bench.spec
    progress = Progress(batch_size=spec.batch_size, seed=spec.seed, order="", window={})
    with tempfile.TemporaryDirectory() as folder:

        def restore(other: Strategy) -> TrainState:
            with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
                restored = checkpoints.restore(other)
            assert restored is not None  # it was saved just now
            return other.logical(to_host(restored[0]))

        with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
            placed, step = to_devices(strategy, state), int(state.step)
            checkpoints.save(placed, step, progress, {}, strategy.logical_state)
        yield restore


def with_slots(strategy: Strategy, state: TrainState, slots: PyTree = None) -> TrainState:
    """Another strategy's state, with this one's in slots: `slots`, or None: they begin anew."""
    if slots is None:
        key = init_key(strategy.spec.seed)
        slots = init_slots(strategy.config, strategy.spec, state.params, key)
    return state._replace(slots=slots or ())


def to_host(tree: PyTree) -> PyTree:
    """The tree with copies of its arrays: numpy's, but for random keys."""
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else np.array(x), tree)


def perturb(
    tree: PyTree, rng: np.random.Generator, relative: float, *, least_usual: bool = False
) -> PyTree:
    """Moves each floating-point element by up to so much of itself, or of a usual element."""

    def one(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        exact = unit = x.astype(np.float64)
        if least_usual and x.size:
            unit = np.maximum(np.abs(exact), math.sqrt(np.mean(np.square(exact))))
        return (exact + relative * unit * rng.uniform(-1, 1, x.shape)).astype(x.dtype)

    return jax.tree.map(one, tree)
