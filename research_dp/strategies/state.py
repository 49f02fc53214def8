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
from research_dp.distributed import placement, sharding
from research_dp.distributed.boxed import is_box, names_of, value_of
from research_dp.distributed.collectives import cast_dtype, flat_axes
from research_dp.distributed.mesh import BATCH_AXES, FSDP_AXIS, batch_devices, sizes_text
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.optimizer_checks import find_mixing_update
from research_dp.distributed.shard_rules import ShardDecision, largest_dim
from research_dp.distributed.sharding import LeafSharding, path_name
from research_dp.errors import UsageError, binding_error
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

    def __missing__(self, name: str) -> Any:
        raise binding_error(
            "train.model",
            f" reads {name!r} of a batch, but train.data gives {sorted(self)}. Take a model and a "
            "data set of the same task.",
        )


def init_state(config: StrategyConfig, spec: TrainSpec, key: jax.Array) -> TrainState:
    """The state before the first step; traced, so that it is sharded from the start."""
    one_row = {k: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for k, x in spec.example.items()}
    params, model_state = spec.model.init(key, _OneExample(one_row))
    opt_state = spec.optimizer.init(params)
    if spec.param_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(cast_dtype(x.dtype, spec.param_dtype)), params)
    loss_scale = spec.loss_scale.init() if spec.loss_scale else ()
    slot_states = {}
    for name, slot in slots.stateful(config).items():
        state = slot.init(params)
        if slot.differs_over:
            devices = math.prod(config.mesh.shape[axis] for axis in slot.differs_over)
            state = jax.tree.map(lambda x, n=devices: jnp.broadcast_to(x, (n, *x.shape)), state)
        slot_states[name] = state
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, model_state, opt_state, loss_scale, slot_states or ())


def infer_state_sharding(
    config: StrategyConfig, spec: TrainSpec, mesh: Mesh | AbstractMesh, *, params_sharded: bool
) -> tuple[StateShardings, TrainState]:
    """Decides how everything is sharded, by tracing alone; the sizes of the mesh are enough.

    Returns the shardings, and the state as `jax.ShapeDtypeStruct`s with shardings.
    `params_sharded`: parameters are sharded between steps, not replicated.
    """
    abstract = jax.eval_shape(lambda key: init_state(config, spec, key), jax.random.key(0))
    slices = _param_shardings(config.shard, abstract.params, mesh, spec.model.units)
    shardings = StateShardings(slices if params_sharded else sharding.replicated(slices), slices)
    if config.reduction.logical_shards is not None:
        check_model(config, spec, abstract)
    specs = jax.tree.map(lambda _: PartitionSpec(), abstract)._replace(
        params=sharding.specs(shardings.params),
        opt_state=_opt_state_specs(spec, abstract.opt_state, slices),
    )
    for name, slot in slots.stateful(config).items():
        over = PartitionSpec(tuple(slot.differs_over) or None)
        specs.slots[name] = jax.tree.map(lambda _, over=over: over, abstract.slots[name])
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract,
        placement.shardings(mesh, specs),
    )
    return shardings, placed


def _param_shardings(
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
        return sharding.infer_sharding(params, shard and largest_dim, axis_size, units)

    def is_stacked(keys: Any) -> bool:
        return sharding.unit_kind(path_name(keys), units) == sharding.STACK

    layers = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.ShapeDtypeStruct(x.shape[is_stacked(keys) :], x.dtype), params
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
        names, stacked = names_of(leaf), is_stacked(keys)
        if FSDP_AXIS not in flat_axes(names):
            reason = decisions[path].reason if path in decisions else "`shard` left it replicated"
            return LeafSharding(path, param.shape, dtype, None, reason, axis_size)
        dim = names.index(FSDP_AXIS) + stacked
        result = LeafSharding(path, param.shape, dtype, dim, "", axis_size)
        if value_of(leaf).shape != result.local_shape[stacked:]:
            raise binding_error(
                "data_parallel.shard",
                f" returned {path} with shape {value_of(leaf).shape}, which is not a shard of "
                f"{param.shape[stacked:]} along dim {names.index(FSDP_AXIS)} on {axis_size} "
                f"devices of axis {FSDP_AXIS!r}.",
            )
        return result

    structures: list[Any] = [jax.tree.structure(params), jax.tree.structure(shards, is_leaf=is_box)]
    if structures[0] != structures[1]:
        raise binding_error(
            "data_parallel.shard",
            " returned another tree than the parameters. Return each leaf, or an nn.Partitioned "
            "around its shard.",
        )
    return jax.tree_util.tree_map_with_path(one, params, shards)


def _opt_state_specs(spec: TrainSpec, opt_state: PyTree, slices: PyTree) -> PyTree:
    def spec_of(leaf: Any, sharding: LeafSharding) -> PartitionSpec:
        # State of another shape than its parameter (factored moments, say) is replicated.
        return sharding.spec if leaf.shape == sharding.shape else PartitionSpec()

    if all(sharding.dim is None for sharding in jax.tree.leaves(slices)):
        return jax.tree.map(lambda _: PartitionSpec(), opt_state)
    try:
        return map_state(spec.optimizer, spec_of, opt_state, slices, lambda _: PartitionSpec())
    except UsageError as error:
        raise binding_error(
            "train.optimizer", f": {error} Use ddp, which keeps it replicated."
        ) from error


def check_optimizer(
    config: StrategyConfig, spec: TrainSpec, slices: PyTree, state: TrainState
) -> None:
    """Checks that the step can apply the optimizer, by tracing its update.

    `slices` are the shardings as the step sees them, `state` is the unsharded abstract state.

    Raises:
        UsageError: The update needs more than gradients, state and parameters, or it mixes elements
            of a parameter and would see shards.
    """
    try:
        mixing = find_mixing_update(spec.optimizer, slices, state.opt_state)
    except UsageError as error:
        raise binding_error("train.optimizer", f": {error}") from error
    if mixing:
        sharded = [p for p in jax.tree.leaves(slices) if p.dim is not None]
        raise binding_error(
            "train.optimizer",
            f" mixes elements of a parameter ({mixing}), but strategy {config.name!r} applies it "
            f"to shards (of {sharded[0].path} and {len(sharded) - 1} more). Use ddp, spmd or "
            "spmd_fsdp; to clip by global norm use train.max_grad_norm.",
        )


def shardings_of(abstract: PyTree) -> PyTree:
    """The shardings of a tree of `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: x.sharding, abstract)


class BatchLayout:
    """How a global batch is sharded: which rows this process provides, and their placement.

    A global batch is cut into micro-batches first, and each micro-batch over the devices, so that
    micro-batch j has the same examples on any mesh. With `logical_shards` it is cut into these: a
    device has neighbours of them, and takes them one after the other as micro-batches.

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
        near = max(step, math.floor(batch_size / step + 0.5) * step)
        raise binding_error(
            "train.batch_size",
            f" = {batch_size} does not divide over {sizes_text(mesh.shape)} = {devices} devices x "
            f"accumulation_steps {micros} = {step}. The nearest that does is {near}.",
        )
