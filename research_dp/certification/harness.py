"""A test bench: a strategy and its oracle, with each step's gradients and update visible.

Both are built with an optimizer that records its gradients in its state; the strategy's own
functions run unchanged. States pass between the two as host arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp.certification.tolerances import EPS
from research_dp.distributed.collectives import cast_dtype
from research_dp.distributed.optimizer import apply_optimizer, with_master_weights
from research_dp.distributed.sharding import LeafSharding
from research_dp.strategies import PlacedBatch, Strategy, StrategyConfig, TrainSpec, TrainState
from research_dp.types import LossOutput, TrainableModel

PyTree = Any
Batch = Mapping[str, np.ndarray]
MetricSums = Mapping[str, tuple[float, float]]  # name -> (sum, count)
_POSITIONS = "positions of the examples"


class RecordedState(NamedTuple):
    """The optimizer's state, and the averaged, clipped gradients of its last update."""

    inner: PyTree
    grads: PyTree


def record_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the gradients of its last update in its state."""

    def init(params: PyTree) -> RecordedState:
        return RecordedState(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: PyTree, state: RecordedState, params: PyTree | None = None
    ) -> tuple[PyTree, RecordedState]:
        updates, inner = optimizer.update(grads, state.inner, params)
        recorded = jax.tree.map(lambda g, old: g.astype(old.dtype), grads, state.grads)
        return updates, RecordedState(inner, recorded)

    return optax.GradientTransformation(init, update)


def gradients_of(state: TrainState) -> PyTree:
    """The gradients that led to a state."""
    leaves = jax.tree.leaves(state.opt_state, is_leaf=_is_recorded)
    (recorded,) = filter(_is_recorded, leaves)
    return recorded.grads


def optimizer_state_of(state: TrainState) -> PyTree:
    """The optimizer's state without the recorded gradients."""
    return jax.tree.map(
        lambda x: x.inner if _is_recorded(x) else x, state.opt_state, is_leaf=_is_recorded
    )


def _is_recorded(x: Any) -> bool:
    return isinstance(x, RecordedState)


class StepResult(NamedTuple):
    """The new state, as host arrays and on the devices, and the step's metrics."""

    state: TrainState
    metrics: MetricSums
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

    @functools.cached_property
    def strategy(self) -> Strategy:
        return self.config.build(self._recording_spec)

    @functools.cached_property
    def oracle(self) -> Strategy:
        spec = self._recording_spec
        if self.gather_dtype is not None and self.against.gather is None:
            spec = dataclasses.replace(spec, model=self._rounding_model())
        numerics = ("accumulation_dtype", "param_dtype", "loss_scale")
        changes = {name: getattr(self.config, name) for name in numerics}
        return dataclasses.replace(self.against, **changes).build(spec)

    @property
    def has_slot_state(self) -> bool:
        return any(one.abstract_state.slots for one in (self.strategy, self.oracle))

    def _rounding_model(self) -> TrainableModel:
        """The model that rounds the parameters which the strategy shards."""
        model, shardings = self.spec.model, self.strategy.shardings.params

        def round_sharded(x: jax.Array, sharding: LeafSharding) -> jax.Array:
            return x if sharding.dim is None else x.astype(cast_dtype(x.dtype, self.gather_dtype))

        def loss(params: PyTree, *args: Any, **options: Any) -> LossOutput:
            return model.loss(jax.tree.map(round_sharded, params, shardings), *args, **options)

        return dataclasses.replace(model, loss=loss)

    def with_spec(self, **changes: Any) -> Bench:
        """The bench with another model, accumulation, clipping, ..."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    @functools.cached_property
    def _recording_spec(self) -> TrainSpec:
        return dataclasses.replace(self.spec, optimizer=record_gradients(self.spec.optimizer))

    @functools.cached_property
    def _apply_optimizer(self) -> Callable[..., tuple[PyTree, PyTree]]:
        optimizer = self._recording_spec.optimizer
        if self.config.param_dtype is not None:
            optimizer = with_master_weights(optimizer)
        return jax.jit(functools.partial(apply_optimizer, optimizer))

    def update(self, state: TrainState, grads: PyTree) -> TrainState:
        """Applies the optimizer to some gradients, outside any strategy."""
        shardings = _shardings(self.oracle)
        placed = jax.device_put(
            (grads, state.opt_state, state.params),
            (gradients_of(shardings), shardings.opt_state, shardings.params),
        )
        params, opt_state = to_host(self._apply_optimizer(*placed))
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state)

    def noisy_step(self, state: TrainState, batch: Batch, rng: np.random.Generator) -> StepResult:
        """The oracle's step with other rounding.

        Each micro-batch's examples are permuted with their keys, so that sums over them associate
        differently. Parameters are perturbed by up to one float32 ULP, as if inner products had
        been summed in another order.
        """
        start = perturb_params(state, rng)
        rows = np.arange(self.spec.batch_size).reshape(self.spec.accumulation_steps, -1)
        return run_step(self.oracle, start, batch, order=rng.permuted(rows, axis=1).reshape(-1))


def run_step(
    strategy: Strategy, state: TrainState, batch: Batch, *, order: np.ndarray | None = None
) -> StepResult:
    """Runs one training step from host arrays; with `order`, on the permuted examples.

    Each example keeps its random key.
    """
    if order is None:
        placed = place_batch(strategy, batch)
    else:
        # Positions are placed as one more array of the batch, so that they are sharded as it is.
        permuted = {name: x[order] for name, x in batch.items()}
        permuted[_POSITIONS] = order.astype(np.int32)
        examples = dict(strategy.place_batch(permuted).examples)
        placed = PlacedBatch(examples=examples, position=examples.pop(_POSITIONS))
    on_devices, metrics = strategy.train_step(to_devices(strategy, state), placed)
    return StepResult(to_host(on_devices), metric_sums(metrics), on_devices)


def place_batch(strategy: Strategy, batch: Batch) -> PlacedBatch:
    """Puts a global batch on a strategy's devices."""
    return strategy.place_batch({name: x[strategy.train_rows] for name, x in batch.items()})


def evaluate(strategy: Strategy, state: TrainState, batch: Batch) -> MetricSums:
    """The metrics of an evaluation batch, for a state on the devices."""
    rows = {name: x[strategy.eval_rows] for name, x in batch.items()}
    return metric_sums(strategy.eval_step(state, strategy.place_eval_batch(rows)))


def metric_sums(metrics: Mapping[str, Any]) -> MetricSums:
    """Sum and count of each metric, as Python numbers."""
    return {name: (float(x[0]), float(x[1])) for name, x in to_host(metrics).items()}


def mean(pair: tuple[float, float]) -> float:
    """Sum over count; 0 if nothing was counted."""
    return pair[0] / pair[1] if pair[1] else 0.0


def _shardings(strategy: Strategy) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, strategy.abstract_state)


def to_devices(strategy: Strategy, state: TrainState) -> TrainState:
    """A host state on a strategy's devices; a copy, because steps donate it.

    Where the state is another strategy's, such as the oracle's, slots with state begin anew.
    """
    abstract = strategy.abstract_state.slots
    if jax.tree.map(np.shape, state.slots) != jax.tree.map(np.shape, abstract):
        slots = {name: getattr(strategy.config, name).init(state.params) for name in abstract}
        # A state that differs from device to device has a leading dim for them.
        each = jax.tree.map(lambda x, a: np.broadcast_to(x, a.shape), slots or (), abstract)
        state = state._replace(slots=each)
    return jax.device_put(state, _shardings(strategy), may_alias=False)


def to_host(tree: PyTree) -> PyTree:
    """The tree with numpy copies of its arrays."""
    return jax.tree.map(lambda x: np.array(x), tree)


def perturb_params(state: TrainState, rng: np.random.Generator) -> TrainState:
    """The state with parameters moved by up to one ULP of float32."""

    def perturb(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return (x.astype(np.float64) * (1 + rng.uniform(-EPS, EPS, x.shape))).astype(x.dtype)

    return state._replace(params=jax.tree.map(perturb, state.params))


def round_gradients(grads: PyTree, precision: float, rng: np.random.Generator) -> PyTree:
    """Gradients moved by up to half a ULP of a coarse dtype.

    The ULP is at least that of a usual element: partial sums that cancel are of its size.
    """

    def perturb(g: np.ndarray) -> np.ndarray:
        exact = g.astype(np.float64)
        usual = math.sqrt(np.mean(np.square(exact))) if g.size else 0.0
        unit = precision * np.maximum(np.abs(exact), usual)
        return (exact + unit * rng.uniform(-0.5, 0.5, g.shape)).astype(g.dtype)

    return jax.tree.map(perturb, grads)
