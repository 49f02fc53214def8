"""What all engines need before they compile: shardings, abstract state, the batch's rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import as_numbers
from research_dp.argument_types import described, is_array_or_number
from research_dp.distributed import placement, sharding
from research_dp.distributed.boxed import as_name, is_box, names_of, value_of
from research_dp.distributed.collectives import PLAIN, Reduction, cast_dtype, flat_axes
from research_dp.distributed.mesh import BATCH_AXES, FSDP_AXIS, batch_devices, sizes_text
from research_dp.distributed.optimizer import apply_in_step, map_state
from research_dp.distributed.sharding import LeafSharding, ShardDecision, largest_dim, path_name
from research_dp.errors import UsageError, binding_error, first_line
from research_dp.strategies import slots, strategy
from research_dp.strategies.frozen import (
    FROZEN,
    MODEL_STATE,
    frozen_of,
    matched,
    plain_name,
    with_values,
    without_gradients,
)
from research_dp.strategies.outer import of_new_round
from research_dp.strategies.step import step_of
from research_dp.strategies.strategy import PlacedBatch, StrategyConfig, TrainSpec, TrainState
from research_dp.types import PyTree


def init_state(
    config: StrategyConfig,
    spec: TrainSpec,
    key: jax.Array,
    initial: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """The state before the first step; traced, so that it is sharded from the start.

    `key` may be the seed of a run, a 0-d integer: the state is then that run's. `initial` has
    arrays that replace the model's own, cast to their dtypes, by `named_variables`; maybe padded.
    """
    if jnp.ndim(key) == 0 and jnp.issubdtype(jnp.result_type(key), jnp.integer):
        key = strategy.init_key(key)
    made = spec.model.init(key, spec.one_example())
    if not isinstance(made, tuple) or len(made) != 2:
        problem = f"init returned {described(made)}; it must return (parameters, model state)."
        raise binding_error(f"{spec.gin_name}.model", f": {problem}")
    params = _arrays(f"{spec.gin_name}.model", made[0], "parameter")
    model_state = _arrays(f"{spec.gin_name}.model", made[1], "model state")
    if initial:
        params = _replaced(params, initial)
        model_state = _replaced(model_state, initial, MODEL_STATE)
    opt_state = _arrays(f"{spec.gin_name}.optimizer", spec.optimizer.init(params))
    if spec.param_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(cast_dtype(x.dtype, spec.param_dtype)), params)
    loss_scale = spec.loss_scale.init() if spec.loss_scale else ()
    slot_states = init_slots(config, spec, params, key)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, model_state, opt_state, loss_scale, slot_states)


def init_slots(
    config: StrategyConfig, spec: TrainSpec, params: PyTree, key: jax.Array
) -> dict[str, PyTree] | tuple[()]:
    """The state of slots before the first step, by name; () if none has any."""
    filled = stateful(config).items()
    return {name: _init_slot(config, spec, name, x, params, key) for name, x in filled} or ()


def _init_slot(
    config: StrategyConfig,
    spec: TrainSpec,
    name: str,
    slot: slots.Stateful,
    params: PyTree,
    key: jax.Array,
) -> PyTree:
    """The state of a slot before the first step: what differs has a leading dim for devices."""
    offered: dict[str, Any] = {"devices": dict(config.mesh.shape)}
    if slots.takes_any(slot.init, "key"):
        offered["key"] = strategy.slot_init_key(key, name)
    if slots.takes_any(slot.init, "shardings", "stored"):
        slices = _param_shardings(config, spec, params)
        stored = _of_params(config, slices, sharded=config.gather is not None)
        offered.update(shardings=slices, stored=stored)
    offered["stacked"] = jax.tree_util.tree_map_with_path(_is_stacked(spec), params)
    made = slot.init(params, **slots.options_of(slot.init, offered))
    state = _arrays(f"data_parallel.{name}", made)
    if slots.is_by_unit(slot):
        slots.check_by_unit(name, state, params, offered["stacked"])

    def one(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        devices = _devices_over(config, name, axes)
        return jnp.broadcast_to(x, (devices, *x.shape)) if axes else x

    return jax.tree.map(one, state, slots.axes_of(name, slot, state))


def _arrays(binding: str, tree: PyTree, what: str = "state") -> PyTree:
    """A tree, numbers as arrays; UsageError for a leaf that cannot be trained, compared, saved."""

    def one(keys: Any, x: Any) -> jax.Array:
        is_array = is_array_or_number(x) or sharding.is_key(x)
        dtype: Any = jnp.asarray(x).dtype if is_array else None
        is_wide = is_array and jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1
        if not is_array:
            problem = f"{described(x)}, no array. Keep it elsewhere."
        elif what == "parameter" and not is_wide:
            problem = f"of dtype {dtype}, which is not trained. Return it as model state."
        elif str(dtype) in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
            problem = f"of dtype {dtype}. Give elements a byte."
        else:
            return x if sharding.is_key(x) else jnp.asarray(x, dtype)
        raise binding_error(binding, f": {what} {path_name(keys)} is {problem}")

    return jax.tree_util.tree_map_with_path(one, tree)


def _replaced(tree: PyTree, initial: Mapping[str, jax.Array], prefix: str = "") -> PyTree:
    """The tree with the arrays that are given for it by name, in its dtypes."""

    def value(keys: Any, x: Any) -> Any:
        given = initial.get(plain_name(prefix + path_name(keys)))
        return x if given is None else sharding.fitted(given, x.shape).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)


def stateful(config: StrategyConfig) -> dict[str, slots.Stateful]:
    """The slots that carry state, by name."""
    filled = {"sync": config.sync, "update": config.update}
    return {name: slot for name, slot in filled.items() if isinstance(slot, slots.Stateful)}


def _devices_over(config: StrategyConfig, name: str, axes: tuple[str, ...]) -> int:
    """On how many devices state of a slot differs; UsageError for an unknown axis."""
    sizes = config.mesh.shape
    if name == "update" and axes:
        problem = ".differs_over: an update has global arrays, the same on all devices. Bind ()."
        raise binding_error("data_parallel.update", problem)
    if unknown := [axis for axis in axes if axis not in sizes]:
        problem = f".differs_over has axis {unknown[0]!r}; the axes are {list(sizes)}."
        raise binding_error(f"data_parallel.{name}", problem)
    return math.prod(sizes[axis] for axis in axes)


def of_layout(built: strategy.Strategy) -> dict[str, Any]:
    """What methods of a slot are offered that see the state of all devices."""
    shardings = built.shardings
    devices = dict(built.config.mesh.shape)
    return {"devices": devices, "shardings": shardings.slices, "stored": shardings.params}


def resize_slots(
    built: strategy.Strategy, state: TrainState, say: Callable[[str], None] = lambda text: None
) -> TrainState:
    """A state whose slots may be those of another number of devices, for this strategy."""
    if built.config.outer is not None:
        if jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, built.abstract_state):
            return state
        say("The run had another number of replicas: a new round begins")
        return of_new_round(state, built.abstract_state)
    config, resized, offered = built.config, {}, of_layout(built)
    for name, slot in stateful(config).items():
        expected, resized[name] = built.abstract_state.slots[name], state.slots[name]
        if jax.tree.map(jnp.shape, resized[name]) == jax.tree.map(jnp.shape, expected):
            continue
        if slots.takes_any(slot.resize, *offered, "params"):
            offered["params"] = sharding.fitted_tree(state.params, built.logical_state.params)
            options = slots.options_of(slot.resize, offered)
            new = slot.resize(resized[name], **options)
        else:
            axes = jax.tree.leaves(slot.differs_over, is_leaf=slots.are_axes)
            most = max(_devices_over(config, name, one) for one in axes)
            new = slot.resize(resized[name], most)
        slots.check_state(f"data_parallel.{name}", new, expected, "its `resize` returned")
        shardings = jax.tree.map(lambda x: x.sharding, expected)
        resized[name] = jax.device_put(new, shardings)
    return state._replace(slots=resized or ())


def infer_state_sharding(
    config: StrategyConfig, spec: TrainSpec, *, params_sharded: bool
) -> tuple[strategy.StateShardings, TrainState, TrainState]:
    """The shardings, and the state as `jax.ShapeDtypeStruct`s, by tracing alone.

    The state is once as it is stored, padded, and once without padding.
    `params_sharded`: between steps parameters are not replicated.
    """
    abstract = jax.eval_shape(lambda seed: init_state(config, spec, seed), np.uint32(0))
    sharding.by_path(abstract)  # a checkpoint has its arrays by path, so it needs different ones
    _check_state_axes(config)
    slices = _param_shardings(config, spec, abstract.params)
    params = _of_params(config, slices, sharded=params_sharded)
    step_of(config.reduction).check_model(config, spec, abstract)
    specs = jax.tree.map(lambda _: PartitionSpec(), abstract)._replace(
        params=jax.tree.map(lambda p: p.spec, params),
        opt_state=_by_parameter(
            abstract.opt_state, slices, lambda _, p: p.spec, lambda _: PartitionSpec()
        ),
    )
    frozen = frozen_of(abstract.model_state)
    of_frozen: PyTree = {}
    if frozen:
        found = _param_shardings(config, spec, frozen)
        of_frozen = without_gradients(_of_params(config, found, sharded=params_sharded))
        specs.model_state[FROZEN] = jax.tree.map(lambda p: p.spec, of_frozen)
        frozen = _by_parameter(frozen, of_frozen, _as_stored, lambda x: x)
    if config.compression and (patterns := config.compression.patterns):
        paths = [p.path for p in jax.tree.leaves((slices, of_frozen))]
        matched(paths, patterns, "compression.exempt")
    for name, slot in stateful(config).items():
        state = abstract.slots[name]
        specs.slots[name] = jax.tree.map(
            lambda _, axes: PartitionSpec(axes) if axes else PartitionSpec(),
            state,
            slots.axes_of(name, slot, state),
        )

    stored = abstract._replace(
        params=_by_parameter(abstract.params, params, _as_stored, lambda x: x),
        model_state=with_values(abstract.model_state, frozen),
        opt_state=_by_parameter(abstract.opt_state, slices, _as_stored, lambda x: x),
    )
    places = placement.shardings(config.mesh, specs)
    placed = jax.tree.map(lambda x, place: x.update(sharding=place), stored, places)
    logical = jax.tree.map(lambda x, y: x.update(sharding=_of_logical(x, y)), abstract, placed)
    return strategy.StateShardings(params, slices, of_frozen), placed, logical


def _of_logical(x: Any, stored: Any) -> NamedSharding:
    """The sharding of an array without padding: the stored one, or that of its parts, or none."""
    if x.shape == stored.shape:
        return stored.sharding
    if x.size == stored.size and FSDP_AXIS in stored.sharding.spec:
        return placement.of_parts(stored.sharding, x.shape)
    return NamedSharding(stored.sharding.mesh, PartitionSpec())


def _is_stacked(spec: TrainSpec) -> Callable[..., bool]:
    """Whether a parameter, by its path, has layers as its first dim."""
    units = spec.model.units
    return lambda keys, *_: sharding.unit_kind(path_name(keys), units) == sharding.STACK


def _of_params(config: StrategyConfig, slices: PyTree, *, sharded: bool) -> PyTree:
    """How parameters are sharded between steps, given how their gradients are in the update."""
    if not sharded:
        return sharding.replicated(slices)
    of_groups = {"axes": (FSDP_AXIS,), "axis_size": config.mesh.shape[FSDP_AXIS]}
    return jax.tree.map(lambda p: dataclasses.replace(p, **of_groups, multiple=p.axis_size), slices)


def _check_state_axes(config: StrategyConfig) -> None:
    axes, sizes = tuple(config.state_axes), config.mesh.shape
    if axes[:1] != (FSDP_AXIS,) or not set(axes) <= set(sizes) or len(set(axes)) < len(axes):
        problem = f" = {axes}: name mesh axes, {FSDP_AXIS!r} first; there are {list(sizes)}."
        raise binding_error("data_parallel.state_axes", problem)


def _param_shardings(config: StrategyConfig, spec: TrainSpec, params: PyTree) -> PyTree:
    """`LeafSharding`s of slices, as the slot `shard` boxes them; it is traced, not run.

    Raises UsageError if it returns another tree, or a box that is no shard of its parameter.
    """
    mesh, shard, units = config.mesh, config.shard, spec.model.units
    axes, axis_size = tuple(config.state_axes), math.prod(mesh.shape[a] for a in config.state_axes)
    name = as_name(axes)
    if shard is None or axis_size == 1:
        return sharding.infer_sharding(params, shard and largest_dim, axis_size, units)

    is_stacked = _is_stacked(spec)
    layers = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.ShapeDtypeStruct(x.shape[is_stacked(keys) :], x.dtype), params
    )
    decisions: dict[str, ShardDecision] = {}
    pads = step_of(config.reduction).pads
    offered = {"units": units, "on_decision": decisions.__setitem__, "pads": pads}
    options = slots.options_of(shard, offered)
    bound: dict[str, Any] = {"axis_env": list(mesh.shape.items()), "return_shape": True}
    trace: Any = jax.make_jaxpr(lambda params: shard(params, name, **options), **bound)
    _, shards = trace(layers)

    def one(keys: Any, param: Any, leaf: Any) -> LeafSharding:
        path, dtype = path_name(keys), np.dtype(param.dtype)
        names, stacked = names_of(leaf), is_stacked(keys)
        if not set(axes) & set(flat_axes(names)):
            reason = decisions[path].reason if path in decisions else "`shard` left it replicated"
            return LeafSharding(
                path, param.shape, dtype, None, reason, axis_size, stacked=bool(stacked)
            )
        if name not in names:
            problem = f" boxed {path} with names {names}: name one dim {name!r}, no tuple."
            raise binding_error("data_parallel.shard", problem)
        dim, shape = names.index(name), value_of(leaf).shape
        _, reason, _, parts = decisions.get(path, ShardDecision(None))
        result = LeafSharding(
            path,
            param.shape,
            dtype,
            dim + stacked,
            reason,
            axis_size,
            axes=axes,
            parts=parts,
            stacked=bool(stacked),
        )
        if shape != result.local_shape[stacked:]:
            raise binding_error(
                "data_parallel.shard",
                f" returned {path} with shape {shape}, which is not a shard of "
                f"{param.shape[stacked:]} along dim {dim} on {axis_size} devices of axis "
                f"{name!r}.",
            )
        return result

    structure: Any = jax.tree.structure(shards, is_leaf=is_box)
    if structure != jax.tree.structure(params):
        raise binding_error(
            "data_parallel.shard",
            " returned another tree than the parameters. Return each leaf, or an nn.Partitioned "
            "around its shard.",
        )
    return jax.tree_util.tree_map_with_path(one, params, shards)


def _by_parameter(
    tree: PyTree,
    shardings: PyTree,
    function: Callable[[Any, LeafSharding], Any],
    other: Callable[[Any], Any],
) -> PyTree:
    """Maps over parameters, or a state, each array with its parameter's sharding.

    State of another shape than its parameter (factored moments, say), which is replicated, is left
    to `other`, as is what belongs to no parameter.
    """

    def one(leaf: Any, sharding: LeafSharding) -> Any:
        return function(leaf, sharding) if leaf.shape == sharding.shape else other(leaf)

    return map_state(one, tree, shardings, other)


def _as_stored(leaf: Any, sharding: LeafSharding) -> Any:
    return leaf.update(shape=sharding.split_shape)


def check_optimizer(spec: TrainSpec, state: TrainState) -> None:
    """Raises UsageError if the update needs more than a step can give."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    apply = functools.partial(apply_in_step, spec.optimizer)
    value = jax.ShapeDtypeStruct((), np.float32)
    try:
        jax.eval_shape(apply, params, state.opt_state, params, value)
    except UsageError as error:
        if error.binding:
            raise
        raise binding_error(f"{spec.gin_name}.optimizer", f": {error}") from error
    except Exception as error:
        raise binding_error(
            f"{spec.gin_name}.optimizer",
            ": its update fails; it is given gradients, state, parameters, `value` (the loss) and "
            f"`grad`: {type(error).__name__}: {first_line(error)}",
        ) from error


def _own(x: Any) -> Any:
    """A copy: JAX reads a host array later, or for ever on CPUs, and its owner may write to it."""
    return x if isinstance(x, jax.Array) else np.array(x)


class BatchLayout:
    """How a global batch is sharded: which rows this process provides, and their placement.

    A global batch is cut into micro-batches first, and each micro-batch over the devices, so that
    micro-batch j has the same examples on any mesh. With exact sums it is cut into logical shards:
    a device has neighbours of them, and takes them one after the other as micro-batches.
    """

    def __init__(self, mesh: Mesh, spec: TrainSpec, reduction: Reduction = PLAIN):
        devices, micros = batch_devices(mesh), spec.accumulation_steps
        self._example = spec.example
        step = devices * micros
        if spec.batch_size % step:
            below = spec.batch_size // step * step
            near = f"{below} or {below + step}" if below else f"{step}, the least"
            raise binding_error(
                f"{spec.gin_name}.batch_size",
                f" = {spec.batch_size} does not divide over {sizes_text(mesh.shape)} = {devices} "
                f"devices x accumulation_steps {micros} = {step}. Take {near}.",
            )
        rows = spec.batch_size // micros
        self.sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self.eval_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self.eval_batch_size = rows
        self.eval_rows = placement.local_indices(self.eval_sharding, (rows,), 0)
        positions = step_of(reduction).positions(spec, devices, reduction)
        micros, rows = positions.shape
        here = placement.local_indices(self.sharding, positions.shape, 1)
        self._micro_rows = positions[:, here]
        self.train_rows = self._micro_rows.reshape(-1)
        self._position: jax.Array | None = None  # the same in each batch, so placed once

        def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((micros, rows, *shape), dtype, sharding=self.sharding)

        examples = {name: abstract(x.shape, x.dtype) for name, x in spec.example.items()}
        self.abstract_batch = PlacedBatch(examples, abstract((), np.int32))

    def place_batch(self, examples: Mapping[str, np.ndarray]) -> PlacedBatch:
        self._check(examples, "place_batch", self.train_rows.size)
        shape = self._micro_rows.shape
        cut = {k: _own(x).reshape(*shape, *np.shape(x)[1:]) for k, x in examples.items()}
        if self._position is None:
            self._position = placement.place(self._micro_rows, self.sharding)
        return PlacedBatch(placement.place(cut, self.sharding), self._position)

    def place_eval_batch(self, examples: Mapping[str, np.ndarray]) -> PyTree:
        self._check(examples, "place_eval_batch", None)
        own = {name: _own(x) for name, x in examples.items()}
        return placement.place(own, self.eval_sharding)

    def _check(self, examples: Any, function: str, rows: int | None) -> None:
        """Raises UsageError for a batch without the arrays that `TrainSpec.example` describes."""
        if isinstance(examples, PlacedBatch):
            raise UsageError(f"{function}: this batch is placed already. Give it to train_step.")
        if not isinstance(examples, Mapping):
            names = ", ".join(self._example)
            raise UsageError(
                f"{function}: the batch is {described(examples)}. Give a dict of arrays: {names}."
            )
        for name, value in examples.items():
            if not isinstance(value, jax.Array):
                as_numbers(f"{function}: {name!r}", value)
        for name, x in self._example.items():
            if name not in examples:
                raise UsageError(
                    f"{function}: the batch has no {name!r}, only {', '.join(examples) or 'none'}."
                )
            shape = np.shape(examples[name])
            if shape[1:] != x.shape or not shape or rows not in (None, shape[0]):
                expected = ", ".join(map(str, ("rows" if rows is None else rows, *x.shape)))
                raise UsageError(
                    f"{function}: {name!r} has shape {shape}. Give ({expected}): the rows of this "
                    "process, then the shape of one example in TrainSpec.example."
                )
