"""Kinds of parameters: a type, and which of its values are accepted.

They are annotations. `config.expected` checks gin's values against them before a run, and
`annotations.checked` the arguments of public functions; `errors.check_count` and the like ask here.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Limit(Protocol):
    """What values of a type are accepted; `str` says it in words that can follow 'give'."""

    def accepts(self, value: Any) -> bool:
        """Whether a value, of any type, is one of them."""
        ...


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Whole numbers from `least` on."""

    least: int

    def accepts(self, value: Any) -> bool:
        return is_integer(value) and value >= self.least

    def __str__(self) -> str:
        return f"a whole number of at least {self.least}"


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Seeds of random keys: JAX drops the bits above these without a word."""

    def accepts(self, value: Any) -> bool:
        return AtLeast(0).accepts(value) and value < 2**32

    def __str__(self) -> str:
        return "a whole number from 0 to 2^32 - 1"


@dataclasses.dataclass(frozen=True)
class Above:
    """Numbers above `bound`."""

    bound: float

    def accepts(self, value: Any) -> bool:
        return is_number(value) and value > self.bound

    def __str__(self) -> str:
        return "a positive number" if self.bound == 0 else f"a number above {self.bound}"


@dataclasses.dataclass(frozen=True)
class Floating:
    """Floating-point dtypes, or their names."""

    def accepts(self, value: Any) -> bool:
        return Dtypes().accepts(value) and jnp.issubdtype(jnp.dtype(value), jnp.floating)

    def __str__(self) -> str:
        return "a floating-point dtype, e.g. 'bfloat16'"


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """All dtypes, or their names."""

    def accepts(self, value: Any) -> bool:
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return False  # whose own dtype numpy would take
        try:
            jnp.dtype(value)
        except (TypeError, ValueError):
            return False
        return True

    def __str__(self) -> str:
        return "a dtype, e.g. 'bfloat16'"


@dataclasses.dataclass(frozen=True)
class Axes:
    """Names of mesh axes: one, or several, nested or not; `least` of them."""

    least: int

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) or (
            isinstance(value, tuple | list)
            and len(value) >= self.least
            and all(self.accepts(name) for name in value)
        )

    def __str__(self) -> str:
        return "the name of a mesh axis, or several" + (" (() for none)" if not self.least else "")


@dataclasses.dataclass(frozen=True)
class Has:
    """Objects with these attributes, of any class; `example` is one."""

    names: tuple[str, ...]
    example: str

    def accepts(self, value: Any) -> bool:
        return not isinstance(value, type) and all(hasattr(value, name) for name in self.names)

    def __str__(self) -> str:
        return f"an object with {' and '.join(self.names)}, e.g. {self.example}"


@dataclasses.dataclass(frozen=True)
class One:
    """Values that a function accepts."""

    accepts: Callable[[Any], bool]
    words: str

    def __str__(self) -> str:
        return self.words


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Trees whose leaves a function accepts.

    Attributes:
        test: Whether a leaf is accepted.
        words: What its leaves are, in the plural.
        like: The parameter whose tree has leaves at the same paths; "": there is none.
        empty: Whether a tree without leaves is accepted.
        counts: What the first dim of each leaf counts, the same number for all; "": nothing.
    """

    test: Callable[[Any], bool]
    words: str
    like: str = ""
    empty: bool = True
    counts: str = ""

    def accepts(self, value: Any) -> bool:
        return self.trouble(value, {}) is None

    def trouble(self, value: Any, others: Mapping[str, Any]) -> str | None:
        """What to say after the parameter's name; None: the tree is accepted."""
        if value is None:
            return f" = None: give {self.words}."
        try:
            flat = jax.tree_util.tree_leaves_with_path(value)
        except (TypeError, ValueError) as error:  # keys that cannot be sorted
            return f": it is no pytree ({str(error).splitlines()[0]}). Give {self.words}."
        wrong = next(((path, leaf) for path, leaf in flat if not self.test(leaf)), None)
        if wrong is not None:
            path, leaf = wrong
            where = f": leaf {path_name(path)!r} is" if path else " ="
            return f"{where} {described(leaf)}. Give {self.words}."
        if not flat and not self.empty:
            return f" = {described(value)} has no leaves. Give {self.words}."
        lengths = [leaf.shape[0] if leaf.ndim else 0 for _, leaf in flat if self.counts]
        for (path, leaf), length in zip(flat, lengths, strict=False):
            if length == 0 or length != lengths[0]:
                number = f", {lengths[0]} like the first leaf" if lengths[0] else ""
                name = f": leaf {path_name(path)!r}" if path else ""
                return (
                    f"{name} of shape {leaf.shape} needs a first dim that counts {self.counts}, "
                    f"at least one{number}."
                )
        if not self.like:
            return None
        paths = [path_name(path) for path, _ in flat]
        other = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(others[self.like])]
        if paths == other:
            return None
        odd = next((p for p in (*other, *paths) if (p in other) != (p in paths)), "order of leaves")
        return f" differs from {self.like} in {odd!r}: give {self.words}, in the same structure."

    def __str__(self) -> str:
        return self.words


def described(value: Any) -> str:
    """A value in a message: an array by its shape and dtype, an object that prints long by kind."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        name = "float0" if dtype == jax.dtypes.float0 else dtype
        return f"an array of shape {tuple(shape)} and dtype {name}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def path_name(path: Any) -> str:
    """A key path as names joined by '/', e.g. 'Dense_0/kernel'.

    The `.value` in which Flax's boxes and variables keep their array is left out.
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_shape(x: Any) -> bool:
    """Whether it is a shape."""
    return isinstance(x, tuple | list) and all(AtLeast(0).accepts(length) for length in x)


def is_sizes(x: Any) -> bool:
    """Whether it is a dict of sizes by axis name."""
    return isinstance(x, Mapping) and all(isinstance(n, str) and is_integer(x[n]) for n in x)


def is_placeable(x: Any) -> bool:
    """Whether it can be put on devices: a number, or an array of numbers or of random keys."""
    return is_array_or_number(x) or (
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def is_units(x: Any) -> bool:
    """Whether it says of keys what parts of a model are there."""
    return isinstance(x, Mapping) and all(
        isinstance(x[key], str) and x[key] in ("part", "stack", "table") for key in x
    )


def is_indices(x: Any) -> bool:
    """Whether it is an array of whole numbers."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)


def arrays_like(parameter: str) -> Leaves:
    """The kind of a tree of arrays, at the paths of the tree that is given as `parameter`."""
    return Leaves(is_array, "arrays of numbers", parameter)


def is_devices(x: Any) -> bool:
    """Whether it is one or more devices, in any order."""
    several = isinstance(x, Sequence | np.ndarray) and len(x) > 0
    return several and all(hasattr(device, "platform") for device in x)


def is_fraction(x: Any) -> bool:
    """Whether it is a number from 0 to 1."""
    return is_number(x) and 0 <= x <= 1


def is_norm(x: Any) -> bool:
    """Whether it is a number of at least 0."""
    return is_number(x) and x >= 0


def is_traced_norm(x: Any) -> bool:
    """Whether it is a number of at least 0, or a 0-d array of one, whose value may be traced."""
    if not isinstance(x, jax.Array | np.ndarray):
        return is_norm(x)
    return is_array(x) and x.ndim == 0 and (isinstance(x, jax.core.Tracer) or is_norm(x.item()))


def is_array(x: Any) -> bool:
    """Whether it is an array of numbers or of True and False: no keys, float0, text or objects."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and is_abstract_array(x)


def is_abstract_array(x: Any) -> bool:
    """The same of anything with a shape and a dtype."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        return False
    try:
        return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    except TypeError:  # another library's dtype
        return False


def is_array_or_number(x: Any) -> bool:
    """Whether it is such an array, or a Python number."""
    return isinstance(x, int | float | complex) or is_array(x)


def is_key(x: Any) -> bool:
    """Whether it is one random key, of JAX's key types or of its older uint32 arrays."""
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    return x.dtype == np.uint32 and x.ndim == 1


def is_integer(value: Any) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
Fraction = Annotated[float, One(is_fraction, "a fraction in [0, 1]")]
DropoutRate = Annotated[float, One(lambda x: is_fraction(x) and x < 1, "a fraction in [0, 1)")]
Seed = Annotated[int, Seeds()]
Dtype = Annotated[Any, Floating()]
AnyDtype = Annotated[Any, Dtypes()]
Number = Annotated[jax.Array, One(is_array_or_number, "a number, or an array of numbers")]
Array = Annotated[jax.Array, One(is_array, "an array of numbers")]
Arrays = Annotated[Any, Leaves(is_array, "arrays of numbers")]
Numbers = Annotated[Any, Leaves(is_array_or_number, "arrays of numbers")]
Shapes = Annotated[Any, Leaves(is_abstract_array, "arrays of numbers, or their shapes and dtypes")]
Units = Annotated[Mapping[str, str], One(is_units, "a dict of key -> 'part', 'stack' or 'table'")]
Indices = Annotated[jax.Array, One(is_indices, "an array of whole numbers")]
MicroBatches = Annotated[
    Any, Leaves(is_array, "arrays of numbers", empty=False, counts="micro-batches")
]
DeviceRows = Annotated[Any, Leaves(is_array, "arrays of numbers", empty=False, counts="devices")]
Keys = Annotated[Any, Leaves(is_key, "single random keys, e.g. jax.random.key(0)", empty=False)]
AxisName = Annotated[str | Sequence[str], Axes(1)]
AxisNames = Annotated[str | Sequence[str], Axes(0)]
Shape = Annotated[tuple[int, ...], One(is_shape, "a shape, e.g. (8, 16)")]
Sizes = Annotated[Mapping[str, int], One(is_sizes, "a dict of sizes, e.g. {'data': 8}")]
Devices = Annotated[Sequence[jax.Device], One(is_devices, "devices, e.g. jax.devices()")]
Placeable = Annotated[Any, Leaves(is_placeable, "arrays of numbers or random keys")]
MaxNorm = Annotated[float, One(is_norm, "a number of at least 0")]
TracedNorm = Annotated[
    Any, One(is_traced_norm, "a number of at least 0, or a 0-d array of such a number")
]
Transform = Annotated[Any, Has(("init", "update"), "optax.sgd(0.1)")]
