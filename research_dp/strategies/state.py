"""What all engines need before they compile: layouts, abstract state, the batch's places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from research_dp.deterministic.logical_shards import check_model, in_shards
from research_dp.distributed import placement
from research_dp.distributed import sharding as layout_lib
from research_dp.distributed.collectives import cast_dtype
from research_dp.distributed.mesh import BATCH_AXES, FSDP_AXIS, batch_devices, sizes_text
from research_dp.distributed.optimizer import find_mixing_update, map_state
from research_dp.errors import UsageError
from research_dp.strategies.strategy import (
    PlacedBatch,
    StateShardings,
    StrategyConfig,
    TrainSpec,
    TrainState,
)

PyTree = Any


class _OneExample(dict[str, jax.ShapeDtypeStruct]):
    """An abstract batch of one example, which says so if a model looks for what it lacks."""

    def __init__(self, example: Mapping[str, jax.ShapeDtypeStruct]):
        super().__init__(
            {k: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for k, x in example.items()}
        )

    def __missing__(self, name: str) -> Any:
        raise UsageError(
            f"train.model reads {name!r} of a batch, but train.data gives {sorted(self)}. "
            "Take a model and a data set of the same task.",
            binding="train.model",
        )


def init_state(spec: TrainSpec, key: jax.Array) -> TrainState:
    """The state before the first step; traced, so that it can be born sharded."""
    params, model_state = spec.model.init(key, _OneExample(spec.example))
    opt_state = spec.optimizer.init(params)
    if spec.param_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(cast_dtype(x.dtype, spec.param_dtype)), params)
    loss_scale = spec.loss_scale.init() if spec.loss_scale else ()
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, opt_state, loss_scale)


def infer_state_sharding(
    recipe: StrategyConfig, spec: TrainSpec, mesh: Mesh | AbstractMesh, *, params_sharded: bool
) -> tuple[StateShardings, TrainState]:
    """Decides where everything lies.

    Args:
        recipe: Its `shard` is asked.
        spec: The model and optimizer, whose shapes are found without computing anything.
        mesh: The mesh; its sizes are enough.
        params_sharded: Whether parameters lie as `shard` says, or whole on each device.

    Returns:
        The layouts, and the state as `jax.ShapeDtypeStruct`s with shardings.
    """
    abstract = jax.eval_shape(lambda key: init_state(spec, key), jax.random.key(0))
    slices = layout_lib.infer_sharding(
        abstract.params, recipe.shard, mesh.shape[FSDP_AXIS], spec.model.units
    )
    layouts = StateShardings(slices if params_sharded else layout_lib.whole(slices), slices)
    if recipe.reduction.logical_shards is not None:
        check_model(recipe, spec, abstract)

    specs = TrainState(
        step=PartitionSpec(),
        params=layout_lib.specs(layouts.params),
        model_state=jax.tree.map(lambda _: PartitionSpec(), abstract.model_state),
        opt_state=_opt_state_specs(spec, abstract.opt_state, slices),
        loss_scale=jax.tree.map(lambda _: PartitionSpec(), abstract.loss_scale),
    )
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract,
        placement.shardings(mesh, specs),
    )
    return layouts, placed


def _opt_state_specs(spec: TrainSpec, opt_state: PyTree, slices: PyTree) -> PyTree:
    def spec_of(leaf: Any, place: layout_lib.LeafSharding) -> PartitionSpec:
        # State of another shape than its parameter (factored moments, say) stays whole.
        return place.spec if leaf.shape == place.shape else PartitionSpec()

    if all(place.dim is None for place in jax.tree.leaves(slices)):
        return jax.tree.map(lambda _: PartitionSpec(), opt_state)
    try:
        return map_state(spec.optimizer, spec_of, opt_state, slices, lambda _: PartitionSpec())
    except UsageError as error:
        raise UsageError(
            f"train.optimizer: {error} Use ddp, which keeps it replicated.",
            binding="train.optimizer",
        ) from error


def check_optimizer(
    recipe: StrategyConfig, spec: TrainSpec, slices: PyTree, state: TrainState
) -> None:
    """Checks that the step can apply the optimizer; traces its update.

    Args:
        recipe: The strategy, for the message.
        spec: The optimizer.
        slices: Placements of parameters and gradients as the step's program sees them.
        state: Shapes and dtypes of the unsharded state.

    Raises:
        UsageError: The update needs more than gradients, state and parameters, or it mixes elements
            of a parameter and would see shards.
    """
    try:
        mixing = find_mixing_update(spec.optimizer, slices, state.opt_state)
    except UsageError as error:
        raise UsageError(f"train.optimizer: {error}", binding="train.optimizer") from error
    if mixing:
        sharded = [p for p in jax.tree.leaves(slices) if p.dim is not None]
        raise UsageError(
            f"train.optimizer mixes elements of a parameter ({mixing}), but strategy "
            f"{recipe.name!r} applies it to shards (of {sharded[0].path} and {len(sharded) - 1} "
            "more). Use ddp, spmd or spmd_fsdp; to clip by global norm use train.max_grad_norm.",
            binding="train.optimizer",
        )


def shardings_of(abstract: PyTree) -> PyTree:
    """The shardings of a tree of `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: x.sharding, abstract)


class BatchLayout:
    """Where a global batch lies: which rows are this process's, and how they get on the devices.

    A global batch is cut into micro-batches first, and each micro-batch over the devices, so that
    micro-batch j holds the same examples on any mesh. Or into logical shards, neighbours on one
    device, which takes one after the other as micro-batches.

    Args:
        mesh: The mesh; dim 1 of a batch is split over its batch axes.
        spec: Sizes.
        logical_shards: How many; None: micro-batches.

    Raises:
        UsageError: The batch does not divide; the message prints the whole equation.
    """

    def __init__(self, mesh: Mesh, spec: TrainSpec, logical_shards: int | None = None):
        devices, micros = batch_devices(mesh), spec.accumulation_steps
        _check_sizes(spec.batch_size, devices, micros, mesh)
        rows = spec.batch_size // micros
        self.sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self.eval_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self.eval_batch_size = rows
        self.eval_rows = placement.local_indices(self.eval_sharding, (rows,), 0)
        places = np.arange(spec.batch_size, dtype=np.int32).reshape(micros, rows)
        if logical_shards:
            places = in_shards(spec, devices, logical_shards)
        micros, rows = places.shape
        here = placement.local_indices(self.sharding, places.shape, 1)
        self._micro_rows = places[:, here]
        self.train_rows = self._micro_rows.reshape(-1)
        self._position: jax.Array | None = None  # the same in each batch, so placed once

        def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((micros, rows, *shape), dtype, sharding=self.sharding)

        examples = {name: abstract(x.shape, x.dtype) for name, x in spec.example.items()}
        self.abstract = PlacedBatch(examples, abstract((), np.int32))

    def micro_batches(self, examples: Mapping[str, np.ndarray]) -> PlacedBatch:
        """This process's host arrays cut into micro-batches: (micro-batches, local rows, ...)."""
        shape = self._micro_rows.shape
        cut = {k: np.reshape(x, (*shape, *np.shape(x)[1:])) for k, x in examples.items()}
        return PlacedBatch(cut, self._micro_rows)

    def place(self, examples: Mapping[str, np.ndarray]) -> PlacedBatch:
        cut, position = self.micro_batches(examples)
        if self._position is None:
            self._position = placement.place(position, self.sharding)
        return PlacedBatch(placement.place(cut, self.sharding), self._position)

    def place_eval(self, examples: Mapping[str, np.ndarray]) -> PyTree:
        return placement.place(dict(examples), self.eval_sharding)


def _check_sizes(batch_size: int, devices: int, micros: int, mesh: Mesh) -> None:
    step = devices * micros
    if batch_size % step:
        sizes = sizes_text(mesh.shape)
        near = max(step, math.floor(batch_size / step + 0.5) * step)
        raise UsageError(
            f"train.batch_size = {batch_size} does not divide over {sizes} = {devices} devices x "
            f"accumulation_steps {micros} = {step}. The nearest that does is {near}.",
            binding="train.batch_size",
        )
