"""Labels that say what the elements of an array depend on, and which primitives are elementwise.

A primitive is elementwise if `vmap` maps its application to scalars to itself: no list of names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.extend.core import JaxprEqn, Primitive


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What the elements of an array depend on. A leaf, not a pytree.

    'constant': all elements are equal, and the same on all devices. 'replicated': the array is the
    same on all devices. 'elementwise': each element depends on the element of one parameter, with
    path `detail` if it is known, at the same position in row-major order. 'mixed', for the reason
    `detail`: none of these.
    """

    kind: Literal["constant", "replicated", "elementwise", "mixed"]
    detail: str = ""

    @property
    def is_same_everywhere(self) -> bool:
        return self.kind in ("constant", "replicated")

    @property
    def source(self) -> str:
        """What an array with this label is made of, for a message."""
        if self.kind == "elementwise":
            return self.detail or "a shard"
        return "an array that is not sharded with the parameter"

    def fits(self, expected: Dependence) -> bool:
        """Whether a result with this label may be used where `expected` is."""
        if self.kind == "elementwise":
            paths = {self.detail, expected.detail} - {""}
            return expected.kind == "elementwise" and len(paths) <= 1
        return self.kind == "constant" or self.kind == expected.kind == "replicated"

    def mixed_by(self, operation: str) -> Dependence:
        """The label of the result of an operation that mixes the elements of this array."""
        return self if self.kind == "mixed" else mixed(f"{operation} {self.source}")

    def join(self, operation: str, other: Dependence) -> Dependence:
        """The label of an elementwise function of two arrays."""
        if self.kind == "mixed" or other == CONSTANT or self == other:
            return self
        if other.kind == "mixed" or self == CONSTANT:
            return other
        if self.kind == other.kind == "elementwise" and self.fits(other):
            return self if self.detail else other
        return mixed(f"{operation} of {self.source} and {other.source}")

    def scanned(self) -> Dependence:
        """The label of what each turn of a loop gets: rows are other elements at each."""
        return self.mixed_by("scan over") if self.kind == "elementwise" else self

    def stacked(self) -> Dependence:
        """The label of what the turns of a loop give, along a new dim."""
        return REPLICATED if self.is_same_everywhere else self.mixed_by("scan of")


CONSTANT, REPLICATED = Dependence("constant"), Dependence("replicated")
elementwise = functools.partial(Dependence, "elementwise")  # of the parameter with this path
mixed = functools.partial(Dependence, "mixed")  # for this reason


def is_deterministic(equation: JaxprEqn) -> bool:
    """Whether equal operands give equal results on all devices: no collective, callback, draw."""
    return not equation.effects and equation.primitive.name != "rng_uniform"


def is_elementwise(equation: JaxprEqn) -> bool:
    """Whether each element of the results depends on the same element of each operand only."""
    avals: list[Any] = [v.aval for v in equation.invars]
    results: list[Any] = [v.aval for v in equation.outvars]
    widest = max((x.shape for x in avals), key=len, default=None)
    return {x.shape for x in results} == {widest} and maps_scalars(equation)


def maps_scalars(equation: JaxprEqn) -> bool:
    """Whether it is a function of scalars, applied to all elements: dims of length 1 may repeat."""
    avals: list[Any] = [v.aval for v in equation.invars]
    operands = tuple((x.ndim, x.dtype) for x in avals)
    results: list[Any] = [v.aval for v in equation.outvars]
    if not is_deterministic(equation) or len({x.shape for x in results}) != 1:
        return False
    if any(x.ndim not in (0, results[0].ndim) for x in avals):
        return False
    try:
        return _maps_scalars(equation.primitive, tuple(equation.params.items()), operands)
    except TypeError:  # an unhashable parameter; no elementwise primitive has one
        return False


@functools.cache
def _maps_scalars(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], operands: tuple[Any, ...]
) -> bool:
    """Whether a primitive is the `vmap` of its own application to scalars.

    `operands` has (rank, dtype) of each; those of rank 0 are the same for all elements.
    """
    ranks = [rank for rank, _ in operands]
    if not set(ranks) <= {0, max(ranks)}:
        return False

    def function(*scalars: Any) -> Any:
        return primitive.bind(*scalars, **dict(params))

    for _ in range(max(ranks)):
        function = jax.vmap(function, in_axes=tuple(0 if rank else None for rank in ranks))
    arrays = [jax.ShapeDtypeStruct((2,) * rank, dtype) for rank, dtype in operands]
    try:
        program = jax.make_jaxpr(function)(*arrays).jaxpr
    except Exception:  # not for scalars, or without a rule for vmap: raises anything
        return False
    if not program.eqns:  # JAX omits a cast that changes nothing
        return set(program.outvars) <= set(program.invars)
    applied = [(e.primitive, e.params, e.invars, e.outvars) for e in program.eqns]
    return applied == [(primitive, dict(params), program.invars, program.outvars)]
