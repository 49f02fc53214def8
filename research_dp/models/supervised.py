"""Models that predict a target: of any Linen or NNX module, with a loss summed over examples."""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Bounds, described
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.units import Units
from research_dp.errors import UsageError, first_line
from research_dp.models.flax.linen import linen_functions_of_inputs
from research_dp.models.flax.module_calls import Names
from research_dp.models.flax.module_units import Selection, find_units
from research_dp.models.flax.nnx import nnx_functions_of_inputs
from research_dp.models.flax.on_shards import apply_in_units
from research_dp.types import Batch, Functions, LossOutput, PyTree, TrainableModel

# (output, target) -> one number per example, (B,), or per position, (B, ...).
PerExample = Callable[[Any, Any], jax.Array]


@checked
def from_linen(
    module: nn.Module,
    *,
    loss: PerExample,
    inputs: Names = "x",
    targets: str | None = "y",
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    units: Selection | None = None,
) -> TrainableModel:
    """A Linen module and its loss, for every strategy.

    An argument or field `train`, `training`, `is_train`, `is_training`, `deterministic` or
    `use_running_average` of the module says whether it trains. `nn.Dropout` has one mask per
    example, whatever the devices. `nn.BatchNorm` has the statistics of the global micro-batch.

    Args:
        module: Its `__call__` takes the inputs by position.
        loss: (output, target) -> one number per example, (B,), or per position, (B, T), e.g.
            `optax.softmax_cross_entropy_with_integer_labels`.
        inputs: Name of the array of a batch that is the input, or several in order.
        targets: Name of the target; None: `loss` and `metrics` take (output, batch).
        metrics: Name -> a function like `loss`, whose weighted mean is logged.
        weights: Name of an array of weights, (B,) or (B, T); None: all examples weigh the same. A
            batch's `mask` (B,), 0 for padding, multiplies them.
        config: Properties that must agree with the data set's `info`, e.g. {'num_classes': 10}.
        bounds: Integer array of a batch -> the key of `config` that it must be below.
        units: Submodules whose parameters are gathered for their calls alone: a class, or a pattern
            of paths such as 'blocks_*', or several of both. None: direct submodules of more than 4
            million parameters. (): none; all parameters are gathered together.

    Raises:
        UsageError: The module does not take these inputs. While it is traced: the loss is not one
            number per example, or the module draws random numbers other than by `nn.Dropout`.
    """
    functions = linen_functions_of_inputs(module, inputs)
    return supervised(functions, loss, inputs, targets, metrics, weights, config, bounds, units)


@checked
def from_nnx(
    factory: Callable[..., nnx.Module],
    *,
    loss: PerExample,
    inputs: Names = "x",
    targets: str | None = "y",
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    units: Selection | None = None,
) -> TrainableModel:
    """An NNX module and its loss, for every strategy.

    An argument `train`, `training`, `is_train`, `is_training`, `deterministic` or
    `use_running_average` of its `__call__` says whether it trains; without one, its methods `train`
    and `eval` are called.
    `nnx.Dropout` has one mask per example, whatever the devices. `nnx.BatchNorm` has the statistics
    of the global micro-batch. Variables other than `nnx.Param` are model state.

    Args:
        factory: (rngs) -> module, e.g. `lambda rngs: Net(64, 10, rngs=rngs)`.
        loss: As in `from_linen`.
        inputs: As in `from_linen`.
        targets: As in `from_linen`.
        metrics: As in `from_linen`.
        weights: As in `from_linen`.
        config: As in `from_linen`.
        bounds: As in `from_linen`.
        units: As in `from_linen`.

    Raises:
        UsageError: `factory` takes more than `rngs`. While the module is traced: it does not take
            these inputs, the loss is not one number per example, or the module draws random numbers
            other than by `nnx.Dropout`.
    """
    functions = nnx_functions_of_inputs(factory, inputs)
    return supervised(functions, loss, inputs, targets, metrics, weights, config, bounds, units)


def supervised(
    functions: Functions,
    loss: PerExample,
    inputs: str | Sequence[str],
    targets: str | None,
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Mapping[str, str] | None = None,
    units: Selection | None = (),
) -> TrainableModel:
    """A model whose loss compares an output of `functions` with a target.

    Args:
        functions: They take the array of a batch that `inputs` names, or a tuple of several.
        loss: (output, target) -> (B,), or (B, ...) for a loss per position.
        inputs: Name of an array of a batch, or several.
        targets: Name of the target; None: `loss` and `metrics` take (output, batch).
        metrics: Name -> a function like `loss`.
        weights: Name of weights (B,) or (B, ...); None: all are 1. `mask` (B,) of a batch, 0 for
            padding, multiplies them. Where they are 0, the target is taken as 0, and so are the
            inputs of an example that has no weight at all.
        config: As in `TrainableModel`.
        bounds: As in `TrainableModel`.
        units: As in `from_linen`.
    """

    def inputs_of(batch: Batch) -> Any:
        return batch[inputs] if isinstance(inputs, str) else tuple(batch[name] for name in inputs)

    scaling = _Scaling(weights, (inputs,) if isinstance(inputs, str) else inputs)

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        for name in (targets, weights):  # a batch without them is refused
            name is None or batch[name]
        return functions.init(key, inputs_of(batch))

    def loss_of(
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        units: Units | None = None,
        **options: Any,
    ) -> LossOutput:
        scales = scaling.of(batch)
        x = jax.tree.map(functools.partial(_zeroed, scales), inputs_of(batch))
        rows = jax.tree.leaves(x)[0].shape[0]

        def run(params: PyTree, model_state: PyTree, x: Any, keys: Any, **units: Any) -> Any:
            return functions.apply(params, model_state, x, keys=keys, **options, **units)

        if units is None or units.gather is None:
            output, model_state = run(params, model_state, x, keys)
        else:
            output, model_state = apply_in_units(run, units, params, model_state, x, keys)
        if targets is None:
            target: Any = {k: scaling.zeroed(batch, k) for k in batch}
        else:
            target = _zeroed(scales, batch[targets], by_position=True)

        def summed(name: str, function: PerExample) -> tuple[jax.Array, Any]:
            values = _checked_values(name, _called(name, function, output, target), rows, target)
            return _weighted_sum(name, values, scales)

        total, count = summed("loss", loss)
        sums = {name: summed(name, function) for name, function in (metrics or {}).items()}
        return LossOutput(total, count, model_state, sums)

    def apply(params: PyTree, x: Any, model_state: PyTree | None = None) -> Any:
        if isinstance(x, Mapping):
            needed = {inputs} if isinstance(inputs, str) else {*inputs}
            if missing := sorted(needed - x.keys()):
                raise UsageError(f"apply: the inputs {sorted(x)} lack {missing[0]!r}.")
            x = inputs_of(x)
        several = not isinstance(inputs, str) and not isinstance(x, tuple)
        return functions.predict(params, (x,) if several else x, model_state)

    def units_of(batch: Batch) -> Mapping[str, str]:
        variables = jax.eval_shape(lambda key: init(key, batch), seed_key(0))
        return find_units(functions, units, variables, inputs_of(batch))

    found = units_of if units is None or units or units == "" else None
    more: Any = {"bounds": bounds or {}, "apply": apply, "counted": scaling.counted}
    return TrainableModel(init, loss_of, config or {}, find_units=found, **more)


def _called(name: str, function: PerExample, output: Any, target: Any) -> Any:
    """What a user's function returns; UsageError with shapes and dtypes if it raises."""
    try:
        return function(output, target)
    except UsageError:
        raise
    except Exception as error:
        given = [jax.tree.map(described, x) for x in (output, target)]
        frames = traceback.extract_tb(error.__traceback__)[1:2]  # the line of the function itself
        where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
        raise UsageError(
            f"{name} fails on an output that is {given[0]} and a target that is {given[1]}:\n"
            f"  {type(error).__name__}: {first_line(error)}{where}"
        ) from error


def _checked_values(name: str, values: Any, rows: int, target: Any) -> jax.Array:
    """The values in float32; UsageError if they are not one per example."""
    shape = jnp.shape(values)
    expected = f"one number per example, ({rows},) here"
    if not shape:
        raise UsageError(
            f"{name} returns one number for the batch. Return {expected}: leave out .mean() or "
            ".sum(), because padding and devices are weighted afterwards. See docs/own_model.md."
        )
    if shape[0] != rows:
        raise UsageError(f"{name} returns an array {shape}. Return {expected}.")
    if isinstance(target, jax.Array) and _is_broadcast(shape, target.shape):
        raise UsageError(
            f"{name} returns an array {shape} for targets {target.shape}: the output was broadcast "
            f"against them. Return {expected}. Give output and target one shape, e.g. by "
            "squeeze(-1) of the one with a last dim of 1."
        )
    return jnp.asarray(values).astype(jnp.float32)


def _is_broadcast(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether values (B, ...) have more numbers than targets (B, ...) of as many dims.

    Values of fewer dims are free, e.g. a loss per anchor (B, A) for boxes (B, N, 4).
    """
    if len(shape) < len(target):
        return False
    return len(shape) > max(len(target), 1) or any(map(int.__gt__, shape, target))


class _Scaling(NamedTuple):
    """The weights of a batch: an array of this name, and the batch's `mask`.

    An input counts as a whole in its example: a layer may look at all of its positions.
    """

    weights: str | None
    inputs: Sequence[str]

    def of(self, batch: Batch) -> list[Any]:
        names = [*([] if self.weights is None else [self.weights]), *{"mask"}.intersection(batch)]
        return [batch[name] for name in names]

    def counted(self, batch: Batch, name: str) -> Any:
        """`TrainableModel.counted`."""
        return _counted(self.of(batch), batch[name], by_position=name not in self.inputs)

    def zeroed(self, batch: Batch, name: str) -> jax.Array:
        return _zeroed(self.of(batch), batch[name], by_position=name not in self.inputs)


def _counted(scales: Sequence[Any], x: Any, *, by_position: bool) -> Any:
    """Where an array (B, ...) has weight, as bool (B, ..., 1, ...): for host arrays and traced.

    `by_position`: at positions that have weights of their own; otherwise in rows with any weight.
    """
    result: Any = np.ones((1,) * x.ndim, bool)
    for scale in scales:
        here = scale.astype(bool)
        if not by_position or scale.shape != x.shape[: scale.ndim]:
            here = here.reshape(scale.shape[0], -1).any(1)
        result = result & here.reshape(here.shape + (1,) * (x.ndim - here.ndim))
    return result


def _zeroed(scales: Sequence[jax.Array], x: jax.Array, *, by_position: bool = False) -> jax.Array:
    """The array, with zeros where it has no weight: NaN would count by 0 * NaN."""
    if not scales:
        return x
    return jnp.where(_counted(scales, x, by_position=by_position), x, jnp.zeros((), x.dtype))


def _weighted_sum(
    name: str, values: jax.Array, scales: Sequence[jax.Array]
) -> tuple[jax.Array, Any]:
    """Sum of weighted float32 values, and sum of weights, each (B,) or (B, ...)."""
    if not scales:
        return jnp.sum(values), np.float32(values.size)
    shape, wide = values.shape, []
    for scale in scales:
        if scale.shape != shape[: scale.ndim]:
            raise UsageError(
                f"{name} returns an array {shape}, and its weights are {scale.shape}. Return one "
                "number for each weight."
            )
        dims = scale.shape + (1,) * (len(shape) - scale.ndim)
        wide.append(jnp.broadcast_to(jnp.asarray(scale, jnp.float32).reshape(dims), shape))
    weight = functools.reduce(operator.mul, wide)
    return jnp.sum(jnp.where(weight == 0, 0.0, values) * weight), jnp.sum(weight)
