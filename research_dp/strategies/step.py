"""One training step as every engine runs it, and one evaluation step.

The functions here see what one device sees (`mapped`, `pmapped`, with mesh axes bound) or global
arrays (`compiled`, without). An engine only wraps them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.distributed import overlap
from research_dp.distributed.boxed import unboxed
from research_dp.distributed.collectives import PLAIN, axes_size
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.norms import global_norm
from research_dp.distributed.optimizer import apply_gradients, apply_optimizer
from research_dp.distributed.remat import drop_gathered
from research_dp.distributed.sharding import TABLE
from research_dp.distributed.units import Units
from research_dp.strategies import slots
from research_dp.strategies.rng import example_keys
from research_dp.strategies.step_optimizer import StepOptimizer, check_shapes
from research_dp.strategies.strategy import (
    PlacedBatch,
    StateShardings,
    StrategyConfig,
    TrainSpec,
    TrainState,
)
from research_dp.types import LossOutput

PyTree = Any
Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Step:
    """The step functions of a strategy.

    `shardings` are those that the step sees. `axes` are the mesh axes that are bound where the step
    runs and that have more than one device; () in the compiled engine.
    """

    config: StrategyConfig
    spec: TrainSpec
    shardings: StateShardings
    axes: tuple[str, ...]

    def train(self, state: TrainState, batch: PlacedBatch) -> tuple[TrainState, Sums]:
        """One step: the new state, and metrics; see `Strategy`."""
        grads, model_state, sums, slot_state = self.mean_gradients(state, batch)
        sums = self.sum_metrics(sums)
        # Losses were divided by the rows of a device's micro-batch; the true number of valid
        # items comes in here, once.
        count = sums["loss"][1]
        rows = batch.position.shape[1] * axes_size(self.axes)
        scale = jnp.where(count > 0, rows / jnp.maximum(count, 1e-9), 0.0)
        optimizer = StepOptimizer(self, state, scale / self.loss_scale(state))
        params, slot_state = self.update(grads, state, optimizer, slot_state)
        new = TrainState(
            state.step + 1, params, model_state, optimizer.state, state.loss_scale, slot_state
        )
        return optimizer.settle(new, sums)

    def evaluate(self, state: TrainState, examples: Mapping[str, jax.Array]) -> Sums:
        """Metrics of a batch as arrays (2,) of sum and count."""
        units, params = self.units(), state.params
        if not self.spec.model.units:
            params = units.gather_all(params)
        out = self.loss(params, state.model_state, examples, None, units, train=False)
        return self.sum_metrics(sums_of(out))

    def mean_gradients(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, Sums, PyTree]:
        """(averaged gradients, new model state, sums of metrics, new state of the slots)."""
        config, several = self.config, batch.position.shape[0] > 1
        keep = config.gather is not None and not config.reshard_after_forward
        params, units, scatter = state.params, self.units(keep=keep), None
        # Units keep what they gather. For several micro-batches, a model without units, or where
        # collectives do not run beside compute, everything is gathered before, scattered after.
        if keep and (several or not self.spec.model.units or not config.overlap):
            params, scatter = jax.vjp(units.gather_all, state.params)
            units = Units()
        each = config.sync_each == "micro_batch"
        by_unit = self._syncs_by_unit and (each or not several)

        def gradients(carry: PyTree, micro: PlacedBatch) -> tuple[PyTree, Any, PyTree]:
            model_state, slot_state = carry
            if by_unit:
                grads, out = self._synced_by_unit(state, params, model_state, micro)
            else:
                loss = self.loss_of(state, model_state, micro, units)
                grads, out = jax.grad(loss, has_aux=True)(params)
                if each:
                    grads, slot_state = self.sync(grads, slot_state)
            return grads, sums_of(out), (out.model_state, slot_state)

        carry = state.model_state, state.slots
        if several:
            grads, sums, carry = add_up(gradients, carry, batch, config.accumulation_dtype)
        else:
            grads, sums, carry = gradients(carry, jax.tree.map(lambda x: x[0], batch))
        model_state, slot_state = carry
        if scatter is not None:
            (grads,) = scatter(jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))
        if not each and not by_unit:
            grads, slot_state = self.sync(grads, slot_state)
        return grads, model_state, sums, slot_state

    def loss_of(
        self,
        state: TrainState,
        model_state: PyTree,
        micro: PlacedBatch,
        units: Units,
        transform: Callable[[PyTree], PyTree] = lambda params: params,
    ) -> Callable[[PyTree], tuple[jax.Array, LossOutput]]:
        """The function of parameters that is differentiated for one micro-batch.

        `model_state` is that before this micro-batch. `transform` maps what is differentiated to
        parameters as `units` take them.
        """
        keys = example_keys(self.spec.seed, state.step, micro.position)
        gathers = units.gather is not None and not self.spec.model.units

        def loss(params: PyTree) -> tuple[jax.Array, LossOutput]:
            if gathers:  # units gather themselves, just before their use
                params = unboxed(self.gather(slots.in_boxes(params, self.shardings.params)))
            params = transform(params)
            out = self.loss(params, model_state, micro.examples, keys, units, train=True)
            # Divided by a constant, so that the numbers are of a mean's size whatever the dtype.
            return out.total / micro.position.shape[0] * self.loss_scale(state), out

        return jax.checkpoint(loss, policy=drop_gathered) if gathers else loss

    def loss(
        self,
        params: PyTree,
        model_state: PyTree,
        examples: Mapping[str, jax.Array],
        keys: jax.Array | None,
        units: Units,
        *,
        train: bool,
    ) -> LossOutput:
        """The model's loss, of parameters that its units gather, or that are unsharded."""
        options: dict[str, Any] = {"train": train, "batch_axes": self.axes}
        if self.spec.model.units:
            options["units"] = units
        return self.spec.model.loss(params, model_state, examples, keys, **options)

    @functools.cached_property
    def gather(self) -> Callable[..., PyTree]:
        """(boxed shards, optionally rows=) -> boxed full parameters, by the slot `gather`."""
        assert self.config.gather is not None
        options = slots.options_of(self.config.gather, {"reduction": self.config.reduction})
        return functools.partial(self.config.gather, axis_name=FSDP_AXIS, **options)

    def units(self, *, keep: bool = False) -> Units:
        """How the model's units are gathered."""
        config = self.config
        if config.gather is None:
            return Units()

        def gather(shards: PyTree, shardings: PyTree, **rows: jax.Array) -> PyTree:
            return unboxed(self.gather(slots.in_boxes(shards, shardings), **rows))

        # Rows are exchanged by sums of their own: only where the strategy's are the plain ones.
        exchanges = config.reduction is PLAIN and FSDP_AXIS in self.axes
        exchanges = exchanges and bool(slots.options_of(config.gather, {"rows": None}))
        look_up = gather if exchanges else None
        return Units(gather, self.shardings.params, look_up, keep=keep, prefetch=config.prefetch)

    def sync(
        self, grads: PyTree, slot_state: PyTree = (), shardings: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """(gradients as `update` takes them, new state of the slots)."""
        if self.config.sync is None:
            return grads, slot_state
        shardings = self.shardings.slices if shardings is None else shardings
        options = {"reduction": self.config.reduction, "shardings": shardings}
        if self.config.gather is not None:
            grads = slots.in_boxes(grads, shardings)
        return slots.call_in(slot_state, "sync", self.config.sync, grads, self.axes, **options)

    def update(
        self, grads: PyTree, state: TrainState, optimizer: StepOptimizer, slot_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """(new parameters, new state of the slots)."""
        params, slot_state = slots.call_in(
            slot_state,
            "update",
            self.config.update or apply_gradients,
            grads,
            state.params,
            optimizer,
            reduction=self.config.reduction,
            shardings=self.shardings.slices,
            averaged=self.config.sync is not None or not self.axes,
        )
        check_shapes("update", "parameters", params, state.params)
        return params, slot_state

    def norm(self, grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Global L2 norm, and float32 (leaves,), above 0 where a gradient is not finite."""
        del step
        return global_norm(grads, self.shardings.slices, self.config.reduction)

    def apply(self, grads: PyTree, params: PyTree, state: TrainState) -> tuple[PyTree, PyTree]:
        """Scaled gradients and parameters of one shape -> (parameters, optimizer state)."""
        return apply_optimizer(self.spec.optimizer, grads, state.opt_state, params)

    def loss_scale(self, state: TrainState) -> jax.Array | float:
        return 1.0 if self.spec.loss_scale is None else state.loss_scale.scale

    def sum_metrics(self, sums: Sums) -> Sums:
        """Sums over devices, all in one small collective; means are taken on the host."""
        if not self.axes:
            return sums
        names = sorted(sums)
        stacked = jnp.stack([sums[name] for name in names])
        summed = self.config.reduction.all_reduce(stacked, self.axes)
        return {name: summed[i] for i, name in enumerate(names)}

    @property
    def _syncs_by_unit(self) -> bool:
        """Whether each unit's gradient is synchronised as soon as it is ready.

        That saves time where collectives run beside compute, and memory where shards are smaller
        than what they are scattered from.
        """
        config = self.config
        if config.gather is not None or config.sync is None or not self.spec.model.units:
            return False
        shards = any(p.dim is not None for p in jax.tree.leaves(self.shardings.slices))
        return (config.overlap or shards) and not isinstance(config.sync, slots.Stateful)

    def _synced_by_unit(
        self, state: TrainState, params: PyTree, model_state: PyTree, micro: PlacedBatch
    ) -> tuple[PyTree, LossOutput]:
        """Averaged gradients of one micro-batch; those of tables, used twice, at the end."""
        kinds, slices = self.spec.model.units, self.shardings.slices
        late = {name: x for name, x in params.items() if kinds.get(name) == TABLE}
        early = {name: x for name, x in params.items() if name not in late}

        def sync(grads: PyTree, shardings: PyTree) -> PyTree:
            return self.sync(grads, (), shardings)[0]

        early_slices = {name: slices[name] for name in early}
        late_slices = {name: slices[name] for name in late}
        targets = overlap.targets_of(sync, early, early_slices)

        def with_targets(given: PyTree) -> PyTree:
            return {
                n: overlap.with_target(early[n], x) if n in early else x for n, x in given.items()
            }

        units = Units(overlap.synchronised(sync), slices)
        loss = self.loss_of(state, model_state, micro, units, with_targets)
        grads, out = jax.grad(loss, has_aux=True)({**targets, **late})
        return {**grads, **sync({name: grads[name] for name in late}, late_slices)}, out


def sums_of(out: LossOutput) -> Sums:
    """Metrics as float32 arrays (2,): sum and count."""
    sums = {"loss": (out.total, out.weight), **out.sums}
    return {name: jnp.stack(pair).astype(jnp.float32) for name, pair in sums.items()}
