"""What a strategy is: its slots and their options, and what an engine builds from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Dtype, MaxNorm, Seed, Transform, described
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.codecs import Compression
from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS, noting, sizes_text
from research_dp.distributed.optimizer import LossScale, with_master_weights
from research_dp.distributed.placement import nbytes
from research_dp.distributed.sharding import fitted_tree
from research_dp.errors import UsageError, binding_error
from research_dp.strategies import frozen, slots
from research_dp.strategies.error_feedback import ErrorFeedback
from research_dp.strategies.tuning import Tuning
from research_dp.types import MEASURED, LossOutput, OneExample, PyTree, TrainableModel

Metrics = Mapping[str, jax.Array]
When = Literal["step", "micro_batch"]
LossOver = Literal["batch", "device"]
Slot = Callable[..., PyTree] | slots.Stateful

# Metrics of a training step that are no sums over examples.
NONFINITE, SKIPPED = "nonfinite", "skipped_steps"
# The first flag of `NONFINITE`: the items' weights are too small to train on, or sum to 0.
WEIGHTLESS, NO_WEIGHT = 2.0, 3.0
# Names that a model's own metrics cannot have: the step's metrics, and the keys of a record.
_RESERVED = ("loss", "grad_norm", NONFINITE, SKIPPED, "split", "step", *MEASURED)
OF_SYNC = "sync/"  # how the names begin of metrics that `sync` reports
OF_OUTER = "outer/"  # and of those of steps at which replicas meet
_OF_A_PART = "the loss is that of each device's part of the batch"
# Random keys: each purpose has a root of its own, so that no key is drawn from twice.
_INIT, _EXAMPLES, _SLOTS = 0, 1, 2


class TrainState(NamedTuple):
    """Everything that training changes; global arrays.

    An array of which the devices divide no dim is stored padded with zeros: `Strategy.logical`
    cuts it.

    `step`, 0-d int32, is the number of steps done; `model_state` has e.g. batch statistics;
    `opt_state` has the shapes and paths of parameters; `loss_scale` is a `LossScaleState`, or ();
    `slots` has the state of the slots that have any ('sync', 'update', 'outer'), see `slots`.

    Of replicas that train by themselves (slot 'outer') `params` and `model_state` are those at
    which they met last; `opt_state` and `loss_scale` have a leading dim, sharded over axis `data`.
    """

    step: Any
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    loss_scale: Any = ()
    slots: Any = ()


def fitted_state(state: TrainState, like: TrainState) -> TrainState:
    """A state with each array cut, or padded with zeros, to another's shapes; () stays ()."""
    pairs = zip(state, like, strict=True)
    return TrainState(*(fitted_tree(x, to) if jax.tree.leaves(x) else x for x, to in pairs))


class PlacedBatch(NamedTuple):
    """A batch on the devices: arrays (accumulation_steps, batch_size / accumulation_steps, ...).

    `position`, int32, is that of each example in the global batch: random keys come from it.
    """

    examples: Mapping[str, Any]
    position: Any


class StateShardings(NamedTuple):
    """Trees of `LeafSharding`: parameters between steps; slices (gradients, optimizer state)."""

    params: PyTree
    slices: PyTree
    frozen: PyTree  # frozen parameters, between steps; {}: there are none

    @property
    def stored(self) -> PyTree:
        """All parameters between steps, frozen ones too."""
        return frozen.joined(self.params, self.frozen) if self.frozen else self.params


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What a strategy is built for.

    With `skip_nonfinite` a step whose loss or gradients are not finite changes only its number.
    `param_dtype` and `loss_scale` are those of the strategy, set by `StrategyConfig.fitted`.
    """

    gin_name: ClassVar[str] = "TrainSpec"  # what messages say before the name of a field

    model: TrainableModel
    optimizer: Transform
    example: Mapping[str, jax.ShapeDtypeStruct]  # one example's arrays, without a batch dim
    batch_size: Count  # examples a step, over all devices and micro-batches
    accumulation_steps: Count = 1  # micro-batches a step
    max_grad_norm: MaxNorm | None = None  # global L2 norm that gradients are scaled down to
    seed: Seed = 0  # of dropout keys; initialisation takes its key as an argument
    param_dtype: Dtype | None = None
    loss_scale: LossScale | None = None
    skip_nonfinite: bool = False
    # What the loss is taken over, if it mixes examples: 'device' accepts that it is each device's
    # part of the batch, which is another algorithm on another number of devices.
    loss_over: LossOver = "batch"
    frozen: str | Sequence[str] = ()  # regular expressions: full paths of what is not trained

    def __post_init__(self) -> None:
        model = self.model.with_units(self.one_example())
        model = frozen.freeze(model, self.frozen, f"{self.gin_name}.frozen")
        object.__setattr__(self, "model", model)

    def one_example(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """An abstract batch of one example; UsageError if a model reads what the data set lacks."""
        return OneExample(self.example, f"{self.gin_name}.model")


class OuterProgram(NamedTuple):
    """A jitted program that runs once in so many steps, by which replicas meet."""

    program: Any
    every: int
    is_step: bool = False  # (state, batch) in place of a training step; else (state) after one

    def lower(self, state: Any, batch: Any) -> Any:
        """The program, lowered for a state, and maybe a batch."""
        return self.program.lower(*self.arguments(state, batch))

    def arguments(self, state: Any, batch: Any) -> tuple[Any, ...]:
        """Those that it takes."""
        return (state, batch) if self.is_step else (state,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy built for one model and mesh: `init`, `place_batch`, `train_step`, `eval_step`.

    `init` makes the state, sharded from birth, from a key, or from the seed of a run. `train_rows`
    and `eval_rows` are the positions in the global batch of the examples that this process gives to
    `place_batch` and `place_eval_batch`, as host arrays. `train_step` takes the old state's memory.
    `eval_step` reads `step`, `params` and `model_state` alone.

    Metrics are arrays (2,): sum and count; and `NONFINITE`, (1 + parameters,), above 0 if the step
    went wrong, and for each gradient, in the order of paths, that did. Those of replicas that train
    by themselves have a leading dim. A step whose items have no weight changes only its number.
    """

    config: StrategyConfig  # what it was built from, resolved
    spec: TrainSpec  # what it was built for, with the strategy's own dtype and scale
    shardings: StateShardings
    abstract_state: TrainState  # shapes, dtypes and shardings, as stored: padded where need be
    logical_state: TrainState  # the same without padding; what has some is replicated
    abstract_batch: PlacedBatch
    train_rows: np.ndarray
    eval_rows: np.ndarray
    eval_batch_size: int  # batch_size / accumulation_steps
    init: Callable[..., TrainState]
    place_batch: Callable[[Mapping[str, np.ndarray]], PlacedBatch]
    place_eval_batch: Callable[[Mapping[str, np.ndarray]], PyTree]
    train_step: Callable[[TrainState, PlacedBatch], tuple[TrainState, Metrics]]
    eval_step: Callable[[TrainState, PyTree], Metrics]
    outer_programs: tuple[OuterProgram, ...] = ()  # what replicas do that meet
    batch_axes: tuple[str, ...] = ()  # that split the batch where the loss runs; (): nothing does
    algorithm: str | None = None  # why it computes another algorithm by design; None: it does not
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `mesh.noting`

    @property
    def programs(self) -> list[tuple[Any, tuple[Any, ...], float]]:
        """(program, abstract arguments, the share of steps in which it runs), the step first."""
        given = self.abstract_state, self.abstract_batch
        others = [(x.program, x.arguments(*given), 1 / x.every) for x in self.outer_programs]
        share = 1 - sum(x.is_step / x.every for x in self.outer_programs)
        return [(self.train_step, given, share), *others]

    @property
    def splits_batch(self) -> bool:
        """Whether the examples that a loss gets together depend on the number of devices."""
        return bool(self.batch_axes) and self.config.reduction.logical_shards is None

    def logical(self, state: TrainState) -> TrainState:
        """A state without padding; () stays (). Arrays that had some are replicated then."""
        return fitted_state(state, self.logical_state)

    def stored(self, state: TrainState) -> TrainState:
        """The inverse of `logical`: a state as `train_step` takes it, on its shardings."""
        padded = fitted_state(state, self.abstract_state)
        return jax.device_put(padded, jax.tree.map(lambda x: x.sharding, self.abstract_state))

    def nbytes(self, field: str) -> tuple[int, int]:
        """Bytes of a field of the state: on a device with padding, and in all without."""
        stored, logical = (getattr(x, field) for x in (self.abstract_state, self.logical_state))
        return nbytes(stored)[0], nbytes(logical)[1]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def mesh(self) -> Mesh:
        return self.config.mesh


@gin.register("data_parallel", module="strategies", denylist=["choose"])
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """A strategy before it meets a model: the engine, the mesh and the slots.

    `strategies.slots` has the contracts of the slots. None in a slot means: not needed.

    Attributes:
        name: What the run's summary calls it.
        engine: `mapped` or `compiled`.
        mesh: The devices, with axes `data` and `fsdp`; `@make_mesh()`.
        shard: Which dims of parameters are sharded over mesh axis `fsdp`; None: none. Without
            `gather` a mapped strategy keeps them replicated between steps, and `shard` says which
            shard of each a device updates.
        gather: How shards become full parameters for compute. None: parameters are replicated.
        sync: How gradients are averaged. None: there is one device, or the compiler averages.
        update: How the optimizer is applied to global arrays. None: as by `apply_gradients`.
        optimizer: (the run's optimizer) -> the one that this strategy applies, both of Optax, e.g.
            one of signs. None: the run's own.
        state_axes: Mesh axes over which gradients and optimizer state are sharded, for a `sync` and
            an `update` that do so; `fsdp` first.
        reshard_after_forward: Whether gathered parameters are dropped after their use, and gathered
            again in the backward pass, for each micro-batch. Otherwise they are gathered, and their
            gradients scattered, once a step.
        sync_each: When `sync` is called: each 'step', or each 'micro_batch'.
        reduction: The collectives that `gather`, `sync` and `update` use.
        compression: The codecs of what they send; `@compression()`. None: nothing is encoded.
        outer: What replicas do that train by themselves along mesh axis `data`, every few steps;
            `@outer()`. Each is then the devices of axis `fsdp`. None: all devices train together.
        accumulation_dtype: In which gradients of micro-batches are added up; None: their own.
        param_dtype: dtype of parameters between steps and on the wire, e.g. 'bfloat16'; the
            optimizer then keeps them in the model's own dtype too, with the rest of its state.
            None: `gather_dtype` of an `update` that gathers, else the model's own.
        loss_scale: `@dynamic_loss_scale()` for compute in float16; None: the loss is not scaled.
        prefetch: Whether the next unit is gathered, and the last one's gradient scattered, while
            one is computed. None: except layers of a stack, which True looks ahead in too; of an
            own model's scan if they are recomputed, see docs/own_model.md.
        overlap: Whether collectives run beside compute: each unit is then gathered, or its
            gradient synchronised, by itself. False where each collective is waited for, as on
            CPUs: fewer, larger ones are faster.
        compiler_options: XLA's options for the training step, by name.
        tuning: What serves the devices; see the files options/.
        choose: Finds the strategy, where this one stands for several, once it is known what is
            built, the same in every process. None: this is the one.
    """

    gin_name: ClassVar[str] = "data_parallel"

    name: str = gin.REQUIRED
    engine: Callable[[StrategyConfig, TrainSpec], Strategy] = gin.REQUIRED
    mesh: Mesh = gin.REQUIRED
    shard: Callable[..., Mapping] | None = None
    gather: Callable[..., Mapping] | None = None
    sync: Slot | None = None
    update: Slot | None = None
    optimizer: Callable[[Transform], Transform] | None = None
    state_axes: Sequence[str] = (FSDP_AXIS,)
    reshard_after_forward: bool = True
    sync_each: When = "step"
    reduction: Reduction = PLAIN
    compression: Compression | None = None
    outer: slots.OuterStep | None = None
    accumulation_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    loss_scale: LossScale | None = None
    prefetch: bool | None = None
    overlap: bool = True
    compiler_options: Mapping[str, Any] | None = None
    tuning: Tuning | None = None
    choose: Callable[[TrainSpec], StrategyConfig] | None = None

    def __post_init__(self) -> None:
        if self.prefetch and (self.gather is None or not self.reshard_after_forward):
            raise binding_error(
                "data_parallel.prefetch",
                f" = True, but {self.name!r} gathers no unit by itself. Bind False.",
            )
        if self.gather and not self.reshard_after_forward and self.sync_each == "micro_batch":
            raise binding_error(
                "data_parallel.sync_each",
                " = 'micro_batch' with reshard_after_forward = False: gradients of gathered "
                "parameters are scattered at the end of a step only. Use 'step'.",
            )
        if self.sync_each == "micro_batch" and slots.takes_any(self.sync, "scale", "report"):
            raise binding_error(
                "data_parallel.sync_each",
                " = 'micro_batch': `sync` takes `scale` or `report`, which are of a step. Use "
                "'step'.",
            )
        if (
            self.sync_each == "micro_batch"
            and self.loss_scale
            and isinstance(self.sync, slots.Stateful)
        ):
            raise binding_error(
                "data_parallel.sync_each",
                " = 'micro_batch' with a loss scale: the state of `sync` would change its unit "
                "with the scale. Use 'step'.",
            )

        if isinstance(self.sync, ErrorFeedback):  # of another compression
            object.__setattr__(self, "sync", self.sync.func)
        if self.compression:
            self._check_compression(self.compression)
        if self.outer is not None:
            self._check_outer()

    def _check_outer(self) -> None:
        """Raises UsageError for what replicas that train by themselves cannot have."""
        if DATA_AXIS in self.state_axes:
            problem = f" has {DATA_AXIS!r}, along which replicas differ. Bind ('{FSDP_AXIS}',)."
            raise binding_error("data_parallel.state_axes", problem)
        if self.compression and self.compression.error_feedback:
            problem = " = True: replicas cannot carry what encoding loses. Bind False."
            raise binding_error("compression.error_feedback", problem)
        for name in ("sync", "update"):
            if isinstance(getattr(self, name), slots.Stateful):
                problem = (
                    " has state, which replicas cannot carry. Bind a function, or outer = None."
                )
                raise binding_error(f"data_parallel.{name}", problem)
        if self.stored_dtype is not None:
            raise binding_error(
                "data_parallel.outer",
                f" with parameters in {self.stored_dtype} between steps: what replicas learn would "
                "be rounded. Bind param_dtype (or gather_dtype of `update`) None, or outer None.",
            )
        if self.reduction.logical_shards is not None:
            raise binding_error(
                "data_parallel.outer",
                ": another number of replicas is another algorithm, so exact sums have no effect. "
                "Bind None, or leave options/deterministic.gin out.",
            )

    def _check_compression(self, given: Compression) -> None:
        """Raises UsageError for a codec that no slot takes; puts error feedback around `sync`."""
        takers = {
            "gather": (self.gather,),
            "update": (self.update,),
            "sync": (self.gather, self.sync),
            "across": (self.sync,),
        }
        for name, filled in takers.items():
            if getattr(given, name) and not any(slots.takes_any(x, "encoding") for x in filled):
                raise binding_error(
                    f"compression.{name}",
                    f" has no effect: {self.name!r} has no function that takes it. Bind None, or a "
                    "strategy with @gather_params, @sync_gradients, @scatter_gradients or "
                    "@fsdp_apply_gradients in the slot.",
                )
        if self.gather and given.sync and given.sync.rounding == "stochastic":
            raise binding_error(
                "compression.sync",
                ": a gather, whose gradients are scattered where it is used, has no random key of "
                "the step. Bind a codec with rounding = 'nearest'.",
            )
        rounds = next((n for n in ("sync", "across", "update") if getattr(given, n)), None)
        if rounds and self.reduction.logical_shards is not None:
            raise binding_error(
                f"compression.{rounds}",
                " with exact sums (data_parallel.reduction): each device rounds what it has, so "
                "the result depends on their number. Bind None; compression.gather alone has the "
                "same bits on any number of devices.",
            )
        sizes = dict(self.mesh.shape)
        if self.outer is not None:  # of a replica
            sizes[DATA_AXIS] = 1
        if given.across and sizes[DATA_AXIS] == 1:
            of_replicas = " in a replica" if self.outer is not None else ""
            raise binding_error(
                "compression.across",
                f" has no effect: axis {DATA_AXIS!r} has one device{of_replicas}. Bind None, or "
                "make_mesh.axes.",
            )
        if given.votes and min(sizes.values()) > 1:
            raise binding_error(
                "compression.sync",
                f" = @sign() over {sizes_text(sizes)}: groups would vote, and then their votes. "
                f"Bind make_mesh.axes = {{'{DATA_AXIS}': -1, '{FSDP_AXIS}': 1}}, or sign.scaled.",
            )
        if given.error_feedback:
            if self.sync is None or isinstance(self.sync, slots.Stateful):
                problem = " = True, but `sync` has a state of its own. Bind False."
                raise binding_error("compression.error_feedback", problem)
            if self.sync_each == "micro_batch":
                problem = (
                    " = True with sync_each = 'micro_batch': the weight of a step is not known"
                )
                raise binding_error("compression.error_feedback", f"{problem} then. Bind False.")
            object.__setattr__(self, "sync", ErrorFeedback(self.sync, given))

    @property
    def stored_dtype(self) -> Any:
        """Dtype of parameters between steps; None: the model's own."""
        if self.param_dtype is not None:
            return self.param_dtype
        with contextlib.suppress(NotImplementedError):  # then the function says what to bind
            if bound := slots.bound_value(self.update, "gather_dtype"):
                return bound
        # To which encoded changes are added: the optimizer keeps its own.
        return "float32" if self.compression and self.compression.update else None

    @property
    def algorithm(self) -> str | None:
        """The `algorithm` of its slots, if they compute another one by design; else None."""
        names = ("compression", "gather", "sync", "update", "optimizer", "outer")
        return slots.algorithm({n: getattr(self, n) for n in names})

    def resolve(self, spec: TrainSpec) -> StrategyConfig:
        """The strategy that is built: this one, or what it chooses (UsageError: there is none)."""
        return self if self.choose is None else self.choose(spec).resolve(spec)

    def build(self, spec: TrainSpec) -> Strategy:
        """Builds the strategy and traces its training step and its evaluation.

        Raises UsageError if slots do not fit the engine or each other, the batch does not divide,
        the model reads what a batch lacks, or the optimizer needs what no step gives.
        """
        if self.choose is not None:
            return self.resolve(spec).build(spec)
        strategy = self.engine(self, self.fitted(spec))
        state, batch = strategy.abstract_state, strategy.abstract_batch
        try:  # This finds what does not fit. The trace is kept for the first step.
            with noting() as choices:
                traced = functools.partial(jax.eval_shape, strategy.train_step)
                getattr(strategy.train_step, "eval_shape", traced)(state, batch)
                for outer in strategy.outer_programs[:1]:
                    outer.program.eval_shape(*outer.arguments(state, batch))
            jax.eval_shape(strategy.eval_step, state, jax.eval_shape(as_evaluated, batch))
        except UsageError as error:
            if error.binding == "prefetch" and self.prefetch is None and self.tuning:
                return dataclasses.replace(self, tuning=self.tuning.without_gathers()).build(spec)
            if hasattr(self, error.binding or ""):  # of a lower room, which knows no strategy
                error.binding = f"data_parallel.{error.binding}"
            raise
        of_a_part = _OF_A_PART if strategy.splits_batch and spec.loss_over == "device" else None
        algorithm = "; ".join(filter(None, (self.algorithm, of_a_part))) or None
        strategy = dataclasses.replace(strategy, choices=choices, algorithm=algorithm)
        is_run = spec.gin_name != TrainSpec.gin_name  # its first lines have the reason
        reason = None if is_run else unsharded_reason(strategy)
        if reason and strategy.mesh.shape[FSDP_AXIS] > 1:
            advice = "Give shard_params a smaller min_weight_size."
            warnings.warn(f"{self.name}: {reason}. {advice}", stacklevel=2)
        return strategy

    def optimizer_of(self, spec: TrainSpec) -> Transform:
        """The optimizer that this strategy applies."""
        made = spec.optimizer if self.optimizer is None else self.optimizer(spec.optimizer)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            problem = f" returned {described(made)}. Return a transformation of Optax."
            raise binding_error("data_parallel.optimizer", problem)
        return made

    def fitted(self, spec: TrainSpec) -> TrainSpec:
        """The spec as an engine takes it: with the strategy's own optimizer, dtype and scale."""
        spec = dataclasses.replace(spec, optimizer=self.optimizer_of(spec))
        if (dtype := self.stored_dtype) is not None:
            optimizer = with_master_weights(spec.optimizer)
            spec = dataclasses.replace(spec, optimizer=optimizer, param_dtype=dtype)
        return dataclasses.replace(spec, loss_scale=self.loss_scale)


data_parallel = StrategyConfig


def as_evaluated(batch: PlacedBatch) -> Mapping[str, Any]:
    """Its first micro-batch, as `place_eval_batch` places it, with a mask of no padding."""
    mask = jnp.ones(batch.position.shape[1:], jnp.float32)
    return {"mask": mask, **jax.tree.map(lambda x: x[0], dict(batch.examples))}


def check_loss(out: Any, spec: TrainSpec) -> None:
    """Raises UsageError for a loss that returned no `LossOutput`, or a metric of a taken name."""
    if not all(hasattr(out, name) for name in LossOutput._fields):
        name = f"{spec.gin_name}.model"
        returns = "return LossOutput(total, weight, model_state, sums), sums over the examples."
        raise binding_error(name, f": its loss returned {described(out)}; {returns}")
    if taken := sorted(x for x in out.sums if x in _RESERVED or x.startswith((OF_SYNC, OF_OUTER))):
        problem = (
            f": its metric {taken[0]!r} has the name of one that every run reports. Rename it."
        )
        raise binding_error(f"{spec.gin_name}.model", problem)


def unsharded_reason(strategy: Strategy) -> str | None:
    """Why `shard` shards nothing, though there are several devices; None: it does, or need not."""
    leaves = jax.tree.leaves(strategy.shardings.slices)
    is_moot = strategy.config.shard is None or strategy.mesh.size == 1 or not leaves
    if is_moot or any(leaf.dim is not None for leaf in leaves):
        return None
    largest = max(leaves, key=lambda leaf: leaf.nbytes)
    return f"nothing is sharded; the largest array, {largest.path}: {largest.reason}"


def init_key(seed: int | jax.Array) -> jax.Array:
    """The key of a run's initial parameters; `seed` may be traced."""
    return jax.random.fold_in(seed_key(seed), _INIT)


def slot_key(seed: int, step: jax.Array, name: str) -> jax.Array:
    """The key of a slot, e.g. 'sync', for one step, the same on all devices."""
    return jax.random.fold_in(slot_init_key(seed_key(seed), name), step)


def slot_init_key(key: jax.Array, name: str) -> jax.Array:
    """The key of a slot's first state, from that of the initial parameters."""
    return jax.random.fold_in(jax.random.fold_in(key, _SLOTS), slots.NAMES.index(name))


def example_keys(seed: int, step: jax.Array, position: jax.Array) -> jax.Array:
    """One key an example, (B,), from the seed, the step and its positions (B,) in the batch."""
    root = jax.random.fold_in(seed_key(seed), _EXAMPLES)
    step_key = jax.random.fold_in(root, step)
    return jax.vmap(lambda index: jax.random.fold_in(step_key, index))(position)
