"""The two engines: how a strategy's step is compiled. `mapped`, `compiled`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gin
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.distributed import placement
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.fsdp import gather_params
from research_dp.distributed.mesh import DATA_AXIS, split_axes
from research_dp.distributed.sharding import fitted_tree
from research_dp.errors import UsageError, binding_error
from research_dp.strategies import slots, state, strategy
from research_dp.strategies.outer import Replicas
from research_dp.strategies.step import Gradients, Step, step_of
from research_dp.strategies.strategy import (
    OuterProgram,
    Strategy,
    StrategyConfig,
    TrainSpec,
    fitted_state,
)
from research_dp.types import PyTree

# A program that runs once: XLA's CPU compiler takes a third of the time, and the bits are the same.
_QUICK_ON_CPU = {"xla_backend_optimization_level": 1}


class Program(NamedTuple):
    """What an engine wraps."""

    step: Step
    stored: strategy.TrainState  # the abstract state, padded where need be
    logical: strategy.TrainState  # without padding
    batch: state.BatchLayout


@gin.register(module="strategies")
@checked
def mapped(config: StrategyConfig, spec: TrainSpec) -> Strategy:
    """`shard_map`: gradients by one device's program, every collective written out by the slots.

    Replication is not tracked (`check_vma=False`): gradients of replicated parameters are this
    device's own until `sync` averages them, once. The optimizer is applied to global arrays, after
    the map.
    """
    by_use = config.gather is not None and config.reshard_after_forward
    config = _tuned(config, gathers_units=by_use and bool(spec.model.units))
    _refuse_no_sync(config)
    if config.prefetch and not spec.model.units:
        raise binding_error(
            "data_parallel.prefetch", " = True, but the model names no units. Bind False."
        )
    _refuse_idle(config, gathers=config.gather is not None)
    step, stored, logical, batch = program = _program(config, spec)
    state_specs = jax.tree.map(lambda x: x.sharding.spec, stored)
    on_mesh = functools.partial(jax.shard_map, mesh=config.mesh, check_vma=False)
    rows, eval_rows = batch.sharding.spec, batch.eval_sharding.spec
    none: Any = PartitionSpec()
    read = _read_in_evaluation(state_specs), eval_rows
    of_all = dataclasses.replace(step, axes=split_axes(config.mesh))
    evaluate = jax.jit(on_mesh(of_all.evaluate, in_specs=read, out_specs=none))
    if config.outer is not None:
        return _of_replicas(config, program, evaluate)
    slices = jax.tree.map(lambda p: p.spec, step.shardings.slices)
    given = Gradients(slices, *(none,) * 4, state_specs.model_state, state_specs.slots)
    reads = state_specs._replace(opt_state=())
    gradients = on_mesh(step.gradients, in_specs=(reads, rows), out_specs=given)

    def train(state: strategy.TrainState, batch: strategy.PlacedBatch) -> Any:
        given = gradients(state._replace(opt_state=()), batch)
        given = given._replace(grads=fitted_tree(given.grads, logical.params))
        # The compiler splits arrays without padding as the padded ones are: nothing moves.
        new, metrics = step.update(fitted_state(state, logical), given)
        return fitted_state(new, stored), metrics

    train_step = _jitted(config, stored)(_of_placed(train))
    return _strategy(config, program, train_step=train_step, evaluate=evaluate)


def _of_replicas(config: StrategyConfig, program: Program, evaluate: Any) -> Strategy:
    """The strategy whose replicas along axis `data` train by themselves, given that of one."""
    replicas = Replicas(config, *program[:3])
    outer: Any = config.outer
    of_each = NamedSharding(config.mesh, PartitionSpec(DATA_AXIS))

    def jitted(send: int | None = None, receive: int | None = None) -> Any:
        step = functools.partial(replicas.train, send=send, receive=receive)
        return _jitted(config, replicas.stored, of_each)(_of_placed(step))

    programs = dict[slots.Events, OuterProgram]()
    for events in dict.fromkeys(outer.events(done) for done in range(1, 3 * outer.every + 1)):
        if events.meet is not None:
            meet = functools.partial(replicas.meet, number=events.meet)
            program_of_all = _jitted(config, replicas.stored)(meet)
            programs[events] = OuterProgram(program_of_all, outer.every)
        elif events != slots.Events():
            step_of_all = jitted(events.send, events.receive)
            programs[events] = OuterProgram(step_of_all, outer.every, is_step=True)
    return _strategy(
        config,
        program._replace(stored=replicas.stored, logical=replicas.logical),
        train_step=jitted(),
        evaluate=evaluate,
        programs=programs,
        replicas=replicas,
    )


def _in_rounds(
    train_step: Any, programs: Mapping[Any, OuterProgram], outer: Any, in_turn: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A training step by which replicas meet too, where a round has it so.

    The number of a state is read once, and then known of those that this returned.
    """
    known: list[Any] = [None, 0]
    compiled = dict[slots.Events, Any]()

    def call(state: strategy.TrainState, batch: strategy.PlacedBatch) -> Any:
        if not compiled:  # with the step, not in the midst of a run
            compiled.update((key, in_turn(x.lower(state, batch))) for key, x in programs.items())
        newest, done = known
        done = 1 + (done if state.step is newest else int(state.step))
        events = outer.events(done)
        if events != slots.Events() and programs[events].is_step:
            state, metrics = compiled[events](state, batch)
        else:
            state, metrics = train_step(state, batch)
            if events.meet is not None:
                state, more = compiled[events](state)
                metrics = {**metrics, **more}
        known[:] = state.step, done
        return state, metrics

    return call


@gin.register(module="strategies")
@checked
def compiled(config: StrategyConfig, spec: TrainSpec) -> Strategy:
    """`jit` on global arrays: the compiler inserts the collectives that the shardings imply.

    A slot that only a mapped program has is a UsageError. `gather` is called with `mesh`; None:
    gathers have no dtype of their own.
    """
    config = _tuned(config, gathers_units=False)
    _refuse_filled(
        config,
        ("outer", "sync", "update", *(() if config.shard else ("gather",))),
        "the compiler inserts collectives in engine 'compiled'; bind None.",
    )
    if config.reduction is not PLAIN and config.mesh.size > 1:
        raise binding_error(
            "data_parallel.reduction",
            ": engine 'compiled' leaves sums to the compiler; use 'mapped'.",
        )
    if config.compression:
        raise binding_error(
            "data_parallel.compression",
            ": engine 'compiled' leaves collectives to the compiler. Bind None, or a strategy of "
            "engine 'mapped', e.g. strategies/fsdp.gin.",
        )
    _refuse_idle(config, gathers=config.shard is not None)
    if config.gather and not slots.options_of(config.gather, {"mesh": config.mesh}):
        raise binding_error("data_parallel.gather", ": it takes no `mesh`. Bind @gather_params.")
    if config.prefetch:
        raise binding_error("data_parallel.prefetch", " = True: the compiler gathers. Bind False.")
    step, stored, logical, _ = program = _program(config, spec, on_global_arrays=True)

    def train(state: strategy.TrainState, batch: strategy.PlacedBatch) -> Any:
        new, metrics = step.train(fitted_state(state, logical), batch)
        return fitted_state(new, stored), metrics

    def evaluated(state: strategy.TrainState, examples: PyTree) -> Any:
        return step.evaluate(fitted_state(state, logical), examples)

    train_step = _jitted(config, stored)(_of_placed(train))
    evaluate = jax.jit(evaluated, out_shardings=_replicated(config))
    return _strategy(config, program, train_step=train_step, evaluate=evaluate)


def _tuned(config: StrategyConfig, *, gathers_units: bool) -> StrategyConfig:
    """A strategy with what its `tuning` has for it; `gathers_units`: each where it is used."""
    found = config.tuning
    if found is None:
        return config
    prefetch = found.prefetch if gathers_units and config.prefetch is None else config.prefetch
    of_gathers = found.gather_options if gathers_units and prefetch == found.prefetch else {}
    given = (found.compiler_options, of_gathers, config.compiler_options)
    options = {name: value for some in given for name, value in (some or {}).items()}
    return dataclasses.replace(config, prefetch=prefetch, compiler_options=options or None)


def _refuse_no_sync(config: StrategyConfig) -> None:
    """Raises UsageError if several devices would each follow gradients of their own."""
    together = config.mesh.size // (config.mesh.shape[DATA_AXIS] if config.outer else 1)
    if config.sync is None and together > 1:
        which = "replicated parameters" if config.gather else "parameters"
        raise binding_error(
            "data_parallel.sync",
            f" = None on {config.mesh.size} devices: nothing averages the gradients of {which}. "
            "Bind @sync_gradients, which skips gradients that `gather` has averaged.",
        )


def _refuse_idle(config: StrategyConfig, *, gathers: bool) -> None:
    """Raises UsageError if an option of `gather` or `sync` is bound, but no such slot is called."""
    for name, default, slot, is_called in (
        ("reshard_after_forward", True, "gather", gathers),
        ("sync_each", "step", "sync", config.sync is not None),
    ):
        value = getattr(config, name)
        if value != default and not is_called:
            raise binding_error(
                f"data_parallel.{name}",
                f" = {value!r} has no effect: this strategy calls no {slot}. Leave it at "
                f"{default!r}.",
            )


def _refuse_filled(config: StrategyConfig, names: tuple[str, ...], why: str) -> None:
    """Raises UsageError if one of these slots or options is not None."""
    for name in names:
        if (value := getattr(config, name)) is not None:
            shown = getattr(value, "__name__", value)
            raise binding_error(f"data_parallel.{name}", f" = {shown}: {why}")


def _program(config: StrategyConfig, spec: TrainSpec, *, on_global_arrays: bool = False) -> Program:
    """The step, how the state is sharded, the abstract state, and the layout of batches."""
    mesh = config.mesh
    shardings, stored, logical = state.infer_state_sharding(
        config, spec, params_sharded=on_global_arrays or config.gather is not None
    )
    axes, config_seen = split_axes(mesh), config
    if config.outer is not None:
        axes = tuple(axis for axis in axes if axis != DATA_AXIS)
    if on_global_arrays:  # gradients too
        axes = ()
        gather = config.shard and functools.partial(config.gather or gather_params, mesh=mesh)
        config_seen = dataclasses.replace(config, gather=gather)
    state.check_optimizer(spec, logical)
    step = step_of(config.reduction)(config_seen, spec, shardings, axes)
    batch = state.BatchLayout(mesh, spec, config.reduction)
    return Program(step, stored, logical, batch)


def _jitted(
    config: StrategyConfig, abstract: strategy.TrainState, of_metrics: NamedSharding | None = None
) -> Callable[..., Any]:
    """`jax.jit` for a training step: the new state takes the old one's memory and shardings."""
    outs = jax.tree.map(lambda x: x.sharding, abstract), of_metrics or _replicated(config)
    options = _compiler_options(config)
    return functools.partial(
        jax.jit, donate_argnums=0, out_shardings=outs, compiler_options=options
    )


def _replicated(config: StrategyConfig) -> NamedSharding:
    return NamedSharding(config.mesh, PartitionSpec())


def _read_in_evaluation(state: Any) -> strategy.TrainState:
    """A state without the fields that evaluation does not read, so that they need not exist."""
    return strategy.TrainState(state.step, state.params, state.model_state, ())


def _strategy(
    config: StrategyConfig,
    program: Program,
    train_step: Callable[..., Any],
    evaluate: Callable[..., Any],
    programs: Mapping[Any, OuterProgram] = MappingProxyType({}),
    replicas: Replicas | None = None,
) -> Strategy:
    """A strategy; `init` is compiled with shardings: the full model is never on one device."""

    def eval_step(state: strategy.TrainState, examples: PyTree) -> strategy.Metrics:
        if isinstance(examples, strategy.PlacedBatch):
            raise UsageError(
                "eval_step: this batch is one of training. Place it for evaluation: "
                "strategy.place_eval_batch(batch)."
            )
        state = _read_in_evaluation(state)
        _refuse_deleted("eval_step", state, examples)
        return evaluate(state, examples)

    step, abstract, logical, batch = program

    def init_state(*args: Any) -> strategy.TrainState:
        made = state.init_state(config, step.spec, *args)
        return fitted_state(made if replicas is None else replicas.initial(made), abstract)

    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    jit = functools.partial(jax.jit, compiler_options=_QUICK_ON_CPU if on_cpu else None)
    init: Any = jit(init_state, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
    last: list[Any] = []
    run_init, run_step = _in_turn(init, last) if on_cpu else init, train_step
    if on_cpu and config.mesh.size > 1:
        run_step = _in_turn(train_step, last, lambda results: results[1])
        evaluate = _in_place_of(evaluate, _in_turn(evaluate, last, lambda results: results))
    if (outer := config.outer) is not None:

        def in_turn(program: Any) -> Any:
            program, is_split = program.compile(), on_cpu and config.mesh.size > 1
            return _in_turn(program, last, lambda results: results[1]) if is_split else program

        run_step = _in_rounds(run_step, programs, outer, in_turn)

    def new_state_of(*args: Any) -> strategy.TrainState:
        with jax.transfer_guard_host_to_device("allow"):  # of the seed
            return run_init(*args)

    def checked_step(state: strategy.TrainState, batch: strategy.PlacedBatch) -> Any:
        _refuse_deleted("train_step", state, batch)
        return run_step(state, batch)

    of_batch = ("abstract_batch", "place_batch", "place_eval_batch", "train_rows", "eval_rows")
    return Strategy(
        config=config,
        spec=step.spec,
        shardings=step.shardings,
        abstract_state=abstract,
        logical_state=logical,
        eval_batch_size=batch.eval_batch_size,
        init=_in_place_of(init, new_state_of),
        train_step=_in_place_of(train_step, checked_step),
        eval_step=eval_step,
        batch_axes=step.axes if outer is None else split_axes(config.mesh),
        outer_programs=tuple(programs.values()),
        **{name: getattr(batch, name) for name in of_batch},
    )


def _in_turn(
    program: Any, last: list[Any], kept: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """A jitted program that begins when the one before it has ended: for devices of a split CPU.

    They share a thread pool: a program that waits in a collective can take the threads that the one
    before it needs to end, and XLA deadlocks. `last` has those results of the newest program of
    the strategy that are `kept`; None: the next program takes their memory, so this one ends here.
    """

    def call(*args: Any) -> Any:
        jax.block_until_ready([last.pop() for _ in last[:]])
        results = program(*args)
        if kept is None:
            return jax.block_until_ready(results)
        last.append(kept(results))
        return results

    return call


def _in_place_of(program: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a jitted program by `call`, and is traced and lowered as it is."""

    @functools.wraps(program)
    def function(*args: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            # Within another trace JAX refuses a jitted function's compiler options.
            return program.__wrapped__(*args)
        return call(*args)

    function.lower = program.lower  # type: ignore[attr-defined]
    function.eval_shape = program.eval_shape  # type: ignore[attr-defined]
    return function


def _refuse_deleted(function: str, state: strategy.TrainState, batch: PyTree) -> None:
    """Raises UsageError for arrays without memory, at which the runtime may end the process."""
    placement.refuse_deleted(f"{function}: the batch", batch, "Place it anew: place_batch(batch).")
    placement.refuse_deleted(f"{function}: the state", state)


def _of_placed(step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step that refuses a batch that is not placed, when it is traced."""

    @functools.wraps(step)
    def train(state: strategy.TrainState, batch: strategy.PlacedBatch) -> Any:
        if not isinstance(batch, strategy.PlacedBatch):
            raise UsageError("train_step: place the batch first: strategy.place_batch(batch).")
        return step(state, batch)

    return train


def _compiler_options(config: StrategyConfig) -> dict[str, Any] | None:
    """The options; UsageError if the compiler of the mesh's devices does not know one."""
    if not config.compiler_options:
        return None
    device, options = config.mesh.devices.flat[0], dict(config.compiler_options)
    renamed = "xla_gpu_enable_pipelined_reduce_scatter"  # after JAX 0.11.0
    if options.get(renamed) is False and jax.__version_info__ >= (0, 11, 1):
        del options[renamed]
        options["xla_gpu_pipeline_reduce_scatter"] = "COLLECTIVE_PIPELINING_MODE_OFF"
    one = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        # The least program there is: the compiler reads options before anything else.
        jax.jit(lambda x: x, compiler_options=options).lower(one).compile()
    except Exception as error:
        bound = ("compiler_options", "gather_options") if config.tuning else ()
        unknown = (n for n in bound for x in getattr(config.tuning, n) or () if x in str(error))
        name = next(unknown, None)
        raise binding_error(
            f"tuning.{name}" if name else "data_parallel.compiler_options",
            f" on {device.platform}: {str(error).splitlines()[0]}. Take the options/ file of "
            "your devices, or none.",
        ) from error
    return options
