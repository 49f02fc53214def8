"""Named kinds of parameters: a type, and what its values must be.

Gin's values are checked against them before a run, all at once; functions that Python code calls
check themselves with `errors.check_count` and the like, which ask here too.
"""

from __future__ import annotations

import dataclasses
from numbers import Integral, Real
from typing import Annotated, Any, Protocol

import jax.numpy as jnp


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
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and value >= self.least

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
        return _is_number(value) and value > self.bound

    def __str__(self) -> str:
        return "a positive number" if self.bound == 0 else f"a number above {self.bound}"


@dataclasses.dataclass(frozen=True)
class NotBelow:
    """Numbers from `bound` on."""

    bound: float

    def accepts(self, value: Any) -> bool:
        return _is_number(value) and value >= self.bound

    def __str__(self) -> str:
        return f"a number of at least {self.bound}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Fractions from 0 to 1, which itself may be left out."""

    with_one: bool = True

    def accepts(self, value: Any) -> bool:
        return _is_number(value) and 0 <= value <= 1 and (self.with_one or value < 1)

    def __str__(self) -> str:
        return f"a fraction in [0, 1{']' if self.with_one else ')'}"


@dataclasses.dataclass(frozen=True)
class Floating:
    """Floating-point dtypes, or their names."""

    def accepts(self, value: Any) -> bool:
        try:
            return jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            return False

    def __str__(self) -> str:
        return "a floating-point dtype, e.g. 'bfloat16'"


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """All dtypes, or their names."""

    def accepts(self, value: Any) -> bool:
        try:
            jnp.dtype(value)
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        return "a dtype, e.g. 'bfloat16'"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, NotBelow(0)]
Fraction = Annotated[float, Part()]
DropoutRate = Annotated[float, Part(with_one=False)]
Seed = Annotated[int, Seeds()]
Dtype = Annotated[Any, Floating()]
AnyDtype = Annotated[Any, Dtypes()]
