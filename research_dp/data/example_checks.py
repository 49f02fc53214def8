"""Checks of data that is there already: arrays of one length, and examples by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import as_numbers
from research_dp.data.shuffle import permute
from research_dp.errors import UsageError
from research_dp.types import Arrays

GUIDE = "See docs/own_data.md."


def named_arrays(x: Any, y: Any, names: Sequence[str], function: str, data: str) -> Arrays:
    """The arrays of a batch by name; UsageError if they are not of one length above 0."""
    if isinstance(x, Mapping):
        if y is not None:
            raise UsageError(f"{function} has a dict and y. Put y into the dict, or give arrays.")
        named = x
    else:
        named = {names[0]: x} if y is None else {names[0]: x, names[-1]: y}
    if x is None:
        raise UsageError(f"{function} of {data} is None. Give arrays (N, ...). {GUIDE}")
    arrays = {name: narrowed(name, value) for name, value in named.items()}
    if not arrays:
        raise UsageError(f"{function}.x of {data} is {{}}. Give at least one array.")
    check_names(arrays, f"{function}: ")
    lengths = {name: len(x) if x.ndim else None for name, x in arrays.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        text = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        problem = f"arrays of {data} differ in length: {text}. The first dim counts examples"
        raise UsageError(f"{function}: {problem}.")
    if 0 in lengths.values():
        raise UsageError(f"{function}.x: {data} has no examples.")
    return arrays


def narrowed(name: str, value: Any) -> np.ndarray:
    """The value as JAX computes with it: float32 instead of float64, int32 instead of int64."""
    array = as_numbers(repr(name), value, f" {GUIDE}")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if dtype.itemsize > 8 and dtype != np.complex64:  # NumPy's own widest, which JAX lacks
        dtype = np.dtype(np.complex64 if dtype.kind == "c" else np.float32)
    if array.dtype != dtype and jnp.issubdtype(dtype, jnp.integer) and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise UsageError(f"{name!r} has values beyond {dtype}. Number them from 0.")
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype, copy=False)
    if array.dtype.itemsize > dtype.itemsize and (np.isinf(narrow) & np.isfinite(array)).any():
        raise UsageError(f"{name!r} has values beyond {dtype}. Scale them, or take their log.")
    return narrow


def check_names(arrays: Arrays, where: str) -> None:
    """Raises UsageError for an array of a name that batches have already."""
    if "mask" in arrays:
        raise UsageError(
            f"{where}an array is called 'mask', which marks padding in evaluation. Name it "
            f"otherwise, and give the model weights= of that name if it weighs the loss. {GUIDE}"
        )


def check_labels(arrays: Arrays, name: str | None, info: Mapping[str, Any], data: str) -> None:
    """Raises UsageError for labels that are no classes of `info`."""
    count, labels = info.get("num_classes"), arrays.get(name or "")
    if count is None or labels is None:
        return
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        problem = f"of dtype {labels.dtype}. Labels are integers: {name}.astype(np.int32)"
    elif labels.min() < 0 or labels.max() >= count:
        problem = f"from {labels.min()} to {labels.max()}. Number them from 0 to {count - 1}"
    else:
        return
    raise UsageError(f"{data} has num_classes = {count} and {name!r} {problem}.")


def check_source(source: Any, function: str, name: str) -> None:
    """Raises UsageError for what is not read by index."""
    if isinstance(source, Mapping):
        raise UsageError(f"{function} of {name} is a dict. Use research_dp.from_arrays.")
    try:
        is_empty = not len(source)
    except TypeError:  # a stream, a class, an array without dims
        is_empty = None
    if is_empty is None or not hasattr(source, "__getitem__"):
        raise UsageError(
            f"{function} of {name} is a {type(source).__name__}, without len() or access by index. "
            "Read a stream once into a list, write it as files by index, or give a DataSet an "
            f"iterator with a state, which resumes exactly. {GUIDE}"
        )
    if is_empty:
        raise UsageError(f"{function}: {name} has no examples.")


def fraction_of(value: Any, size: int, function: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Entries to train on and to evaluate on, in order; the same in every run."""
    count = round(value * size) if value and 0 < value < 1 else 0
    if not 0 < count < size:
        raise UsageError(
            f"{function}.eval = {value}: {count} of {size} examples of {name} to evaluate on. Give "
            "a fraction between 0 and 1 that leaves examples to both, or data to evaluate on: the "
            "same data, to train on all of it."
        )
    order = permute(np.arange(size), size, seed=0, epoch=0)
    return np.sort(order[count:]), np.sort(order[:count])


def length_of(arrays: Arrays) -> int:
    """The number of examples."""
    return len(next(iter(arrays.values())))


def spec_of(arrays: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of one example of stacked arrays."""
    return {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in arrays.items()}


def in_words(spec: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """Names, shapes and dtypes, for messages."""
    return ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in spec.items())
