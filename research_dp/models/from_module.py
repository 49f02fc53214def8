"""`from_linen` and `from_nnx`: a module as anybody writes it, as a `TrainableModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Bounds
from research_dp.models.flax.linen import linen_functions_of_inputs
from research_dp.models.flax.module_calls import Names
from research_dp.models.flax.nnx import nnx_functions_of_inputs
from research_dp.models.supervised import supervised
from research_dp.types import TrainableModel

Loss = Callable[[Any, Any], jax.Array]


@checked
def from_linen(
    module: nn.Module,
    *,
    loss: Loss,
    inputs: Names = "x",
    targets: str | None = "y",
    metrics: Mapping[str, Loss] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
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

    Raises:
        UsageError: The module does not take these inputs. While it is traced: the loss is not one
            number per example, or the module draws random numbers other than by `nn.Dropout`.
    """
    functions = linen_functions_of_inputs(module, inputs)
    return supervised(functions, loss, inputs, targets, metrics, weights, config, bounds)


@checked
def from_nnx(
    factory: Callable[..., nnx.Module],
    *,
    loss: Loss,
    inputs: Names = "x",
    targets: str | None = "y",
    metrics: Mapping[str, Loss] | None = None,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
) -> TrainableModel:
    """An NNX module and its loss, for every strategy.

    An argument `train`, `training`, `is_train`, `is_training`, `deterministic` or
    `use_running_average` of its `__call__` says whether it trains; without one, its methods `train`
    and `eval` are called.
    `nnx.Dropout` has one mask per example, whatever the devices. `nnx.BatchNorm` has the statistics
    of the global micro-batch. Variables other than `nnx.Param` are model state.

    Args:
        factory: (rngs) -> module, e.g. `lambda rngs: Net(64, 10, rngs=rngs)`.
        loss: (output, target) -> one number per example, (B,), or per position, (B, T), e.g.
            `optax.softmax_cross_entropy_with_integer_labels`.
        inputs: Name of the array of a batch that is the input, or several in order.
        targets: Name of the target; None: `loss` and `metrics` take (output, batch).
        metrics: Name -> a function like `loss`, whose weighted mean is logged.
        weights: Name of an array of weights, (B,) or (B, T); None: all examples weigh the same. A
            batch's `mask` (B,), 0 for padding, multiplies them.
        config: Properties that must agree with the data set's `info`, e.g. {'num_classes': 10}.
        bounds: Integer array of a batch -> the key of `config` that it must be below.

    Raises:
        UsageError: `factory` takes more than `rngs`. While the module is traced: it does not take
            these inputs, the loss is not one number per example, or the module draws random numbers
            other than by `nnx.Dropout`.
    """
    functions = nnx_functions_of_inputs(factory, inputs)
    return supervised(functions, loss, inputs, targets, metrics, weights, config, bounds)
