"""Models that predict a target: of any Linen or NNX module, with a loss summed over examples."""

from __future__ import annotations

import dataclasses
import functools
import inspect
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
from research_dp.models.flax.module_calls import (
    SOWN,
    Given,
    Inputs,
    Streams,
    inputs_of,
    keys_by_value,
    names_of,
)
from research_dp.models.flax.module_units import Selection, find_units
from research_dp.models.flax.nnx import nnx_functions_of_inputs
from research_dp.models.flax.on_shards import apply_in_units
from research_dp.types import Batch, Functions, LossOutput, PyTree, TrainableModel

# (output, target) -> one number per example, (B,), or per position, (B, ...).
PerExample = Callable[[Any, Any], jax.Array]
# That, or (apply, params, batch, keys) -> such numbers, or them and metrics by name.
Loss = Callable[..., Any]


@checked
def from_linen(
    module: nn.Module,
    *,
    loss: Loss,
    inputs: Inputs = "x",
    targets: str | None = "y",
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    units: Selection | None = None,
    rngs: Streams = (),
    eval_module: nn.Module | None = None,
) -> TrainableModel:
    """A Linen module and its loss, for every strategy.

    An argument or field `train`, `training`, `is_train`, `is_training`, `deterministic` or
    `use_running_average` of the module says whether it trains. `nn.Dropout` has one mask per
    example, whatever the devices. `nn.BatchNorm` has the statistics of the global micro-batch,
    whatever axis it names. What is sown into collection 'losses' is added to the loss, into
    'metrics' is logged; each by its path, numbers that are means over examples.

    Args:
        module: Its `__call__` takes the inputs.
        loss: (output, target) -> one number per example, (B,), or per position, (B, T), e.g.
            `optax.softmax_cross_entropy_with_integer_labels`. Or, with these names, (apply, params,
            batch, keys) -> such numbers, or (numbers, metrics by name): it calls `apply(params,
            ...)` as it calls the module, whose mode, keys and state are given. `keys` (B,) are the
            examples', None in evaluation.
        inputs: Name of the array of a batch that is the input, or several in order; a dict of
            arguments, each the name of an array, or a constant; or a function of the batch, a dict
            of arrays, that makes the one argument. An own call is only initialised with them.
        targets: Name of the target; None: `loss` and `metrics` take (output, batch).
        metrics: Name -> a function like `loss`, whose weighted mean is logged.
        weights: Name of an array of weights, (B,) or (B, T); None: all examples weigh the same. A
            batch's `mask` (B,), 0 for padding, multiplies them.
        config: Properties that must agree with the data set's `info`, e.g. {'num_classes': 10}.
        bounds: Integer array of a batch -> the key of `config` that it must be below.
        units: Submodules whose parameters are gathered for their calls alone: a class, or a pattern
            of paths such as 'blocks_*', or several of both. None: direct submodules of more than 4
            million parameters. (): none; all parameters are gathered together.
        rngs: Streams that the module draws from other than by `nn.Dropout`, such as 'sample'. It is
            then called for each example by itself, with keys of the example, in evaluation too.
        eval_module: The module in evaluation, of the same parameters; None: `module`.

    Raises:
        UsageError: The module does not take these inputs. While it is traced: the loss is not one
            number per example, or the module draws from a stream that `rngs` does not name.
    """
    functions = linen_functions_of_inputs(module, inputs, rngs=rngs, eval_module=eval_module)
    own = functions, loss, inputs, targets, metrics, weights, config, bounds, units
    return supervised(*own, draws=bool(rngs))


@checked
def from_nnx(
    factory: Callable[..., nnx.Module],
    *,
    loss: Loss,
    inputs: Inputs = "x",
    targets: str | None = "y",
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    units: Selection | None = None,
    rngs: Streams = (),
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
        rngs: As in `from_linen`; `factory` is given these streams.

    Raises:
        UsageError: `factory` takes more than `rngs`. While the module is traced: it does not take
            these inputs, the loss is not one number per example, or the module draws random numbers
            other than by `nnx.Dropout` and without `rngs`.
    """
    functions = nnx_functions_of_inputs(factory, inputs, rngs=rngs)
    own = functions, loss, inputs, targets, metrics, weights, config, bounds, units
    return supervised(*own, draws=bool(rngs))


def supervised(
    functions: Functions,
    loss: Loss,
    inputs: Inputs,
    targets: str | None,
    metrics: Mapping[str, PerExample] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Mapping[str, str] | None = None,
    units: Selection | None = (),
    draws: bool = False,
) -> TrainableModel:
    """A model whose loss compares an output of `functions` with a target.

    Args:
        functions: They take what `inputs_of` makes of a batch.
        loss: This and the others are as in `from_linen`.
        inputs: Of an example that has no weight at all they are taken as 0.
        targets: Where its weight is 0, it is taken as 0.
        metrics: Name -> a function like `loss`.
        weights: `mask` (B,) of a batch, 0 for padding, multiplies them.
        config: As in `TrainableModel`.
        bounds: As in `TrainableModel`.
        units: None finds large ones.
        draws: Whether `functions` draw for each example, in evaluation too.
    """
    plain, has_own_call = functions, _calls_model(loss, metrics, targets)
    if has_own_call:
        called = functools.partial(_called_by, loss, functions.apply, draws)
        functions = dataclasses.replace(functions, apply=called)
    scaling = _Scaling(weights, names_of(inputs), all_inputs=callable(inputs))

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        for name in (None if has_own_call else targets, weights):  # a batch without is refused
            name is None or batch[name]
        return functions.init(key, inputs_of(inputs, batch))

    def loss_of(
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        units: Units | None = None,
        **options: Any,
    ) -> LossOutput:
        scales = scaling.of(batch)
        if has_own_call:
            x: Any = scaling.targets(batch, None)
        else:
            x = jax.tree.map(functools.partial(_zeroed, scales), inputs_of(inputs, batch))
        rows = jax.tree.leaves(x)[0].shape[0]

        def run(params: PyTree, model_state: PyTree, x: Any, keys: Any, **units: Any) -> Any:
            return functions.apply(params, model_state, x, keys=keys, **options, **units)

        if units is None or units.gather is None:
            output, model_state = run(params, model_state, x, keys)
        else:
            output, model_state = apply_in_units(run, units, params, model_state, x, keys)
        model_state, sown = _without_sown(model_state)
        if has_own_call:
            target: Any = None
            value, given = output if isinstance(output, tuple) else (output, {})
        else:
            target = scaling.targets(batch, targets)
            value = _called("loss", loss, output, target)
            given = {k: _called(k, f, output, target) for k, f in (metrics or {}).items()}
        values = _checked_values("loss", value, rows, target)
        found = {name: _checked_values(name, x, rows, target) for name, x in given.items()}
        values, found = _with_sown(values, found, sown)
        sums = {name: _weighted_sum(name, x, scales) for name, x in found.items()}
        return LossOutput(*_weighted_sum("loss", values, scales), model_state, sums)

    def apply(params: PyTree, x: Any, model_state: PyTree | None = None) -> Any:
        return plain.predict(params, _as_inputs(inputs, x), model_state)

    def units_of(batch: Batch) -> Mapping[str, str]:
        variables = jax.eval_shape(lambda key: init(key, batch), seed_key(0))
        given = dict(batch) if has_own_call else inputs_of(inputs, batch)
        return find_units(functions, units, variables, given)

    found = units_of if units is None or units or units == "" else None
    more: Any = {"bounds": bounds or {}, "apply": apply, "counted": scaling.counted}
    return TrainableModel(init, loss_of, config or {}, find_units=found, **more)


def _calls_model(loss: Loss, metrics: Any, targets: str | None) -> bool:
    """Whether a loss calls the model by itself; UsageError for what then has no effect."""
    is_own = next(iter(inspect.signature(loss).parameters), None) == "apply"
    if is_own and metrics:
        raise UsageError(
            "metrics: a loss that takes `apply` returns its metrics, (numbers, {name: numbers})."
        )
    if is_own and targets != "y":
        raise UsageError("targets: a loss that takes `apply` is given the batch. Leave it out.")
    return is_own


def _as_inputs(inputs: Inputs, x: Any) -> Any:
    """What a model is given, of a batch or of the inputs themselves."""
    if isinstance(x, Mapping):
        if missing := sorted({*names_of(inputs)} - x.keys()):
            raise UsageError(f"apply: the inputs {sorted(x)} lack {missing[0]!r}.")
        return inputs_of(inputs, x)
    several = not isinstance(inputs, str) and not callable(inputs) and not isinstance(x, tuple)
    return (x,) if several else x


def _called_by(
    loss: Loss,
    apply: Callable[..., Any],
    draws: bool,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    *,
    keys: jax.Array | None,
    **options: Any,
) -> tuple[Any, PyTree]:
    """(what a loss returns that calls the model by itself, new model state).

    The state goes from call to call; what they sow comes together. Each call has keys of its own;
    those that `draws` in evaluation are made of the batch, not of what the loss computes of it.
    """
    states, sown = [model_state], dict[str, dict[str, Any]]()
    roots = keys
    if keys is None and draws:
        roots = keys_by_value([x for name, x in sorted(batch.items()) if name != "mask"])

    def call(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        mine, number = roots, len(states) - 1
        if mine is not None and number:
            mine = jax.vmap(jax.random.fold_in, (0, None))(mine, number)
        y, state = apply(params, states[-1], Given(args, kwargs), keys=mine, **options)
        state, own = _without_sown(state)
        states.append(state)
        for kind, numbers in own.items():
            for name, number in numbers.items():
                of_kind = sown.setdefault(kind, {})
                of_kind[name] = of_kind.get(name, 0) + number
        return y

    values = loss(call, params, batch, keys)
    return values, {**states[-1], **sown}


def _with_sown(
    loss: jax.Array,
    metrics: dict[str, jax.Array],
    sown: Mapping[str, Mapping[str, jax.Array]],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss (B, ...), and metrics by name, with the numbers that were sown for them."""
    for kind, numbers in sown.items():
        for name, number in numbers.items():  # one of all examples, or one of each, (B,)
            if name in metrics:
                raise UsageError(f"two metrics have the name {name!r}. Sow by another name.")
            dims = number.shape + (1,) * (loss.ndim - number.ndim)
            metrics[name] = jnp.broadcast_to(number.reshape(dims), loss.shape)
            loss = loss + metrics[name] if kind == "losses" else loss
    return loss, metrics


def _without_sown(model_state: PyTree) -> tuple[PyTree, dict[str, dict[str, Any]]]:
    """The state, and the numbers that were sown, by collection and path."""
    sown = {kind: model_state[kind] for kind in SOWN if kind in model_state}
    return {kind: x for kind, x in model_state.items() if kind not in sown}, sown


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
    all_inputs: bool

    def of(self, batch: Batch) -> list[Any]:
        names = [*([] if self.weights is None else [self.weights]), *{"mask"}.intersection(batch)]
        return [batch[name] for name in names]

    def counted(self, batch: Batch, name: str) -> Any:
        """`TrainableModel.counted`."""
        return _counted(self.of(batch), batch[name], by_position=not self.is_input(name))

    def is_input(self, name: str) -> bool:
        return self.all_inputs or name in self.inputs

    def targets(self, batch: Batch, name: str | None) -> Any:
        """The array of this name, or all by name, with zeros where they have no weight."""
        scales = self.of(batch)
        if name is not None:
            return _zeroed(scales, batch[name], by_position=True)
        return {k: _zeroed(scales, x, by_position=not self.is_input(k)) for k, x in batch.items()}


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
