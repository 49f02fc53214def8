"""Types of parameters: annotations that say which values `argument_checks.checked` accepts."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Limit:
    """The values that a predicate accepts, described in words that can follow 'give'."""

    accepts: Callable[[Any], bool]
    description: str


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Pytrees whose leaves a predicate accepts."""

    accepts_leaf: Callable[[Any], bool]
    description: str  # of the leaves, in the plural
    like: str = ""  # parameter whose tree has leaves at the same paths
    empty: bool = True  # a tree without leaves is accepted
    counts: str = ""  # what the first dim of every leaf counts; all have the same number

    def accepts(self, value: Any) -> bool:
        return self.problem(value, {}) is None

    def problem(self, value: Any, others: Mapping[str, Any]) -> str | None:
        """The problem with a tree, worded to follow the parameter's name; None: it is accepted.

        `others` are all arguments of the call, among them that of parameter `like`.
        """
        if value is None:
            return f" = None: give {self.description}."
        try:
            flat = _named_leaves(value)
        except (TypeError, ValueError) as error:  # keys that cannot be sorted
            return f": it is no pytree ({str(error).splitlines()[0]}). Give {self.description}."
        for path, leaf in flat:
            if not self.accepts_leaf(leaf):
                location = f": leaf {path!r} is" if path else " ="
                return f"{location} {described(leaf)}. Give {self.description}."
        if not flat and not self.empty:
            return f" = {described(value)} has no leaves. Give {self.description}."
        lengths = [leaf.shape[0] if leaf.ndim else 0 for _, leaf in flat if self.counts]
        for (path, leaf), length in zip(flat, lengths, strict=False):
            if length == 0 or length != lengths[0]:
                name = f": leaf {path!r}" if path else ""
                number = f", {lengths[0]} like the first leaf" if lengths[0] else ""
                return (
                    f"{name} of shape {leaf.shape} needs a first dim that counts {self.counts}, "
                    f"at least one{number}."
                )
        if self.like not in others:  # a binding is judged by itself
            return None
        paths = [path for path, _ in flat]
        expected = [path for path, _ in _named_leaves(others[self.like])]
        if paths == expected:
            return None
        unmatched = [p for p in (*expected, *paths) if (p in expected) != (p in paths)]
        where = (unmatched or ["order of leaves"])[0]
        like = f"{self.description}, in the same structure"
        return f" differs from {self.like} in {where!r}: give {like}."


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def described(value: Any) -> str:
    """A value in a message: arrays by shape and dtype, objects with a long repr by their type."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None and not isinstance(value, type):
        name = "float0" if dtype == jax.dtypes.float0 else dtype
        return f"an array of shape {tuple(shape)} and dtype {name}"
    if is_integer(value) and abs(value) >= 10**80:  # Python refuses to print the longest
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def path_name(path: Any) -> str:
    """A key path as names joined by '/', e.g. 'Dense_0/kernel'.

    The `.value` attribute in which Flax's boxes and variables keep their array is left out.
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_integer(x: Any) -> bool:
    """Whether it is an integer; True and False are not."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether it is a real number that a float can hold; True and False are not."""
    try:
        return isinstance(x, numbers.Real) and not isinstance(x, bool) and float(x) is not None
    except OverflowError:
        return False


def is_abstract_array(x: Any) -> bool:
    """Whether it has a shape, and a dtype of numbers or booleans."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        return False
    with contextlib.suppress(TypeError):  # another library's dtype
        return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
    return False


def is_array(x: Any) -> bool:
    """Whether it is an array of numbers or booleans: no random keys, float0, text or objects."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and is_abstract_array(x)


def is_array_or_number(x: Any) -> bool:
    """Whether it is an array of numbers or booleans, or a Python number."""
    return isinstance(x, int | float | complex) or is_array(x)


def _is_placeable(x: Any) -> bool:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return is_key or is_array_or_number(x)


def _is_dtype(x: Any) -> bool:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return False  # numpy would accept it and use its dtype
    with contextlib.suppress(TypeError, ValueError):
        return jnp.dtype(x) is not None
    return False


def is_floating_dtype(x: Any) -> bool:
    """Whether it is a floating-point dtype, or the name of one."""
    return _is_dtype(x) and jnp.issubdtype(jnp.dtype(x), jnp.floating)


def _is_axes(x: Any, least: int) -> bool:
    """Whether it is the name of an axis, or a (nested) sequence of at least so many names."""
    several = isinstance(x, tuple | list) and len(x) >= least
    return isinstance(x, str) or (several and all(_is_axes(name, least) for name in x))


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple | list) and all(is_integer(length) and length >= 0 for length in x)


def _is_units(x: Any) -> bool:
    kinds = ("part", "shared", "stack", "table")
    return isinstance(x, Mapping) and all(isinstance(x[k], str) and x[k] in kinds for k in x)


def _is_devices(x: Any) -> bool:
    several = isinstance(x, Sequence | np.ndarray) and len(x) > 0
    return several and all(hasattr(device, "platform") for device in x)


def _is_norm(x: Any) -> bool:
    return is_number(x) and x >= 0


def _is_traced_norm(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray):
        return _is_norm(x)
    return is_array(x) and x.ndim == 0 and (isinstance(x, jax.core.Tracer) or _is_norm(x.item()))


def _is_key(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    is_typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x.ndim == 0 if is_typed else x.dtype == np.uint32 and x.ndim == 1


def has_attributes(names: Sequence[str], example: str) -> Limit:
    """Objects with these attributes, of any class; `example` is one."""
    return Limit(
        lambda x: not isinstance(x, type) and all(hasattr(x, name) for name in names),
        f"an object with {' and '.join(names)}, e.g. {example}",
    )


def arrays_like(parameter: str) -> Leaves:
    """Trees of arrays at the paths of the tree that is given as `parameter`."""
    return Leaves(is_array, "arrays of numbers", parameter)


Count = Annotated[int, Limit(lambda x: is_integer(x) and x >= 1, "an integer of at least 1")]
CountOrZero = Annotated[int, Limit(lambda x: is_integer(x) and x >= 0, "an integer of at least 0")]
Steps = Annotated[
    int,
    Limit(
        lambda x: is_integer(x) and 0 <= x < 2**31, "an integer from 0 to 2^31 - 1: steps are int32"
    ),
]
# JAX drops the bits of a seed above 32 silently.
Seed = Annotated[
    int, Limit(lambda x: is_integer(x) and 0 <= x < 2**32, "an integer from 0 to 2^32 - 1")
]
Positive = Annotated[float, Limit(lambda x: is_number(x) and x > 0, "a positive number")]
Fraction = Annotated[float, Limit(lambda x: is_number(x) and 0 <= x <= 1, "a fraction in [0, 1]")]
BelowOne = Annotated[float, Limit(lambda x: is_number(x) and 0 <= x < 1, "a fraction in [0, 1)")]
MaxNorm = Annotated[float, Limit(_is_norm, "a number of at least 0")]
TracedNorm = Annotated[
    Any, Limit(_is_traced_norm, "a number of at least 0, or a 0-d array of such a number")
]
Dtype = Annotated[Any, Limit(is_floating_dtype, "a floating-point dtype, e.g. 'bfloat16'")]
AnyDtype = Annotated[Any, Limit(_is_dtype, "a dtype, e.g. 'bfloat16'")]
Shape = Annotated[tuple[int, ...], Limit(_is_shape, "a shape, e.g. (8, 16)")]
Sizes = Annotated[Mapping[str, int], "a dict of sizes, e.g. {'data': 8}"]
Bounds = Annotated[
    Mapping[str, str], "a dict of array -> key of `config`, e.g. {'y': 'num_classes'}"
]
Devices = Annotated[Sequence[jax.Device], Limit(_is_devices, "devices, e.g. jax.devices()")]
AxisName = Annotated[
    str | Sequence[str], Limit(lambda x: _is_axes(x, 1), "the name of a mesh axis, or several")
]
AxisNames = Annotated[
    str | Sequence[str],
    Limit(lambda x: _is_axes(x, 0), "the name of a mesh axis, or several (() for none)"),
]
Units = Annotated[
    Mapping[str, str], Limit(_is_units, "a dict of path -> 'part', 'shared', 'stack' or 'table'")
]
Number = Annotated[jax.Array, Limit(is_array_or_number, "a number, or an array of numbers")]
Array = Annotated[jax.Array, Limit(is_array, "an array of numbers")]
Indices = Annotated[
    jax.Array,
    Limit(lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.integer), "an array of integers"),
]
Arrays = Annotated[Any, Leaves(is_array, "arrays of numbers")]
Numbers = Annotated[Any, Leaves(is_array_or_number, "arrays of numbers")]
Shapes = Annotated[Any, Leaves(is_abstract_array, "arrays of numbers, or their shapes and dtypes")]
Placeable = Annotated[Any, Leaves(_is_placeable, "arrays of numbers or random keys")]
Keys = Annotated[Any, Leaves(_is_key, "single random keys, e.g. jax.random.key(0)", empty=False)]
MicroBatches = Annotated[
    Any, Leaves(is_array, "arrays of numbers", empty=False, counts="micro-batches")
]
DeviceRows = Annotated[Any, Leaves(is_array, "arrays of numbers", empty=False, counts="devices")]
Transform = Annotated[Any, has_attributes(("init", "update"), "optax.sgd(0.1)")]
