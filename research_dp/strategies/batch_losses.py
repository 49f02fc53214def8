"""Whether a model's loss and metrics are sums over examples, found by an experiment on one batch.

A loss that mixes examples computes of a device's part of the batch something else than of the
batch. So a batch is evaluated in two orders, the second with half of its rows on other devices: a
sum over examples stays the same but for rounding. The strategy's own programs run, as for the first
step and the first evaluation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import is_floating_dtype
from research_dp.distributed.batch_examples import split_over
from research_dp.distributed.jaxpr import used_part, walk
from research_dp.distributed.mesh import batch_devices, traced_for
from research_dp.distributed.units import Units
from research_dp.errors import binding_error
from research_dp.strategies.strategy import (
    NONFINITE,
    OF_SYNC,
    SKIPPED,
    Metrics,
    PlacedBatch,
    Strategy,
    TrainState,
    as_evaluated,
    example_keys,
)
from research_dp.types import PyTree

# Relative differences of a mean over examples that are taken for rounding. Sums in float32 in
# another order are 1e-7 apart, losses that mix examples 1e-3 and more.
_ROUNDING = 2.0**-16
_STEP_ASIDE = 0.02  # standard deviation of what is added to each parameter
_LEAST = 1e-3  # means below it are compared as if they were as large: theirs may cancel
_TURNED = 1e-3  # of the examples, at least one, may change sides in a count, as of right answers
DIFFERS = "Numbers may differ from those of one device"
_RANDOM = (
    ": random numbers depend on how the batch is split (a key serves several examples, or comes "
    "from its index on the device; draw for each example with its own key of `keys`), or numbers "
    "of an example depend on others"
)
_DRAWS = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
_NO_SUMS = ("grad_norm", NONFINITE, SKIPPED)


class Finding(NamedTuple):
    """That a batch's loss or metric depends on the order of its rows."""

    is_random: bool  # only in training, where numbers are drawn: the order may matter to these
    message: str


@checked
def check_batch_loss(strategy: Strategy, batch: Mapping[str, Any] | PlacedBatch) -> str | None:
    """Refuses a model of which examples depend on others of the batch, by an experiment.

    One batch is evaluated in two orders, by `eval_step` and by `train_step`, from a state that is
    made for each and dropped. Call it before a state is made: there is memory for one.

    Args:
        strategy: One that splits the batch. Any other is not judged, nor is one that gives a device
            one example of a micro-batch.
        batch: The host arrays of a training batch that `place_batch` takes, or a placed batch.

    Returns:
        A warning: the order matters in training alone, and random numbers may be the reason; or
        `loss_over` is 'device', and this batch does not show why. None: there is nothing to say.

    Raises:
        UsageError: The loss or a metric depends on the order, and `loss_over` is not 'device'; or
            the batch has other arrays.
    """
    placed = batch if isinstance(batch, PlacedBatch) else strategy.place_batch(batch)
    if not splits_examples(strategy):
        return None
    found = order_dependence(strategy, placed)
    if found is None and strategy.spec.loss_over == "device":
        option = f"{strategy.spec.gin_name}.loss_over = 'device'"
        return f"{option} shows no effect on this batch: its loss is a sum over examples"
    if found is not None and found.is_random:
        return f"{DIFFERS}: {found.message}"
    if found is not None:
        _refuse(strategy, found.message)
    return None


def check_batch_evaluation(strategy: Strategy, state: TrainState, batch: PyTree) -> None:
    """`check_batch_loss` of an evaluation, for a state and a batch that `place_eval_batch` placed.

    Raises UsageError as that does.
    """
    if not splits_examples(strategy):
        return
    rows = PartitionSpec(strategy.abstract_batch.position.sharding.spec[1])
    other = _on_mesh(
        strategy, lambda x: jax.tree.map(functools.partial(_moved, rows), x), rows, rows
    )
    first, second = (strategy.eval_step(state, x) for x in (batch, other(batch)))
    half = functools.partial(_half, strategy, lambda: state, batch)
    for text in _differences(strategy, first, second, half, "evaluation"):
        _refuse(strategy, text)


def _refuse(strategy: Strategy, found: str) -> None:
    """Raises UsageError for a model of which examples depend on others, unless it is accepted."""
    spec = strategy.spec
    if spec.loss_over != "device":
        raise binding_error(
            f"{spec.gin_name}.model",
            f": numbers of an example depend on others of the batch: {found}. "
            f"{strategy.name} gives a device a part of it.\n  Take research_dp.gather_examples or "
            f"global_mean; or accept it, by {spec.gin_name}.loss_over = 'device', if the loss of "
            "each device's part is meant (docs/batch_losses.md).",
        )


def splits_examples(strategy: Strategy) -> bool:
    """Whether devices have parts of a batch, of several examples each: one mixes with nothing."""
    devices, (_, rows) = batch_devices(strategy.mesh), strategy.abstract_batch.position.shape
    is_one = strategy.config.outer is None  # rows of replicas that differ do not change places
    return is_one and strategy.splits_batch and devices > 1 and rows > devices


def order_dependence(strategy: Strategy, placed: PlacedBatch) -> Finding | None:
    """The first number of a batch that depends on the order of its rows; the loss leads."""
    if not splits_examples(strategy):
        return None
    moved, batch, other = _arranged(strategy, placed)
    with jax.debug_nans(False):  # the experiment's own are no fault of the run
        for aside in (_STEP_ASIDE, 0.0):  # where a loss is not finite beside its start
            state = _new_state(strategy, aside)
            first = strategy.eval_step(state, batch)
            if all(np.isfinite(np.asarray(x)).all() for x in first.values()):
                break
        second = strategy.eval_step(state, other)
        half = functools.partial(_half, strategy, lambda: state, batch)
        for text in _differences(strategy, first, second, half, "evaluation"):
            return Finding(False, text)
        first = strategy.train_step(state, placed)[1]  # the state goes: there is memory for one
        second = strategy.train_step(_new_state(strategy, aside), moved)[1]
        half = functools.partial(_half, strategy, lambda: _new_state(strategy, aside), batch)
        for text in _differences(strategy, first, second, half, "training"):
            rows = placed.position.shape[1] // batch_devices(strategy.mesh)
            forward = next(operations_of_loss(strategy, rows))
            is_random = any(e.primitive.name in _DRAWS for e in forward)
            return Finding(is_random, text + (_RANDOM if is_random else ""))
    return None


def operations_of_loss(strategy: Strategy, rows: int) -> Iterator[list[Any]]:
    """The operations of a device's loss of so many examples, and those of its gradient."""
    spec, state = strategy.spec, strategy.logical_state
    batch = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in spec.example.items()}
    options: dict[str, Any] = {"units": Units()} if spec.model.units else {}
    options |= {"train": True, "batch_axes": strategy.batch_axes}

    def loss(params: PyTree, model_state: PyTree, batch: PyTree) -> Any:
        keys = example_keys(spec.seed, jnp.int32(0), jnp.arange(rows))
        with split_over(strategy.batch_axes, strategy.config.reduction), traced_for(None):
            return spec.model.loss(params, model_state, batch, keys, **options).total

    for function in (loss, jax.grad(loss)):
        make = jax.make_jaxpr(function, axis_env=[*strategy.mesh.shape.items()])
        traced = make(state.params, state.model_state, batch).jaxpr
        yield [e for e, _ in walk(used_part(traced))]


def _half(strategy: Strategy, state: Callable[[], TrainState], batch: PyTree) -> Metrics:
    """Metrics of every second example: where the addends of all cancel, these have their size."""
    sharding = batch["mask"].sharding
    every_second = jax.jit(lambda x: x * (jnp.arange(x.shape[0]) % 2), out_shardings=sharding)
    mask = jax.block_until_ready(every_second(batch["mask"]))
    return strategy.eval_step(state(), {**batch, "mask": mask})


def _aside(x: jax.Array, by: float, sharding: jax.sharding.Sharding) -> jax.Array:
    noise = by * jax.random.normal(jax.random.key(0), x.shape)
    return jax.lax.with_sharding_constraint((x + noise).astype(x.dtype), sharding)


_move_aside = jax.jit(_aside, static_argnums=2, donate_argnums=0)


def _new_state(strategy: Strategy, aside: float) -> TrainState:
    """A state whose parameters are off their start, at which a head of zeros hides all else."""

    def one(x: jax.Array) -> jax.Array:
        is_moved = aside and jnp.issubdtype(x.dtype, jnp.inexact)
        return _move_aside(x, aside, x.sharding) if is_moved else x

    state = strategy.init(np.uint32(strategy.spec.seed), None)  # as a run calls it
    params = jax.tree.map(one, state.params)
    return state._replace(params=jax.block_until_ready(params))  # devices of a CPU take turns


def _arranged(strategy: Strategy, batch: PlacedBatch) -> tuple[Any, ...]:
    """A batch with every second row on the next device; and both orders, as evaluated.

    Rows stay in their micro-batch, of which a model may take the mean, and keep their positions in
    the global batch, from which their random keys come.
    """
    spec = batch.position.sharding.spec

    def arrange(batch: PlacedBatch) -> tuple[Any, ...]:
        other = jax.tree.map(functools.partial(_moved, spec), batch)
        return other, as_evaluated(batch), as_evaluated(other)

    rows = PartitionSpec(spec[1])
    return _on_mesh(strategy, arrange, spec, (spec, rows, rows))(batch)


def _moved(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """Every second row on the next device, and each device's on other places; the last dim of rows.

    Places change by other numbers on each device: else those of one place would stay together.
    """
    dim, axes = len(spec) - 1, spec[-1]
    devices = jax.lax.axis_size(axes)
    odd = (slice(None),) * dim + (slice(1, None, 2),)
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    from_last = jax.lax.ppermute(x[odd], axes, to_next)
    return jnp.roll(x.at[odd].set(from_last), 1 + jax.lax.axis_index(axes), axis=dim)


def _on_mesh(
    strategy: Strategy, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A function of each device's rows, which waits: programs on devices of a CPU take turns."""
    options: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    program = jax.jit(jax.shard_map(function, mesh=strategy.mesh, **options))
    return lambda batch: jax.block_until_ready(program(batch))


def _rounding(strategy: Strategy) -> float:
    """The relative difference of a mean over the batch that is taken for rounding.

    The coarsest dtypes of the evaluation's program decide. Of independent roundings, one for each
    example, the mean has one over the square root of their number; a number of its own has all.
    """
    abstract = jax.eval_shape(as_evaluated, strategy.abstract_batch)
    program = jax.make_jaxpr(strategy.eval_step)(strategy.abstract_state, abstract)
    values = [x.aval for e, _ in walk(program.jaxpr) for x in e.outvars]
    found = {(x.dtype, x.ndim == 0) for x in values if is_floating_dtype(x.dtype)}
    examples = math.sqrt(strategy.spec.batch_size)
    parts = (float(jnp.finfo(d).eps) / (1 if is_sum else examples) for d, is_sum in found)
    return max(_ROUNDING, *parts)


def _differences(
    strategy: Strategy, first: Metrics, second: Metrics, half: Callable[[], Metrics], mode: str
) -> Iterator[str]:
    """Metrics, the loss first, whose mean or weight is beyond rounding.

    It is relative to the larger of the two; and of that of `half` of the examples, made if need be,
    as the bound of half precision is.
    """
    rounding, of_half = functools.cache(lambda: _rounding(strategy)), functools.cache(half)
    names = [x for x in first if x not in _NO_SUMS and not x.startswith(OF_SYNC)]
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        sums, weights = np.stack([np.asarray(x[name], np.float64) for x in (first, second)]).T
        if not (np.isfinite(sums).all() and np.isfinite(weights).all()):
            continue  # what is not finite ends the run with words of its own
        means = sums / np.where(weights, weights, 1.0)
        counts = name != "loss" and (sums == np.round(sums)).all()
        turned = max(_TURNED, 1 / max(weights.max(), 1.0)) if counts else 0.0
        for what, pair, allowed in ((name, means, turned), (f"weight of {name}", weights, 0.0)):
            (a, b), size = pair, max(*np.abs(pair), _LEAST)
            beyond = abs(a - b) - allowed
            if beyond <= _ROUNDING * size or beyond <= rounding() * size:
                continue
            total, weight = np.asarray(of_half().get(name, (0.0, 0.0)), np.float64)
            if beyond > rounding() * max(size, abs(total / (weight or 1.0))):
                words = f"{a:.8g}, and {b:.8g} with half of its rows on other devices"
                yield f"{what} in {mode} is {words}"
