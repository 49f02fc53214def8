"""What models and data sets are to everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Units

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


Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """Which training batches to read.

    Attributes:
        seed: Seed of the order and of augmentation.
        batch_size: Size of the global batch.
        rows: Places in the global batch that this process provides, (R,) integer.
        first_step: Step to begin with.
        num_steps: Step to end before.
    """

    seed: int
    batch_size: int
    rows: np.ndarray
    first_step: int
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOrder:
    """Which part of an evaluation split to read: each example once, in order, padding masked.

    Attributes:
        batch_size: Size of the global batch.
        rows: Places in the global batch that this process provides, (R,) integer.
    """

    batch_size: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitIdentity:
    """What distinguishes the examples of a split from others of the same name.

    Attributes:
        examples: Number of examples.
        digest: Hexadecimal hash of a few of them.
    """

    examples: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Which data a run reads. Processes of a run, and a run that is continued, compare it.

    Attributes:
        name: Name of the data set.
        version: Its version.
        splits: What is read of it, by split, e.g. 'train[:90%]'.
    """

    name: str
    version: str
    splits: Mapping[str, SplitIdentity]

    def __str__(self) -> str:
        splits = (
            f"{split} {one.examples:,} examples (digest {one.digest})"
            for split, one in self.splits.items()
        )
        return f"{self.name} {self.version}: {', '.join(splits)}"

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> DataIdentity:
        """The identity that `dataclasses.asdict` made a dict of."""
        splits = {split: SplitIdentity(**one) for split, one in written["splits"].items()}
        return cls(**{**written, "splits": splits})

    def difference(self, other: DataIdentity) -> tuple[str, str, str] | None:
        """The first thing that differs, as (what, here, in `other`); None if nothing does.

        Splits that only one of them names are not compared.
        """
        if (self.name, self.version) != (other.name, other.version):
            here, there = (f"{one.name} {one.version}" for one in (self, other))
            return "the data set", here, there
        for split, one in self.splits.items():
            two = other.splits.get(split, one)
            if one.examples != two.examples:
                what = f"the number of examples in {split}"
                return what, f"{one.examples:,}", f"{two.examples:,}"
            if one.digest != two.digest:
                return f"the digest of examples of {split}", one.digest, two.digest
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """Training and evaluation batches. It can be made, and asked, without the data being there.

    Attributes:
        name: Its name, for messages.
        example: Shape and dtype of one example's arrays.
        info: Facts for the model, e.g. `num_classes`.
        prepare: Makes the data ready to be read where it is not, e.g. downloads it. Every process
            must call it, for they may wait for each other; `train` and `evaluate` do.
        train: Yields this process's rows of each batch, endlessly shuffled.
        evaluate: Yields this process's rows of each batch, with `mask` (R,), 0 for padding.
        order: What the order of training examples depends on besides `TrainOrder`; a run is not
            continued under another.
        rereads: Whether a run that is continued reads its stream again from the beginning.
        identity: () -> `DataIdentity`, once the data is prepared; None: it is not known.
        locate: (order, place in its stream) -> which example is there, for messages; None: the
            place itself is reported.
    """

    name: str
    example: Mapping[str, jax.ShapeDtypeStruct]
    info: Mapping[str, Any]
    prepare: Callable[[], None]
    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    order: str = ""
    rereads: bool = False
    identity: Callable[[], DataIdentity] | None = None
    locate: Callable[[TrainOrder | EvalOrder, int], str] | None = None
