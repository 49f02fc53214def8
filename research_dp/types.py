"""The interfaces of models and data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Bounds, Units
from research_dp.errors import binding_error

PyTree = Any
Batch = Mapping[str, Any]
# name -> (sum over valid items, number of valid items). They are summed over devices, micro-batches
# and batches before the division, so that a mean is never a mean of means.
Sums = Mapping[str, tuple[jax.Array, jax.Array]]
HostSums = Mapping[str, tuple[float, float]]  # the same on the host
# What a run records beside the metrics of its model, which cannot have these names.
MEASURED = (
    *("steps_per_second", "examples_per_second", "tokens_per_second", "mfu"),
    *("data_wait_seconds", "data_wait_fraction", "dispatch_seconds", "device_wait_seconds"),
    *("save_seconds", "eval_seconds", "learning_rate", "device_memory_bytes"),
)


class LossOutput(NamedTuple):
    """The result of a loss function.

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
    """The work of training on one example, for throughput and MFU."""

    tokens: int
    # Of the forward and backward pass by the model's formula, without recomputation; None: unknown.
    flops: float | None
    dtype: str  # of compute, for which MFU takes the devices' peak


class OneExample(dict[str, jax.ShapeDtypeStruct]):
    """An abstract batch of one example; UsageError if a model reads what the data set lacks."""

    def __init__(self, example: Mapping[str, jax.ShapeDtypeStruct], binding: str):
        super().__init__(
            {k: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for k, x in example.items()}
        )
        self._binding = binding  # of the model

    def __missing__(self, name: str) -> Any:
        raise binding_error(
            self._binding,
            f" reads {name!r} of a batch, but the data set gives {sorted(self)}. Take a model and "
            f"a data set of the same task; arrays have names in from_arrays({{{name!r}: array}}).",
        )


@checked
@dataclasses.dataclass(frozen=True)
class TrainableModel:
    """A model and its loss.

    Attributes:
        init: (key, batch of `jax.ShapeDtypeStruct`) -> (parameters, model state), nested dicts.
        loss: (parameters, model state, batch, keys, train, batch_axes) -> `LossOutput`. `keys` has
            one random key an example, (B,), or is None; `batch_axes` are the bound mesh axes that
            the batch is split over, for statistics over the global batch.
        config: Properties that must agree with the data set's `info`, e.g. `num_classes`.
        units: Path -> 'part', 'shared' (used several times), 'stack' or 'table', for parameters
            that are gathered together. If there are any, `loss` also takes `units` and computes
            these parts through it. Empty: the model is one unit.
        work: Shapes of one example's arrays -> `Work`; None: unknown.
        bounds: Integer array of a batch -> the key of `config` that bounds it, e.g.
            {'label': 'num_classes'}. A run refuses values that are negative or not below it.
        apply: (parameters, inputs, model state={}) -> outputs, e.g. logits, for inference; inputs
            are the array of a batch that the model predicts from, a tuple of several, or a batch
            that has them. None: not given.
        counted: (batch, name of one of its arrays (B, ...)) -> bool (B, ..., 1, ...), False where
            it has no weight, so that its values are not checked. None: in rows whose `mask` is 0.
        find_units: (batch of `jax.ShapeDtypeStruct`) -> `units`, where the model's inputs must be
            known for them; None: they are given.
        decode: (parameters, tokens, cache) -> (logits of what follows, cache), for sampling; see
            `LanguageModel.decode`. None: it has no sequences.
    """

    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]]
    loss: Callable[..., LossOutput]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    units: Units = dataclasses.field(default_factory=dict)
    work: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Work] | None = None
    bounds: Bounds = dataclasses.field(default_factory=dict)
    apply: Callable[..., Any] | None = None
    find_units: Callable[[Batch], Mapping[str, str]] | None = None
    counted: Callable[[Batch, str], Any] | None = None
    decode: Callable[..., Any] | None = None

    def with_units(self, example: Batch) -> TrainableModel:
        """The same model, its units found for a batch of one abstract example."""
        if self.find_units is None:
            return self
        return dataclasses.replace(self, find_units=None, units=self.find_units(example))


@dataclasses.dataclass(frozen=True)
class Functions:
    """A module of a neural-network library as pure functions, without a loss.

    `init` maps (key, inputs of `jax.ShapeDtypeStruct`) to (parameters, model state), and `apply`
    (parameters, model state, input, train, keys, batch_axes) to (output, new model state).
    """

    init: Callable[[jax.Array, Any], tuple[PyTree, PyTree]]
    apply: Callable[..., tuple[jax.Array, PyTree]]

    def predict(self, params: PyTree, inputs: Any, model_state: PyTree | None = None) -> Any:
        """The output in evaluation: `TrainableModel.apply`."""
        return self.apply(params, model_state or {}, inputs, train=False)[0]


Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """Which training batches to read: those of steps `first_step` to `num_steps` - 1."""

    seed: int  # of the order and of augmentation
    batch_size: int  # of the global batch
    rows: np.ndarray  # indices in the global batch that this process provides, (R,) integer
    first_step: int
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOrder:
    """Which evaluation batches to read: each example once, in order, padding masked."""

    batch_size: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitIdentity:
    """Identifies the examples of a split by their number and a hash of a few of them."""

    examples: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identifies the data that a run reads; compared between processes and with a resumed run."""

    name: str
    version: str
    splits: Mapping[str, SplitIdentity]  # those that are read, by name, e.g. 'train[:90%]'

    def __str__(self) -> str:
        splits = (
            f"{name} {split.examples:,} examples (digest {split.digest})"
            for name, split in self.splits.items()
        )
        return f"{self.name} {self.version}: {', '.join(splits)}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DataIdentity:
        """The inverse of `dataclasses.asdict`."""
        splits = {name: SplitIdentity(**split) for name, split in fields["splits"].items()}
        return cls(**{**fields, "splits": splits})

    def difference(self, other: DataIdentity) -> tuple[str, str, str] | None:
        """The first difference as (what, value here, value in `other`); None: they are equal.

        Only splits that both have are compared.
        """
        versions = f"{self.name} {self.version}", f"{other.name} {other.version}"
        differences = [("the data set", *versions)]
        for name, here in self.splits.items():
            there = other.splits.get(name, here)
            numbers = f"{here.examples:,}", f"{there.examples:,}"
            differences.append((f"the number of examples in {name}", *numbers))
            digests = here.digest, there.digest
            differences.append((f"the digest of examples of {name}", *digests))
        return next((one for one in differences if one[1] != one[2]), None)


class Bound(NamedTuple):
    """A binding that takes effect: its value as text, and where it is."""

    value: str
    place: str | None  # e.g. 'runs/digits.gin:5', '--gin.train.seed'; None: not known
    of_strategy: bool | None  # whether only `train.strategy` leads to it; None: not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """Training and evaluation batches. Its fields are known before the data is there."""

    name: str
    example: Mapping[str, jax.ShapeDtypeStruct]  # shape and dtype of one example's arrays
    info: Mapping[str, Any]  # properties for the model, e.g. `num_classes`
    # Makes the data readable, e.g. downloads it. Every process must call it, because processes may
    # wait for each other; `train` and `evaluate` do.
    prepare: Callable[[], None]
    # They yield this process's rows of each batch: endlessly shuffled; with `mask` (R,), 0 for
    # padding. What `train` returns may have `get_state` and `set_state`, or `state_dict` and
    # `load_state_dict`: its state is saved, and what continues begins at step 0 and is moved to it.
    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    # What the order of training examples depends on besides `TrainOrder`; a run resumes only with
    # the same.
    order: str = ""
    rereads: bool = False  # a resumed run reads its stream again from the beginning
    identity: Callable[[], DataIdentity] | None = None  # once it is prepared; None: unknown
    # (order, index in its stream) -> which example is there, for messages; None: messages give the
    # index.
    locate: Callable[[TrainOrder | EvalOrder, int], str] | None = None


class Splits(NamedTuple):
    """What a reader makes; fields as in `DataSet`, but `order` omits data set and split."""

    train: Callable[[TrainOrder], Iterator[Arrays]]
    evaluate: Callable[[EvalOrder], Iterator[Arrays]]
    order: str = "by index"
    rereads: bool = False
    locate: Callable[[TrainOrder | EvalOrder, int], str] | None = None
