"""One training step as every engine runs it, and one evaluation step.

The functions here see what one device sees (`mapped`, `pmapped`, with mesh axes bound) or the
whole (`compiled`, without). An engine only wraps them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.deterministic.division import as_written
from research_dp.deterministic.logical_shards import check_wide, one_by_one
from research_dp.deterministic.sum import fence, norm_by_blocks, unknown_zero, without_negative_zero
from research_dp.distributed.collectives import axes_size, cast_dtype
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.microbatch import add_up
from research_dp.distributed.optimizer import apply_optimizer, clip_factor, global_norm
from research_dp.distributed.overlap import hold, synchronised, targets_of
from research_dp.distributed.remat import drop_gathered
from research_dp.distributed.sharding import TABLE, path_name
from research_dp.distributed.units import Units
from research_dp.errors import UsageError
from research_dp.strategies.nonfinite import settle
from research_dp.strategies.rng import example_keys
from research_dp.strategies.strategy import (
    PlacedBatch,
    StateShardings,
    StrategyConfig,
    TrainSpec,
    TrainState,
)
from research_dp.types import LossOutput

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Step:
    """The step functions of a recipe.

    Attributes:
        config: The slots.
        spec: Model, optimizer and batch.
        shardings: Where things lie, as the step sees them.
        axes: The mesh axes that are bound where the steps run and that have more than one device;
            () in the compiled engine.
    """

    config: StrategyConfig
    spec: TrainSpec
    shardings: StateShardings
    axes: tuple[str, ...]

    def train(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step: the new state, and metrics; see `Strategy`."""
        if self._shards:
            grads, model_state, sums = self._mean_of_shards(state, batch)
        else:
            grads, model_state, sums = self._mean_gradients(state, batch)
        _check_shapes(grads, self._slice_shapes(), "data_parallel.sync", "gradients")
        sums = self._add_up(sums)
        # Losses were divided by the rows of a device's micro-batch; the true number of valid
        # items comes in here, once.
        count = sums["loss"][1]
        rows = batch.position.shape[1] * axes_size(self.axes)
        scale = jnp.where(count > 0, rows / jnp.maximum(count, 1e-9), 0.0)
        scale = scale / self._loss_scale(state)
        norm, spoilt = self._norm(grads, state.step)
        norm = scale * norm
        scale = scale * clip_factor(norm, self.spec.max_grad_norm)
        own = self.spec.param_dtype is None  # otherwise the optimizer's parameters are wider
        grads = jax.tree.map(
            lambda g, p: (g * scale).astype(p.dtype if own else cast_dtype(p.dtype, jnp.float32)),
            grads,
            state.params,
        )
        if self._shards:
            grads = jax.tree.map(without_negative_zero, grads)
            grads = fence(grads, unknown_zero(state.step))
        update = as_written(self._update, grads, state) if self._shards else self._update
        params, opt_state = update(grads, state)
        new = TrainState(state.step + 1, params, model_state, opt_state, state.loss_scale)
        return settle(self.spec, state, new, norm, spoilt, sums)

    def _loss_scale(self, state: TrainState) -> jax.Array | float:
        return 1.0 if self.spec.loss_scale is None else state.loss_scale.scale

    def evaluate(
        self, state: TrainState, examples: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Metrics of a batch as arrays (2,) of sum and count."""
        units, params = self._units(), state.params
        if not self._shards:
            out = self._loss(params, state.model_state, examples, None, units, train=False)
            return self._add_up(_pairs(out))
        params = units.whole(params)
        rows = self.spec.batch_size // self._shards

        def sums_of(params: PyTree, part: PyTree) -> dict[str, jax.Array]:
            return _pairs(self._loss(params, state.model_state, part, None, Units(), train=False))

        parts = {name: x.reshape(-1, rows, *x.shape[1:]) for name, x in examples.items()}
        reduction = self.config.reduction
        return self._add_up(one_by_one(sums_of, params, parts, state.step, reduction))

    def _mean_gradients(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """(gradients as `update` takes them, new model state, sums of metrics)."""
        recipe, several = self.config, batch.position.shape[0] > 1
        has_units = bool(self.spec.model.units)
        keep = recipe.gather is not None and recipe.gather_each == "step"
        # Units keep what they gather by themselves; for several micro-batches, a model without
        # units, or where each collective is waited for, all is gathered before them and scattered
        # after them: each once.
        once = keep and (several or not has_units or self._waits)
        # Where each micro-batch is synchronised, or there is but one, units do it as they go.
        early = has_units and recipe.gather is None and recipe.sync is not None
        early = early and (recipe.sync_each == "micro_batch" or not several) and self._early_pays
        params, units = state.params, self._units(keep=keep)
        if once:
            params, scatter = jax.vjp(units.whole, state.params)
            units = Units()

        def gradients(model_state: PyTree, micro: PlacedBatch) -> tuple[PyTree, Any, PyTree]:
            if early:
                grads, out = self._early_gradients(state, params, model_state, micro)
            else:
                grads, out = self._gradients(state, params, model_state, micro, units)
                grads = self._sync(grads, "micro_batch")
            return grads, _pairs(out), out.model_state

        grads, sums, model_state = add_up(
            gradients, state.model_state, batch, recipe.accumulation_dtype
        )
        if once:
            (grads,) = scatter(jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))
        grads = grads if early else self._sync(grads, "step")
        return grads, model_state, sums

    def _mean_of_shards(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """`_mean_gradients` where a micro-batch is a logical shard.

        The sum over a device's shards is complete before it travels, so that the order of additions
        is one for all strategies: all is gathered before them, and scattered after them.
        """
        params, scatter = jax.vjp(self._units().whole, state.params)
        check_wide(params)

        def of_shard(params: PyTree, shard: PlacedBatch) -> tuple[PyTree, PyTree]:
            grads, out = self._gradients(state, params, state.model_state, shard, Units())
            return grads, _pairs(out)

        recipe = self.config
        grads, sums = one_by_one(of_shard, params, batch, state.step, recipe.reduction)
        (grads,) = scatter(grads)
        return grads if recipe.sync is None else self._synced(grads), state.model_state, sums

    def _gradients(
        self,
        state: TrainState,
        params: PyTree,
        model_state: PyTree,
        micro: PlacedBatch,
        units: Units,
        held: Callable[[PyTree], PyTree] = lambda params: params,
    ) -> tuple[PyTree, LossOutput]:
        """Gradients of one micro-batch, with respect to `params`, which `held` makes parameters."""
        keys = example_keys(self.spec.seed, state.step, micro.position)

        def loss(params: PyTree) -> tuple[jax.Array, LossOutput]:
            out = self._loss(held(params), model_state, micro.examples, keys, units, train=True)
            # Divided by a constant, so that the numbers are of a mean's size whatever the dtype.
            return out.total / micro.position.shape[0] * self._loss_scale(state), out

        if units.gather is not None and not self.spec.model.units:
            loss = jax.checkpoint(loss, policy=drop_gathered)
        return jax.grad(loss, has_aux=True)(params)

    @property
    def _waits(self) -> bool:
        """Whether nothing is computed beside a collective, so that the fewer there are, the better.

        XLA's CPU backend waits for each: those of units cost 2 to 4 % of a step of lm_tiny.
        """
        return self.config.mesh.devices.flat[0].platform == "cpu"

    @property
    def _early_pays(self) -> bool:
        """Whether synchronising a unit as soon as it is ready saves time or memory.

        Slices are smaller than what they are scattered from, on any device.
        """
        slices = jax.tree.leaves(self.shardings.slices)
        return not self._waits or any(place.dim is not None for place in slices)

    def _early_gradients(
        self, state: TrainState, params: PyTree, model_state: PyTree, micro: PlacedBatch
    ) -> tuple[PyTree, LossOutput]:
        """Synchronised gradients of one micro-batch; those of tables, used twice, at the end."""
        kinds, slices = self.spec.model.units, self.shardings.slices
        early = {name: own for name, own in params.items() if kinds.get(name) != TABLE}
        late = {name: own for name, own in params.items() if name not in early}

        def layout_of(part: PyTree) -> PyTree:
            return {name: slices[name] for name in part}

        targets = targets_of(self._synced, early, layout_of(early))
        grads, out = self._gradients(
            state,
            {**targets, **late},
            model_state,
            micro,
            Units(synchronised(self._synced), slices),
            held=lambda given: {
                n: hold(early[n], x) if n in early else x for n, x in given.items()
            },
        )
        late_grads = {name: grads[name] for name in late}
        return {**grads, **self._synced(late_grads, layout_of(late))}, out

    def _loss(
        self,
        params: PyTree,
        model_state: PyTree,
        examples: Mapping[str, jax.Array],
        keys: jax.Array | None,
        units: Units,
        *,
        train: bool,
    ) -> LossOutput:
        """The model's loss; its units gather themselves, or all is gathered before."""
        model, more = self.spec.model, {}
        if model.units:
            more = {"units": units}
        else:
            params = units.whole(params)
        return model.loss(
            params, model_state, examples, keys, train=train, batch_axes=self.axes, **more
        )

    def _units(self, *, keep: bool = False) -> Units:
        """How the model's units become whole."""
        recipe = self.config
        if recipe.gather is None:
            return Units()
        gather = functools.partial(recipe.gather, reduction=recipe.reduction)
        # Rows are exchanged as plainly as they are added up: not if sums go another way.
        plain = FSDP_AXIS in self.axes and recipe.reduction.exchanges_rows
        knows_rows = "rows" in inspect.signature(recipe.gather).parameters
        return Units(
            gather,
            self.shardings.params,
            look_up_split=gather if plain and knows_rows else None,
            keep=keep,
            look_ahead=recipe.look_ahead,
        )

    @property
    def _shards(self) -> int:
        """Number of logical shards; 0 if the reduction knows none."""
        return self.config.reduction.logical_shards or 0

    def _norm(self, grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `global_norm`."""
        slices = self.shardings.slices
        if self._shards:
            return norm_by_blocks(grads, slices, self._shards, unknown_zero(step))
        return global_norm(grads, slices, self.config.reduction)

    def _sync(self, grads: PyTree, when: str) -> PyTree:
        recipe = self.config
        if recipe.sync is None or recipe.sync_each != when:
            return grads
        return self._synced(grads)

    def _synced(self, grads: PyTree, layout: PyTree = None) -> PyTree:
        recipe = self.config
        assert recipe.sync is not None
        layout = self.shardings.slices if layout is None else layout
        return recipe.sync(grads, layout, axes=self.axes, reduction=recipe.reduction)

    def _update(self, grads: PyTree, state: TrainState) -> tuple[PyTree, PyTree]:
        optimizer, recipe = self.spec.optimizer, self.config
        if recipe.update is None:
            return apply_optimizer(optimizer, grads, state.opt_state, state.params)
        params, opt_state = recipe.update(
            optimizer,
            grads,
            state.opt_state,
            state.params,
            self.shardings.slices,
            axes=self.axes,
            reduction=recipe.reduction,
        )
        shapes = [x.shape for x in jax.tree.leaves(state.params)]
        _check_shapes(params, shapes, "data_parallel.update", "parameters")
        return params, opt_state

    def _slice_shapes(self) -> list[tuple[int, ...]]:
        return [p.local_shape for p in jax.tree.leaves(self.shardings.slices)]

    def _add_up(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums over devices, all in one small collective; means are taken on the host."""
        if not self.axes:
            return sums
        names = sorted(sums)
        together = jnp.stack([sums[name] for name in names])
        added = self.config.reduction.all_reduce(together, self.axes)
        return {name: added[i] for i, name in enumerate(names)}


def _pairs(out: LossOutput) -> dict[str, jax.Array]:
    """Metrics as float32 arrays (2,): sum and count."""
    sums = {"loss": (out.total, out.weight), **out.sums}
    return {name: jnp.stack(pair).astype(jnp.float32) for name, pair in sums.items()}


def _check_shapes(tree: PyTree, shapes: list[tuple[int, ...]], binding: str, what: str) -> None:
    """Raises UsageError if a slot's function returned something of another shape."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), shape in zip(flat, shapes, strict=True):
        if x.shape != shape:
            raise UsageError(
                f"{binding} leaves {what} {path_name(path)} with shape {x.shape} on a device, not "
                f"{shape}. The four slots must fit each other.",
                binding=binding,
            )
