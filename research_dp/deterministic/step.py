"""The training step with exact sums: the same bits on any number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from research_dp.deterministic.division import as_written
from research_dp.deterministic.logical_shards import check_wide, one_by_one
from research_dp.deterministic.norm import norm_by_blocks
from research_dp.deterministic.sum import TreeReduction, fence, unknown_zero, without_negative_zero
from research_dp.distributed.optimizer import apply_optimizer
from research_dp.distributed.units import Units
from research_dp.strategies.step import Step, Sums, sums_of
from research_dp.strategies.strategy import PlacedBatch, TrainState

PyTree = Any


class DeterministicStep(Step):
    """A `Step` in which a micro-batch is a logical shard.

    The sum over a device's shards is complete before it is communicated, so that the order of
    additions is one for all strategies. So everything is gathered before the shards, and scattered
    after them.
    """

    @property
    def _reduction(self) -> TreeReduction:
        assert isinstance(self.config.reduction, TreeReduction)
        return self.config.reduction

    def mean_gradients(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, Sums, PyTree]:
        """As in `Step`."""
        params, scatter = jax.vjp(self.units().gather_all, state.params)
        check_wide(params)

        def of_shard(params: PyTree, shard: PlacedBatch) -> tuple[PyTree, PyTree]:
            loss = self.loss_of(state, state.model_state, shard, Units())
            grads, out = jax.grad(loss, has_aux=True)(params)
            return grads, sums_of(out)

        grads, sums = one_by_one(of_shard, params, batch, state.step, self._reduction)
        (grads,) = scatter(grads)
        grads, slot_state = self.sync(grads, state.slots)
        return grads, state.model_state, sums, slot_state

    def evaluate(self, state: TrainState, examples: Mapping[str, jax.Array]) -> Sums:
        """As in `Step`."""
        params = self.units().gather_all(state.params)
        rows = self.spec.batch_size // self._reduction.logical_shards

        def of_shard(params: PyTree, part: PyTree) -> Sums:
            return sums_of(self.loss(params, state.model_state, part, None, Units()))

        parts = {name: x.reshape(-1, rows, *x.shape[1:]) for name, x in examples.items()}
        return self.sum_metrics(one_by_one(of_shard, params, parts, state.step, self._reduction))

    def norm(self, grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As in `Step`."""
        shards = self._reduction.logical_shards
        return norm_by_blocks(grads, self.shardings.slices, shards, unknown_zero(step))

    def apply(self, grads: PyTree, params: PyTree, state: TrainState) -> tuple[PyTree, PyTree]:
        """As in `Step`."""
        grads = jax.tree.map(without_negative_zero, grads)
        grads = fence(grads, unknown_zero(state.step))

        def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return apply_optimizer(self.spec.optimizer, grads, opt_state, params)

        arguments = (grads, state.opt_state, params)
        return as_written(update, *arguments)(*arguments)
