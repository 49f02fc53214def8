"""Labels that say what the elements of an array depend on, and which primitives are elementwise.

A primitive is elementwise if `vmap` maps its application to scalars to itself. JAX's own batching
rule is the proof, so there is no list of names.
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

    Attributes:
        kind: 'constant': all elements are equal, and the same on all devices. 'replicated': the
            array is the same on all devices. 'elementwise': each element depends on the element of
            one parameter at the same position in row-major order. 'mixed': none of these.
        detail: Path of the parameter, '' if unknown; the reason for 'mixed'.
    """

    kind: Literal["constant", "replicated", "elementwise", "mixed"]
    detail: str = ""

    def fits(self, expected: Dependence) -> bool:
        """Whether a result with this label may be used where `expected` is."""
        if self.kind == "elementwise":
            paths = {self.detail, expected.detail} - {""}
            return expected.kind == "elementwise" and len(paths) <= 1
        return self.kind == "constant" or self.kind == expected.kind == "replicated"

    @property
    def source(self) -> str:
        """What an array with this label is made of, for a message."""
        if self.kind == "elementwise":
            return self.detail or "a shard"
        return "an array that is not sharded with the parameter"


CONSTANT = Dependence("constant")
REPLICATED = Dependence("replicated")


def elementwise(path: str = "") -> Dependence:
    """The label of an array that is sharded as the parameter of this path."""
    return Dependence("elementwise", path)


def mixed(reason: str) -> Dependence:
    """The label of an array whose elements depend on several elements of a parameter."""
    return Dependence("mixed", reason)


def mixed_by(operation: str, label: Dependence) -> Dependence:
    """The label of the result of an operation that mixes the elements of its operand."""
    return label if label.kind == "mixed" else mixed(f"{operation} {label.source}")


def join(operation: str, a: Dependence, b: Dependence) -> Dependence:
    """The label of an elementwise function of two arrays."""
    if a.kind == "mixed" or b == CONSTANT:
        return a
    if b.kind == "mixed" or a == CONSTANT:
        return b
    if a.kind == b.kind == "elementwise" and a.fits(b):
        return a if a.detail else b
    return a if a == b else mixed(f"{operation} of {a.source} and {b.source}")


def is_deterministic(equation: JaxprEqn) -> bool:
    """Whether equal operands give equal results on all devices: no collective, callback, draw."""
    return not equation.effects and equation.primitive.name != "rng_uniform"


def is_elementwise(equation: JaxprEqn) -> bool:
    """Whether each element of the results depends on the same element of each operand only."""
    avals: list[Any] = [v.aval for v in equation.invars]
    results: list[Any] = list(equation.outvars)
    operands = tuple((x.ndim, x.dtype) for x in avals)
    widest = max((x.shape for x in avals), key=len, default=None)
    if {v.aval.shape for v in results} != {widest} or not is_deterministic(equation):
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
    equation = program.eqns[0]
    return (
        len(program.eqns) == 1
        and equation.primitive is primitive
        and equation.params == dict(params)
        and equation.invars == program.invars
        and equation.outvars == program.outvars
    )
