"""What all engines need before they compile: shardings, abstract state, the batch's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from research_dp.deterministic.logical_shards import check_model, in_shards
from research_dp.distributed import placement
from research_dp.distributed.boxed import is_box, names_of, value_of
from research_dp.distributed.collectives import cast_dtype, flat_axes
from research_dp.distributed.mesh import BATCH_AXES, FSDP_AXIS, batch_devices, sizes_text
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.optimizer_checks import find_mixing_update
from research_dp.distributed.shard_rules import ShardDecision, largest_dim
from research_dp.distributed.sharding import (
    STACK,
    LeafSharding,
    infer_sharding,
    path_name,
    replicated,
    unit_kind,
)
from research_dp.distributed.sharding import specs as sharding_specs
from research_dp.errors import UsageError
from research_dp.strategies import slots
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


def init_state(config: StrategyConfig, spec: TrainSpec, key: jax.Array) -> TrainState:
    """The state before the first step; traced, so that it is sharded from the start."""
    params, model_state = spec.model.init(key, _OneExample(spec.example))
    opt_state = spec.optimizer.init(params)
    if spec.param_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(cast_dtype(x.dtype, spec.param_dtype)), params)
    loss_scale = spec.loss_scale.init() if spec.loss_scale else ()
    slot_states = {}
    for name, slot in _stateful(config).items():
        devices = math.prod(config.mesh.shape[axis] for axis in slot.differs_over)

        def on_each(x: jax.Array, devices: int = devices) -> jax.Array:
            return jnp.broadcast_to(x, (devices, *x.shape))

        one = slot.init(params)
        slot_states[name] = jax.tree.map(on_each, one) if slot.differs_over else one
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, model_state, opt_state, loss_scale, slot_states or ())


def _stateful(config: StrategyConfig) -> dict[str, slots.Stateful]:
    """The slots that have state, by name."""
    filled = {"sync": config.sync, "update": config.update}
    return {name: slot for name, slot in filled.items() if isinstance(slot, slots.Stateful)}


def infer_state_sharding(
    config: StrategyConfig, spec: TrainSpec, mesh: Mesh | AbstractMesh, *, params_sharded: bool
) -> tuple[StateShardings, TrainState]:
    """Decides how everything is sharded.

    Args:
        config: The strategy, whose `shard` is traced.
        spec: The model and optimizer, whose shapes are found without computing anything.
        mesh: The mesh; its sizes are enough.
        params_sharded: Whether parameters are sharded between steps, or replicated.

    Returns:
        The shardings, and the state as `jax.ShapeDtypeStruct`s with shardings.
    """
    abstract = jax.eval_shape(lambda key: init_state(config, spec, key), jax.random.key(0))
    slices = _slot_shardings(config.shard, abstract.params, mesh, spec.model.units)
    shardings = StateShardings(slices if params_sharded else replicated(slices), slices)
    if config.reduction.logical_shards is not None:
        check_model(config, spec, abstract)
    slot_specs = {
        name: jax.tree.map(
            lambda _, slot=slot: PartitionSpec(tuple(slot.differs_over) or None),
            abstract.slots[name],
        )
        for name, slot in _stateful(config).items()
    }
    specs = TrainState(
        step=PartitionSpec(),
        params=sharding_specs(shardings.params),
        model_state=jax.tree.map(lambda _: PartitionSpec(), abstract.model_state),
        opt_state=_opt_state_specs(spec, abstract.opt_state, slices),
        loss_scale=jax.tree.map(lambda _: PartitionSpec(), abstract.loss_scale),
        slots=slot_specs or (),
    )
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract,
        placement.shardings(mesh, specs),
    )
    return shardings, placed


def _slot_shardings(
    shard: Callable[..., PyTree] | None,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    units: Mapping[str, str],
) -> PyTree:
    """`LeafSharding`s of parameters, as the slot `shard` boxes them; it is traced, not run.

    Raises:
        UsageError: It returns another tree, or a box that is no shard of its parameter.
    """
    axis_size = mesh.shape[FSDP_AXIS]
    if shard is None or axis_size == 1:
        return infer_sharding(params, shard and largest_dim, axis_size, units)
    layers = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.ShapeDtypeStruct(_layer_shape(keys, x, units), x.dtype), params
    )
    decisions: dict[str, ShardDecision] = {}
    options = slots.options_of(shard, {"units": units, "on_decision": decisions.__setitem__})
    trace = jax.make_jaxpr(
        lambda params: shard(params, FSDP_AXIS, **options),
        axis_env=list(mesh.shape.items()),
        return_shape=True,
    )
    _, shards = trace(layers)

    def one(keys: Any, param: Any, leaf: Any) -> LeafSharding:
        path, dtype = path_name(keys), np.dtype(param.dtype)
        names, stacked = names_of(leaf), unit_kind(path, units) == STACK
        if FSDP_AXIS not in flat_axes(names):
            reason = decisions[path].reason if path in decisions else "`shard` left it replicated"
            return LeafSharding(path, param.shape, dtype, None, reason, axis_size)
        dim = names.index(FSDP_AXIS) + stacked
        sharding = LeafSharding(path, param.shape, dtype, dim, "", axis_size)
        if value_of(leaf).shape != sharding.local_shape[stacked:]:
            raise UsageError(
                f"data_parallel.shard returned {path} with shape {value_of(leaf).shape}, which is "
                f"not a shard of {param.shape[stacked:]} along dim {names.index(FSDP_AXIS)} on "
                f"{axis_size} devices of axis {FSDP_AXIS!r}.",
                binding="data_parallel.shard",
            )
        return sharding

    structures: list[Any] = [jax.tree.structure(params), jax.tree.structure(shards, is_leaf=is_box)]
    if structures[0] != structures[1]:
        raise UsageError(
            "data_parallel.shard returned another tree than the parameters. Return each leaf, or "
            "an nn.Partitioned around its shard.",
            binding="data_parallel.shard",
        )
    return jax.tree_util.tree_map_with_path(one, params, shards)


def _layer_shape(keys: Any, x: Any, units: Mapping[str, str]) -> tuple[int, ...]:
    """The shape of a parameter; of a stack, that of one layer."""
    return x.shape[1:] if unit_kind(path_name(keys), units) == STACK else x.shape


def _opt_state_specs(spec: TrainSpec, opt_state: PyTree, slices: PyTree) -> PyTree:
    def spec_of(leaf: Any, sharding: LeafSharding) -> PartitionSpec:
        # State of another shape than its parameter (factored moments, say) is replicated.
        return sharding.spec if leaf.shape == sharding.shape else PartitionSpec()

    if all(sharding.dim is None for sharding in jax.tree.leaves(slices)):
        return jax.tree.map(lambda _: PartitionSpec(), opt_state)
    try:
        return map_state(spec.optimizer, spec_of, opt_state, slices, lambda _: PartitionSpec())
    except UsageError as error:
        raise UsageError(
            f"train.optimizer: {error} Use ddp, which keeps it replicated.",
            binding="train.optimizer",
        ) from error


def check_optimizer(
    config: StrategyConfig, spec: TrainSpec, slices: PyTree, state: TrainState
) -> None:
    """Checks that the step can apply the optimizer; traces its update.

    Args:
        config: The strategy, for the message.
        spec: The optimizer.
        slices: Shardings of parameters and gradients as the step's program sees them.
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
            f"{config.name!r} applies it to shards (of {sharded[0].path} and {len(sharded) - 1} "
            "more). Use ddp, spmd or spmd_fsdp; to clip by global norm use train.max_grad_norm.",
            binding="train.optimizer",
        )


def shardings_of(abstract: PyTree) -> PyTree:
    """The shardings of a tree of `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: x.sharding, abstract)


class BatchLayout:
    """How a global batch is sharded: which rows this process provides, and their placement.

    A global batch is cut into micro-batches first, and each micro-batch over the devices, so that
    micro-batch j has the same examples on any mesh. Or into logical shards: a device has neighbours
    of them, and takes them one after the other as micro-batches.

    Args:
        mesh: The mesh; dim 1 of a batch is split over its batch axes.
        spec: Sizes.
        logical_shards: How many; None: micro-batches.

    Raises:
        UsageError: The batch does not divide; the message prints the full equation.
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
