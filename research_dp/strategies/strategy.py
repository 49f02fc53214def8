"""What a strategy is: a recipe of four slots, and what an engine builds from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import gin
import jax
import numpy as np
from jax.sharding import Mesh

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Dtype, MaxNorm, Seed, Transform
from research_dp.distributed.collectives import PLAIN, Reduction
from research_dp.distributed.loss_scale import LossScale
from research_dp.distributed.optimizer import with_master_weights
from research_dp.distributed.sharding import Rule
from research_dp.errors import UsageError
from research_dp.types import TrainableModel

PyTree = Any
Metrics = Mapping[str, jax.Array]
When = Literal["step", "micro_batch"]

# Metrics of a training step that are no sums over examples.
NONFINITE, SKIPPED = "nonfinite", "skipped_steps"


class TrainState(NamedTuple):
    """Everything that training changes; global arrays.

    Attributes:
        step: Number of steps done; 0-d int32.
        params: Parameters by path.
        model_state: E.g. batch statistics.
        opt_state: Optimizer state, with parameters' shapes, addressed by parameter path.
        loss_scale: `LossScaleState`, or () without loss scaling.
    """

    step: Any
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    loss_scale: Any = ()


class PlacedBatch(NamedTuple):
    """A batch on the devices.

    Attributes:
        examples: Arrays (accumulation_steps, batch_size / accumulation_steps, ...).
        position: The examples' places in the global batch, from which their random keys come;
            int32 (accumulation_steps, batch_size / accumulation_steps).
    """

    examples: Mapping[str, Any]
    position: Any


class StateShardings(NamedTuple):
    """Where things lie: trees of `LeafSharding`.

    Attributes:
        params: Parameters between steps.
        slices: Gradients as the update takes them, and the optimizer state.
    """

    params: PyTree
    slices: PyTree


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What a strategy is built for.

    Attributes:
        model: The model.
        optimizer: The optimizer.
        example: Shape and dtype of one example's arrays, without a batch dim.
        batch_size: Examples a step, over all devices and micro-batches.
        accumulation_steps: Micro-batches a step.
        max_grad_norm: Gradients are scaled down to this global L2 norm; None: never.
        seed: Seed of dropout keys (initialisation takes its key as an argument).
        param_dtype: dtype in which parameters lie and travel, the optimizer keeping them in the
            model's own; None: the model's own. The strategy's, see `StrategyConfig.build`.
        loss_scale: How the loss is scaled; None: it is not. The strategy's too.
        skip_nonfinite: Whether a step whose loss or gradients are not finite changes nothing but
            the step's number, instead of the parameters.
    """

    model: TrainableModel
    optimizer: Transform
    example: Mapping[str, jax.ShapeDtypeStruct]
    batch_size: Count
    accumulation_steps: Count = 1
    max_grad_norm: MaxNorm | None = None
    seed: Seed = 0
    param_dtype: Dtype | None = None
    loss_scale: LossScale | None = None
    skip_nonfinite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy built for one model and mesh: `init`, `place_batch`, `train_step`, `eval_step`.

    Attributes:
        config: What it was built from, resolved.
        shardings: Where parameters and optimizer state lie, and why.
        abstract_state: Shapes, dtypes and shardings of the state.
        abstract_batch: The same of a placed batch.
        train_rows: Places in the global batch of the examples that this process provides.
        eval_rows: The same for evaluation, whose batch has `eval_batch_size` examples.
        eval_batch_size: batch_size / accumulation_steps.
        init: key -> TrainState, sharded from birth.
        place_batch: Host arrays of this process's `train_rows` -> PlacedBatch.
        place_eval_batch: Host arrays of this process's `eval_rows` -> examples on the devices.
        train_step: (TrainState, PlacedBatch) -> (TrainState, metrics); the old state is donated.
            Metrics are arrays (2,): sum and count; and `NONFINITE`, (1 + parameters,), above 0
            if the step went wrong, and for each gradient, in the order of paths, that did.
        eval_step: (TrainState, examples) -> metrics.
        batch_axes: The mesh axes over which the batch is split where the loss runs; (): the loss
            gets the global micro-batch.
    """

    config: StrategyConfig
    shardings: StateShardings
    abstract_state: TrainState
    abstract_batch: PlacedBatch
    train_rows: np.ndarray
    eval_rows: np.ndarray
    eval_batch_size: int
    init: Callable[[jax.Array], TrainState]
    place_batch: Callable[[Mapping[str, np.ndarray]], PlacedBatch]
    place_eval_batch: Callable[[Mapping[str, np.ndarray]], PyTree]
    train_step: Callable[[TrainState, PlacedBatch], tuple[TrainState, Metrics]]
    eval_step: Callable[[TrainState, PyTree], Metrics]
    batch_axes: tuple[str, ...] = ()

    @property
    def splits_batch(self) -> bool:
        """Whether the examples that a loss gets together depend on the number of devices."""
        return bool(self.batch_axes) and self.config.reduction.logical_shards is None

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.config.name

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.config.mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """A strategy before it meets a model: the engine, the mesh and the four slots.

    `data_parallel` makes one, and says what the fields mean.

    Attributes:
        choose: Of a recipe that stands for one of several: finds that one, once it is known what is
            built, the same in every process. None: this is the one.
    """

    name: str
    engine: Callable[[StrategyConfig, TrainSpec], Strategy]
    mesh: Mesh
    shard: Rule | None
    gather: Callable[..., PyTree] | None
    sync: Callable[..., PyTree] | None
    update: Callable[..., tuple[PyTree, PyTree]] | None
    gather_each: str
    sync_each: str
    reduction: Reduction
    accumulation_dtype: Any
    param_dtype: Any
    loss_scale: LossScale | None
    look_ahead: bool
    compiler_options: dict[str, Any] | None
    choose: Callable[[TrainSpec], StrategyConfig] | None = None

    def resolve(self, spec: TrainSpec) -> StrategyConfig:
        """The recipe that is built: this one, or what it chooses.

        Whoever reads a recipe, or builds it more than once, resolves it first.

        Raises:
            UsageError: There is none to choose.
        """
        return self if self.choose is None else self.choose(spec).resolve(spec)

    def build(self, spec: TrainSpec) -> Strategy:
        """Builds the strategy for a model and a batch, and traces its training step.

        Raises:
            UsageError: The slots do not fit the engine or each other, the batch does not divide,
                the model reads what a batch does not have, or the optimizer cannot be applied to
                shards.
        """
        if self.choose is not None:
            return self.resolve(spec).build(spec)
        strategy = self.engine(self, self.fitted(spec))
        # Whatever does not fit is found here. The trace is kept for the first step.
        jax.eval_shape(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)
        return strategy

    def fitted(self, spec: TrainSpec) -> TrainSpec:
        """The spec as an engine takes it: with the strategy's own dtype and scale."""
        if self.param_dtype is not None:
            optimizer = with_master_weights(spec.optimizer)
            spec = dataclasses.replace(spec, optimizer=optimizer, param_dtype=self.param_dtype)
        return dataclasses.replace(spec, loss_scale=self.loss_scale)

    def refuse_no_sync(self) -> None:
        """Raises UsageError if several devices would each follow gradients of their own."""
        if self.sync is None and self.mesh.size > 1:
            raise UsageError(
                f"data_parallel.sync = None on {self.mesh.size} devices: nothing averages their "
                "gradients. Bind @average_gradients, which leaves alone what `gather` averaged.",
                binding="data_parallel.sync",
            )

    def refuse_idle(self, *, gathers: bool, syncs: bool) -> None:
        """Raises UsageError if it is bound when something happens that never does."""
        for name, value, default, happens in (
            ("gather", self.gather_each, "micro_batch", gathers),
            ("sync", self.sync_each, "step", syncs),
        ):
            if value != default and not happens:
                raise UsageError(
                    f"data_parallel.{name}_each = {value!r} has no effect: this strategy calls no "
                    f"{name}. Leave it at {default!r}.",
                    binding=f"data_parallel.{name}_each",
                )

    def refuse_slots(self, names: tuple[str, ...], why: str) -> None:
        """Raises UsageError if one of these slots or options is not None."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise UsageError(
                    f"data_parallel.{name} = {getattr(value, '__name__', value)}: {why}",
                    binding=f"data_parallel.{name}",
                )


@gin.register(module="strategies")
@checked
def data_parallel(
    *,
    name: str = gin.REQUIRED,
    engine: Callable[[StrategyConfig, TrainSpec], Strategy] = gin.REQUIRED,
    mesh: Mesh = gin.REQUIRED,
    shard: Rule | None = None,
    gather: Callable[..., PyTree] | None = None,
    sync: Callable[..., PyTree] | None = None,
    update: Callable[..., tuple[PyTree, PyTree]] | None = None,
    gather_each: When = "micro_batch",
    sync_each: When = "step",
    reduction: Reduction = PLAIN,
    accumulation_dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    loss_scale: LossScale | None = None,
    look_ahead: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> StrategyConfig:
    """Composes a strategy from an engine, a mesh and four functions.

    Args:
        name: What the run's summary calls it.
        engine: `mapped`, `compiled` or `pmapped`.
        mesh: The device mesh.
        shard: (path, shape, axis size) -> `ShardDecision`: the dim of a parameter that is sharded
            over mesh axis `fsdp`. Parameters are sharded so where something gathers them: `gather`,
            or the compiler. Without `gather` a mapped strategy keeps whole parameters, and `shard`
            says which slice of each one a device updates. None: nothing is sharded.
        gather: (held, layout, reduction=) -> whole parameters for compute, whose gradients come
            back as this device's shard of the mean over `fsdp`. None: parameters are whole.
        sync: (grads, layout, axes=, reduction=) -> gradients as `update` takes them, averaged
            over devices. None: there is one device, or the compiler averages.
        update: (optimizer, grads, opt_state, params, layout, axes=, reduction=) ->
            (params, opt_state). None: the optimizer is applied to what a device holds.
        gather_each: When `gather` is called: for each 'micro_batch', and again in its backward
            pass; or once a 'step', so that whole parameters and gradients live through it.
        sync_each: When `sync` is called: each 'step', or each 'micro_batch'.
        reduction: How partial sums become one; `sync`, `gather` and `update` receive it.
        accumulation_dtype: dtype in which gradients of micro-batches are added up; None: their
            own.
        param_dtype: dtype in which parameters lie between steps and travel, e.g. 'bfloat16'; the
            optimizer then keeps them in the model's own dtype too, with the rest of its state.
            None: the model's own.
        loss_scale: `@dynamic_loss_scale()` for compute in float16; None: the loss is not scaled.
        look_ahead: Gather the next unit of a stack, and scatter the last one's gradient, while one
            is computed; see `distributed.units.Units`.
        compiler_options: XLA's options for the training step, by name; gin/options/ has some that
            were measured.
    """
    if look_ahead and (gather is None or gather_each == "step"):
        raise UsageError(
            f"data_parallel.look_ahead = True, but {name!r} gathers no unit by itself. Bind False.",
            binding="data_parallel.look_ahead",
        )
    if gather is not None and (gather_each, sync_each) == ("step", "micro_batch"):
        raise UsageError(
            "data_parallel.sync_each = 'micro_batch' with gather_each = 'step': gradients of "
            "gathered parameters are scattered at the end of a step only. Use 'step' for both.",
            binding="data_parallel.sync_each",
        )
    return StrategyConfig(
        name=name,
        engine=engine,
        mesh=mesh,
        shard=shard,
        gather=gather,
        sync=sync,
        update=update,
        gather_each=gather_each,
        sync_each=sync_each,
        reduction=reduction,
        accumulation_dtype=accumulation_dtype,
        param_dtype=param_dtype,
        loss_scale=loss_scale,
        look_ahead=look_ahead,
        compiler_options=dict(compiler_options) if compiler_options else None,
    )
