"""`from_arrays` and `from_source`: data that is there already, as a `DataSet`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import CountOrZero
from research_dp.data.example_checks import (
    GUIDE,
    check_labels,
    check_names,
    check_source,
    fraction_of,
    in_words,
    length_of,
    named_arrays,
    narrowed,
    spec_of,
)
from research_dp.data.indexed import NUM_HASHED, Examples, indexed_splits, split_identity
from research_dp.data.preprocess import Preprocess, Rng
from research_dp.errors import UsageError, first_line
from research_dp.types import Arrays, DataIdentity, DataSet, SplitIdentity

_READ_FIRST = 4  # examples, to see whether a source reuses memory
Augment = Callable[[Arrays, np.random.Generator], Arrays]


@checked
def from_arrays(
    x: Any,
    y: Any = None,
    *,
    eval: Any = 0.1,
    names: Sequence[str] = ("x", "y"),
    info: Mapping[str, Any] | None = None,
    augment: Augment | None = None,
    name: str = "arrays",
) -> DataSet:
    """Arrays in memory as training and evaluation data.

    The order of examples depends on the seed and the step alone. So a run resumes exactly, on any
    number of devices and processes. float64 becomes float32, and int64 becomes int32.

    Args:
        x: Inputs (N, ...), of NumPy or JAX; or a dict of arrays (N, ...), which are the batch.
        y: Targets (N, ...); None: there are none, or `x` is a dict.
        eval: The evaluation data: (x, y), or a dict like `x`; or the fraction of the examples that
            are evaluated on and not trained on, the same in every run. To train on all examples,
            give the training data here too.
        names: What batches call `x` and `y`.
        info: Properties for the model, e.g. {'num_classes': 10}, which `y` is checked against.
        augment: (example, NumPy generator) -> example, for training. The generator is a function of
            the seed and the position in the training stream.
        name: In messages and in the run's record.

    Raises:
        UsageError: Arrays differ in length, are empty or do not contain numbers, or labels are out
            of range.
    """
    if len(names) != 2:
        raise UsageError(f"from_arrays.names = {names!r}: give two, for x and y.")
    info, target = dict(info or {}), names[-1] if y is not None else None
    arrays = named_arrays(x, y, names, "from_arrays", name)
    check_labels(arrays, target, info, f"{name} train")
    train_entries = eval_entries = None
    eval_arrays = arrays
    if isinstance(eval, numbers.Real | None):
        train_entries, eval_entries = fraction_of(eval, length_of(arrays), "from_arrays", name)
    else:
        eval_x, eval_y = eval if isinstance(eval, tuple | list) and len(eval) == 2 else (eval, None)
        eval_arrays = named_arrays(eval_x, eval_y, names, "from_arrays.eval", name)
        check_labels(eval_arrays, target, info, f"{name} eval")
        if spec_of(eval_arrays) != spec_of(arrays):
            raise UsageError(
                f"from_arrays.eval has examples of {in_words(spec_of(eval_arrays))}, and the "
                f"training data of {name} has {in_words(spec_of(arrays))}. Give both the same."
            )
    inputs, plain = (
        _preprocess("from_arrays", spec_of(arrays), info, None, f) for f in (augment, None)
    )
    of_training = _Gathered if augment is None else Examples
    train = of_training(_Rows(arrays), inputs, 0, f"{name} train", None, train_entries)
    evaluation = _Gathered(_Rows(eval_arrays), plain, 0, f"{name} eval", None, eval_entries)
    return _data_set(name, inputs, train, evaluation)


@checked
def from_source(
    source: Any,
    *,
    eval: Any = 0.1,
    transform: Callable[[Any], Arrays] | None = None,
    augment: Augment | None = None,
    info: Mapping[str, Any] | None = None,
    name: str = "source",
    threads: CountOrZero = 0,
    workers: CountOrZero = 0,
    cache_bytes: CountOrZero = 2**28,
) -> DataSet:
    """Examples by index as training and evaluation data.

    A source has `len(source)` and `source[index]`: a list, `grain.sources`, a dataset of Hugging
    Face or of PyTorch. The order is as in `from_arrays`; float64 and int64 are narrowed as there.

    Args:
        source: Its examples are dicts of arrays, of the same shapes and dtypes, or what `transform`
            takes. Arrays, dicts, lists, tuples and dataclasses are copied before `transform` and
            `augment` get them, other objects are not.
        eval: A source to evaluate on; or the fraction of the examples that are evaluated on and not
            trained on, the same in every run. `source` itself: all are trained on.
        transform: An example of the source -> dict of arrays, e.g. decoding; the same at each call.
        augment: (example, NumPy generator) -> example, for training. The generator is a function of
            the seed and the position in the training stream.
        info: Properties for the model, e.g. {'num_classes': 10}.
        name: In messages and in the run's record.
        threads: Threads that read batches ahead; 0: a batch is read when it is requested, while the
            devices compute. They take turns if the source writes examples into the same memory.
        workers: Processes that read training batches ahead instead; 0: none. They import the
            program, so what it runs is below `if __name__ == "__main__":`.
        cache_bytes: A split that needs at most this many bytes stays in memory once it is read.

    Raises:
        UsageError: The source has no length or no access by index, is empty, or its examples are
            not dicts of arrays of numbers. While reading: an example differs from the first one.
    """
    check_source(source, "from_source.source", name)
    train_entries = eval_entries = None
    eval_source = source
    if isinstance(eval, numbers.Real | None):
        train_entries, eval_entries = fraction_of(eval, len(source), "from_source", name)
    else:
        eval_source = eval
        check_source(eval, "from_source.eval", name)
    properties = dict(info or {})
    unchecked = _preprocess("from_source", {}, properties, transform, None)
    first = Examples(source, unchecked, 0, f"{name} train", None, train_entries)(np.array([0]))
    spec = spec_of(first)
    inputs, plain = (
        _preprocess("from_source", spec, properties, transform, f) for f in (augment, None)
    )
    takes_turns = {
        id(data): max(threads, workers) > 0
        and _reuses_memory(data, lambda raw: plain.example(raw, None))
        for data in (source, eval_source)
    }
    train, evaluation = (
        Examples(data, made, cache_bytes, f"{name} {split}", None, own, takes_turns[id(data)])
        for data, made, split, own in (
            (source, inputs, "train", train_entries),
            (eval_source, plain, "eval", eval_entries),
        )
    )
    return _data_set(name, inputs, train, evaluation, threads=threads, workers=workers)


class _Rows:
    """Arrays of the same length as a source of examples."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays

    def __len__(self) -> int:
        return length_of(self.arrays)

    def __getitem__(self, index: int) -> Arrays:
        return {name: x[index] for name, x in self.arrays.items()}


class _Gathered(Examples):
    """Examples of arrays, gathered at once."""

    def __call__(self, indices: np.ndarray, rngs: Sequence[Rng] | None = None) -> Arrays:
        entries = indices if self.entries is None else self.entries[indices]
        return self.source[entries]


def _data_set(
    name: str, inputs: Preprocess, train: Examples, evaluation: Examples, **options: int
) -> DataSet:
    splits = indexed_splits(lambda: train, lambda: evaluation, inputs, **options)

    @functools.cache
    def identity() -> DataIdentity:
        hashed = {"train": _identity(train), "eval": _identity(evaluation)}
        return DataIdentity(name=name, version="by index", splits=hashed)

    return DataSet(
        name=name,
        example=inputs.spec,
        info=inputs.info,
        prepare=lambda: None,
        train=splits.train,
        evaluate=splits.evaluate,
        order=f"{name} train, {splits.order}",
        identity=identity,
        locate=splits.locate,
    )


def _identity(examples: Examples) -> SplitIdentity:
    """By evenly spaced examples, without augmentation."""
    size = len(examples)
    indices = np.arange(NUM_HASHED) * size // NUM_HASHED
    return split_identity(size, [examples(np.unique(indices))])


def _preprocess(
    function: str,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    info: Mapping[str, Any],
    transform: Callable[[Any], Arrays] | None,
    augment: Augment | None,
) -> Preprocess:
    """Examples as dicts of arrays of this spec; {}: of any."""

    def example(raw: Any, rng: Rng) -> Arrays:
        arrays = raw
        if transform is not None or (rng is not None and augment is not None):
            arrays = _copied(raw)
        if transform is not None:
            arrays = _called(f"{function}.transform", transform, arrays)
        if rng is not None and augment is not None:
            arrays = _called(f"{function}.augment", augment, arrays, rng)
        if not isinstance(arrays, Mapping):
            raise UsageError(
                f"it is a {type(arrays).__name__}. Give dicts of arrays, by from_source.transform, "
                f"e.g. lambda example: {{'x': example[0], 'y': example[1]}}. {GUIDE}"
            )
        check_names(arrays, "")
        arrays = {name: narrowed(name, x) for name, x in arrays.items()}
        own = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        if spec and own != spec:
            raise UsageError(
                f"it has {in_words(own)}, and the first example has {in_words(spec)}. Give all "
                f"the same shapes and dtypes, by transform. {GUIDE}"
            )
        return arrays

    def batch(arrays: Arrays, rows: np.ndarray, total: int, rng: Rng) -> Arrays:
        return arrays

    return Preprocess(spec, info, example, batch, example_is_random=augment is not None)


def _copied(raw: Any) -> Any:
    """An example with arrays and containers of its own, which users' functions may change."""
    if isinstance(raw, np.ndarray):
        return raw.copy()
    if type(raw) in (list, tuple):
        is_flat = raw and isinstance(raw[0], numbers.Number | str | bytes)
        return raw[:] if is_flat else type(raw)(map(_copied, raw))
    if isinstance(raw, tuple) and hasattr(raw, "_make"):
        return raw._make(map(_copied, raw))
    if isinstance(raw, dict):
        own: Any = copy.copy(raw)
        for name, x in raw.items():
            dict.__setitem__(own, name, _copied(x))
        return own
    if dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        own = copy.copy(raw)
        for field in dataclasses.fields(raw):  # frozen ones too
            object.__setattr__(own, field.name, _copied(getattr(raw, field.name)))
        return own
    is_tensor = hasattr(raw, "__array__") and not isinstance(raw, jax.Array | np.generic)
    return copy.deepcopy(raw) if is_tensor else raw


def _reuses_memory(source: Any, prepare: Callable[[Any], Any]) -> bool:
    """Whether an example, raw or prepared, changes while the next ones are read."""
    kept: list[tuple[Any, bytes]] = []
    try:
        for index in range(min(len(source), _READ_FIRST)):
            raw = source[index]
            kept += [(x, pickle.dumps(x)) for x in (raw, prepare(raw))]
        return any(pickle.dumps(x) != before for x, before in kept)
    except Exception:  # it is named when it is read; until then threads take turns
        return True


def _called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns; its exceptions become a UsageError that names it."""
    try:
        return function(*args)
    except UsageError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise UsageError(f"{name} failed with {problem}.") from error
