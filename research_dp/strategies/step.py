"""One training step as every engine runs it, and one evaluation step.

A step has two parts. `gradients` and `evaluate` see what one device sees (`mapped`, with mesh axes
bound) or global arrays (`compiled`, without). `update` always sees global arrays, so that any Optax
transform runs as it is. An engine only wraps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from research_dp.distributed import matrices, overlap
from research_dp.distributed.batch_examples import split_over
from research_dp.distributed.boxed import unboxed
from research_dp.distributed.codecs import Encoding
from research_dp.distributed.collectives import Reduction, axes_size, cast_dtype
from research_dp.distributed.differentiable_gather import drop_gathered
from research_dp.distributed.mesh import FSDP_AXIS, traced_for
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.norms import clip_factor, global_norm
from research_dp.distributed.optimizer import apply_gradients, apply_in_step
from research_dp.distributed.sharding import (
    PART,
    STACK,
    LeafSharding,
    Parted,
    fitted,
    is_sharded,
    of_parts,
    parted,
    replicated,
    unit_of,
)
from research_dp.distributed.unit_order import Order
from research_dp.distributed.units import Units
from research_dp.errors import binding_error
from research_dp.strategies import slots, strategy
from research_dp.strategies.frozen import frozen_of, joined, with_values
from research_dp.strategies.nonfinite import without_nonfinite
from research_dp.strategies.strategy import PlacedBatch, StateShardings, TrainState, example_keys
from research_dp.types import LossOutput, PyTree

Sums = dict[str, jax.Array]
Gathers = Literal["at use", "once a unit", "once"]


class Gradients(NamedTuple):
    """What a step computes of its batch: averages over all devices."""

    grads: PyTree  # as `update` takes them
    scale: jax.Array  # 0-d float32, that they were, or are to be, multiplied by: see `Step.scales`
    norm: jax.Array  # global L2 norm before scaling; 0-d float32
    nonfinite: jax.Array  # float32 (leaves,), above 0 where a gradient is not finite
    sums: Sums
    model_state: PyTree
    slots: PyTree


class GradientPlan(NamedTuple):
    """How a step gets averaged gradients."""

    gathers: Gathers  # where parameters are sharded; "once": for all micro-batches together
    syncs: Literal["unit", "micro_batch", "step"]  # after what gradients are synchronised


@dataclasses.dataclass(frozen=True)
class Step:
    """The step functions of a strategy."""

    # Whether arrays of which the devices divide no dim are padded with zeros.
    pads: ClassVar[bool] = True

    config: strategy.StrategyConfig
    spec: strategy.TrainSpec
    shardings: StateShardings  # of global arrays
    axes: tuple[str, ...]  # that are bound and have several devices; () in the compiled engine
    # Of each training loss that was traced: whether the weight of a batch is computed, maybe 0.
    weighted: list[bool] = dataclasses.field(default_factory=list)

    @staticmethod
    def check_model(
        config: strategy.StrategyConfig, spec: strategy.TrainSpec, abstract: TrainState
    ) -> None:
        """Raises UsageError for a model, or an option, that this step cannot do."""

    @staticmethod
    def positions(spec: strategy.TrainSpec, devices: int, reduction: Reduction) -> np.ndarray:
        """Positions in the global batch, int32: a row for each micro-batch, of all devices."""
        del devices, reduction
        return np.arange(spec.batch_size, dtype=np.int32).reshape(spec.accumulation_steps, -1)

    def train(self, state: TrainState, batch: PlacedBatch) -> tuple[TrainState, Sums]:
        """One step: the new state, and metrics; see `Strategy`."""
        return self.update(state, self.gradients(state, batch))

    def gradients(self, state: TrainState, batch: PlacedBatch) -> Gradients:
        """What a step computes of its batch."""
        rows = batch.position.shape[1] * axes_size(self.axes)

        def summed(sums: Sums) -> tuple[Sums, jax.Array]:
            """Metrics over devices, and the scale of gradients."""
            sums = self.sum_metrics(sums)
            return sums, _scale_of(sums["loss"][1], rows) / self.loss_scale(state)

        scale: Any = None
        reported: Sums = {}
        with self._split():
            grads, model_state, sums, slot_state = self.local_gradients(state, batch)
            if self.plan.syncs == "step":
                offered: dict[str, Any] = {"report": _reporter(reported)}
                if self.carries_state or slots.takes_any(self.config.sync, "scale"):
                    sums, scale = summed(sums)
                    before, offered["scale"] = self.scales(scale)
                    if self.carries_state:
                        grads = jax.tree.map(lambda g: self._times(g, before), grads)
                grads, slot_state = self.sync(grads, state, slot_state, **offered)
        if reported:
            sums |= reported if scale is None else self.sum_metrics(reported)
        # Global arrays are whole for who sees them, however devices share them.
        slices = self.shardings.slices if self.axes else replicated(self.shardings.slices)
        slots.check_shapes("sync", "gradients", grads, slices)
        norm, nonfinite = self.norm(grads, slices, state.step)
        if scale is None:
            sums, scale = summed(sums)
        return Gradients(grads, scale, norm, nonfinite, sums, model_state, slot_state)

    def update(self, state: TrainState, given: Gradients) -> tuple[TrainState, Sums]:
        """The new state, and metrics, of global arrays."""
        count = given.sums["loss"][1]
        # Then nothing but the step's number changes.
        is_empty = (count <= 0) & jnp.isfinite(count) if any(self.weighted) else None
        _, scale = self.scales(given.scale)
        norm = scale * given.norm
        factor = scale * clip_factor(norm, self.spec.max_grad_norm)
        same = self.spec.param_dtype is None  # otherwise the optimizer's parameters are wider

        def scaled(g: jax.Array, p: jax.Array) -> jax.Array:
            return (g * factor).astype(p.dtype if same else cast_dtype(p.dtype, jnp.float32))

        value = given.sums["loss"][0] / jnp.where(count > 0, count, 1.0)
        opt_states = list[PyTree]()

        def apply(grads: PyTree, params: PyTree) -> PyTree:
            params, opt_state = self.apply(state, is_empty, value, grads, params)
            opt_states.append(opt_state)
            return params

        optimizer = types.SimpleNamespace(apply_gradients=apply)
        update = self.config.update or apply_gradients
        arguments = jax.tree.map(scaled, given.grads, state.params), state.params, optimizer
        offered = {
            **self._context("update", update, state),
            "mesh": self.config.mesh,
            "shardings": self.shardings.slices,
            "stored": self.shardings.params,
            **self._encoding(self.shardings.params),
        }
        try:
            params, slot_state = slots.call_in(given.slots, "update", update, *arguments, **offered)
        except NameError as error:
            if "axis" not in str(error):
                raise
            raise binding_error(
                "data_parallel.update",
                f": {error}. It is called outside of the map, with global arrays: take `mesh`, and "
                "use jax.shard_map.",
            ) from error
        if (calls := len(opt_states)) != 1:
            problem = f" must call optimizer.apply_gradients once, not {calls} times."
            raise binding_error("data_parallel.update", problem)
        (opt_state,) = opt_states
        slots.check_shapes("update", "parameters", params, state.params)
        slots.check_state(f"{self.spec.gin_name}.optimizer", opt_state, state.opt_state)
        new = TrainState(
            state.step + 1, params, given.model_state, opt_state, state.loss_scale, slot_state
        )
        return without_nonfinite(
            self.spec, state, new, given.sums, norm, given.nonfinite, given.scale, is_empty
        )

    def evaluate(self, state: TrainState, examples: Mapping[str, jax.Array]) -> Sums:
        """Metrics of a batch as arrays (2,) of sum and count."""
        units, params = self.units(), state.params
        if units.gather and not self.spec.model.units:
            params = self.gathered(params, self.shardings.params)
        out = self.loss(params, state.model_state, examples, None, units)
        return self.sum_metrics(sums_of(out))

    def local_gradients(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, Sums, PyTree]:
        """(gradients, new model state, sums of metrics, new state of the slots).

        Gradients are averages, but for a plan that synchronises them once a step, after this.
        """
        plan, params, model_state, scatter = self.plan, state.params, state.model_state, None
        units = self.units(keep=plan.gathers != "at use")
        if plan.gathers == "once":
            params, scatter, model_state = self.gathered_once(state)
            units = Units()

        def gradients(carry: PyTree, micro: PlacedBatch) -> tuple[PyTree, Any, PyTree]:
            model_state, slot_state = carry
            if plan.syncs == "unit":
                grads, out, slot_state = self._synced_by_unit(state, params, micro, *carry)
            else:
                loss = self.loss_of(state, model_state, micro, units)
                grads, out = jax.grad(loss, has_aux=True)(params)
            if plan.syncs == "micro_batch":
                grads, slot_state = self.sync(grads, state, slot_state)
            return grads, sums_of(out), (out.model_state, slot_state)

        carry = model_state, state.slots
        if batch.position.shape[0] > 1:
            grads, sums, carry = add_up(gradients, carry, batch, self.config.accumulation_dtype)
        else:
            grads, sums, carry = gradients(carry, jax.tree.map(lambda x: x[0], batch))
        model_state, slot_state = carry
        if scatter is not None:
            (grads,) = scatter(jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))
            model_state = with_values(model_state, frozen_of(state.model_state))
        return grads, model_state, sums, slot_state

    @functools.cached_property
    def plan(self) -> GradientPlan:
        """When parameters are gathered and gradients synchronised; decided at the first trace."""
        config, has_units = self.config, bool(self.spec.model.units)
        several = self.spec.accumulation_steps > 1
        gathers: Gathers = "at use"
        if config.gather is not None and not config.reshard_after_forward:
            # Units keep what they gather. For several micro-batches, or where collectives do not
            # run beside compute, everything is gathered before, scattered after.
            gathers = "once a unit" if has_units and config.overlap and not several else "once"
        # Unit by unit saves time where collectives run beside compute, and memory where shards are
        # smaller than what they are scattered from.
        shards = is_sharded(self.shardings.slices)
        may = config.sync is not None and not slots.takes_any(config.sync, *slots.OF_A_STEP)
        if config.compression and config.compression.draws:  # by a key of the step
            may = False
        if isinstance(config.sync, slots.Stateful):  # the unit of gradients is that of the loss
            may &= slots.is_by_unit(config.sync) and config.sync_each == "step"
            may &= self.spec.loss_scale is None and not several
        by_unit = config.gather is None and may and has_units and (config.overlap or shards)
        syncs = config.sync_each
        return GradientPlan(
            gathers, "unit" if by_unit and (syncs != "step" or not several) else syncs
        )

    @property
    def carries_state(self) -> bool:
        """Whether `sync` has state, and gradients are scaled before it."""
        return isinstance(self.config.sync, slots.Stateful) and self.plan.syncs != "micro_batch"

    def scales(self, scale: jax.Array) -> tuple[Any, jax.Array]:
        """What gradients are multiplied by before they are synchronised, and after."""
        return (scale, jnp.ones_like(scale)) if self.carries_state else (1.0, scale)

    def _times(self, g: jax.Array, factor: Any) -> jax.Array:
        """A gradient in the unit of the loss; in float16 it could be 0 without its loss scale."""
        dtype = g.dtype if self.spec.loss_scale is None else cast_dtype(g.dtype, jnp.float32)
        return (g * factor).astype(dtype)

    def loss_of(
        self, state: TrainState, model_state: PyTree, micro: PlacedBatch, units: Units
    ) -> Callable[[PyTree], tuple[jax.Array, LossOutput]]:
        """The function of parameters that is differentiated for one micro-batch."""
        keys = example_keys(self.spec.seed, state.step, micro.position)
        gathers = units.gather is not None and not self.spec.model.units

        def loss(params: PyTree) -> tuple[jax.Array, LossOutput]:
            if gathers:  # units gather themselves, just before their use
                params = self.gathered(params, self.shardings.params)
            out = self.loss(params, model_state, micro.examples, keys, units)
            # Divided by a constant, so that the numbers are of a mean's size whatever the dtype.
            return out.total / micro.position.shape[0] * self.loss_scale(state), out

        return jax.checkpoint(loss, policy=drop_gathered) if gathers else loss

    def loss(
        self, params: PyTree, model_state: PyTree, batch: Any, keys: Any, units: Units
    ) -> LossOutput:
        """The model's loss; `units` gather shards. No `keys`: evaluation."""
        options: dict[str, Any] = {"train": keys is not None, "batch_axes": self.axes}
        order, frozen = Order(), frozen_of(model_state)
        if self.spec.model.units:
            options["units"] = dataclasses.replace(units, order=order)
        elif units.gather is not None:
            model_state = self._with_gathered(model_state)
        with self._split():
            out = self.spec.model.loss(params, model_state, batch, keys, **options)
        strategy.check_loss(out, self.spec)
        if keys is not None:
            self.weighted.append(isinstance(out.weight, jax.core.Tracer))
            slots.check_state(f"{self.spec.gin_name}.model", out.model_state, model_state)
        model_state = with_values(out.model_state, frozen)
        return out._replace(total=order.finish(out.total), model_state=model_state)

    @contextlib.contextmanager
    def _split(self) -> Iterator[None]:
        """While the model runs, or is differentiated: over which axes its batch is split."""
        reduction = self.config.reduction
        # Logical shards know nothing of each other: each is a batch of its own.
        axes = self.axes if reduction.logical_shards is None else ()
        with split_over(axes, reduction), traced_for(self.config.mesh, self.axes):
            yield

    @functools.cached_property
    def gather(self) -> Callable[..., PyTree]:
        """The slot: (boxed shards, axis, optionally rows=) -> boxed full parameters."""
        slot = self.config.gather
        assert slot is not None
        options = slots.options_of(slot, {"reduction": self.config.reduction})
        return functools.partial(slot, **options)

    def gathered(self, shards: PyTree, shardings: PyTree, **rows: jax.Array) -> PyTree:
        """What the slot gathers of shards, without padding; of tables maybe some rows alone.

        Frozen parameters by themselves: a bucket with others would scatter a gradient for them.
        """
        layouts = parted(shardings, shardings)
        if not jax.tree.leaves(shardings):
            return shards
        if all(map(jax.tree.leaves, layouts)):
            parts = Parted(*map(self.gathered, parted(shards, shardings), layouts))
            return of_parts(parts, shardings)
        if not self.axes:  # global arrays
            shards = jax.tree.map(lambda x, p: fitted(x, p.split_shape), shards, shardings)
        options = slots.options_of(self.gather, self._encoding(shardings))
        boxes = slots.in_boxes(shards, shardings)
        full = unboxed(self.gather(boxes, FSDP_AXIS, **options, **rows))

        def cut(x: jax.Array, p: LeafSharding) -> jax.Array:
            return fitted(x, (*x.shape[:-1], *p.shape[-1:]) if rows else p.shape)

        return jax.tree.map(cut, full, shardings)

    def gathered_all(self, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        """Unsharded parameters, and the model state with unsharded frozen ones."""
        if self.config.gather is None:
            return params, model_state
        params = self.gathered(params, self.shardings.params)
        return params, self._with_gathered(model_state)

    def _with_gathered(self, model_state: PyTree) -> PyTree:
        frozen = self.gathered(frozen_of(model_state), self.shardings.frozen)
        return with_values(model_state, frozen)

    def gathered_once(self, state: TrainState) -> tuple[PyTree, Callable[..., Any], PyTree]:
        """`gathered_all` of a state: parameters, what scatters their gradient, model state."""
        gather = functools.partial(self.gathered_all, model_state=state.model_state)
        params, scatter, model_state = jax.vjp(gather, state.params, has_aux=True)
        return params, scatter, model_state

    def units(self, *, keep: bool = False) -> Units:
        """How the model's units are gathered."""
        config = self.config
        if config.gather is None:
            return Units()

        exchanges = config.reduction.exchanges_rows and FSDP_AXIS in self.axes
        takes_rows = exchanges and slots.takes_any(config.gather, "rows")
        look_up = self.gathered if takes_rows else None
        return Units(
            self.gathered,
            self.shardings.stored,
            look_up,
            keep=keep,
            prefetch=config.prefetch,
            kinds=self.spec.model.units,
        )

    def sync(
        self,
        grads: PyTree,
        state: TrainState,
        slot_state: PyTree = (),
        shardings: PyTree = None,
        **offered: Any,
    ) -> tuple[PyTree, PyTree]:
        """(gradients as `update` takes them, new state of the slots)."""
        slot = self.config.sync
        if slot is None:
            return grads, slot_state
        # A part of the model is synchronised by itself where parameters are not gathered.
        stored = self.shardings.params if shardings is None else replicated(shardings)
        shardings = self.shardings.slices if shardings is None else shardings
        options = {**self._context("sync", slot, state), "params": state.params, **offered}
        options |= {"shardings": shardings, "stored": stored}
        options |= self._encoding(stored, state)
        if self.config.gather is not None:
            grads = slots.in_boxes(grads, self.shardings.params)
        return slots.call_in(slot_state, "sync", slot, grads, self.axes, **options)

    def _encoding(self, shardings: PyTree, state: TrainState | None = None) -> dict[str, Encoding]:
        """What slots that communicate are offered, if the strategy has codecs."""
        given, key = self.config.compression, None
        if given is None:
            return {}
        if given.draws and state is not None:
            key = strategy.slot_key(self.spec.seed, state.step, "sync")
        return {"encoding": Encoding(given, shardings, key)}

    def _context(self, name: str, slot: Any, state: TrainState) -> dict[str, Any]:
        """What `sync` and `update` are both offered."""
        devices = dict(self.config.mesh.shape)
        offered = {"reduction": self.config.reduction, "devices": devices, "step": state.step}
        if slots.takes_any(slot, "key"):
            offered["key"] = strategy.slot_key(self.spec.seed, state.step, name)
        return offered

    def norm(self, grads: PyTree, slices: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Global L2 norm, and float32 (leaves,), above 0 where a gradient is not finite."""
        del step
        return global_norm(grads, slices, self.config.reduction)

    def apply(
        self,
        state: TrainState,
        is_empty: jax.Array | None,
        value: jax.Array,
        grads: PyTree,
        params: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """Scaled gradients and parameters -> (new parameters, optimizer state).

        `value` is the loss. Where a batch `is_empty` (None: it never is), nobody uses the results.
        """
        del is_empty
        with matrices.over(self.config.mesh, self.shardings.slices):
            return apply_in_step(self.spec.optimizer, grads, state.opt_state, params, value)

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

    def _synced_by_unit(
        self,
        state: TrainState,
        params: PyTree,
        micro: PlacedBatch,
        model_state: PyTree,
        slot_state: PyTree,
    ) -> tuple[PyTree, LossOutput, PyTree]:
        """(averaged gradients of one micro-batch, the loss's output, new state of the slots).

        Gradients of tables, used twice, are averaged at the end.
        """
        kinds, slices = self.spec.model.units, self.shardings.slices
        slot: Any = self.config.sync
        own = slots.of_one_device("sync", slot, slot_state["sync"]) if self.carries_state else {}

        def by_leaf(fields: Mapping[str, PyTree], tree: PyTree) -> PyTree:
            """The state of each leaf of a tree, as a tuple: as autodiff takes it."""
            return jax.tree.map(lambda _, *of_leaf: of_leaf, tree, *(fields[name] for name in own))

        def by_field(states: PyTree, tree: PyTree) -> dict[str, PyTree]:
            each = enumerate(own)
            return {name: jax.tree.map(lambda _, x, i=i: x[i], tree, states) for i, name in each}

        def sync(grads: PyTree, shardings: PyTree, states: PyTree) -> tuple[PyTree, PyTree]:
            if not own:
                return self.sync(grads, state, (), shardings)[0], states
            synced.update(p.path for p in jax.tree.leaves(shardings))
            if not jax.tree.leaves(grads):
                return grads, states
            fields = by_field(states, grads)
            carried = {"sync": slots.of_all_devices("sync", slot, fields, fields)}
            means, new = self.sync(grads, state, carried, shardings)
            return means, by_leaf(slots.of_one_device("sync", slot, new["sync"]), grads)

        split = (_early_and_late(x, kinds) for x in (params, slices, by_leaf(own, params)))
        (early, late), (early_slices, late_slices), (early_states, late_states) = split
        synced = Counter[str]()  # how often each gradient was
        targets = overlap.targets_of(sync, early, early_slices, early_states)
        synced.clear()
        units = Units(overlap.synchronised(sync), slices, kinds=kinds)
        loss = self.loss_of(state, model_state, micro, units)

        def of_targets(given: PyTree, states: PyTree, late: PyTree) -> tuple[jax.Array, LossOutput]:
            return loss(joined(overlap.with_target(early, given, states), late))

        total, back, out = jax.vjp(of_targets, targets, early_states, late, has_aux=True)
        scale = jnp.ones_like(total)
        if own:  # in the unit of the loss before they are synchronised
            devices, pair = axes_size(self.axes), sums_of(out)["loss"]
            is_known = not self.weighted[-1]  # the same on all devices: nothing waits for a sum
            count = devices * pair[1] if is_known else self.sum_metrics({"loss": pair})["loss"][1]
            scale *= _scale_of(count, micro.position.shape[0] * devices).astype(scale.dtype)
        grads, new_states, late_grads = back(scale)
        late_means, late_new = sync(late_grads, late_slices, late_states)
        if own:
            for p in jax.tree.leaves(slices):
                if synced[p.path] != 1:
                    problem = (
                        f": the gradient of {p.path} is ready {synced[p.path]} times in a step"
                    )
                    raise binding_error("data_parallel.sync", f".by_unit{problem}. Bind False.")
            new = by_field(joined(new_states, late_new), params)
            slot_state = {**slot_state, "sync": slots.of_all_devices("sync", slot, new, own)}
        return joined(grads, late_means), out, slot_state


def _early_and_late(tree: PyTree, kinds: Mapping[str, str]) -> tuple[PyTree, PyTree]:
    """What is synchronised unit by unit, and what at the end."""
    flat = flatten_dict(tree)
    units = {k: unit_of("/".join(map(str, k)), kinds) for k in flat}
    early = {k for k, unit in units.items() if unit and kinds[unit] in (PART, STACK)}
    return tuple(
        unflatten_dict({k: x for k, x in flat.items() if (k in early) is is_early})
        for is_early in (True, False)
    )


def _scale_of(count: jax.Array, rows: int) -> jax.Array:
    """Losses were divided by rows; the true number of valid items comes in here, once."""
    return jnp.where(count > 0, rows / jnp.where(count > 0, count, 1.0), 0.0)


def _reporter(reported: Sums) -> Callable[[str, Any], None]:
    """What `sync` reports metrics by, under names of their own."""

    def report(name: str, value: Any) -> None:
        shape, key = jnp.shape(value), f"{strategy.OF_SYNC}{name}"
        if shape or key in reported:
            what = f"has shape {shape}" if shape else "is reported twice"
            problem = f": its metric {name!r} {what}. Report a 0-d number once."
            raise binding_error("data_parallel.sync", problem)
        reported[key] = jnp.stack([jnp.asarray(value, jnp.float32), jnp.ones((), jnp.float32)])

    return report


def step_of(reduction: Reduction) -> type[Step]:
    """The class of the step that takes sums by these collectives."""
    return reduction.exact_step or Step


def sums_of(out: LossOutput) -> Sums:
    """Metrics as float32 arrays (2,): sum and count, each converted alone.

    A sum in bfloat16 would round its count, one in float16 would make it infinite.
    """
    sums = {"loss": (out.total, out.weight), **out.sums}
    return {k: jnp.stack([jnp.asarray(x, jnp.float32) for x in pair]) for k, pair in sums.items()}
