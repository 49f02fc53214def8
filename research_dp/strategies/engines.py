"""The three engines: how a strategy's step is compiled. `mapped`, `compiled`, `pmapped`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import gin
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.deterministic.step import DeterministicStep
from research_dp.distributed import placement
from research_dp.distributed.boxed import is_box
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.differentiable_gather import gather_by_compiler
from research_dp.distributed.mesh import (
    DATA_AXIS,
    FSDP_AXIS,
    refuse_several_processes,
    split_axes,
)
from research_dp.distributed.sharding import replicated
from research_dp.errors import binding_error
from research_dp.strategies import slots, state
from research_dp.strategies.step import Step
from research_dp.strategies.strategy import (
    PlacedBatch,
    StateShardings,
    Strategy,
    StrategyConfig,
    TrainSpec,
    TrainState,
)

PyTree = Any


@gin.register(module="strategies")
@checked
def mapped(config: StrategyConfig, spec: TrainSpec) -> Strategy:
    """`shard_map`: the step is one device's program, every collective written out by the slots.

    Replication is not tracked (`check_vma=False`): gradients of replicated parameters are this
    device's own until `sync` averages them, once.

    Raises:
        UsageError: The optimizer cannot be applied to shards, or the batch does not divide.
    """
    slots.refuse_no_sync(config)
    if config.prefetch and not spec.model.units:
        raise binding_error(
            "data_parallel.prefetch", " = True, but the model names no units. Bind False."
        )
    slots.refuse_idle(config, gathers=config.gather is not None, syncs=config.sync is not None)
    step, abstract, batch = _device_program(config, spec)
    state_specs = jax.tree.map(lambda x: x.sharding.spec, abstract)
    on_mesh = functools.partial(jax.shard_map, mesh=config.mesh, check_vma=False)
    train = on_mesh(
        step.train,
        in_specs=(state_specs, batch.sharding.spec),
        out_specs=(state_specs, PartitionSpec()),
    )
    evaluate = on_mesh(
        step.evaluate, in_specs=(state_specs, batch.eval_sharding.spec), out_specs=PartitionSpec()
    )
    return _strategy(
        step,
        abstract,
        batch,
        train_step=jax.jit(train, donate_argnums=0, compiler_options=_compiler_options(config)),
        eval_step=jax.jit(evaluate),
    )


@gin.register(module="strategies")
@checked
def compiled(config: StrategyConfig, spec: TrainSpec) -> Strategy:
    """`jit` on global arrays: the compiler inserts the collectives that the shardings imply.

    Raises:
        UsageError: A slot is filled that only a mapped program has, or the batch does not divide.
    """
    slots.refuse_filled(
        config,
        ("gather", "sync", "update"),
        "the compiler inserts collectives in engine 'compiled'; bind None.",
    )
    mesh = config.mesh
    if config.reduction is not PLAIN and mesh.size > 1:
        raise binding_error(
            "data_parallel.reduction",
            ": engine 'compiled' leaves sums to the compiler; use 'mapped'.",
        )
    slots.refuse_idle(config, gathers=config.shard is not None, syncs=False)
    shardings, abstract = state.infer_state_sharding(config, spec, mesh, params_sharded=True)
    gather = None if config.shard is None else _gather_on(mesh)
    # The step sees gradients and slices as global arrays.
    seen = StateShardings(shardings.params, replicated(shardings.slices))
    state.check_optimizer(config, spec, seen.slices, abstract)
    step = _step(dataclasses.replace(config, gather=gather), spec, seen, ())
    outs = (state.shardings_of(abstract), NamedSharding(mesh, PartitionSpec()))
    options = _compiler_options(config)
    return _strategy(
        step,
        abstract,
        state.BatchLayout(mesh, spec, config.reduction.logical_shards),
        config=config,
        shardings=shardings,
        train_step=jax.jit(
            step.train, donate_argnums=0, out_shardings=outs, compiler_options=options
        ),
        eval_step=jax.jit(step.evaluate, out_shardings=outs[1]),
    )


@gin.register(module="strategies")
@checked
def pmapped(config: StrategyConfig, spec: TrainSpec) -> Strategy:
    """`pmap` over axis `data`, parameters replicated: kept for comparison with older code.

    Raises:
        UsageError: Something is sharded, the batch does not divide, or there are several processes,
            whose arrays pmap keeps apart.
    """
    _check_pmapped(config)
    devices = config.mesh.devices.ravel()
    count = len(devices)
    step, abstract, batch = _device_program(config, spec)
    # pmap lays its arguments out on a mesh of its own, of this one axis.
    line = Mesh(devices, (DATA_AXIS,))
    by_device = NamedSharding(line, PartitionSpec(DATA_AXIS))
    on_each = NamedSharding(line, PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_each), abstract
    )
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (count, x.shape[0], x.shape[1] // count, *x.shape[2:]), x.dtype, sharding=by_device
        ),
        batch.abstract,
    )

    def place_batch(examples: Mapping[str, np.ndarray]) -> PlacedBatch:
        def split(x: np.ndarray) -> np.ndarray:  # (micro, rows) -> (device, micro, rows a device)
            return x.reshape(x.shape[0], count, -1, *x.shape[2:]).swapaxes(0, 1)

        return placement.place(jax.tree.map(split, batch.micro_batches(examples)), by_device)

    def place_eval_batch(examples: Mapping[str, np.ndarray]) -> Any:
        split = {k: x.reshape(count, -1, *x.shape[1:]) for k, x in examples.items()}
        return placement.place(split, by_device)

    pmap = functools.partial(
        jax.pmap, axis_name=DATA_AXIS, in_axes=(None, 0), out_axes=None, devices=list(devices)
    )
    return _strategy(
        step,
        abstract,
        batch,
        abstract_batch=abstract_batch,
        place_batch=place_batch,
        place_eval_batch=place_eval_batch,
        train_step=pmap(step.train, donate_argnums=0),
        eval_step=pmap(step.evaluate),
    )


def _check_pmapped(config: StrategyConfig) -> None:
    """Raises UsageError for what `pmap` cannot do."""
    refuse_several_processes(
        "engine 'pmapped'", "Use ddp, which computes the same.", "data_parallel.engine"
    )
    slots.refuse_filled(config, ("compiler_options",), "jax.pmap takes none; bind None.")
    slots.refuse_filled(
        config, ("shard", "gather"), "engine 'pmapped' replicates parameters; bind None."
    )
    slots.refuse_no_sync(config)
    slots.refuse_idle(config, gathers=False, syncs=config.sync is not None)
    for name, slot in slots.stateful(config).items():
        raise binding_error(
            f"data_parallel.{name}",
            f" = {type(slot).__name__}: engine 'pmapped' keeps no state of slots; use 'mapped'.",
        )
    if (size := config.mesh.shape[FSDP_AXIS]) != 1:
        raise binding_error(
            "make_mesh.axes",
            f": engine 'pmapped' has one axis, {DATA_AXIS!r}, but {FSDP_AXIS!r} has size {size}. "
            "Bind make_mesh.axes = {'data': -1}.",
        )


def _device_program(
    config: StrategyConfig, spec: TrainSpec
) -> tuple[Step, TrainState, state.BatchLayout]:
    """The step as one device's program, the abstract state, and the layout of batches."""
    shardings, abstract = state.infer_state_sharding(
        config, spec, config.mesh, params_sharded=config.gather is not None
    )
    state.check_optimizer(config, spec, shardings.slices, abstract)
    step = _step(config, spec, shardings, split_axes(config.mesh))
    return step, abstract, state.BatchLayout(config.mesh, spec, config.reduction.logical_shards)


def _step(
    config: StrategyConfig, spec: TrainSpec, shardings: StateShardings, axes: tuple[str, ...]
) -> Step:
    """The step functions; with exact sums if the strategy's reduction has logical shards."""
    exact = config.reduction.logical_shards is not None
    return (DeterministicStep if exact else Step)(config, spec, shardings, axes)


def _gather_on(mesh: Mesh) -> Any:
    """A `gather` in which the compiler inserts the collectives."""

    def one(leaf: Any) -> Any:
        if not is_box(leaf):
            return leaf
        sharded = NamedSharding(mesh, PartitionSpec(*leaf.names))
        return gather_by_compiler(leaf.value, sharded, NamedSharding(mesh, PartitionSpec()))

    def gather(params: PyTree, axis_name: str) -> PyTree:
        del axis_name
        return jax.tree.map(one, params, is_leaf=is_box)

    return gather


def _strategy(step: Step, abstract: TrainState, batch: state.BatchLayout, **parts: Any) -> Strategy:
    """A strategy from what all engines have in common and the parts of one.

    `init` is compiled with the state's shardings, so that the full model is never on one device.
    """
    init = functools.partial(state.init_state, step.config, step.spec)
    common = {
        "config": step.config,
        "shardings": step.shardings,
        "abstract_batch": batch.abstract,
        "place_batch": batch.place,
        "place_eval_batch": batch.place_eval,
    }
    return Strategy(
        abstract_state=abstract,
        train_rows=batch.train_rows,
        eval_rows=batch.eval_rows,
        eval_batch_size=batch.eval_batch_size,
        init=jax.jit(init, out_shardings=state.shardings_of(abstract)),
        batch_axes=step.axes,
        **{**common, **parts},
    )


def _compiler_options(config: StrategyConfig) -> dict[str, Any] | None:
    """The options; UsageError if the compiler of the mesh's devices does not know one."""
    if not config.compiler_options:
        return None
    options, device = dict(config.compiler_options), config.mesh.devices.flat[0]
    one = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        # The least program there is: the compiler reads options before anything else.
        jax.jit(lambda x: x, compiler_options=options).lower(one).compile()
    except Exception as error:
        raise binding_error(
            "data_parallel.compiler_options",
            f" on {device.platform}: {str(error).splitlines()[0]}. Take the gin/options/ file of "
            "your devices, or none.",
        ) from error
    return options
