"""A strategy and its oracle side by side, built so that every step can be looked into.

Both are built with an optimizer that keeps the gradients it was given in its state, so that one
program tells the gradients, the update and the trajectory; the strategy's own functions run as
they are. States travel between the two as host arrays.
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
from research_dp.errors import UsageError
from research_dp.strategies import PlacedBatch, Strategy, StrategyConfig, TrainSpec, TrainState
from research_dp.types import LossOutput, TrainableModel

PyTree = Any
Batch = Mapping[str, np.ndarray]


class Recorded(NamedTuple):
    """State of `recording`.

    Attributes:
        inner: State of the optimizer.
        grads: Gradients as it was given them last: averaged and clipped; zeros before.
    """

    inner: PyTree
    grads: PyTree


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, which keeps the gradients of its last update in its state."""

    def init(params: PyTree) -> Recorded:
        return Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: PyTree, state: Recorded, params: PyTree | None = None
    ) -> tuple[PyTree, Recorded]:
        updates, inner = optimizer.update(grads, state.inner, params)
        kept = jax.tree.map(lambda g, old: g.astype(old.dtype), grads, state.grads)
        return updates, Recorded(inner, kept)

    return optax.GradientTransformation(init, update)


def gradients_of(state: TrainState) -> PyTree:
    """The gradients that led to a state."""
    return _recorded(state.opt_state).grads


def optimizer_state_of(state: TrainState) -> PyTree:
    """The optimizer's state without what `recording` keeps in it."""

    def plain(x: Any) -> Any:
        return x.inner if _is_recorded(x) else x

    return jax.tree.map(plain, state.opt_state, is_leaf=_is_recorded)


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Recorded)


def _recorded(opt_state: PyTree) -> Recorded:
    (found,) = filter(_is_recorded, jax.tree.leaves(opt_state, is_leaf=_is_recorded))
    return found


class Done(NamedTuple):
    """What a step left.

    Attributes:
        state: The new state, host arrays.
        metrics: Each metric's sum and count.
        on_devices: The same state as it lies on the devices.
    """

    state: TrainState
    metrics: Mapping[str, tuple[float, float]]
    on_devices: TrainState

    @property
    def loss(self) -> float:
        return _mean(self.metrics["loss"])

    @property
    def norm(self) -> float:
        return _mean(self.metrics["grad_norm"])

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated, for something was not finite: no norm counts then."""
        return not self.metrics["grad_norm"][1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What is compared with what.

    Attributes:
        config: The strategy.
        against: The oracle; it is given what of the strategy is part of the numbers: the dtypes
            in which parameters lie and gradients add up, and the scale of the loss.
        spec: Model, optimizer (the user's own) and batch.
        precision: Relative distance of neighbouring numbers of the coarsest dtype in which the
            configuration lets gradients be, before they are summed over devices.
        gather_dtype: dtype in which the strategy gathers what it shards, if the configuration
            names one: the oracle computes with parameters rounded to it, too.
    """

    config: StrategyConfig
    against: StrategyConfig
    spec: TrainSpec
    precision: float = EPS
    gather_dtype: str | None = None

    @functools.cached_property
    def strategy(self) -> Strategy:
        return self.config.build(self._spec)

    @functools.cached_property
    def oracle(self) -> Strategy:
        numbers = ("accumulation_dtype", "param_dtype", "loss_scale")
        same = {name: getattr(self.config, name) for name in numbers}
        spec = self._spec
        if self.gather_dtype is not None and self.against.gather is None:
            spec = dataclasses.replace(spec, model=self._rounding_model())
        return dataclasses.replace(self.against, **same).build(spec)

    def _rounding_model(self) -> TrainableModel:
        """The model with those parameters rounded that the strategy shards."""
        model, layout = self.spec.model, self.strategy.shardings.params

        def loss(params: PyTree, *args: Any, **more: Any) -> LossOutput:
            def seen(x: jax.Array, place: LeafSharding) -> jax.Array:
                return x if place.dim is None else x.astype(cast_dtype(x.dtype, self.gather_dtype))

            return model.loss(jax.tree.map(seen, params, layout), *args, **more)

        return dataclasses.replace(model, loss=loss)

    def with_spec(self, **changes: Any) -> Bench:
        """The same with another model, say."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    @functools.cached_property
    def _spec(self) -> TrainSpec:
        return dataclasses.replace(self.spec, optimizer=recording(self.spec.optimizer))

    @functools.cached_property
    def applied(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """(gradients, optimizer state, parameters) -> (parameters, optimizer state), by itself."""
        optimizer = self._spec.optimizer
        if self.config.param_dtype is not None:
            optimizer = with_master_weights(optimizer)
        return jax.jit(functools.partial(apply_optimizer, optimizer))

    def update(self, state: TrainState, grads: PyTree) -> TrainState:
        """The state with its optimizer applied to some gradients, lying as the oracle's do."""
        lies = jax.tree.map(lambda x: x.sharding, self.oracle.abstract_state)
        shardings = (gradients_of(lies), lies.opt_state, lies.params)
        given = jax.device_put((grads, state.opt_state, state.params), shardings)
        params, opt_state = on_host(self.applied(*given))
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state)

    def noisy(self, state: TrainState, batch: Batch, rng: np.random.Generator) -> Done:
        """The oracle's step with everything about it changed that rounding is free to change.

        The examples of each micro-batch are in another order, keys and all, so that sums over them
        are associated otherwise; and each parameter is moved by up to one unit in the last place
        of float32, as inner products of another order would come out.
        """
        return step(self.oracle, nudged(state, rng), batch, order=_shuffled(self.spec, rng))


def step(
    strategy: Strategy, state: TrainState, batch: Batch, *, order: np.ndarray | None = None
) -> Done:
    """One training step from host arrays.

    Args:
        strategy: Built.
        state: Where it starts.
        batch: The global batch.
        order: Places in the batch of the examples as they are to lie; each keeps its key.
    """
    placed = strategy.place_batch({name: x[strategy.train_rows] for name, x in batch.items()})
    if order is not None:
        # Places travel as one more array of the batch, so that they lie as it does.
        moved = {name: x[order] for name, x in batch.items()} | {_PLACES: order.astype(np.int32)}
        examples = dict(strategy.place_batch(moved).examples)
        placed = PlacedBatch(examples=examples, position=examples.pop(_PLACES))
    on_devices, metrics = strategy.train_step(put(strategy, state), placed)
    return Done(on_host(on_devices), as_pairs(metrics), on_devices)


_PLACES = "places of the examples"


def as_pairs(metrics: Mapping[str, Any]) -> Mapping[str, tuple[float, float]]:
    """Sum and count of each metric."""
    return {name: (float(x[0]), float(x[1])) for name, x in on_host(metrics).items()}


def put(strategy: Strategy, state: TrainState) -> TrainState:
    """A host state on a strategy's devices; a copy, for it will be donated."""
    shardings = jax.tree.map(lambda x: x.sharding, strategy.abstract_state)
    return jax.device_put(state, shardings, may_alias=False)


def on_host(tree: PyTree) -> PyTree:
    """Arrays as numpy arrays of their own."""
    return jax.tree.map(lambda x: np.array(x), tree)


def nudged(state: TrainState, rng: np.random.Generator) -> TrainState:
    """A state whose parameters are moved by up to one unit in the last place of float32."""

    def nudge(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return (x.astype(np.float64) * (1 + rng.uniform(-EPS, EPS, x.shape))).astype(x.dtype)

    return state._replace(params=jax.tree.map(nudge, state.params))


def rounded(grads: PyTree, precision: float, rng: np.random.Generator) -> PyTree:
    """Gradients off by up to half a unit in the last place of a coarse dtype.

    That of a usual element at least: partial sums that cancel are of its size.
    """

    def one(g: np.ndarray) -> np.ndarray:
        wide = g.astype(np.float64)
        usual = math.sqrt(np.mean(np.square(wide))) if g.size else 0.0
        unit = precision * np.maximum(np.abs(wide), usual)
        return (wide + unit * rng.uniform(-0.5, 0.5, g.shape)).astype(g.dtype)

    return jax.tree.map(one, grads)


def _shuffled(spec: TrainSpec, rng: np.random.Generator) -> np.ndarray:
    """Places of a batch, in another order within each micro-batch."""
    rows = np.arange(spec.batch_size).reshape(spec.accumulation_steps, -1)
    return rng.permuted(rows, axis=1).reshape(-1)


def _mean(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else 0.0


def check_one_process() -> None:
    """Raises UsageError if there are several processes."""
    if jax.process_count() > 1:
        raise UsageError(
            f"certify runs in one process; this run has {jax.process_count()}. Give --cpu_devices."
        )
