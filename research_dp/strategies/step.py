"""One training step as every engine runs it, and one evaluation step.

The functions here see what one device sees (`mapped`, `pmapped`, with mesh axes bound) or global
arrays (`compiled`, without). An engine only wraps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.distributed import overlap
from research_dp.distributed.batch_examples import split_over
from research_dp.distributed.boxed import unboxed
from research_dp.distributed.collectives import axes_size, cast_dtype
from research_dp.distributed.differentiable_gather import drop_gathered
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.norms import clip_factor, global_norm
from research_dp.distributed.optimizer import apply_gradients, apply_optimizer
from research_dp.distributed.sharding import TABLE
from research_dp.distributed.units import Units
from research_dp.errors import binding_error
from research_dp.strategies import slots, strategy
from research_dp.strategies.strategy import PlacedBatch, StateShardings, TrainState, example_keys
from research_dp.types import LossOutput, PyTree

Sums = dict[str, jax.Array]
# Of gradients: what is to be scaled up by more, or its square, may be 0 in its dtype.
_MOST_SCALE, _MOST_SCALE_F16 = 1e12, 1e5


@dataclasses.dataclass(frozen=True)
class Step:
    """The step functions of a strategy."""

    config: strategy.StrategyConfig
    spec: strategy.TrainSpec
    shardings: StateShardings  # as the step sees them
    axes: tuple[str, ...]  # that are bound and have several devices; () in the compiled engine

    def train(self, state: TrainState, batch: PlacedBatch) -> tuple[TrainState, Sums]:
        """One step: the new state, and metrics; see `Strategy`."""
        with self._split():
            grads, model_state, sums, slot_state = self.mean_gradients(state, batch)
        sums = self.sum_metrics(sums)
        # Losses were divided by the rows of a device's micro-batch; the true number of valid
        # items comes in here, once.
        count = sums["loss"][1]
        rows = batch.position.shape[1] * axes_size(self.axes)
        scale = jnp.where(count > 0, rows / jnp.where(count > 0, count, 1.0), 0.0)
        optimizer = StepOptimizer(self, state, scale / self.loss_scale(state))
        params, slot_state = slots.call_in(
            slot_state,
            "update",
            self.config.update or apply_gradients,
            *(grads, state.params, optimizer),
            reduction=self.config.reduction,
            shardings=self.shardings.slices,
            averaged=self.config.sync is not None or not self.axes,
        )
        if optimizer.calls != 1:
            problem = f" must call optimizer.apply_gradients once, not {optimizer.calls} times."
            raise binding_error("data_parallel.update", problem)
        slots.check_shapes("update", "parameters", params, state.params)
        new = TrainState(
            state.step + 1, params, model_state, optimizer.state, state.loss_scale, slot_state
        )
        return optimizer.skip_nonfinite(new, sums)

    def evaluate(self, state: TrainState, examples: Mapping[str, jax.Array]) -> Sums:
        """Metrics of a batch as arrays (2,) of sum and count."""
        units = self.units()
        params = state.params if self.spec.model.units else units.gather_all(state.params)
        out = self.loss(params, state.model_state, examples, None, units)
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
        self, state: TrainState, model_state: PyTree, micro: PlacedBatch, units: Units
    ) -> Callable[[PyTree], tuple[jax.Array, LossOutput]]:
        """The function of parameters that is differentiated for one micro-batch."""
        keys = example_keys(self.spec.seed, state.step, micro.position)
        gathers = units.gather is not None and not self.spec.model.units

        def loss(params: PyTree) -> tuple[jax.Array, LossOutput]:
            if gathers:  # units gather themselves, just before their use
                params = self.gather(slots.in_boxes(params, self.shardings.params), FSDP_AXIS)
                params = unboxed(params)
            out = self.loss(params, model_state, micro.examples, keys, units)
            strategy.check_loss(out, self.spec)
            # Divided by a constant, so that the numbers are of a mean's size whatever the dtype.
            return out.total / micro.position.shape[0] * self.loss_scale(state), out

        return jax.checkpoint(loss, policy=drop_gathered) if gathers else loss

    def loss(
        self, params: PyTree, model_state: PyTree, batch: Any, keys: Any, units: Units
    ) -> LossOutput:
        """The model's loss; `units` gather shards. No `keys`: evaluation."""
        options: dict[str, Any] = {"train": keys is not None, "batch_axes": self.axes}
        if self.spec.model.units:
            options["units"] = units
        with self._split():
            return self.spec.model.loss(params, model_state, batch, keys, **options)

    def _split(self) -> contextlib.AbstractContextManager[None]:
        """While the model runs, or is differentiated: over which axes its batch is split."""
        reduction = self.config.reduction
        # Logical shards know nothing of each other: each is a batch of its own.
        return split_over(self.axes if reduction.logical_shards is None else (), reduction)

    @functools.cached_property
    def gather(self) -> Callable[..., PyTree]:
        """The slot: (boxed shards, axis, optionally rows=) -> boxed full parameters."""
        slot = self.config.gather
        assert slot is not None
        options = slots.options_of(slot, {"reduction": self.config.reduction})
        return functools.partial(slot, **options)

    def units(self, *, keep: bool = False) -> Units:
        """How the model's units are gathered."""
        config = self.config
        if config.gather is None:
            return Units()

        def gather(shards: PyTree, shardings: PyTree, **rows: jax.Array) -> PyTree:
            return unboxed(self.gather(slots.in_boxes(shards, shardings), FSDP_AXIS, **rows))

        exchanges = config.reduction.exchanges_rows and FSDP_AXIS in self.axes
        look_up = gather if exchanges and slots.options_of(config.gather, {"rows": None}) else None
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

        targets = overlap.targets_of(sync, early, {name: slices[name] for name in early})
        loss = self.loss_of(state, model_state, micro, Units(overlap.synchronised(sync), slices))

        def of_targets(given: PyTree) -> tuple[jax.Array, LossOutput]:
            given_early = {name: given[name] for name in early}
            return loss({**given, **overlap.with_target(early, given_early)})

        grads, out = jax.grad(of_targets, has_aux=True)({**targets, **late})
        late_grads = {name: grads[name] for name in late}
        return {**grads, **sync(late_grads, {name: slices[name] for name in late})}, out


def sums_of(out: LossOutput) -> Sums:
    """Metrics as float32 arrays (2,): sum and count, each converted alone.

    A sum in bfloat16 would round its count, one in float16 would make it infinite.
    """
    sums = {"loss": (out.total, out.weight), **out.sums}
    return {k: jnp.stack([jnp.asarray(x, jnp.float32) for x in pair]) for k, pair in sums.items()}


class StepOptimizer:
    """The optimizer of one step, as `update` calls it with averaged gradients.

    It then has the optimizer's new state, and the global norm of the scaled gradients.
    """

    elementwise = True  # the engine has checked it (`state.check_optimizer`)

    def __init__(self, step: Step, state: TrainState, scale: jax.Array):
        self._step, self._before, self._scale = step, state, scale
        self.calls = 0
        self.state: PyTree = None

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree:
        """New parameters; shapes are those of the optimizer's shards."""
        self.calls += 1
        step, before = self._step, self._before
        slots.check_shapes("sync", "gradients", gradients, step.shardings.slices)
        slots.check_shapes("update", "parameters of the optimizer", parameters, gradients)
        norm, self._nonfinite = step.norm(gradients, before.step)
        self._norm = self._scale * norm
        scale = self._scale * clip_factor(self._norm, step.spec.max_grad_norm)
        same = step.spec.param_dtype is None  # otherwise the optimizer's parameters are wider

        def scaled(g: jax.Array, p: jax.Array) -> jax.Array:
            return (g * scale).astype(p.dtype if same else cast_dtype(p.dtype, jnp.float32))

        gradients = jax.tree.map(scaled, gradients, parameters)
        parameters, self.state = step.apply(gradients, parameters, before)
        return parameters

    def skip_nonfinite(self, new: TrainState, sums: Sums) -> tuple[TrainState, Sums]:
        """The state that the step leaves, given the one that it computed, and its metrics."""
        spec, old, norm = self._step.spec, self._before, self._norm
        metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
        is_lost = self._scale > (_MOST_SCALE if spec.loss_scale is None else _MOST_SCALE_F16)
        loss_is_wrong = ~jnp.isfinite(sums["loss"]).all() | is_lost
        wrong = ~jnp.isfinite(norm) | loss_is_wrong
        if spec.loss_scale is not None:
            finite = jnp.isfinite(norm)
            kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            adapted = spec.loss_scale.adapt(old.loss_scale, finite)
            new = kept._replace(step=new.step, loss_scale=adapted)
            # A norm that is not a number would hide all others of the record.
            shown = [jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)]
            metrics["grad_norm"] = jnp.stack(shown)
            metrics["loss_scale"] = jnp.stack([old.loss_scale.scale, jnp.ones_like(norm)])
            # Gradients that overflow are scaled down next time; a scale of 1 is not scaled down.
            wrong = ~jnp.isfinite(norm) & (old.loss_scale.scale <= 1.0) | loss_is_wrong
        if spec.skip_nonfinite:
            kept = jax.tree.map(lambda a, b: jnp.where(wrong, b, a), new, old)
            new = kept._replace(step=new.step, loss_scale=new.loss_scale)
            metrics = {name: jnp.where(wrong, 0.0, pair) for name, pair in metrics.items()}
            metrics[strategy.SKIPPED] = jnp.stack([wrong.astype(jnp.float32), jnp.ones(())])
        loss_flag = jnp.where(is_lost, strategy.WEIGHTLESS, wrong.astype(jnp.float32))
        return new, {**metrics, strategy.NONFINITE: jnp.stack([loss_flag, *self._nonfinite])}
