"""What a model is to everything else: two pure functions on pytrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from research_dp.distributed.annotations import checked
from research_dp.distributed.kinds import Units

PyTree = Any
Batch = Mapping[str, Any]
# name -> (sum over valid items, number of valid items): added up over devices, micro-batches and
# batches, then divided, so that a mean is never a mean of means.
Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class LossOutput(NamedTuple):
    """What a loss returns for the examples it was given.

    Attributes:
        total: Sum of the loss over valid items (examples, or tokens); 0-d float32.
        weight: Number of valid items, or the sum of their weights; 0-d float32.
        model_state: New model state, e.g. batch statistics; the same on every device.
        sums: Further metrics as (sum, count) pairs.
    """

    total: jax.Array
    weight: jax.Array
    model_state: PyTree
    sums: Sums


class Work(NamedTuple):
    """What one training example is to a model, however it is computed.

    Attributes:
        tokens: Tokens that it has.
        flops: Floating-point operations of its forward and backward pass that the model's formula
            asks for: nothing that is computed twice counts twice.
        dtype: Compute dtype, in which the devices' peak is taken for MFU.
    """

    tokens: int
    flops: float
    dtype: str


@checked
@dataclasses.dataclass(frozen=True)
class TrainableModel:
    """A model and its loss.

    Attributes:
        init: (key, batch of `jax.ShapeDtypeStruct`) -> (parameters, model state), nested dicts.
        loss: (parameters, model state, batch, keys, train, batch_axes) -> `LossOutput`. `keys` has
            one random key an example, (B,), or is None; `batch_axes` are the bound mesh axes that
            the batch is split over, for statistics over the whole batch.
        config: Facts that the data set can be checked against, e.g. `num_classes`.
        units: Keys of the parameters that are gathered together, each with what it is: `PART`,
            `STACK` or `TABLE` of `distributed.layout`. With any, `loss` takes one more argument,
            `units` (`distributed.units.Units`), and runs its parts through it. Empty: the model is
            one unit.
        work: Shapes of one example's arrays -> `Work`, for rates in tokens and for MFU; None: they
            are not known.
        bounds: Integer arrays of a batch, each with the fact of `config` that its values are below
            and not negative, e.g. {'label': 'num_classes'}. A run refuses other values.
    """

    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]]
    loss: Callable[..., LossOutput]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    units: Units = dataclasses.field(default_factory=dict)
    work: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Work] | None = None
    bounds: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Functions:
    """A module of some library as pure functions, before it has a loss.

    Attributes:
        init: (key, inputs of `jax.ShapeDtypeStruct`) -> (parameters, model state).
        apply: (parameters, model state, input, train, keys, batch_axes) ->
            (output, new model state).
    """

    init: Callable[[jax.Array, Any], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[jax.Array, PyTree]]
