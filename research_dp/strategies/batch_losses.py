"""Whether a model's loss and metrics are sums over examples, found by an experiment on one batch.

A loss that mixes examples computes of a device's part of the batch something else than of the
batch. So a batch is evaluated in two orders, the second with half of its rows on other devices: a
sum over examples stays the same but for rounding. The strategy's own programs run, as for the first
step and the first evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import is_floating_dtype
from research_dp.distributed.jaxpr import walk
from research_dp.distributed.mesh import batch_devices
from research_dp.errors import binding_error
from research_dp.strategies.strategy import (
    NONFINITE,
    SKIPPED,
    Metrics,
    PlacedBatch,
    Strategy,
    TrainState,
    as_evaluated,
)

# Relative differences of a mean over examples that are taken for rounding. Sums in float32 in
# another order are 1e-7 apart, losses that mix examples 1e-3 and more.
_ROUNDING = 2.0**-16
_STEP_ASIDE = 0.02  # standard deviation of what is added to each parameter
_LEAST = 1e-3  # means below it are compared as if they were as large: theirs may cancel
_TURNED = 1e-3  # of the examples, at least one, may change sides in a count, as of right answers
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
        A warning, where the order matters in training alone and random numbers may be the reason.

    Raises:
        UsageError: The loss or a metric depends on the order, and `loss_over` is not 'device'; or
            it is, and nothing depends on the order. Or the batch has other arrays.
    """
    spec = strategy.spec
    accepted = spec.loss_over == "device"
    placed = batch if isinstance(batch, PlacedBatch) else strategy.place_batch(batch)
    if not splits_examples(strategy):
        return None
    found = order_dependence(strategy, placed)
    if found is None and accepted:
        problem = " = 'device' has no effect: the loss is a sum over examples. Leave it out."
        raise binding_error(f"{spec.gin_name}.loss_over", problem)
    if found is None or found.is_random:
        return found and found.message
    if not accepted:
        raise binding_error(
            f"{spec.gin_name}.model",
            f": numbers of an example depend on others of the batch: {found.message}. "
            f"{strategy.name} gives a device a part of it.\n  Take research_dp.gather_examples or "
            f"global_mean; or accept it, by {spec.gin_name}.loss_over = 'device', if the loss of "
            "each device's part is meant (docs/batch_losses.md).",
        )
    return None


def splits_examples(strategy: Strategy) -> bool:
    """Whether devices have parts of a batch, of several examples each: one mixes with nothing."""
    devices, (_, rows) = batch_devices(strategy.mesh), strategy.abstract_batch.position.shape
    return strategy.splits_batch and devices > 1 and rows > devices


def order_dependence(strategy: Strategy, placed: PlacedBatch) -> Finding | None:
    """The first number of a batch that depends on the order of its rows; the loss leads."""
    if not splits_examples(strategy):
        return None
    moved, *evaluated = _arranged(strategy, placed)
    bound, state = _rounding(strategy), _new_state(strategy)
    first, second = (strategy.eval_step(state, x) for x in evaluated)
    for text in _differences(first, second, bound):
        return Finding(False, text.format("evaluation"))
    usual = strategy.train_step(state, placed)[1]  # the state goes: there is memory for one
    for text in _differences(usual, strategy.train_step(_new_state(strategy), moved)[1], bound):
        program = jax.make_jaxpr(strategy.train_step)(strategy.abstract_state, placed)
        is_random = any(e.primitive.name in _DRAWS for e, _ in walk(program.jaxpr))
        return Finding(is_random, text.format("training") + (_RANDOM if is_random else ""))
    return None


def _new_state(strategy: Strategy) -> TrainState:
    """A state whose parameters are off their start, at which a head of zeros hides all else."""

    def aside(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
        noise = _STEP_ASIDE * jax.random.normal(jax.random.key(0), x.shape)
        return jax.lax.with_sharding_constraint((x + noise).astype(x.dtype), sharding)

    move = jax.jit(aside, static_argnums=1, donate_argnums=0)

    def one(x: jax.Array) -> jax.Array:
        return move(x, x.sharding) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    state = strategy.init(strategy.spec.seed)
    return state._replace(params=jax.tree.map(one, state.params))


def _arranged(strategy: Strategy, batch: PlacedBatch) -> tuple[Any, ...]:
    """A batch with every second row on the next device; and both orders, as evaluated.

    Rows change their places on a device too, by other numbers on each. They stay in their
    micro-batch, of which a model may take the mean, and keep their positions in the global batch,
    from which their random keys come.
    """
    spec, devices = batch.position.sharding.spec, batch_devices(strategy.mesh)
    to_next = [(i, (i + 1) % devices) for i in range(devices)]

    def moved(x: jax.Array) -> jax.Array:
        from_last = jax.lax.ppermute(x[:, 1::2], spec[1], to_next)
        places = 1 + jax.lax.axis_index(spec[1])
        return jnp.roll(x.at[:, 1::2].set(from_last), places, axis=1)

    def arrange(batch: PlacedBatch) -> tuple[Any, ...]:
        other = jax.tree.map(moved, batch)
        return other, as_evaluated(batch), as_evaluated(other)

    rows = PartitionSpec(spec[1])
    on_mesh = jax.shard_map(
        arrange,
        mesh=strategy.mesh,
        in_specs=spec,
        out_specs=(spec, rows, rows),
        check_vma=False,
    )
    return jax.jit(on_mesh)(batch)


def _rounding(strategy: Strategy) -> float:
    """The relative difference of a mean over the batch that is taken for rounding.

    The coarsest dtype of the evaluation's program decides: of independent roundings, one for each
    example, the mean has one over the square root of their number.
    """
    abstract = jax.eval_shape(as_evaluated, strategy.abstract_batch)
    program = jax.make_jaxpr(strategy.eval_step)(strategy.abstract_state, abstract)
    dtypes = {x.aval.dtype for e, _ in walk(program.jaxpr) for x in e.outvars if x.aval.ndim}
    eps = max((float(jnp.finfo(d).eps) for d in dtypes if is_floating_dtype(d)), default=0.0)
    return max(_ROUNDING, 2 * eps / math.sqrt(strategy.spec.batch_size))


def _differences(first: Metrics, second: Metrics, bound: float) -> Iterator[str]:
    """Metrics, the loss first, whose mean or weight is beyond a bound; '{}' is for the mode."""
    for name in sorted(first.keys() - set(_NO_SUMS), key=lambda name: (name != "loss", name)):
        sums, weights = np.stack([np.asarray(x[name], np.float64) for x in (first, second)]).T
        if not (np.isfinite(sums).all() and np.isfinite(weights).all()):
            continue  # what is not finite ends the run with words of its own
        means = sums / np.where(weights, weights, 1.0)
        counts = name != "loss" and (sums == np.round(sums)).all()
        turned = max(_TURNED, 1 / max(weights.max(), 1.0)) if counts else 0.0
        for what, pair, allowed in ((name, means, turned), (f"weight of {name}", weights, 0.0)):
            if abs(np.diff(pair)[0]) > bound * max(*np.abs(pair), _LEAST) + allowed:
                a, b = (f"{x:.8g}" for x in pair)
                yield f"{what} in {{}} is {a}, and {b} with half of its rows on other devices"
